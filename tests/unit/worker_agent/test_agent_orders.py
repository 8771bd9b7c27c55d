"""What the agent answers to each order, and what it then does."""

from typing import Any

import pytest
from msgspec.structs import replace

from broker.bus.base import BucketSpec, LinkDown, Timeout
from broker.bus.memory import MemoryBus
from broker.wire import subjects
from broker.wire.codec import encode
from broker.wire.messages import (
    Abort,
    Answer,
    DrainWorker,
    Inventory,
    Kind,
    Leader,
    Outcome,
    Probe,
    Reason,
    TerminalRecord,
)
from tests.agents import WORKER, ScriptedEngine, Stage, an_agent, an_answer
from tests.builders import LANE, a_job, an_attempt
from tests.crashing import Failing, Step
from tests.turns import until
from worker_agent.engine.base import Chunk


async def running(stage: Stage, engine: ScriptedEngine, job_id: str = "job-1") -> None:
    """Wait until the engine has the job."""
    await until(lambda: job_id in engine.running)


def an_abort(stage: Stage, reason: Reason, *, job_id: str = "job-1", number: int = 1) -> Abort:
    """An order to stop an attempt."""
    return Abort(
        epoch=1,
        number=stage.next_number(),
        key=f"{LANE}.{job_id}",
        attempt=an_attempt(number),
        reason=reason,
    )


async def test_a_second_dispatch_of_a_running_job_is_a_duplicate() -> None:
    """The same attempt, or a later one: the job runs once here."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await stage.dispatch(a_job())
        await running(stage, engine)
        again = await stage.dispatch(a_job())
        later = await stage.dispatch(a_job(), attempt=an_attempt(2))
        assert (again.answer, later.answer) == (Answer.DUPLICATE, Answer.DUPLICATE)
        engine.say("job-1", an_answer())
        await stage.end_of("job-1")
        assert (await stage.dispatch(a_job())).answer is Answer.DUPLICATE
        assert list(engine.requests) == ["job-1"]


async def test_never_more_jobs_than_the_engine_has_slots() -> None:
    """One more is busy, and an end makes room."""
    engine = ScriptedEngine(slots=2)
    async with an_agent(engine=engine) as stage:
        for number in (1, 2):
            job = a_job(id=f"job-{number}")
            assert (await stage.dispatch(job, attempt=an_attempt(number))).answer is Answer.ACCEPTED
        third = a_job(id="job-3")
        reply = await stage.dispatch(third, attempt=an_attempt(3))
        assert (reply.answer, reply.detail) == (Answer.BUSY, "all 2 slots are taken")
        engine.say("job-1", an_answer())
        await stage.end_of("job-1")
        assert (await stage.dispatch(third, attempt=an_attempt(4))).answer is Answer.ACCEPTED
        engine.say("job-2", an_answer())
        engine.say("job-3", an_answer())


async def test_an_order_of_a_lower_epoch_is_refused() -> None:
    """A broker that lost its leadership can start, stop and drain nothing."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await stage.dispatch(a_job(), attempt=an_attempt(1, epoch=5))
        stale = await stage.dispatch(a_job(id="job-2"), attempt=an_attempt(9, epoch=4))
        assert (stale.answer, stale.epoch) == (Answer.STALE_EPOCH, 5)
        drain = await stage.order(DrainWorker(epoch=4, number=100))
        assert drain.answer is Answer.STALE_EPOCH
        abort = await stage.order(
            Abort(
                epoch=4,
                number=101,
                key=f"{LANE}.job-1",
                attempt=an_attempt(1, epoch=5),
                reason=Reason.WORKER_LOST,
            )
        )
        assert abort.answer is Answer.STALE_EPOCH
        assert not stage.agent.report(0).heartbeat.draining
        engine.say("job-1", an_answer())
        assert (await stage.end_of("job-1")).outcome is Outcome.SETTLED


