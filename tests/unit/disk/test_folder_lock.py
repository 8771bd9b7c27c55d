"""A folder has one holder, told to whoever else asks; a lock ends with its holder's life."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from broker.disk.folder_lock import HOLDER_BYTES_MAX, LOCK_FILE, FolderTaken, held

HOLDS_FOR_EVER = """
import signal, sys
from pathlib import Path
from broker.disk.folder_lock import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    signal.pause()
"""


def test_a_folder_is_made_and_held_by_one(tmp_path: Path) -> None:
    """The second is told by whom; after the first, it is free."""
    folder = tmp_path / "new" / "state"
    with held(folder):
        with (
            pytest.raises(FolderTaken, match=rf"in use by process {os.getpid()} on \S+$"),
            held(folder),
        ):
            pytest.fail("held twice")
        with pytest.raises(FolderTaken), held(folder):
            pytest.fail("held after a refusal")
    with held(folder):
        pass


def test_a_lock_dies_with_a_killed_process(tmp_path: Path) -> None:
    """`kill -9` leaves the file and no lock."""
    command = [sys.executable, "-c", HOLDS_FOR_EVER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(FolderTaken) as taken, held(tmp_path):
            pytest.fail("held twice")
        assert taken.value.holder.startswith(f"process {process.pid} on ")
        process.send_signal(signal.SIGKILL)
    with held(tmp_path):
        assert (tmp_path / LOCK_FILE).read_text().startswith(f"process {os.getpid()} on ")


@pytest.mark.parametrize("said", [b"", b"\x00\x1b[2J", b"x\ny"])
def test_what_stands_in_the_file_is_told_only_if_it_is_a_line(tmp_path: Path, said: bytes) -> None:
    """A holder on a full disk says nothing, and a file may be anybody's."""
    with held(tmp_path):
        (tmp_path / LOCK_FILE).write_bytes(said)
        with (
            pytest.raises(FolderTaken, match="another process, which does not say"),
            held(tmp_path),
        ):
            pytest.fail("held twice")


def test_no_more_of_it_is_read_than_a_holder_writes(tmp_path: Path) -> None:
    """Whatever its size."""
    with held(tmp_path):
        (tmp_path / LOCK_FILE).write_bytes(b"x" * (HOLDER_BYTES_MAX + 1))
        with pytest.raises(FolderTaken) as taken, held(tmp_path):
            pytest.fail("held twice")
    assert taken.value.holder == "x" * HOLDER_BYTES_MAX


def test_what_can_not_be_locked_is_an_os_error(tmp_path: Path) -> None:
    """A folder that is a file, for one."""
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError), held(tmp_path / "file" / "state"):
        pytest.fail("held a file")
