"""Where a batch's results go when they are fetched: over what was fetched of it before, or nothing.

Results of a batch that runs are fetched again and again, so a file there is replaced. Anything else
that stands there is somebody's: the input itself, another batch's results, a device.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from producers.batch.errors import OutputUnusable

NAME_CHARS_MAX = 50
"""Of a file's name in that of the one beside it: a name has 255 bytes at most."""

LINE_BYTES_MAX = 1 << 25
"""Of what stands there at most so much is read: a result is half as long at the most."""


class _Result(msgspec.Struct):
    id: str


_results = msgspec.json.Decoder(_Result)


def require_own(path: Path, *, batch_id: str) -> None:
    """See that nothing stands there but what was fetched of this batch. Raises OutputUnusable."""
    with _told(path):
        if not os.path.lexists(path):
            return
        if not path.is_file():
            message = f"{path} is no regular file; results can only be kept in one"
            raise OutputUnusable(message)
        with path.open("rb") as standing:
            first = standing.readline(LINE_BYTES_MAX)
    if first and not _is_of(first, batch_id):
        message = (
            f"{path} holds something else than results of {batch_id}; move it away, or name"
            " another file"
        )
        raise OutputUnusable(message)


def _is_of(line: bytes, batch_id: str) -> bool:
    try:
        return _results.decode(line).id.startswith(f"batch_req_{batch_id}-")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


class Place:
    """A file that is written beside its place, and takes it once it is whole."""

    def __init__(self, path: Path) -> None:
        """Raises OutputUnusable."""
        self._path = path
        self._beside = path.with_name(f".{path.name[:NAME_CHARS_MAX]}.{os.getpid()}")
        with _told(path):
            self._file: IO[bytes] = self._beside.open("wb")

    def write(self, data: bytes) -> int:
        """Write all of it; return how many bytes. Raises OutputUnusable."""
        with _told(self._path):
            return self._file.write(data)

    def take(self) -> None:
        """Put what was written in its place. Raises OutputUnusable."""
        with _told(self._path):
            self._file.close()
            self._beside.replace(self._path)

    def close(self) -> None:
        """Leave nothing beside it."""
        with _told(self._path):
            try:
                self._file.close()
            finally:
                self._beside.unlink(missing_ok=True)


@contextmanager
def _told(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        message = f"{path} can't be written: {(error.strerror or str(error)).lower()}"
        raise OutputUnusable(message) from error
