"""The lines of a stored input: cut out of its chunks as they come, window by window."""

from collections.abc import AsyncIterable, AsyncIterator

from producers.batch.source import Line, line_of

LINE_BYTES_MAX = 16_000_000
"""A longer line is not held in memory: it becomes one error line without its custom_id. Twice the
largest body of a job, so that a line that is only too large still gives its id."""


class Splitter:
    """Cuts bytes into lines, numbered as an editor numbers them; blank ones are left out."""

    def __init__(self, *, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self._line_bytes_max = line_bytes_max
        self._held = bytearray()
        self._too_long = False
        self._number = 0

    def feed(self, data: bytes) -> list[Line]:
        """Take the next bytes; return the lines that end in them."""
        *ends, rest = data.split(b"\n")
        found: list[Line] = []
        for end in ends:
            self._hold(end)
            self._close(found)
        self._hold(rest)
        return found

    def end(self) -> list[Line]:
        """Return the last line, where it lacks its end."""
        found: list[Line] = []
        if self._held or self._too_long:
            self._close(found)
        return found

    def _hold(self, part: bytes) -> None:
        if self._too_long:
            return
        self._held += part
        if len(self._held) > self._line_bytes_max:
            self._too_long = True
            self._held.clear()

    def _close(self, found: list[Line]) -> None:
        self._number += 1
        if self._too_long:
            found.append(Line(self._number, b"", 0, too_long=True))
        else:
            line = line_of(bytes(self._held), self._number)
            if line.text:
                found.append(line)
        self._held.clear()
        self._too_long = False


async def windows(
    content: AsyncIterable[bytes], *, lines_max: int, bytes_max: int
) -> AsyncIterator[list[Line]]:
    """Give an input's lines in windows of at most so many lines, or bytes and one line."""
    splitter = Splitter()
    window: list[Line] = []
    size = 0
    async for chunk in content:
        for line in splitter.feed(chunk):
            window.append(line)
            size += len(line.text)
            if len(window) >= lines_max or size >= bytes_max:
                yield window
                window, size = [], 0
    window += splitter.end()
    if window:
        yield window
