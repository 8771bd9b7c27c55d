"""The rule of removal as the broker keeps it: record, dead letter, word, and only then the ack."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from broker.bus.base import BucketSpec, ConsumerSpec, Delivery, Message, NotFound, StreamSpec
from broker.bus.memory import MemoryBus
from broker.bus.memory_clock import ManualClock
from broker.service.closer import END_BYTES_MAX, Closer, Ending, Farewell
from broker.service.held import Duplicate
from broker.wire import subjects
from broker.wire.codec import decode, decode_out, encode
from broker.wire.messages import DeadLetter, End, Kind, Reason, StoredEnd, TerminalRecord
from tests.builders import a_job
from tests.turns import until

JOBS = StreamSpec(name="JOBS_acme", subjects=("jobs.acme.>",), work_queue=True)
RESULTS = StreamSpec(
    name="RESULTS_acme",
    subjects=("results.acme.*",),
    max_msgs_per_subject=1,
    discard_new_per_subject=True,
    allow_msg_ttl=True,
)
DLQ = StreamSpec(name="DLQ_acme", subjects=("dlq.acme.*",))
CONSUMER = ConsumerSpec(stream="JOBS_acme", name="b2-tiny", filter_subject="jobs.acme.2.tiny")


def a_record(**fields: object) -> TerminalRecord:
    """The record of a job that was refused."""
    return TerminalRecord(
        **{
            "job": "job-1",
            "lane": "acme",
            "kind": Kind.REJECTED,
            "ended_at_s": 5.0,
            "client": "client-1",
            "reason": Reason.QUEUE_FULL,
            **fields,
        }  # pyright: ignore[reportArgumentType]
    )


def a_duplicate(delivery: Delivery, *, client: str) -> Duplicate:
    """A further message of a known job."""
    return Duplicate(
        client, delivery.stream, delivery.subject, delivery.sequence, delivery.ack_subject
    )


class Bench:
    """A lane on the in-process bus, with a closer at work."""

    def __init__(self, bus: MemoryBus, clock: ManualClock) -> None:
        self.bus = bus
        self.clock = clock
        self.heard: list[Message] = []
        self.closed: list[tuple[Ending, TerminalRecord, bool]] = []
        self.closer = Closer(bus, closed=self._closed)

    def _closed(self, ending: Ending, record: TerminalRecord, *, won: bool) -> None:
        self.closed.append((ending, record, won))

    async def delivered(self) -> Delivery:
        """Publish a job and pull it."""
        await self.bus.append("jobs.acme.2.tiny", encode(a_job()))
        got: list[Delivery] = []
        pull = await self.bus.pull("JOBS_acme", "b2-tiny", got.extend, window=1)
        await until(lambda: bool(got))
        await pull.stop()
        return got[0]

    async def ending(self, **fields: object) -> Ending:
        """The end of a delivered job."""
        delivery = await self.delivered()
        return Ending(
            **{
                "key": "acme.job-1",
                "record": a_record(),
                "stream": delivery.stream,
                "sequence": delivery.sequence,
                "ack_subject": delivery.ack_subject,
                "client": "client-1",
                **fields,
            }  # pyright: ignore[reportArgumentType]
        )

    async def queued(self) -> int:
        """Messages still in the lane's stream."""
        return (await self.bus.stream_state("JOBS_acme")).messages

    async def record(self) -> TerminalRecord:
        """The record that stands."""
        stored = await self.bus.last_message("RESULTS_acme", "results.acme.job-1")
        return decode(stored.data, TerminalRecord)


@asynccontextmanager
async def a_bench() -> AsyncGenerator[Bench, None]:
    """A bench whose closer runs until the test is done."""
    clock = ManualClock()
    bus = MemoryBus(clock=clock)
    for spec in (JOBS, RESULTS, DLQ):
        await bus.ensure_stream(spec)
    await bus.ensure_bucket(BucketSpec(subjects.ATTEMPTS_BUCKET))
    await bus.ensure_consumer(CONSUMER)
    bench = Bench(bus, clock)
    await bus.subscribe("out.acme.>", bench.heard.append)
    task = asyncio.create_task(bench.closer.run())
    try:
        yield bench
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await bus.close()


async def test_an_ending_leaves_a_record_tells_the_caller_and_removes_the_message() -> None:
    """All three, and the caller hears the very record that is stored."""
    async with a_bench() as bench:
        bench.closer.put(await bench.ending())
        await until(lambda: bool(bench.closed))
        assert await bench.record() == a_record()
        assert await bench.queued() == 0
        await until(lambda: bool(bench.heard))
        event = decode_out(bench.heard[0].data)
        assert isinstance(event, End)
        assert decode(event.record, TerminalRecord) == a_record()
        assert bench.closed[0][2] is True


async def test_the_message_stays_while_its_record_cannot_be_written() -> None:
    """RESULTS unreachable: no ack, however long it takes; then all is done once."""
    async with a_bench() as bench:
        ending = await bench.ending()
        bench.bus.disconnect()
        bench.closer.put(ending)
        await until(lambda: bench.closer.failures > 0)
        assert not bench.closed
        bench.bus.reconnect()
        await until(lambda: bool(bench.closed))
        assert await bench.queued() == 0


