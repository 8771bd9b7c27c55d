"""The rule of removal as the broker keeps it: record, dead letter, word, and only then the ack."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from broker.bus.base import (
    BucketSpec,
    ConsumerSpec,
    Delivery,
    LinkDown,
    Message,
    NotFound,
    StreamFull,
    StreamSpec,
)
from broker.bus.memory import MemoryBus
from broker.bus.memory_clock import ManualClock
from broker.service.closer import (
    BEGUN_AT_ONCE_MAX,
    END_BYTES_MAX,
    STEPS_MAX,
    Closer,
    Ending,
    Farewell,
)
from broker.service.held import Duplicate
from broker.wire import subjects
from broker.wire.codec import decode, decode_out, encode
from broker.wire.messages import (
    Attempt,
    DeadLetter,
    End,
    Failure,
    JobAttempts,
    Kind,
    Reason,
    StoredEnd,
    TerminalRecord,
)
from tests.builders import a_job
from tests.crashing import Failing, Gate, faulty
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
        bench.closer.put(Farewell("acme.job-1", "acme", "job-1", (a_duplicate(twin, client="c2"),)))
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


async def test_a_lane_whose_results_are_full_holds_up_no_other() -> None:
    """An ending that waits for its next try takes no room: STEPS_MAX full ones, and ours goes."""
    async with a_bench() as bench:
        for number in range(STEPS_MAX * 2):
            stuck = a_record(job=f"stuck-{number}", lane="gone")
            bench.closer.put(
                Ending(f"gone.stuck-{number}", stuck, "JOBS_gone", number + 1, ack_subject="")
            )
        await until(lambda: bench.closer.failures >= STEPS_MAX * 2)
        bench.closer.put(await bench.ending())
        await until(lambda: bool(bench.closed))
        assert bench.closed[0][0].key == "acme.job-1"


async def test_an_ack_that_is_never_answered_gives_way_to_removal_by_sequence() -> None:
    """A consumer made anew is silent about a delivery of its past life."""
    async with a_bench() as bench:
        ending = await bench.ending()
        await bench.bus.ensure_consumer(CONSUMER, recreate=True)
        bench.closer.put(ending)
        await until(lambda: bool(bench.heard))
        bench.clock.advance(10)
        await until(lambda: bool(bench.closed))
        assert await bench.queued() == 0


async def test_an_ack_to_a_consumer_that_is_gone_gives_way_too() -> None:
    """No responders: the message leaves by its sequence."""
    async with a_bench() as bench:
        ending = await bench.ending()
        del bench.bus.server.streams["JOBS_acme"].consumers["b2-tiny"]
        bench.closer.put(ending)
        await until(lambda: bool(bench.closed))
        assert await bench.queued() == 0


async def test_attempts_say_that_a_job_is_given_up_before_its_record_does() -> None:
    """A crash after the record: the next leader finds the key, and writes the letter."""
    async with a_bench() as bench:
        failures = (Failure(Attempt(1, 1), "w1", Reason.STALLED, 5.0),)
        record = a_record(kind=Kind.DEAD_LETTERED, reason=Reason.STALLED, failures=failures)
        ending = await bench.ending(record=record, dead_letter=True)
        gate = Gate("append", prefix="results.")
        closer = Closer(faulty(bench.bus, gate), closed=bench._closed)
        closer.put(ending)
        task = asyncio.create_task(closer.run())
        await gate.reached.wait()
        task.cancel()
        stored = await bench.bus.kv_get(subjects.ATTEMPTS_BUCKET, "acme.job-1")
        assert decode(stored.value, JobAttempts).failures == failures


async def test_a_dead_letter_that_was_written_long_ago_is_not_written_again() -> None:
    """The leader died between letter and ack, for longer than a message id is known."""
    async with a_bench() as bench:
        record = a_record(kind=Kind.DEAD_LETTERED, reason=Reason.STALLED)
        ending = await bench.ending(record=record, dead_letter=True)
        letter = DeadLetter(job=encode(a_job()), subject="jobs.acme.2.tiny", record=record)
        await bench.bus.append("dlq.acme.job-1", encode(letter))
        bench.closer.put(ending)
        await until(lambda: bool(bench.closed))
        assert (await bench.bus.stream_state("DLQ_acme")).messages == 1


async def test_a_dead_letter_whose_message_is_gone_needs_no_letter() -> None:
    """Somebody removed it: the record stands, and there is nothing to replay."""
    async with a_bench() as bench:
        record = a_record(kind=Kind.DEAD_LETTERED, reason=Reason.STALLED)
        ending = await bench.ending(record=record, dead_letter=True)
        await bench.bus.delete_message("JOBS_acme", ending.sequence)
        bench.closer.put(ending)
        await until(lambda: bool(bench.closed))
        assert (await bench.bus.stream_state("DLQ_acme")).messages == 0


async def test_a_dead_letter_too_large_with_its_job_is_written_without_it() -> None:
    """Better a letter that can be read and not replayed than a job that never ends."""
    async with a_bench() as bench:
        record = a_record(kind=Kind.DEAD_LETTERED, reason=Reason.STALLED, message="x" * 500)
        ending = await bench.ending(record=record, dead_letter=True)
        bench.bus.server.payload_bytes_max = len(encode(record)) + 100
        bench.closer.put(ending)
        await until(lambda: bool(bench.closed))
        stored = await bench.bus.last_message("DLQ_acme", "dlq.acme.job-1")
        assert decode(stored.data, DeadLetter).job == b""


async def test_full_dead_letters_hold_the_job_until_there_is_room() -> None:
    """Nothing leaves its stream before it can be listed, read and replayed."""
    full = StreamFull("no room")
    async with a_bench() as bench:
        record = a_record(kind=Kind.DEAD_LETTERED, reason=Reason.STALLED)
        failing = Failing("append", full, times=2, prefix="dlq.")
        closer = Closer(faulty(bench.bus, failing), closed=bench._closed)
        closer.put(await bench.ending(record=record, dead_letter=True))
        task = asyncio.create_task(closer.run())
        await until(lambda: failing.raised == 1)
        assert await bench.queued() == 1
        await asyncio.wait_for(until(lambda: bool(bench.closed)), 5)
        task.cancel()
        assert (await bench.bus.stream_state("DLQ_acme")).messages == 1


async def test_a_standing_record_that_runs_out_while_we_look_is_written_anew() -> None:
    """Between the lost compare-and-set and the look, a rejection's life ended: ours is next."""
    async with a_bench() as bench:
        await bench.bus.append("results.acme.job-1", encode(a_record(ended_at_s=1.0)), ttl_s=1.0)
        gate = Gate("last_message", prefix="RESULTS")
        closer = Closer(faulty(bench.bus, gate), closed=bench._closed)
        closer.put(await bench.ending())
        task = asyncio.create_task(closer.run())
        await gate.reached.wait()
        bench.clock.advance(2)
        gate.open.set()
        await asyncio.wait_for(until(lambda: bool(bench.closed)), 5)
        task.cancel()
        assert bench.closed[0][2] is True


