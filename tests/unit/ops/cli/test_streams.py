"""Where output goes: a reader that leaves, closed streams, text without a place there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]

RUN = ["sim", "run", "--trace", "excerpt:conversation", "--part", "20", "--policy", "lmetric"]


def started(arguments: list[str], **options: Any) -> "subprocess.CompletedProcess[bytes]":
    """Run the command as a process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("environment", {})}
    command = [sys.executable, "-m", "ops.cli.main", *arguments]
    return subprocess.run(
        command, env=environment, stderr=subprocess.PIPE, check=False, timeout=120, **options
    )


def test_a_reader_that_leaves_costs_no_report(tmp_path: Path) -> None:
    """`... | head -0`: what was computed is written, and nothing has failed."""
    path = tmp_path / "a.json"
    read_end, write_end = os.pipe()
    os.close(read_end)
    ended = started([*RUN, "--report", str(path)], stdout=write_end)
    os.close(write_end)
    assert ended.returncode == 0
    assert ended.stderr.decode() == f"written: {path}\n"
    assert json.loads(path.read_bytes())["requests"] == 20


def test_closed_standard_output(tmp_path: Path) -> None:
    """`>&-`, as some schedulers start things: the report is written all the same."""
    path = tmp_path / "a.json"
    ended = started([*RUN, "--report", str(path)], preexec_fn=lambda: os.close(1))
    assert ended.returncode == 0
    assert json.loads(path.read_bytes())["requests"] == 20


@pytest.mark.parametrize("streams", [(0,), (0, 1, 2)])
def test_closed_streams_are_nobody_elses(streams: tuple[int, ...]) -> None:
    """`<&-`: no socket of the event loop takes their place, of which it would abort the process."""
    arguments = ["batch", "list", "--lane", "acme", "--url", "http://no-such-link"]

    def close() -> None:
        for stream in streams:
            os.close(stream)

    ended = started(arguments, stdout=subprocess.PIPE, preexec_fn=close)
    assert ended.returncode in {2, 3}
    told = ended.stderr.decode()
    assert not told if 2 in streams else "not a NATS URL" in told


def test_closed_standard_input_has_nothing_to_read() -> None:
    """It is as empty as /dev/null, and nobody is asked who can't answer."""
    for arguments in (["batch", "check", "-"], ["erase", "--lane", "acme", "--all"]):
        ended = started(arguments, preexec_fn=lambda: os.close(0))
        assert ended.returncode == 2, ended.stderr
        assert b"this should not happen" not in ended.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_the_characters(encoding: str) -> None:
    """What it can't show is spelled out."""
    environment = {"PYTHONIOENCODING": encoding}
    arguments = [*RUN[:-1], "weighted"]
    ended = started(arguments, stdout=subprocess.PIPE, environment=environment)
    assert ended.returncode == 0
    shown = ended.stdout.decode(encoding)
    assert "TTFT mean" in shown
    assert ("\\xb5s" if encoding == "ascii" else "µs") in shown
