"""The lines of a trace file: plain, gzip or Zstandard, told by content and not by name."""

import gzip
import zlib
from pathlib import Path

import zstandard

from broker.sim.errors import TraceError

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
        return path.read_bytes()
    except OSError as error:
        raise TraceError(path, f"can't be read: {error.strerror}") from error


def _decompressed(content: bytes, path: Path) -> bytes:
    try:
        if content.startswith(GZIP_MAGIC):
            return gzip.decompress(content)
        if content.startswith(ZSTD_MAGIC):
            return _unframed(content)
    except (zlib.error, EOFError, gzip.BadGzipFile, zstandard.ZstdError) as error:
        raise TraceError(path, f"broken compressed file, fetch it again: {error}") from error
    return content


def _unframed(content: bytes) -> bytes:
    parts: list[bytes] = []
    while content:
        frame = zstandard.ZstdDecompressor().decompressobj()
        parts.append(frame.decompress(content))
        if not frame.eof:
            raise EOFError
        content = frame.unused_data
    return b"".join(parts)
