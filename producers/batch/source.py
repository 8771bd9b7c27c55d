"""The input as numbered lines: plain, gzip or zstd, from a file or standard input."""

import gzip
import io
import os
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, cast

import xxhash
import zstandard

from broker.disk.named_file import open_named
from producers.batch.errors import InputUnusable
from producers.batch.lines import UTF_16

STDIN = "-"

LINE_BYTES_MAX = 32_000_000
"""A longer line is not held in memory: it becomes one error line without its custom_id. Four times
the largest body of a job, so that a line that is only too large still gives its id."""

LINE_SKIPPED_BYTES_MAX = 1_000_000_000
"""So much of a longer line is passed over in search of its end: what has none is no file of lines,
and standard input may be a device that never ends."""

READ_BYTES = 1 << 20

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_OTHER_FORMS = {
    **dict.fromkeys(UTF_16, "UTF-16; save it as UTF-8"),
    b"PK\x03\x04": "a zip archive; unpack it, or use .gz or .zst",
    b"BZh": "bzip2; unpack it, or use .gz or .zst",
    b"\xfd7zX": "xz; unpack it, or use .gz or .zst",
}
"""Beginnings that no line of JSON has: each line would fail alone, a million error lines."""
_BOM = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n\x0b\x0c"

_DAMAGE = (OSError, EOFError, zlib.error, zstandard.ZstdError)


@dataclass(frozen=True, slots=True)
class Line:
    """One line that isn't blank."""

    number: int
    """1-based, blank lines counted: what an editor shows."""
    text: bytes
    """Without its end; empty when `too_long`."""
    digest: int
    """Of the text, 64 bits signed: says on a later run whether the line is still the same."""
    too_long: bool = False


@dataclass(frozen=True, slots=True)
class Survey:
    """What one pass over the input found: its identity, and how much there is to do."""

    digest: str
    lines: int
    """0 when all are blank."""
    bytes: int


def survey(path: str) -> Survey:
    """Read the whole (decompressed) input once. Raises InputUnusable."""
    digest = xxhash.xxh3_128()
    lines = size = 0
    last = b""
    blank = True
    with open_input(path) as source, _told(path):
        while chunk := source.read(READ_BYTES):
            digest.update(chunk)
            lines += chunk.count(b"\n")
            size += len(chunk)
            blank = blank and not chunk.strip(_BLANK)
            last = chunk[-1:]
    lines += last not in {b"", b"\n"}
    return Survey(digest.hexdigest(), 0 if blank else lines, size)


def read_lines(path: str) -> Iterator[Line]:
    """Give the lines that aren't blank. Raises InputUnusable."""
    with open_input(path) as source:
        number = 0
        while True:
            with _told(path, after_line=number):
                raw = source.readline(LINE_BYTES_MAX)
                number += 1
                line = _line(source, raw, number)
            if line is None:
                return
            if line.text or line.too_long:
                yield line


class Source(Protocol):
    """Bytes to read: what the standard library's buffered readers offer."""

    def read(self, size: int = -1, /) -> bytes:
        """Read up to `size` bytes; none at the end."""
        ...

    def readline(self, size: int = -1, /) -> bytes:
        """Read up to the end of the line, or `size` bytes."""
        ...


class _Peekable(Source, Protocol):
    def peek(self, size: int = 0, /) -> bytes: ...


@contextmanager
def open_input(path: str) -> Generator[Source]:
    """Open an input and decompress it as its first bytes say. Raises InputUnusable."""
    if not path:
        message = "no input is named; name a file, or - for standard input"
        raise InputUnusable(message)
    with _told(path):
        # Of standard input a reader of its own: the interpreter can't end while a thread waits
        # inside `sys.stdin`. Closed below, once the caller is done.
        raw = os.fdopen(0, "rb", closefd=False) if path == STDIN else open_named(Path(path))
    with raw:
        yield _decompressed(raw, path)


