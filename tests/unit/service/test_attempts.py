"""Failures across brokers: written behind, read back, forgotten when their job is gone."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import msgspec

from broker.bus.base import BucketSpec, LinkDown, NotFound, StreamSpec, Timeout
from broker.bus.memory import MemoryBus
from broker.service.attempts import FAILURES_KEPT_MAX, AttemptBook
from broker.wire.codec import decode, encode
from broker.wire.messages import Attempt, Failure, JobAttempts, Kind, Reason, TerminalRecord
from broker.wire.subjects import ATTEMPTS_BUCKET
from tests.crashing import Failing, Fault, faulty
from tests.turns import until

KEY = "acme.job-1"


def a_failure(number: int = 1) -> Failure:
    """An attempt that stalled on `w1`."""
    return Failure(Attempt(1, number), "w1", Reason.STALLED, 5.0)


class Shelf:
    """A bucket with a book at work."""

    def __init__(self, bus: MemoryBus, fault: Fault | None) -> None:
        self.bus = bus
        self.book = AttemptBook(faulty(bus, fault) if fault else bus)

    async def stored(self, key: str = KEY) -> tuple[Failure, ...]:
        """What the bucket holds of a job."""
        try:
            entry = await self.bus.kv_get(ATTEMPTS_BUCKET, key)
        except NotFound:
            return ()
        return decode(entry.value, JobAttempts).failures

    async def holds(self, count: int) -> bool:
        """Whether the bucket holds so many failures of the job."""
        return len(await self.stored()) == count


@asynccontextmanager
async def a_book(fault: Fault | None = None) -> AsyncGenerator[Shelf]:
    """A book that writes until the test is done."""
    bus = MemoryBus()
    await bus.ensure_bucket(BucketSpec(ATTEMPTS_BUCKET))
    await bus.ensure_stream(
        StreamSpec(name="RESULTS_acme", subjects=("results.acme.*",), max_msgs_per_subject=1)
    )
    shelf = Shelf(bus, fault)
    task = asyncio.create_task(shelf.book.run())
    try:
        yield shelf
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await bus.close()


async def a_key(bus: MemoryBus, key: str = KEY, *, value: bytes | None = None) -> None:
    """A key that an earlier leader left."""
    await bus.kv_put(ATTEMPTS_BUCKET, key, value or encode(JobAttempts(failures=(a_failure(),))))


async def a_record(bus: MemoryBus, kind: Kind) -> TerminalRecord:
    """A record that stands."""
    record = TerminalRecord(job="job-1", lane="acme", kind=kind, ended_at_s=1.0)
    await bus.append("results.acme.job-1", encode(record))
    return record


async def test_failures_are_written_behind_and_deleted_with_their_job() -> None:
    """Nobody waits for the bucket."""
    async with a_book() as shelf:
        shelf.book.add(KEY, a_failure(1))
        shelf.book.add(KEY, a_failure(2))
        await until(lambda: shelf.holds(2))
        shelf.book.forget(KEY)
        await until(lambda: shelf.holds(0))


async def test_a_job_that_never_failed_costs_no_write() -> None:
    """The usual case."""
    async with a_book() as shelf:
        shelf.book.forget(KEY)
        assert not shelf.book._dirty


async def test_only_the_last_failures_are_kept() -> None:
    """FAILURES_KEPT_MAX bounds a value."""
    async with a_book() as shelf:
        for number in range(FAILURES_KEPT_MAX + 3):
            shelf.book.add(KEY, a_failure(number))
        assert len(shelf.book.failures[KEY]) == FAILURES_KEPT_MAX
        assert shelf.book.failures[KEY][-1] == a_failure(FAILURES_KEPT_MAX + 2)


async def test_a_busy_engine_does_not_push_out_failures_that_count() -> None:
    """Uncharged ones go first, so that a takeover forgives nothing."""
    async with a_book() as shelf:
        shelf.book.add(KEY, a_failure(0))
        for number in range(1, FAILURES_KEPT_MAX + 5):
            shelf.book.add(KEY, msgspec.structs.replace(a_failure(number), charged=False))
        assert len(shelf.book.failures[KEY]) == FAILURES_KEPT_MAX
        assert shelf.book.failures[KEY][0] == a_failure(0)


async def test_a_write_that_fails_is_tried_again() -> None:
    """The link comes back, and the newest is written; other keys were not held up for ever."""
    async with a_book(Failing("kv_put", LinkDown("cut"))) as shelf:
        shelf.book.add(KEY, a_failure(1))
        await asyncio.wait_for(until(lambda: shelf.holds(1)), 5)


async def test_the_next_leader_reads_what_the_last_one_wrote() -> None:
    """Case 30: failures count across brokers, whatever the server counts."""
    async with a_book() as shelf:
        await a_key(shelf.bus)
        await shelf.book.load()
        assert shelf.book.failures == {KEY: (a_failure(),)}


async def test_a_key_whose_record_stands_is_dropped() -> None:
    """Its delete was lost with the last leader."""
    async with a_book() as shelf:
        await a_key(shelf.bus)
        await a_record(shelf.bus, Kind.COMPLETED)
        await shelf.book.load()
        assert not shelf.book.failures
        await until(lambda: shelf.holds(0))


async def test_a_dead_letters_key_is_kept_until_its_message_is_gone() -> None:
    """Record and no letter: the leader may have died between the two."""
    async with a_book() as shelf:
        await a_key(shelf.bus)
        record = await a_record(shelf.bus, Kind.DEAD_LETTERED)
        await shelf.book.load()
        assert shelf.book.dead_letters == {KEY: record}
        assert await shelf.holds(1)
        shelf.book.forget(KEY)
        assert not shelf.book.dead_letters
        await until(lambda: shelf.holds(0))


async def test_garbage_in_bucket_and_results_is_survived() -> None:
    """An unreadable value, an unreadable record, a key that is no job's."""
    async with a_book() as shelf:
        await a_key(shelf.bus, "acme.bad", value=b"\xc1")
        await a_key(shelf.bus, "no-lane")
        await a_key(shelf.bus)
        await shelf.bus.append("results.acme.job-1", b"\xc1")
        await shelf.book.load()
        assert not shelf.book.failures
        await until(lambda: shelf.holds(0))


async def test_a_lane_that_is_no_more_stops_no_start() -> None:
    """Its stream does not answer; its failures are read, and harm nobody."""
    async with a_book() as shelf:
        await a_key(shelf.bus, "gone.job-1")
        await shelf.book.load()
        assert list(shelf.book.failures) == ["gone.job-1"]


async def test_a_start_asks_again_until_it_has_read_everything() -> None:
    """A server that goes away in the middle ends no leadership."""
    async with a_book(Failing("last_message", Timeout("slow"), times=2)) as shelf:
        await a_key(shelf.bus)
        await asyncio.wait_for(shelf.book.load(), 5)
        assert shelf.book.failures == {KEY: (a_failure(),)}


async def test_what_can_be_no_key_is_never_written() -> None:
    """A worker's list may name anything; a key that the server refuses would be tried for ever."""
    async with a_book() as shelf:
        shelf.book.add("acme.>", a_failure())
        assert not shelf.book._dirty
