"""What `inferlane up` finds wrong before it starts anything."""

import socket
from pathlib import Path

import pytest

from ops.cli.errors import CommandError, ExitCode, Misused
from ops.cli.up_check import check_folder, check_model_file, check_model_name, check_port
from ops.demo.setting import TINY_GGUF


def test_a_model_file_is_looked_into(tmp_path: Path) -> None:
    """Not there, a folder, something else: one sentence each, and the tiny model passes."""
    check_model_file(TINY_GGUF)
    text = tmp_path / "model.txt"
    text.write_text("no model")
    with pytest.raises(Misused, match="is no GGUF file"):
        check_model_file(text)
    for missing in (tmp_path, tmp_path / "nothing.gguf"):
        with pytest.raises(Misused, match="there is no model file"):
            check_model_file(missing)


def test_names_that_no_configuration_can_carry_are_refused() -> None:
    """A quote in a path would end the string that names it."""
    for check in (check_folder, check_model_file):
        with pytest.raises(Misused, match="no quotes"):
            check(Path('a"b'))


def test_a_file_name_too_long_for_a_model_is_refused() -> None:
    """Dots and underscores count three times."""
    check_model_name("Llama-3.2-1B-Instruct-Q4_K_M")
    with pytest.raises(Misused, match="under a shorter one"):
        check_model_name("a.b_c" * 10)


def test_a_port_in_use_is_told_with_the_option_to_change() -> None:
    """0 asks for any free one and is never in use."""
    check_port(0, option="--port", what="NATS")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CommandError, match=f"port {port} for NATS .* another --port") as raised:
            check_port(port, option="--port", what="NATS")
    assert raised.value.code is ExitCode.FAILED
    check_port(port, option="--port", what="NATS")
