"""Server-sent events come out whole, wherever the bytes break."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_agent.engine import sse
from worker_agent.engine.base import AnswerTooLarge
from worker_agent.engine.sse import SseReader

STREAM = (
    b": ping\n\n"
    b"event: response.created\ndata: {}\n\n"
    b'data: {"a": 1}\r\n\r\n'
    b"data:no space\n\n"
    b"data: first\ndata: second\n\n"
    b"id: 7\nretry: 10\n\n"
    b"data: [DONE]\n\n"
)
EVENTS = [b"{}", b'{"a": 1}', b"no space", b"first\nsecond", b"[DONE]"]


def read_all(pieces: list[bytes]) -> list[bytes]:
    """Feed all pieces."""
    reader = SseReader()
    return [event for piece in pieces for event in reader.feed(piece)]


@given(st.lists(st.integers(1, len(STREAM) - 1), max_size=12))
def test_events_however_the_stream_is_cut(cuts: list[int]) -> None:
    """Comments, names and ids are dropped, data lines joined; the cuts don't matter."""
    places = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[a:b] for a, b in pairwise(places)]
    assert read_all(pieces) == EVENTS


def test_flush_gives_an_event_without_its_blank_line() -> None:
    """A server that ends right after its last line has still said it."""
    reader = SseReader()
    assert reader.feed(b"data: x\ndata: y") == []
    assert reader.flush() == [b"x\ny"]
    assert reader.flush() == []


def test_line_without_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that never ends is given up at the bound, not when memory is gone."""
    monkeypatch.setattr(sse, "EVENT_BYTES_MAX", 100)
    reader = SseReader()
    reader.feed(b"data: " + b"x" * 94)
    with pytest.raises(AnswerTooLarge, match="one event is longer than 100 bytes"):
        reader.feed(b"x")


def test_event_of_many_lines_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """So is an event that goes on line by line."""
    monkeypatch.setattr(sse, "EVENT_BYTES_MAX", 100)
    reader = SseReader()
    reader.feed(b"data: " + b"x" * 60 + b"\n")
    with pytest.raises(AnswerTooLarge, match="one event"):
        reader.feed(b"data: " + b"x" * 60 + b"\n")


def test_stream_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a stream of small events without end."""
    monkeypatch.setattr(sse, "STREAM_BYTES_MAX", 100)
    reader = SseReader()
    assert len(reader.feed(b"data: x\n\n" * 11)) == 11
    with pytest.raises(AnswerTooLarge, match="the stream is longer than 100 bytes"):
        reader.feed(b"data: x\n\n")
