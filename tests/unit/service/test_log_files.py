"""Rotated files of lines: bounded in size and number, whole lines after any failure."""

import os
import shutil
from pathlib import Path

import pytest

from broker.service.log_files import LogFiles


def _files(folder: Path, *, bytes_max: int = 100, files_max: int = 3) -> LogFiles:
    return LogFiles(folder, "log", bytes_max=bytes_max, files_max=files_max)


def _stored(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_lines_are_appended(tmp_path: Path) -> None:
    """The folder is made, and a second process goes on where the first ended."""
    folder = tmp_path / "new" / "state"
    for line in (b"1\n", b"2\n"):
        files = _files(folder)
        files.append(line)
        files.close()
    assert _stored(folder) == {"log.jsonl": b"1\n2\n"}


def test_a_file_that_was_taken_away_is_begun_anew(tmp_path: Path) -> None:
    """Deleted, moved by others, or gone with its folder: no line goes where nobody reads it."""
    folder = tmp_path / "state"
    files = _files(folder)
    files.append(b"1\n")
    files.path.unlink()
    files.append(b"2\n")
    assert _stored(folder) == {"log.jsonl": b"2\n"}
    files.path.rename(folder / "log.old")
    files.append(b"3\n")
    assert _stored(folder) == {"log.jsonl": b"3\n", "log.old": b"2\n"}
    shutil.rmtree(folder)
    files.append(b"4\n")
    assert _stored(folder) == {"log.jsonl": b"4\n"}
    files.close()


def test_rotation_keeps_so_many_files(tmp_path: Path) -> None:
    """The newest lines are in the unnumbered file, and the oldest file goes."""
    files = _files(tmp_path, bytes_max=3, files_max=3)
    for number in range(5):
        files.append(b"%d\n" % number)
    files.close()
    assert _stored(tmp_path) == {
        "log.1.jsonl": b"3\n",
        "log.2.jsonl": b"2\n",
        "log.jsonl": b"4\n",
    }


def test_file_is_filled_to_its_bound(tmp_path: Path) -> None:
    """A file may be as long as the bound, and not a byte longer."""
    files = _files(tmp_path, bytes_max=4)
    for line in (b"1\n", b"2\n", b"3\n"):
        files.append(line)
    files.close()
    assert _stored(tmp_path) == {"log.1.jsonl": b"1\n2\n", "log.jsonl": b"3\n"}


def test_batch_longer_than_a_file(tmp_path: Path) -> None:
    """It makes a file of its own rather than none."""
    files = _files(tmp_path, bytes_max=3)
    files.append(b"123456\n")
    files.append(b"7\n")
    files.close()
    assert _stored(tmp_path) == {"log.1.jsonl": b"123456\n", "log.jsonl": b"7\n"}


def test_one_file_only(tmp_path: Path) -> None:
    """With one file kept, it is begun anew."""
    files = _files(tmp_path, bytes_max=3, files_max=1)
    for line in (b"1\n", b"2\n"):
        files.append(line)
    files.close()
    assert _stored(tmp_path) == {"log.jsonl": b"2\n"}


def test_half_a_line_of_a_killed_process(tmp_path: Path) -> None:
    """What is written next begins on a line of its own."""
    (tmp_path / "log.jsonl").write_bytes(b"1\n2")
    files = _files(tmp_path)
    files.append(b"3\n")
    files.close()
    assert _stored(tmp_path) == {"log.jsonl": b"1\n2\n3\n"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_full_disk(tmp_path: Path) -> None:
    """The error is told; once there is room, writing goes on by itself."""
    (tmp_path / "log.jsonl").symlink_to("/dev/full")
    files = _files(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        files.append(b"1\n")
    (tmp_path / "log.jsonl").unlink()
    files.append(b"2\n")
    files.close()
    assert _stored(tmp_path) == {"log.jsonl": b"2\n"}


def test_half_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes half a line and then no more leaves no two halves in one line."""
    files = _files(tmp_path)
    files.append(b"1\n")
    real = os.write
    answers = iter([2, OSError(28, "No space left on device")])

    def write(descriptor: int, data: bytes) -> int:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return real(descriptor, data[:answer])

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space left"):
        files.append(b"2345\n")
    monkeypatch.undo()
    files.append(b"6\n")
    files.close()
    assert _stored(tmp_path) == {"log.jsonl": b"1\n23\n6\n"}


def test_write_in_two_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short write is gone on with."""
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:2]))
    files = _files(tmp_path)
    files.append(b"12345\n")
    files.close()
    assert _stored(tmp_path) == {"log.jsonl": b"12345\n"}


def test_folder_that_went_away(tmp_path: Path) -> None:
    """After an error the file is opened anew: a folder put back is found."""
    blocker = tmp_path / "state"
    blocker.write_text("a file where the folder should be")
    files = _files(blocker)
    with pytest.raises(OSError, match="exists"):
        files.append(b"1\n")
    blocker.unlink()
    files.append(b"2\n")
    files.close()
    assert (blocker / "log.jsonl").read_bytes() == b"2\n"