async def test_an_inventory_teaches_the_epoch_and_is_answered_in_full() -> None:
    """The new leader's epoch counts from now on, the echo is 0, the summary is full."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await stage.dispatch(a_job())
        await stage.until(lambda: any(beat.echo == 1 for beat in stage.beats))
        stage.beats.clear()
        await stage.bus.publish(subjects.INVENTORY, encode(Inventory(epoch=7)))
        await stage.until(lambda: any(beat.epoch == 7 for beat in stage.beats))
        beat = next(beat for beat in stage.beats if beat.epoch == 7)
        assert beat.echo == 0
        assert beat.summary is not None
        assert beat.summary.full
        assert [one.key for one in beat.inflight] == [f"{LANE}.job-1"]
        engine.say("job-1", an_answer())


async def test_an_inventory_for_another_worker_only_teaches_the_epoch() -> None:
    """It asks nobody here for a full report."""
    async with an_agent() as stage:
        await stage.until(lambda: bool(stage.beats))
        other = Inventory(epoch=7, worker="worker-2")
        await stage.bus.publish(subjects.INVENTORY, encode(other))
        await stage.beat(lambda beat: beat.epoch == 7)
        assert stage.beats[-1].summary is None


async def test_an_old_brokers_inventory_is_ignored() -> None:
    """It neither lowers the epoch nor asks for a report."""
    async with an_agent() as stage:
        await stage.dispatch(a_job(), attempt=an_attempt(1, epoch=5))
        await stage.end_of("job-1")
        await stage.bus.publish(subjects.INVENTORY, encode(Inventory(epoch=4)))
        await stage.bus.publish(subjects.INVENTORY, b"garbage")
        assert (await stage.order(Probe(epoch=5, number=9))).answer is Answer.ACCEPTED
        assert stage.agent.fence.epoch == 5


async def test_the_leader_key_is_read_at_the_start() -> None:
    """An agent that starts under a leader refuses the one before, unheard."""
    bus = MemoryBus()
    await bus.ensure_bucket(BucketSpec(name=subjects.LEADER_BUCKET))
    value = encode(Leader(broker="b", epoch=9))
    await bus.kv_create(subjects.LEADER_BUCKET, subjects.LEADER_KEY, value)
    async with an_agent(bus=bus) as stage:
        reply = await stage.order(Probe(epoch=8, number=1))
        assert (reply.answer, reply.epoch) == (Answer.STALE_EPOCH, 9)


async def test_the_key_that_was_just_created_has_its_revision_as_epoch() -> None:
    """Epoch 0 in the key means: this very revision."""
    bus = MemoryBus()
    await bus.ensure_bucket(BucketSpec(name=subjects.LEADER_BUCKET))
    value = encode(Leader(broker="b"))
    revision = await bus.kv_create(subjects.LEADER_BUCKET, subjects.LEADER_KEY, value)
    async with an_agent(bus=bus) as stage:
        assert stage.agent.fence.epoch == revision


async def test_the_leader_key_is_read_again_after_a_lost_link() -> None:
    """A takeover that the agent did not hear of fences the old leader all the same."""
    bus = MemoryBus()
    await bus.ensure_bucket(BucketSpec(name=subjects.LEADER_BUCKET))
    async with an_agent(bus=bus) as stage:
        stage.link.disconnect()
        value = encode(Leader(broker="b", epoch=9))
        await bus.kv_create(subjects.LEADER_BUCKET, subjects.LEADER_KEY, value)
        stage.link.reconnect()
        await until(lambda: stage.agent.fence.epoch == 9)


async def test_a_leader_key_once_read_is_not_read_again() -> None:
    """Only a link that comes back is a reason: agents must not keep the key's server busy."""
    bus = MemoryBus()
    await bus.ensure_bucket(BucketSpec(name=subjects.LEADER_BUCKET))
    reads: list[Step] = []

    def count(step: Step) -> None:
        if step.operation == "kv_get" and step.when == "after":
            reads.append(step)

    async with an_agent(bus=bus, fault=count) as stage:
        for _ in range(2):
            before = len(reads)
            stage.link.disconnect()
            stage.link.reconnect()
            await until(lambda before=before: len(reads) > before)
        stage.beats.clear()
        await stage.until(lambda: len(stage.beats) >= 3)
        assert len(reads) == 3


async def test_an_unreadable_leader_key_stops_nobody() -> None:
    """The fence then learns from orders."""
    bus = MemoryBus()
    await bus.ensure_bucket(BucketSpec(name=subjects.LEADER_BUCKET))
    await bus.kv_create(subjects.LEADER_BUCKET, subjects.LEADER_KEY, b"\xc1")
    async with an_agent(bus=bus) as stage:
        assert (await stage.dispatch(a_job())).answer is Answer.ACCEPTED
        await stage.end_of("job-1")


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\xc1",
        b"\x00" * 100,
        b"\x81\xa4type\xa8dispatch",
        b"\x81\xa4type\xa5other",
        encode(Inventory(epoch=1)),
    ],
)
async def test_garbage_orders_are_answered_as_unknown(garbage: bytes) -> None:
    """The sender hears why, and the next order is obeyed as ever."""
    async with an_agent() as stage:
        reply = await stage.order(garbage)
        assert reply.answer is Answer.UNKNOWN
        assert reply.detail.startswith("not an order: ")
        assert (await stage.dispatch(a_job())).answer is Answer.ACCEPTED
        await stage.end_of("job-1")