def plain_size(path: str) -> int:
    """Bytes of an input that is a plain file; 0 where they are not known before it is read."""
    try:
        if path == STDIN or not Path(path).is_file():
            return 0
        with Path(path).open("rb") as raw:
            is_packed = raw.read(len(_ZSTD_MAGIC)).startswith((_GZIP_MAGIC, _ZSTD_MAGIC))
            return 0 if is_packed else os.fstat(raw.fileno()).st_size
    except OSError:
        return 0  # Whoever reads it says why it can't be read.


def _decompressed(source: _Peekable, path: str) -> Source:
    with _told(path):
        magic = source.peek(len(_ZSTD_MAGIC))[: len(_ZSTD_MAGIC)]
    for begin, form in _OTHER_FORMS.items():
        if magic.startswith(begin):
            message = f"{path} is {form}; nothing was submitted"
            raise InputUnusable(message)
    if magic.startswith(_GZIP_MAGIC):
        return gzip.GzipFile(fileobj=cast("BinaryIO", source))
    if magic == _ZSTD_MAGIC:
        return io.BufferedReader(_ZstdSource(source), READ_BYTES)
    for suffix, name in ((".gz", "gzip"), (".zst", "zstd")):
        if path.endswith(suffix) and magic:
            message = f"{path} is no {name} file, though it is named so; rename it or compress it"
            raise InputUnusable(message)
    return source


class _ZstdSource(io.RawIOBase):
    """Decompressed bytes of a zstd file of any number of frames; a cut-off one is an error."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source
        self._ready = memoryview(b"")
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._given = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "bytearray | memoryview") -> int:  # type: ignore[override]
        while not self._ready:
            given = self._given or self._source.read(READ_BYTES >> 3)
            self._given = b""
            if not given and self._frame is not None:
                message = "the compressed data is cut off"
                raise EOFError(message)
            if not given:
                return 0
            frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._ready = memoryview(frame.decompress(given))
            self._frame = None if frame.eof else frame
            self._given = frame.unused_data if frame.eof else b""
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def _line(source: Source, raw: bytes, number: int) -> Line | None:
    """Make the line that begins with `raw`; None at the end of the input."""
    if not raw:
        return None
    if len(raw) == LINE_BYTES_MAX and not raw.endswith(b"\n"):
        digest = xxhash.xxh3_64(raw)
        skipped_bytes = len(raw)
        while (rest := source.readline(READ_BYTES)) and not rest.endswith(b"\n"):
            digest.update(rest)
            skipped_bytes += len(rest)
            if skipped_bytes > LINE_SKIPPED_BYTES_MAX:
                message = (
                    f"line {number} has no end within {LINE_SKIPPED_BYTES_MAX:,} bytes: is this a"
                    " file of JSON lines?"
                )
                raise InputUnusable(message)
        digest.update(rest)
        return Line(number, b"", _signed(digest.intdigest()), too_long=True)
    return line_of(raw, number)


def line_of(raw: bytes, number: int) -> Line:
    """Make a line of its bytes: without its end, blanks around it and a byte order mark before it.

    A mark stands in the midst where files that began with one were joined.
    """
    text = raw.removeprefix(_BOM).strip(_BLANK)
    return Line(number, text, _signed(xxhash.xxh3_64_intdigest(text)))


def _signed(digest: int) -> int:
    """As SQLite holds a 64-bit number."""
    return digest - (1 << 64) if digest >= 1 << 63 else digest


@contextmanager
def _told(path: str, *, after_line: int | None = None) -> Generator[None]:
    """Tell a fault of the file in one sentence."""
    name = "standard input" if path == STDIN else path
    try:
        yield
    except FileNotFoundError as error:
        message = f"there is no file {name}"
        raise InputUnusable(message) from error
    except _DAMAGE as error:
        where = f" after line {after_line}" if after_line else ""
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        message = f"{name} can't be read{where} ({reason}); nothing more was submitted"
        raise InputUnusable(message) from error
