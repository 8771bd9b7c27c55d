"""The `inferlane` command as a whole: help that teaches, and codes to trust."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

from ops.cli import errors
from ops.cli.main import COMMANDS, main, make_app

PRESENT = [one.name for one in COMMANDS if Path(f"ops/cli/{one.name}.py").exists()]

VALID = '[policy]\nmodels = ["tiny"]\n[[policy.lanes]]\nname = "acme"\n'


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Help is laid out for 80 columns wherever the tests run."""
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_of_the_whole(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What it is, first steps, every command with a line, and the exit codes."""
    assert main(arguments) == 0
    told = capsys.readouterr().out
    for text in ("First steps", "inferlane demo", "Exit codes: 0 done", "--debug"):
        assert text in told
    rows = [line.strip("│ ") for line in told.splitlines() if line.startswith("│")]
    for command in PRESENT:
        assert any(row.split()[0] == command and len(row.split()) > 3 for row in rows if row)


@pytest.mark.parametrize("command", PRESENT)
def test_help_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command explains itself, and every flag has words beside its name."""
    assert main([command, "--help"]) == 0
    told = capsys.readouterr().out
    assert f"Usage: inferlane {command}" in told
    assert len(told.splitlines()) > 8


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["wrkers"], 'Unknown command "wrkers". Did you mean "workers"?'),
        (["workers", "--jsn"], "Unknown option: --jsn. Did you mean --json?"),
        (["drain"], "WORKER"),
        (["drain", "w1", "--undo", "--wait"], "--undo is done at once: leave out --wait"),
        (["drain", "w 1"], "worker 'w 1' is not 1 to 64 of the characters"),
        (["dlq", "replay"], "name the jobs to replay, or give --lane LANE --all"),
        (["dlq", "replay", "--all"], "name the jobs to replay, or give --lane LANE --all"),
        (["dlq", "replay", "a.b", "--lane", "a"], "name the jobs to replay"),
        (["dlq", "replay", "a.b", "--lane", "a", "--all"], "name the jobs to replay"),
        (["decisions", "trace"], "name the log's files, such as inferlane-state/decisions"),
        (["decisions", "trace", "/absent.jsonl"], "/absent.jsonl can't be read: no such file"),
        (["decisions", "trace", "a", "--output", "./a"], "a is what is read"),
        (["decisions", "trace", "--output", "a"], "name the log's files"),
        (["config", "check", "/absent.toml"], "/absent.toml: cannot be read: no such file"),
        (["doctor", "--config", "/absent.toml"], "/absent.toml: cannot be read: no such file"),
        (["broker", "--config", "/absent.toml"], "/absent.toml: cannot be read: no such file"),
    ],
)
def test_wrong_usage(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Code 2 and one sentence on standard error; nothing on standard output."""
    assert main(arguments) == errors.ExitCode.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("inferlane: ")
    assert told in err
    assert "Traceback" not in err


def test_debug_shows_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --debug, wherever it stands, or its variable, the error itself comes through."""
    with pytest.raises(errors.Misused):
        main(["drain", "w1", "--undo", "--wait", "--debug"])
    monkeypatch.setenv("INFERLANE_DEBUG", "1")
    with pytest.raises(errors.Misused):
        main(["drain", "w1", "--undo", "--wait"])


def test_debug_after_two_dashes_is_an_argument(capsys: pytest.CaptureFixture[str]) -> None:
    """What follows `--` belongs to the command."""
    assert main(["config", "check", "--", "--debug"]) == errors.ExitCode.USAGE
    assert "--debug: cannot be read" in capsys.readouterr().err


def test_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C ends with 130, as shells have it, and without a traceback."""

    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("broker.service.config.load", interrupted)
    assert main(["config", "check", "x.toml"]) == errors.ExitCode.INTERRUPTED
    assert capsys.readouterr().err == "inferlane: interrupted\n"


def test_only_the_command_at_hand_is_imported() -> None:
    """A command that can't be imported brings down no other, and starts are quick."""
    code = (
        "import sys; from ops.cli.main import main; main(['config', 'check', 'absent.toml']);"
        "print([name for name in sys.modules if name in ('ops.cli.demo', 'ops.cli.dlq', 'nats')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_reader_that_has_had_enough(tmp_path: Path) -> None:
    """`inferlane ... | head -1` is no failure and prints no error."""
    file = tmp_path / "f.toml"
    file.write_text(VALID)
    code = "import sys; from ops.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "config", "show", str(file)]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_logs_keep_off_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What libraries log goes to standard error, so that --json stays JSON."""
    file = tmp_path / "f.toml"
    file.write_text(VALID)
    main(["config", "check", str(file)])
    capsys.readouterr()
    structlog.get_logger("x").error("something")
    out, err = capsys.readouterr()
    assert out == ""
    assert "something" in err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """The distribution's own."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.count(".") == 2


def test_every_command_of_the_readme_is_there() -> None:
    """The names that people learn from the documents."""
    names = {command.name for command in COMMANDS}
    assert names >= {"demo", "up", "ab", "broker", "worker", "submit", "batch", "workers", "lanes"}
    assert names >= {"drain", "dlq", "reconcile", "doctor", "config"}
    assert make_app()["config"]["check"] is not None