async def test_an_order_that_wants_no_answer_is_obeyed() -> None:
    """A message without a reply subject is no reason to fail."""
    async with an_agent() as stage:
        order = DrainWorker(epoch=1, number=1)
        await stage.bus.publish(subjects.work(WORKER), encode(order))
        await stage.until(lambda: any(beat.draining for beat in stage.beats))


async def test_a_job_that_can_not_be_read_is_unknown_and_counted() -> None:
    """The echo passes it, so the broker knows that it does not run."""
    async with an_agent() as stage:
        reply = await stage.dispatch(a_job(), job=b"garbage")
        assert reply.answer is Answer.UNKNOWN
        assert reply.detail.startswith("the job can't be read: ")
        await stage.until(lambda: any(beat.echo == 1 and not beat.inflight for beat in stage.beats))


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"lane": "other"}, "the job is of lane acme, its stream of other"),
        ({"ack_subject": ""}, "the order does not say where to acknowledge"),
        ({"job": encode(a_job(model="big"))}, "model big is not served here"),
        ({"job": encode(a_job(adapter="lora"))}, "adapter lora is not served here"),
    ],
)
async def test_a_job_that_does_not_belong_here_is_unknown(
    fields: dict[str, Any], detail: str
) -> None:
    """Another lane's stream, no way to acknowledge, a model that isn't served."""
    async with an_agent() as stage:
        reply = await stage.dispatch(a_job(), **fields)
        assert (reply.answer, reply.detail) == (Answer.UNKNOWN, detail)
        assert not stage.agent.ledger.running


async def test_an_order_that_was_overtaken_is_not_run() -> None:
    """A heartbeat may have denied it already: its job may run elsewhere."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await stage.order(Probe(epoch=1, number=8))
        reply = await stage.dispatch(a_job(), number=7)
        assert (reply.answer, reply.detail) == (Answer.BUSY, "order 7 came after order 8")
        assert not stage.agent.ledger.running
        drain = await stage.order(DrainWorker(epoch=1, number=6))
        assert drain.answer is Answer.ACCEPTED
        assert not stage.agent.report(0).heartbeat.draining


async def test_an_engine_that_is_not_ready_takes_nothing() -> None:
    """Loading a model takes minutes: until then the worker is busy, and tells why."""
    engine = ScriptedEngine()
    engine.is_ready = False
    async with an_agent(engine=engine) as stage:
        reply = await stage.dispatch(a_job())
        assert reply.answer is Answer.BUSY
        assert "told so by the test" in reply.detail
        await stage.until(lambda: bool(stage.beats))
        assert not stage.beats[-1].ready
        assert "told so by the test" in stage.beats[-1].notice
        engine.is_ready = True
        await stage.beat(lambda beat: beat.ready)
        assert (await stage.dispatch(a_job(), attempt=an_attempt(2))).answer is Answer.ACCEPTED
        engine.say("job-1", an_answer())


async def test_unconfirmed_acks_stop_new_work_at_their_bound() -> None:
    """At `ack_retries_max` records without an ack the worker is busy; the acks make room."""
    silent = Failing("ack", Timeout("no word"), times=1_000_000)
    async with an_agent(fault=silent, ack_retries_max=2) as stage:
        for number in (1, 2):
            await stage.dispatch(a_job(id=f"job-{number}"), attempt=an_attempt(number))
            await stage.end_of(f"job-{number}")
        third = a_job(id="job-3")
        reply = await stage.dispatch(third, attempt=an_attempt(3))
        assert (reply.answer, reply.detail) == (Answer.BUSY, "2 acks are not confirmed")
        beat = await stage.beat(lambda beat: "2 acks not confirmed" in beat.notice)
        assert len(beat.finished) == 2
        silent.left = 0
        await stage.acknowledged()
        assert (await stage.dispatch(third, attempt=an_attempt(4))).answer is Answer.ACCEPTED
        await stage.end_of("job-3")


async def test_an_abort_frees_slot_and_engine_and_writes_the_cancellation() -> None:
    """A cancelled job: engine request closed, record written, end told, message gone."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await stage.dispatch(a_job())
        engine.say("job-1", Chunk(output_tokens=1))
        await running(stage, engine)
        reply = await stage.order(an_abort(stage, Reason.CANCELLED))
        assert reply.answer is Answer.ACCEPTED
        finished = await stage.end_of("job-1")
        assert (finished.outcome, finished.kind) == (Outcome.SETTLED, Kind.CANCELLED)
        assert engine.aborted == ["job-1"]
        record = await stage.record("job-1")
        assert (record.kind, record.reason) == (Kind.CANCELLED, Reason.CANCELLED)
        await stage.acknowledged()
        assert await stage.queued() == 0