async def test_a_record_that_stands_wins_over_ours() -> None:
    """First wins: the caller hears the standing record, and ours is not written."""
    async with a_bench() as bench:
        standing = a_record(kind=Kind.COMPLETED, reason=None)
        await bench.bus.append("results.acme.job-1", encode(standing))
        bench.closer.put(await bench.ending())
        await until(lambda: bool(bench.closed))
        assert await bench.record() == standing
        _, record, won = bench.closed[0]
        assert (record, won) == (standing, False)
        assert await bench.queued() == 0


async def test_our_own_record_found_after_a_lost_answer_is_a_win() -> None:
    """The write was stored and its answer lost: the next try finds it and goes on as winner."""
    async with a_bench() as bench:
        await bench.bus.append("results.acme.job-1", encode(a_record()))
        bench.closer.put(await bench.ending())
        await until(lambda: bool(bench.closed))
        assert bench.closed[0][2] is True


async def test_an_unreadable_standing_record_still_ends_the_job() -> None:
    """Garbage in RESULTS blocks nothing: the message leaves, ours is not written over it."""
    async with a_bench() as bench:
        await bench.bus.append("results.acme.job-1", b"\xc1garbage")
        bench.closer.put(await bench.ending())
        await until(lambda: bool(bench.closed))
        assert await bench.queued() == 0
        assert bench.closed[0][2] is False


async def test_a_dead_letter_is_published_with_the_job_before_the_message_leaves() -> None:
    """Case 29: what failed for good can be listed, read and replayed."""
    async with a_bench() as bench:
        record = a_record(kind=Kind.DEAD_LETTERED, reason=Reason.STALLED)
        bench.closer.put(await bench.ending(record=record, dead_letter=True))
        await until(lambda: bool(bench.closed))
        stored = await bench.bus.last_message("DLQ_acme", "dlq.acme.job-1")
        letter = decode(stored.data, DeadLetter)
        assert (letter.job, letter.subject) == (encode(a_job()), "jobs.acme.2.tiny")
        assert letter.record == record
        assert await bench.queued() == 0


async def test_a_job_that_completed_meanwhile_is_not_dead_lettered() -> None:
    """The standing record decides: no dead letter for a job that has its result."""
    async with a_bench() as bench:
        await bench.bus.append(
            "results.acme.job-1", encode(a_record(kind=Kind.COMPLETED, reason=None))
        )
        record = a_record(kind=Kind.DEAD_LETTERED, reason=Reason.STALLED)
        bench.closer.put(await bench.ending(record=record, dead_letter=True))
        await until(lambda: bool(bench.closed))
        with pytest.raises(NotFound):
            await bench.bus.last_message("DLQ_acme", "dlq.acme.job-1")


async def test_an_unpulled_message_is_removed_by_its_sequence() -> None:
    """A cancelled job that nobody pulled has no ack subject."""
    async with a_bench() as bench:
        appended = await bench.bus.append("jobs.acme.2.tiny", encode(a_job()))
        ending = Ending(
            key="acme.job-1",
            record=a_record(kind=Kind.CANCELLED, reason=Reason.CANCELLED),
            stream="JOBS_acme",
            sequence=appended.sequence,
            ack_subject="",
        )
        bench.closer.put(ending)
        await until(lambda: bool(bench.closed))
        assert await bench.queued() == 0
        assert not bench.heard


async def test_a_record_too_large_to_repeat_is_pointed_at() -> None:
    """END_BYTES_MAX: a larger record stands in RESULTS, and the caller is told to look there."""
    async with a_bench() as bench:
        record = a_record(body=b"x" * END_BYTES_MAX)
        bench.closer.put(await bench.ending(record=record))
        await until(lambda: bool(bench.heard))
        assert decode_out(bench.heard[0].data) == StoredEnd(job="job-1")


async def test_duplicates_are_told_and_acknowledged_after_the_record_stands() -> None:
    """A second message with a known id leaves with the first one's record."""
    async with a_bench() as bench:
        ending = await bench.ending()
        twin = await bench.delivered()
        bench.closer.put(
            Farewell("acme.job-1", "acme", "job-1", (a_duplicate(twin, client="c2"),))
        )
        await until(lambda: bool(bench.heard))
        assert bench.heard[0].subject == subjects.out("acme", "c2", "job-1")
        bench.closer.put(ending)
        await until(lambda: bool(bench.closed))
        assert await bench.queued() == 0


async def test_a_rejection_runs_out_so_that_the_next_try_can_succeed() -> None:
    """The record of a rejection lives for its retry-after only."""
    async with a_bench() as bench:
        bench.closer.put(await bench.ending(ttl_s=1.0))
        await until(lambda: bool(bench.closed))
        assert (await bench.record()).kind is Kind.REJECTED
        bench.clock.advance(1.1)
        with pytest.raises(NotFound):
            await bench.record()
