"""Server-sent events, cut out of a byte stream that may break anywhere."""

from worker_agent.engine.base import RESPONSE_BYTES_MAX, AnswerTooLarge

EVENT_BYTES_MAX = RESPONSE_BYTES_MAX
"""Longest event, and longest line: /v1/responses ends with one that holds the whole answer."""

STREAM_BYTES_MAX = 8 * RESPONSE_BYTES_MAX
"""Longest stream: llama.cpp wraps a 4-byte token in 250 bytes, so this is some 250,000 tokens."""


class SseReader:
    """Feed it bytes as they come, and take each event's data. All else in the stream is dropped."""

    def __init__(self) -> None:
        self._unfinished: list[bytes] = []
        self._unfinished_bytes = 0
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._stream_bytes = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events that `piece` completes. Raises AnswerTooLarge."""
        self._stream_bytes += len(piece)
        if self._stream_bytes > STREAM_BYTES_MAX:
            message = f"the stream is longer than {STREAM_BYTES_MAX} bytes"
            raise AnswerTooLarge(message)
        if b"\n" not in piece:
            self._keep(piece)
            return []
        head, *lines = piece.split(b"\n")
        first = b"".join((*self._unfinished, head))
        self._unfinished.clear()
        self._unfinished_bytes = 0
        self._keep(lines.pop())
        events: list[bytes] = []
        for line in (first, *lines):
            self._line(line.removesuffix(b"\r"), events)
        return events

    def flush(self) -> list[bytes]:
        """Return what the end of the stream leaves over: an event that lacks its blank line."""
        return self.feed(b"\n\n")

    def _line(self, line: bytes, events: list[bytes]) -> None:
        if line.startswith(b"data:"):
            data = line[5:].removeprefix(b" ")
            self._data.append(data)
            self._data_bytes += len(data)
            self._check(self._data_bytes)
        elif not line and self._data:
            events.append(b"\n".join(self._data))
            self._data.clear()
            self._data_bytes = 0

    def _keep(self, piece: bytes) -> None:
        self._unfinished.append(piece)
        self._unfinished_bytes += len(piece)
        self._check(self._unfinished_bytes)

    def _check(self, size: int) -> None:
        if size > EVENT_BYTES_MAX:
            message = f"one event is longer than {EVENT_BYTES_MAX} bytes"
            raise AnswerTooLarge(message)
