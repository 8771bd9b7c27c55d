"""Lines from a thread that may block: windows, pauses, faults, the end."""

import asyncio
import queue
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest

from producers.batch.errors import InputUnusable
from producers.batch.feed import Feed
from producers.batch.plan import Bounds
from producers.batch.source import Line
from tests.lanes import until

BOUNDS = Bounds(lookahead_lines=3, gather_s=0.02)


def some(*numbers: int) -> Iterator[Line]:
    """Lines of ten bytes."""
    return (Line(number, b"x" * 10, number) for number in numbers)


async def test_windows_are_full_until_the_last() -> None:
    """At most `lookahead_lines` each; an empty one says that it is over, again and again."""
    feed = Feed(some(*range(7)), BOUNDS)
    sizes = [len(await feed.take()) for _ in range(5)]
    assert sizes == [3, 3, 1, 0, 0]


async def test_a_window_is_bounded_in_bytes() -> None:
    """`lookahead_bytes`, passed by one line at most."""
    feed = Feed(some(*range(4)), replace(BOUNDS, lookahead_bytes=11))
    assert [len(await feed.take()) for _ in range(3)] == [2, 2, 0]


async def test_the_thread_reads_no_more_than_a_window_ahead() -> None:
    """An endless input takes no memory while nobody takes."""
    read: list[int] = []

    def endless() -> Iterator[Line]:
        for number in count():
            read.append(number)
            yield Line(number, b"x", number)

    feed = Feed(endless(), BOUNDS)
    await feed.take()
    await until(lambda: len(read) == 7)
    await asyncio.sleep(0.02)
    assert len(read) == 7
    feed.close()


async def test_what_has_come_is_handed_over_when_the_input_pauses() -> None:
    """A pipe with one line in it gives a window of one line."""
    pipe: queue.Queue[Line | None] = queue.Queue()
    feed = Feed(iter(pipe.get, None), BOUNDS)
    pipe.put(Line(1, b"x", 1))
    assert [line.number for line in await feed.take()] == [1]
    pipe.put(Line(2, b"x", 2))
    assert [line.number for line in await feed.take()] == [2]
    pipe.put(None)
    assert await feed.take() == []


async def test_a_fault_is_raised_after_the_lines_before_it() -> None:
    """What could be read is run; then the fault is told."""

    def breaks() -> Iterator[Line]:
        yield from some(1, 2)
        message = "damaged"
        raise InputUnusable(message)

    feed = Feed(breaks(), BOUNDS)
    assert len(await feed.take()) == 2
    with pytest.raises(InputUnusable):
        await feed.take()
