"""The lines of a decision log in several files: rotated, compressed, of several brokers."""

import gzip
import heapq
import io
import re
import zlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import IO, cast

import zstandard

from broker.disk.named_file import open_named
from ops.cli.errors import CommandError, Misused

LINE_BYTES_MAX = 1 << 20
"""A longer line is given in pieces: the longest of a decision log has 12 kB."""

PIECE_BYTES = 1 << 14
"""Read of a compressed file at once: half a gigabyte unpacked, at the worst ratio there is."""

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_INSTANT = re.compile(rb'"at_s":(\d+(?:\.\d+)?)')

_TimedLine = tuple[float, bytes]


def lines_in_order(paths: Iterable[Path]) -> Iterator[bytes]:
    """Give the lines of all files in the order of time, whatever the order of the files.

    A file is opened when its turn comes; as many are open at once as overlap in time. A file given
    twice is read once.

    Raises:
        Misused: a file is not there, or can't be opened.
        CommandError: a file can't be read to its end.
    """
    begins = [(_begins_at_s(path), path) for path in dict.fromkeys(map(Path.resolve, paths))]
    files = [_timed(path, begins_at_s) for begins_at_s, path in sorted(begins)]
    return map(itemgetter(1), heapq.merge(*files, key=itemgetter(0)))


def _begins_at_s(path: Path) -> float:
    """Find a file's first instant; 0 where there is none."""
    with _opened(path) as file:
        found = (_INSTANT.search(line) for line in _lines(file))
        return next((float(one[1]) for one in found if one is not None), 0.0)


def _timed(path: Path, begins_at_s: float) -> Iterator[_TimedLine]:
    at_s = begins_at_s
    yield at_s, b""  # Its place among the files, without opening it before its turn.
    with _opened(path) as file:
        for line in _lines(file):
            found = _INSTANT.search(line)
            at_s = at_s if found is None else float(found[1])
            yield at_s, line


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    while line := file.readline(LINE_BYTES_MAX):
        yield line


@contextmanager
def _opened(path: Path) -> Generator[IO[bytes]]:
    """Open a file and decompress it as its first bytes say."""
    try:
        raw = open_named(path)
    except OSError as error:
        message = f"{path} can't be read: {(error.strerror or str(error)).lower()}"
        raise Misused(message) from error
    with raw:
        try:
            yield _decompressed(raw, raw.peek(len(_ZSTD_MAGIC)))
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            message = f"{path} can't be read to its end: {error}"
            raise CommandError(message) from error


def _decompressed(raw: IO[bytes], begin: bytes) -> IO[bytes]:
    if begin.startswith(_GZIP_MAGIC):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
    if begin.startswith(_ZSTD_MAGIC):
        return io.BufferedReader(_Frames(raw))
    return raw


class _Frames(io.RawIOBase):
    """What Zstandard's frames hold, one after the other; one that is cut is an error.

    The library's own reader takes the end of the file for the end of the frame.
    """

    def __init__(self, packed: IO[bytes]) -> None:
        super().__init__()
        self._packed = packed
        self._piece = b""
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def readinto(self, buffer: "bytearray | memoryview") -> int:  # type: ignore[override]
        """Fill the buffer, 0 at the end. Raises EOFError when the file ends within a frame."""
        while not self._ready:
            self._piece = self._piece or self._packed.read(PIECE_BYTES)
            if not self._piece:
                if self._frame is not None:
                    message = "compressed file ended before the end of its frame"
                    raise EOFError(message)
                return 0
            frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._ready = memoryview(frame.decompress(self._piece))
            done = frame.eof
            self._frame, self._piece = (None, frame.unused_data) if done else (frame, b"")
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
