"""Files that people name: what is no file is told at once, what is too large is not read."""

import os
import socket
import threading
from pathlib import Path

import pytest

from broker.disk.named_file import open_named, read_named


def a_huge_file(folder: Path, size: int) -> Path:
    """Make a file of holes."""
    path = folder / "huge"
    with path.open("wb") as file:
        file.truncate(size)
    return path


def test_a_file_is_read_whole_up_to_the_bound(tmp_path: Path) -> None:
    """As many bytes as allowed, and none."""
    path = tmp_path / "f"
    path.write_bytes(b"12345")
    assert read_named(path, bytes_max=5) == b"12345"
    path.write_bytes(b"")
    assert read_named(path, bytes_max=5) == b""


def test_a_larger_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """A terabyte of holes would not fit in memory."""
    with pytest.raises(OSError, match="it is larger than 1,000 bytes"):
        read_named(a_huge_file(tmp_path, 1 << 40), bytes_max=1000)


def test_a_file_whose_size_is_not_told_is_read_to_the_bound() -> None:
    """The kernel's own files say that they are empty."""
    assert read_named(Path("/proc/self/status"), bytes_max=100_000)
    with pytest.raises(OSError, match="it is larger than 10 bytes"):
        read_named(Path("/proc/self/status"), bytes_max=10)


def test_what_is_no_file_is_told_at_once(tmp_path: Path) -> None:
    """An endless device, a pipe that nobody writes to, a folder, a socket, nothing."""
    pipe, address = tmp_path / "pipe", tmp_path / "socket"
    os.mkfifo(pipe)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(address))
        for path, told in (
            (Path("/dev/zero"), "it is a device"),
            (pipe, "it is a pipe, not a file; write it to a file first"),
            (tmp_path, "Is a directory"),
            (address, "No such device or address"),
            (tmp_path / "absent", "No such file"),
        ):
            with pytest.raises(OSError, match=told):
                open_named(path)


def test_a_pipe_is_read_where_it_may_be_one() -> None:
    """Whatever its writer is slow to write; also no more than the bound."""
    reader, writer = os.pipe()
    late = threading.Timer(0, lambda: (os.write(writer, b"late"), os.close(writer)))
    try:
        late.start()
        assert read_named(Path(f"/dev/fd/{reader}"), bytes_max=4, pipes=True) == b"late"
    finally:
        late.join()
        os.close(reader)


def test_a_device_is_none_where_a_pipe_may_be_one() -> None:
    """`--body /dev/zero` is refused as well."""
    with pytest.raises(OSError, match="it is a device"):
        read_named(Path("/dev/zero"), bytes_max=4, pipes=True)
