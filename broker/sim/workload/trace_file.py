"""The lines of a trace file: plain, gzip or Zstandard, told by content and not by name."""

import gzip
import io
import zlib
from pathlib import Path

import zstandard

from broker.disk.named_file import read_named
from broker.sim.errors import TraceError

FILE_BYTES_MAX = 4_000_000_000
"""Largest trace, packed or not: memory holds its lines. The largest public one has a quarter."""

PIECE_BYTES = 1 << 14
"""Unpacked at once: half a gigabyte at the worst ratio that Zstandard has."""
GZIP_MAGIC = b"\x1f\x8b"
"""How a gzip file begins (RFC 1952, 2.3.1)."""
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
"""How a Zstandard frame begins (RFC 8878, 3.1.1)."""

Line = tuple[int, bytes]
"""A line that is not blank, and its number from 1."""


def read_lines(path: Path) -> list[Line]:
    """Return the file's lines but for blank ones; never empty.

    Raises:
        TraceError: the file can't be read, is broken or empty.
    """
    content = _decompressed(_read(path), path)
    numbered = enumerate(content.removeprefix(b"\xef\xbb\xbf").splitlines(), 1)
    lines = [(number, line) for number, line in numbered if line.strip()]
    if not lines:
        raise TraceError(path, "is empty: a trace has one request a line")
    return lines


def _read(path: Path) -> bytes:
    try:
        return read_named(path, bytes_max=FILE_BYTES_MAX)
    except OSError as error:
        raise TraceError(path, f"can't be read: {error.strerror}") from error


def _decompressed(content: bytes, path: Path) -> bytes:
    try:
        if content.startswith(GZIP_MAGIC):
            unpacked = gzip.GzipFile(fileobj=io.BytesIO(content)).read(FILE_BYTES_MAX + 1)
            if len(unpacked) > FILE_BYTES_MAX:
                raise _too_large(path)
            return unpacked
        if content.startswith(ZSTD_MAGIC):
            return _unframed(content, path)
    except (zlib.error, EOFError, gzip.BadGzipFile, zstandard.ZstdError) as error:
        raise TraceError(path, f"broken compressed file, fetch it again: {error}") from error
    return content


def _unframed(content: bytes, path: Path) -> bytes:
    unpacked = bytearray()
    frame = None
    for start in range(0, len(content), PIECE_BYTES):
        piece = content[start : start + PIECE_BYTES]
        while piece:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            unpacked += frame.decompress(piece)
            if len(unpacked) > FILE_BYTES_MAX:
                raise _too_large(path)
            piece, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError
    return bytes(unpacked)


def _too_large(path: Path) -> TraceError:
    return TraceError(path, f"is larger than {FILE_BYTES_MAX:,} bytes when unpacked")