async def test_an_abort_for_a_passed_deadline_records_the_expiry() -> None:
    """The broker noticed first; the record is the same as if the agent had."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await stage.dispatch(a_job())
        await running(stage, engine)
        await stage.order(an_abort(stage, Reason.DEADLINE_EXPIRED))
        await stage.end_of("job-1")
        record = await stage.record("job-1")
        assert (record.kind, record.reason) == (Kind.EXPIRED, Reason.DEADLINE_EXPIRED)


async def test_an_abort_that_brings_a_record_writes_that_one() -> None:
    """The broker may know better how the job ends, and the agent whose API key asked."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await stage.dispatch(a_job(api_key_name="alice"))
        await running(stage, engine)
        given = TerminalRecord(
            job="job-1", lane=LANE, kind=Kind.FAILED, ended_at_s=1.0, reason=Reason.LANE_PAUSED
        )
        order = an_abort(stage, Reason.LANE_PAUSED)
        await stage.order(replace(order, record=given))
        await stage.end_of("job-1")
        assert await stage.record("job-1") == replace(given, api_key_name="alice")


async def test_an_abort_with_another_jobs_record_writes_our_own() -> None:
    """An order may not write what it is not about."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await stage.dispatch(a_job())
        await running(stage, engine)
        given = TerminalRecord(job="job-9", lane=LANE, kind=Kind.FAILED, ended_at_s=1.0)
        order = an_abort(stage, Reason.CANCELLED)
        await stage.order(replace(order, record=given))
        await stage.end_of("job-1")
        assert (await stage.record("job-1")).kind is Kind.CANCELLED
        assert not await stage.has_record("job-9")


async def test_a_revoked_attempt_writes_nothing_and_leaves_the_message() -> None:
    """It runs elsewhere: no record, no ack, no end, and the engine is free."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await stage.dispatch(a_job())
        await running(stage, engine)
        await stage.order(an_abort(stage, Reason.WORKER_LOST))
        finished = await stage.end_of("job-1")
        assert (finished.outcome, finished.reason) == (Outcome.RETRY, Reason.WORKER_LOST)
        assert not finished.charged
        assert engine.aborted == ["job-1"]
        assert not await stage.has_record("job-1")
        assert await stage.queued() == 1
        assert not stage.out


async def test_an_abort_for_what_does_not_run_here_is_unknown_and_remembered() -> None:
    """Should its dispatch still come, it does not start."""
    async with an_agent() as stage:
        await stage.submit(a_job())
        reply = await stage.order(an_abort(stage, Reason.WORKER_LOST))
        assert reply.answer is Answer.UNKNOWN
        assert (await stage.dispatch(a_job())).answer is Answer.DUPLICATE
        assert not stage.agent.ledger.running


async def test_an_abort_of_an_older_attempt_leaves_the_newer_alone() -> None:
    """Attempts never mix."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await stage.dispatch(a_job(), attempt=an_attempt(2))
        await running(stage, engine)
        reply = await stage.order(an_abort(stage, Reason.WORKER_LOST, number=1))
        assert reply.answer is Answer.UNKNOWN
        engine.say("job-1", an_answer())
        assert (await stage.end_of("job-1")).kind is Kind.COMPLETED


async def test_a_lost_answer_is_read_from_the_echo() -> None:
    """The broker hears nothing of its order; the next heartbeat lists the job."""
    engine = ScriptedEngine()
    lost = Failing("publish", LinkDown("cut"), prefix="_INBOX")
    async with an_agent(engine=engine, fault=lost) as stage:
        with pytest.raises(Timeout):
            await stage.dispatch(a_job(), timeout_s=0.05)
        await stage.beat(lambda beat: bool(beat.inflight))
        assert stage.beats[-1].echo == 1
        engine.say("job-1", an_answer())
        assert (await stage.end_of("job-1")).kind is Kind.COMPLETED
