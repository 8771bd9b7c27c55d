"""The result files of a batch: one writer at a time, and what stands is read back from them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.bus import topology
from broker.bus.files import Files
from broker.bus.memory import MemoryBus
from broker.bus.topology import Bounds, LanePlan
from broker.wire.codec import MalformedMessage
from broker.wire.messages import Usage
from producers.batch.outcome import Ended
from producers.batches.errors import LeaseLost
from producers.batches.journal import Standing, decode_entry, numbers_of, ranges_of
from producers.batches.records import Batch, Counts
from producers.batches.results import Result, ResultFiles
from tests.builders import LANE, MODEL
from tests.stored_batches import a_batch


def a_result(number: int, *, ok: bool = True, unrun: bool = False) -> Result:
    """A line's end."""
    ended = Ended(number, b'{"custom_id":"id-%d"}\n' % number, ok=ok)
    return Result(ended=ended, usage=Usage(3, 2, 1), unrun=unrun)


async def the_files() -> Files:
    """Files of a lane."""
    bus = MemoryBus()
    await topology.apply(bus, topology.of([LanePlan(LANE, (MODEL,))], Bounds()))
    return Files(bus, LANE)


async def taken_over(files: Files, batch: Batch) -> ResultFiles:
    """The result files in the hands of a new runner."""
    results = ResultFiles(files, batch)
    await results.take_over()
    return results


async def test_what_stands_is_read_back() -> None:
    """Lines, sums and counts, from the chunks alone; empty files are not known."""
    files, batch = await the_files(), a_batch(counts=Counts(total=9))
    first = await taken_over(files, batch)
    assert first.counted(batch).output_file_id == ""
    assert await files.all() == []
    await first.add(first.output, [a_result(3), a_result(1)], patience_s=1.0)
    await first.add(first.errors, [a_result(2, ok=False, unrun=True)], patience_s=1.0)
    await first.add(first.output, [a_result(7)], patience_s=1.0)
    second = await taken_over(files, batch)
    assert [number for number in range(10) if number in second.standing] == [1, 2, 3, 7]
    counted = second.counted(batch)
    assert counted.counts == Counts(total=9, completed=3, failed=1)
    assert (counted.usage, second.unrun) == (Usage(12, 8, 4), 1)
    assert (counted.output_file_id, counted.error_file_id) == (batch.output_id, batch.errors_id)
    await second.finish(life_s=60.0)
    info = await files.find(batch.output_id)
    assert info is not None
    assert (info.growing, info.lines, info.purpose) == (False, 3, "batch_output")
    content = b"".join([chunk async for chunk in files.content(info)])
    assert content.count(b"\n") == 3


@pytest.mark.parametrize("ok", [True, False])
async def test_who_was_overtaken_writes_no_more(ok: bool) -> None:
    """From the moment the next one has begun, before he wrote a line: neither file takes one."""
    files, batch = await the_files(), a_batch()
    first = await taken_over(files, batch)
    await first.add(first.output, [a_result(1)], patience_s=1.0)
    second = await taken_over(files, batch)
    file = first.output if ok else first.errors
    with pytest.raises(LeaseLost):
        await first.add(file, [a_result(2, ok=ok)], patience_s=1.0)
    third = await taken_over(files, batch)
    assert 2 not in third.standing
    with pytest.raises(LeaseLost):
        await second.add(second.errors, [a_result(3, ok=False)], patience_s=1.0)


async def test_a_line_never_stands_twice() -> None:
    """A second end of a line is a fault of ours, and isn't written."""
    files, batch = await the_files(), a_batch()
    results = await taken_over(files, batch)
    await results.add(results.output, [a_result(1)], patience_s=1.0)
    with pytest.raises(AssertionError):
        await results.add(results.errors, [a_result(1, ok=False)], patience_s=1.0)
    assert results.errors.last.count == 0


@given(st.sets(st.integers(1, 10**6), max_size=200))
def test_ranges_come_back(numbers: set[int]) -> None:
    """Any set of line numbers, sorted."""
    assert list(numbers_of(ranges_of(numbers))) == sorted(numbers)


def test_ranges_are_short() -> None:
    """What stands together is told together."""
    assert ranges_of([5, 1, 2, 3, 9, 10]) == "1-3,5,9-10"
    assert ranges_of([]) == ""


@pytest.mark.parametrize("text", ["", "{", '{"lines":"1-x"}', "[]", '{"count":"a"}'])
def test_an_entry_that_is_none(text: str) -> None:
    """A chunk that we did not write is told as such."""
    with pytest.raises(MalformedMessage):
        decode_entry(text)


def test_standing_takes_a_bit_for_a_line() -> None:
    """A million lines in well under a megabyte."""
    standing = Standing()
    for number in range(1, 1_000_001):
        standing.add(number)
    assert 1_000_000 in standing
    assert 1_000_001 not in standing
    assert len(standing._bits) < 150_000
