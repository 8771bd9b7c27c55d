"""What stands in a result file, chunk by chunk: each chunk says which lines it brought. Pure.

A chunk and its entry are stored in one message, so no crash comes between them; what a batch has
achieved is read back from there alone.
"""

from collections.abc import Iterable

import msgspec

from broker.wire.codec import MalformedMessage
from broker.wire.messages import Usage

ENTRY_HEADER = "Inferlane-Lines"

ENTRY_BYTES_MAX = 48_000
"""Longest entry: the server takes 64 KB of headers."""


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chunk brought, and the file's sums with it."""

    lines: str = ""
    """Numbers, as ranges: `1-5,9`. Empty: the chunk only ends another writer."""
    count: int = 0
    """Lines of the file up to here."""
    bytes: int = 0
    usage: Usage = Usage()
    unrun: int = 0
    """Of the lines, those that the window left no time for."""


_decoder = msgspec.json.Decoder(Entry)


def encode_entry(entry: Entry) -> str:
    """Write an entry as a header's value."""
    return msgspec.json.encode(entry).decode()


def decode_entry(text: str) -> Entry:
    """Read a header's value. Raises MalformedMessage."""
    try:
        entry = _decoder.decode(text)
        for _ in numbers_of(entry.lines):
            pass
    except (msgspec.MsgspecError, ValueError) as error:
        message = f"not an entry of a result file: {text[:80]!r}"
        raise MalformedMessage(message) from error
    return entry


def ranges_of(numbers: Iterable[int]) -> str:
    """Write line numbers as ranges, sorted: {1, 2, 3, 9} is `1-3,9`."""
    parts: list[str] = []
    first = last = 0
    for number in sorted(numbers):
        if number != last + 1 or not first:
            if first:
                parts.append(_range(first, last))
            first = number
        last = number
    if first:
        parts.append(_range(first, last))
    return ",".join(parts)


def numbers_of(ranges: str) -> Iterable[int]:
    """Undo `ranges_of`. Raises ValueError."""
    for part in ranges.split(",") if ranges else ():
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


class Standing:
    """Which lines stand in a result file: a bit each, 125 KB for a million."""

    def __init__(self) -> None:
        self._bits = bytearray()

    def __contains__(self, number: int) -> bool:
        index, bit = divmod(number, 8)
        return index < len(self._bits) and bool(self._bits[index] >> bit & 1)

    def add(self, number: int) -> None:
        """Note a line. One that stands already is a fault of ours."""
        assert number not in self, f"line {number} stands twice"
        index, bit = divmod(number, 8)
        if index >= len(self._bits):
            self._bits.extend(bytes(index + 1 - len(self._bits) + (len(self._bits) >> 3)))
        self._bits[index] |= 1 << bit