async def test_a_word_that_cannot_be_sent_stops_nothing() -> None:
    """The caller's ticket finds the record."""
    async with a_bench() as bench:
        failing = Failing("publish", LinkDown("cut"))
        closer = Closer(faulty(bench.bus, failing), closed=bench._closed)
        closer.put(await bench.ending())
        task = asyncio.create_task(closer.run())
        await until(lambda: bool(bench.closed))
        task.cancel()
        assert failing.raised == 1
        assert not bench.heard


async def test_a_surprise_gives_up_one_ending_and_says_which() -> None:
    """The others go on; its message was not removed, so the job comes again."""
    async with a_bench() as bench:
        given_up: list[str] = []
        failing = Failing("append", RuntimeError("a fault of ours"), prefix="results.")
        closer = Closer(faulty(bench.bus, failing), closed=bench._closed, given_up=given_up.append)
        ending = await bench.ending()
        closer.put(ending)
        task = asyncio.create_task(closer.run())
        await until(lambda: bool(given_up))
        assert given_up == ["acme.job-1"]
        assert await bench.queued() == 1
        closer.put(ending)
        await until(lambda: bool(bench.closed))
        task.cancel()


async def test_a_window_of_endings_is_begun_a_few_in_a_turn_of_the_loop() -> None:
    """A lane is cancelled, and hundreds of held jobs end at once: others have their turns too."""
    async with a_bench() as bench:
        ending = await bench.ending()
        for _ in range(10 * BEGUN_AT_ONCE_MAX):
            bench.closer.put(ending)
        left = bench.closer._work.qsize()
        while left:
            await asyncio.sleep(0)
            assert left - bench.closer._work.qsize() <= BEGUN_AT_ONCE_MAX
            left = bench.closer._work.qsize()
