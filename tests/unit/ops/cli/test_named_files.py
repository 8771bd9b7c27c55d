"""Each file that a command takes: what is no file, or too large, is told at once."""

import io
import os
import sys
from pathlib import Path

import pytest

from broker.wire.messages import BODY_BYTES_MAX
from ops.cli.main import main

COMMANDS = {
    "config check": ["config", "check", "FILE"],
    "config show": ["config", "show", "FILE"],
    "broker": ["broker", "--config", "FILE"],
    "worker": ["worker", "--config", "FILE"],
    "gateway": ["gateway", "--config", "FILE"],
    "doctor": ["doctor", "--config", "FILE"],
    "doctor of the server": ["doctor", "--nats-config", "FILE"],
    "submit": ["submit", "Hello", "--config", "FILE"],
    "a body": ["submit", "--body", "FILE"],
    "a batch": ["batch", "check", "FILE"],
    "a trace": ["sim", "run", "--trace", "FILE"],
    "a decision log": ["decisions", "trace", "FILE"],
    "accuracy": ["decisions", "accuracy", "FILE"],
    "a replay": ["replay", "FILE", "--policy", "round_robin"],
    "a model": ["up", "--gguf", "FILE"],
}

READ_BY_LINES = ("a batch", "a model", "a decision log", "accuracy", "a replay")
"""In flat memory, however large; of a model only its first bytes."""


def _told(command: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    code = main([str(path) if word == "FILE" else word for word in COMMANDS[command]])
    said = capsys.readouterr().err
    assert code in (1, 2), said
    assert str(path) in said
    return said


@pytest.mark.parametrize("command", COMMANDS)
def test_an_endless_device(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It was read until memory ran out."""
    assert "it is a device, not a file" in _told(command, Path("/dev/zero"), capsys)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "a body"])
def test_a_pipe_without_a_writer(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was waited for, for ever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "it is a pipe, not a file" in _told(command, pipe, capsys)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Is told as one."""
    said = _told(command, tmp_path, capsys).lower()
    assert "directory" in said or "folder" in said


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in READ_BY_LINES])
def test_a_file_beyond_any_use(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A terabyte is refused by its size."""
    huge = tmp_path / "huge"
    with huge.open("wb") as file:
        file.truncate(1 << 40)
    assert "larger than" in _told(command, huge, capsys)


def test_a_prompt_from_an_endless_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As much is read as a body may have."""

    class _Endless(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: "bytearray | memoryview") -> int:  # type: ignore[override]
            return len(buffer)

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(_Endless())))
    assert main(["submit", "-"]) == 2
    assert f"larger than {BODY_BYTES_MAX:,} bytes" in capsys.readouterr().err
