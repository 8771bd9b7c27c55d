"""`.ci/run` on machines with and without node: every program that it calls is a stand-in here."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TOOLS = ("bash", "dirname", "env", "cat", "chmod", "mkdir")
"""What each machine has."""

_STAND_IN = """#!/usr/bin/env bash
echo "${0##*/} $*${DEBIAN_FRONTEND:+ ($DEBIAN_FRONTEND)}" >> "$CALLS"
"""
_FAILS = _STAND_IN + "exit 100\n"
_SUDO = """#!/usr/bin/env bash
echo "sudo" >> "$CALLS"
# As sudo does: nothing of the caller's environment goes through.
exec env -i PATH="$PATH" CALLS="$CALLS" "$@"
"""
_ID = """#!/usr/bin/env bash
echo {user}
"""
_PYTHON = """#!/usr/bin/env bash
echo "${0##*/} $*" >> "$CALLS"
mkdir -p .venv/bin
for name in pip just; do
    cat "$STAND_IN" > .venv/bin/$name
    chmod +x .venv/bin/$name
done
"""

INSTALLED = [
    "apt-get update -qq",
    "apt-get install -y -qq --no-install-recommends nodejs npm (noninteractive)",
]
REST = ["python3 -m venv .venv", "pip install -q rust-just", "just check", "just test"]


@dataclass
class Machine:
    """A machine that `.ci/run` runs on."""

    folder: Path

    def has(self, name: str, text: str = _STAND_IN) -> None:
        """Put a program on it."""
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def run(self) -> tuple[int, list[str]]:
        """Run the script; return its exit code and what it called, in order."""
        calls = self.folder / "calls"
        calls.touch()
        environment = {
            "PATH": str(self.folder / "bin"),
            "CALLS": str(calls),
            "STAND_IN": str(self.folder / "stand-in"),
        }
        script = self.folder / "tree" / ".ci" / "run"
        ended = subprocess.run([script], env=environment, capture_output=True, check=False)
        return ended.returncode, calls.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with Python and nothing else; its user is root."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "tree" / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", tmp_path / "tree" / ".ci" / "run")
    (tmp_path / "stand-in").write_text(_STAND_IN)
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None
        (tmp_path / "bin" / name).symlink_to(found)
    made = Machine(tmp_path)
    made.has("python3", _PYTHON)
    made.has("apt-get")
    made.has("sudo", _SUDO)
    made.has("id", _ID.format(user=0))
    return made


def test_node_is_installed_where_there_is_none(machine: Machine) -> None:
    """Before anything else, and without a question."""
    assert machine.run() == (0, [*INSTALLED, *REST])


def test_another_user_asks_root_for_it(machine: Machine) -> None:
    """Who passes nothing on of the caller's environment: no question all the same."""
    machine.has("id", _ID.format(user=1000))
    assert machine.run() == (0, ["sudo", INSTALLED[0], "sudo", INSTALLED[1], *REST])


def test_npm_is_wanted_too(machine: Machine) -> None:
    """A distribution may have node without it."""
    machine.has("node")
    assert machine.run() == (0, [*INSTALLED, *REST])


def test_where_there_is_node_nothing_is_installed(machine: Machine) -> None:
    """No root is needed then."""
    machine.has("node")
    machine.has("npm")
    machine.has("apt-get", _FAILS)
    assert machine.run() == (0, REST)


def test_without_node_it_fails(machine: Machine) -> None:
    """Tests with a client of node must not be skipped in silence."""
    machine.has("apt-get", _FAILS)
    assert machine.run() == (100, [INSTALLED[0]])


def test_what_failed_once_is_tried_again(machine: Machine) -> None:
    """Once, and alone; what fails again fails the run."""
    (machine.folder / "stand-in").write_text(_STAND_IN + '[ "$1" != test ]\n')
    code, calls = machine.run()
    assert code == 1
    again = "just test --last-failed --last-failed-no-failures=none"
    assert calls[-2:] == ["just test", again]
