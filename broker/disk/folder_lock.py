"""One process to a folder: a lock that the kernel frees with its holder's life, however that ends.

The lock file says who holds it, for people: the lock itself is the kernel's (flock; on NFS the
server's, so that hosts that share a folder see each other).
"""

import contextlib
import fcntl
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

LOCK_FILE = "lock"

HOLDER_BYTES_MAX = 512
"""What is read of who holds it: a process number and a host's name, of 253 characters at most."""


class FolderTaken(Exception):
    """Another process has the folder; `holder` says which."""

    def __init__(self, folder: Path, holder: str) -> None:
        super().__init__(f"{folder} is in use by {holder}")
        self.folder = folder
        self.holder = holder


@contextmanager
def held(folder: Path) -> Generator[None]:
    """Hold a folder, made if absent, until the block ends.

    Raises FolderTaken at once when another process holds it, on whatever host; OSError when it
    can't be locked, as on a read-only disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FolderTaken(folder, _holder(descriptor)) from error
        # On a full disk it is held all the same, and says nothing of whom by.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    """Read whose it is; what stands there need not be a holder's line."""
    said = os.pread(descriptor, HOLDER_BYTES_MAX, 0).decode(errors="replace").strip()
    return said if said.isprintable() and said else "another process, which does not say its number"
