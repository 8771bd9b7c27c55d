"""Ctrl-C at any time: never a traceback, and the process dies of the signal."""

import signal
import subprocess
import sys

import pytest

WHILE_LOADING = """
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "cyclopts":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
"""

IN_THE_COMMAND = """
import broker.service.config
def load(path):
    os.kill(os.getpid(), signal.SIGINT)
broker.service.config.load = load
"""

WHILE_TOLD = """
import ops.cli.main
def fail(text, code):
    os.kill(os.getpid(), signal.SIGINT)
ops.cli.main._fail = fail
"""

AFTER_TOLD = """
import ops.cli.entry
die = ops.cli.entry._die_of_sigint
def die_later():
    os.kill(os.getpid(), signal.SIGINT)
    die()
ops.cli.entry._die_of_sigint = die_later
"""

AT_EXIT = """
import atexit
atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
"""


def ended(before: str, *arguments: str) -> tuple[int, str]:
    """Run the program after some code; returns its code and what it said on standard error."""
    code = f"import os, signal, sys\n{before}\nfrom ops.cli.entry import main\nsys.exit(main())"
    command = [sys.executable, "-c", code, "config", "check", "absent.toml", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("before", "told"),
    [
        (WHILE_LOADING, ""),
        (IN_THE_COMMAND, "inferlane: interrupted\n"),
        (IN_THE_COMMAND + WHILE_TOLD, ""),
        (IN_THE_COMMAND + AFTER_TOLD, "inferlane: interrupted\n"),
    ],
)
def test_ctrl_c_ends_it_by_the_signal(before: str, told: str) -> None:
    """While it loads, at work, and again while it tells of the first, or has."""
    assert ended(before) == (-signal.SIGINT, told)


def test_ctrl_c_at_the_exit_says_nothing() -> None:
    """The command has ended, and said how."""
    code, told = ended(AT_EXIT)
    assert code == -signal.SIGINT
    assert len(told.splitlines()) == 1


def test_debug_shows_where_it_was() -> None:
    """The traceback is wanted then."""
    code, told = ended(IN_THE_COMMAND, "--debug")
    assert code == -signal.SIGINT
    assert told.startswith("Traceback")
    assert told.endswith("KeyboardInterrupt\n")


def test_where_it_is_ignored_it_stays_so() -> None:
    """Behind `nohup`, or `&` in a script, Ctrl-C is meant for others."""
    code, told = ended(f"signal.signal(signal.SIGINT, signal.SIG_IGN)\n{WHILE_LOADING}")
    assert code == 2
    assert "absent.toml" in told


def test_other_ends_keep_their_code() -> None:
    """Wrong usage is 2."""
    assert ended("")[0] == 2
