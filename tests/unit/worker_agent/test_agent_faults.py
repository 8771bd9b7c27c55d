"""The bus fails at any step, or the agent is cut off there: nothing is lost, nor told twice."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import suppress

import pytest

from broker.bus.base import (
    BusError,
    LinkDown,
    NoStream,
    PayloadTooLarge,
    StreamFull,
    Timeout,
)
from broker.bus.memory import MemoryBus
from broker.wire import subjects
from broker.wire.codec import encode
from broker.wire.messages import End, Kind, Outcome, Reason, StoredEnd, TerminalRecord
from tests.agents import ScriptedEngine, Stage, an_agent, an_answer
from tests.builders import LANE, a_job, an_attempt
from tests.crashing import Failing, Gate, Step
from tests.turns import until
from worker_agent.engine.base import Chunk, EngineOutput, EngineRequest

RESULT = subjects.result(LANE, "job-1")


def ends(stage: Stage) -> int:
    """How often the caller was told the end."""
    return sum(isinstance(event, (End, StoredEnd)) for event in stage.out)


@pytest.mark.parametrize("error", [Timeout("?"), LinkDown("cut"), NoStream("election")])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_record_of_unknown_fate_is_written_once_and_won(error: BusError, when: str) -> None:
    """The append is repeated; a record of ours that is found standing is our own win."""
    engine = ScriptedEngine()
    lost = Failing("append", error, times=3, when="before" if when == "before" else "after")
    async with an_agent(engine=engine, fault=lost) as stage:
        await stage.dispatch(a_job())
        engine.say("job-1", an_answer())
        finished = await stage.end_of("job-1")
        assert (finished.outcome, finished.kind) == (Outcome.SETTLED, Kind.COMPLETED)
        await stage.acknowledged()
        assert ends(stage) == 1
        assert await stage.queued() == 0
        assert lost.raised >= 1


async def test_a_lost_append_that_another_won_is_a_loss() -> None:
    """Ours never arrived, another's did: found by reading back, and not told as ours."""
    engine = ScriptedEngine()
    lost = Failing("append", Timeout("?"))
    other = TerminalRecord(job="job-1", lane=LANE, kind=Kind.CANCELLED, ended_at_s=1.0)
    async with an_agent(engine=engine, fault=lost) as stage:
        await stage.bus.append("results.acme.other", b"")
        await stage.dispatch(a_job())
        await until(lambda: "job-1" in engine.running)
        await stage.bus.append(RESULT, encode(other))
        engine.say("job-1", an_answer())
        assert (await stage.end_of("job-1")).kind is Kind.CANCELLED
        assert ends(stage) == 0


async def test_a_record_that_vanishes_between_two_looks_is_written_after_all() -> None:
    """A rejection's record lives only for its retry-after: found standing, gone when read."""
    engine = ScriptedEngine()
    bus = MemoryBus()
    standing = TerminalRecord(job="job-1", lane=LANE, kind=Kind.REJECTED, ended_at_s=1.0)

    async def vanish(step: Step) -> None:
        if step.operation == "append" and step.when == "before" and step.count == 1:
            await bus.append(RESULT, encode(standing))
        if step.operation == "last_message" and step.when == "before" and step.count == 2:
            stored = await bus.last_message(subjects.results_stream(LANE), RESULT)
            await bus.delete_message(subjects.results_stream(LANE), stored.sequence)

    async with an_agent(bus=bus, engine=engine, fault=vanish) as stage:
        await stage.dispatch(a_job())
        engine.say("job-1", an_answer())
        assert (await stage.end_of("job-1")).kind is Kind.COMPLETED
        assert (await stage.record("job-1")).kind is Kind.COMPLETED


async def test_a_full_results_stream_is_waited_for_and_told() -> None:
    """The job keeps its slot, the heartbeat says why at once, and nothing is dropped."""
    engine = ScriptedEngine(slots=1)
    full = Failing("append", StreamFull("bytes"), times=1_000_000)
    async with an_agent(engine=engine, fault=full, heartbeat_s=60.0) as stage:
        await stage.dispatch(a_job())
        engine.say("job-1", an_answer())
        await stage.beat(lambda beat: bool("acme" in beat.notice))
        assert stage.beats[-1].notice == "results stream full: lanes acme"
        assert stage.beats[-1].inflight
        full.left = 0
        assert (await stage.end_of("job-1")).kind is Kind.COMPLETED
        await stage.beat(lambda beat: not beat.notice)


async def test_a_record_that_the_server_finds_too_large_is_written_without_its_body() -> None:
    """A server with a smaller limit than ours ends no agent and no job."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine, fault=Failing("append", PayloadTooLarge("1 MB"))) as stage:
        await stage.dispatch(a_job())
        engine.say("job-1", an_answer())
        finished = await stage.end_of("job-1")
        assert (finished.kind, finished.reason) == (Kind.FAILED, Reason.PAYLOAD_TOO_LARGE)


async def test_an_end_that_the_server_finds_too_large_is_told_without_its_record() -> None:
    """The caller fetches it from RESULTS."""
    engine = ScriptedEngine()
    too_large = Failing("publish", PayloadTooLarge("1 MB"), prefix="out.")
    async with an_agent(engine=engine, fault=too_large) as stage:
        await stage.dispatch(a_job())
        engine.say("job-1", an_answer())
        await stage.end_of("job-1")
        assert stage.out == [StoredEnd(job="job-1")]


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_lost_ack_is_repeated_in_the_background(when: str) -> None:
    """The slot is free meanwhile, the end is told, and the message goes in the end.

    An ack that arrived and whose answer was lost is known by its message, which is gone.
    """
    engine = ScriptedEngine(slots=1)
    lost = Failing("ack", Timeout("?"), times=3, when="before" if when == "before" else "after")
    async with an_agent(engine=engine, fault=lost) as stage:
        await stage.dispatch(a_job())
        engine.say("job-1", an_answer())
        await stage.end_of("job-1")
        reply = await stage.dispatch(a_job(id="job-2"), attempt=an_attempt(2))
        assert reply.answer == "accepted"
        engine.say("job-2", an_answer())
        await stage.end_of("job-2")
        await stage.acknowledged()
        assert await stage.queued() == 0
        assert lost.raised == (3 if when == "before" else 2)
        await until(lambda: not stage.agent._acks._is_owed.is_set())


async def test_an_unconfirmed_end_stays_in_the_heartbeats() -> None:
    """A lost note is healed however long the ack takes."""
    engine = ScriptedEngine()
    silent = Failing("ack", Timeout("?"), times=1_000_000)
    async with an_agent(engine=engine, fault=silent, finished_beats=2) as stage:
        await stage.dispatch(a_job())
        engine.say("job-1", an_answer())
        await stage.end_of("job-1")
        stage.beats.clear()
        await stage.until(lambda: len(stage.beats) >= 6)
        assert all(not beat.finished[0].acknowledged for beat in stage.beats)
        silent.left = 0
        await stage.beat(lambda beat: beat.finished == ())


async def test_an_unreadable_results_stream_hands_the_job_back() -> None:
    """Whether it ended before can't be known: not run here, not charged to the worker."""
    engine = ScriptedEngine()
    silent = Failing("last_message", Timeout("?"), times=1_000_000)
    async with an_agent(engine=engine, fault=silent, check_s_max=0.05) as stage:
        await stage.dispatch(a_job())
        finished = await stage.end_of("job-1")
        assert (finished.outcome, finished.reason) == (Outcome.RETRY, Reason.HANDED_BACK)
        assert not finished.charged
        assert engine.requests == {}


async def test_a_job_is_handed_back_before_the_broker_would_call_it_stalled() -> None:
    """Chaos, seed 4: a cut link and a restart of NATS on end, and jobs were charged as stalled in
    the moment in which their engine began.
    """
    silent = Failing("last_message", Timeout("?"), times=1_000_000)
    async with an_agent(engine=ScriptedEngine(), fault=silent, check_s_max=30.0) as stage:
        await stage.dispatch(a_job(), stall_s=0.1)
        finished = await stage.end_of("job-1")
        assert (finished.reason, finished.charged) == (Reason.HANDED_BACK, False)


async def test_a_record_check_is_repeated_until_answered() -> None:
    """One lost look does not run a job twice, nor hand it back."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine, fault=Failing("last_message", Timeout("?"))) as stage:
        await stage.dispatch(a_job())
        engine.say("job-1", an_answer())
        assert (await stage.end_of("job-1")).kind is Kind.COMPLETED


async def test_a_running_job_outlives_the_link() -> None:
    """No order, no renewal, no token gets through for a while: the job ends all the same, once."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await stage.dispatch(a_job(stream=True))
        engine.say("job-1", Chunk(data=b"{1}", output_tokens=1))
        await stage.until(lambda: len(stage.out) == 1)
        stage.link.disconnect()
        engine.say("job-1", Chunk(data=b"{2}", output_tokens=2), an_answer())
        await until(lambda: not engine.running)
        assert stage.agent.ledger.running, "it holds its slot until the record is known"
        stage.link.reconnect()
        assert (await stage.end_of("job-1")).kind is Kind.COMPLETED
        await stage.acknowledged()
        assert (ends(stage), await stage.queued()) == (1, 0)
        assert stage.agent._notes.counts["tokens_unsent"] == 1


async def test_a_message_is_renewed_from_acceptance_until_the_ack() -> None:
    """A dead broker disturbs no running job: the agent itself keeps its message."""
    engine = ScriptedEngine()
    renewed: list[str] = []

    def watch(step: Step) -> None:
        if step.operation == "renew" and step.when == "after":
            renewed.append(step.subject)
        if step.operation == "ack" and step.when == "before" and len(renewed) < 6:
            message = "not yet"
            raise Timeout(message)

    async with an_agent(engine=engine, fault=watch, renew_s=0.02) as stage:
        await stage.dispatch(a_job())
        await until(lambda: len(renewed) >= 3)
        engine.say("job-1", an_answer())
        await stage.end_of("job-1")
        await until(lambda: len(renewed) >= 6)
        await stage.acknowledged()
        count = len(renewed)
        await stage.until(lambda: len(stage.beats) > 3)
        assert len(renewed) <= count + 1
        assert set(renewed) == {stage.deliveries["job-1"].ack_subject}


async def test_an_ack_that_nobody_can_answer_is_paid_when_the_message_is_gone() -> None:
    """A broker took the message out, and the consumer was reset: it is silent for ever."""
    gate = Gate("ack")
    async with an_agent(fault=gate, call_s_max=0.05) as stage:
        delivery = await stage.submit(a_job())
        await stage.dispatch(a_job())
        await gate.reached.wait()
        await stage.bus.reset_consumer(delivery.stream, "b2")
        await stage.bus.delete_message(delivery.stream, delivery.sequence)
        gate.open.set()
        await stage.acknowledged()
        await stage.beat(lambda beat: bool(beat.finished) and beat.finished[0].acknowledged)


async def test_an_ack_that_is_not_answered_holds_up_no_other() -> None:
    """It goes behind them. Its message is there, so it is tried again until it is answered."""
    unanswered: list[str] = []

    def silent(step: Step) -> None:
        if step.operation == "ack" and step.when == "before":
            unanswered.append(step.subject)
            if step.subject == unanswered[0] and unanswered.count(step.subject) < TRIES:
                message = "no answer"
                raise Timeout(message)
            if unanswered.count(step.subject) == 1:
                message = "cut"
                raise LinkDown(message)

    async with an_agent(fault=silent) as stage:
        for number in (1, 2, 3):
            await stage.dispatch(a_job(id=f"job-{number}"), attempt=an_attempt(number))
            await stage.end_of(f"job-{number}")
        await stage.acknowledged()
        last = {
            subject: len(unanswered) - unanswered[::-1].index(subject) for subject in unanswered
        }
        assert max(last, key=last.__getitem__) == unanswered[0]


async def test_a_failed_renewal_is_tried_again() -> None:
    """One lost renewal stops neither the next nor other jobs'."""
    engine = ScriptedEngine()
    renewed: Counter[str] = Counter()

    def watch(step: Step) -> None:
        if step.operation == "renew":
            if step.when == "before" and step.count == 1:
                message = "cut"
                raise LinkDown(message)
            renewed[step.subject] += step.when == "after"

    async with an_agent(engine=engine, fault=watch, renew_s=0.02) as stage:
        for number in (1, 2):
            await stage.dispatch(a_job(id=f"job-{number}"), attempt=an_attempt(number))
        await until(lambda: len(+renewed) == 2)
        engine.say("job-1", an_answer())
        engine.say("job-2", an_answer())


TRIES = 6
"""Of an ack that is answered at last."""

STARTING = ("kv_get", "rtt_s")
"""Calls of the agent's own start: no job's."""


async def count_steps() -> int:
    """Calls that one streamed job makes on the bus of its agent, both sides of each."""
    steps: list[Step] = []
    engine = ScriptedEngine()
    async with an_agent(engine=engine, fault=steps.append) as stage:
        await stage.dispatch(a_job(stream=True))
        engine.say("job-1", Chunk(data=b"{}", output_tokens=1), an_answer())
        await stage.end_of("job-1")
        await stage.acknowledged()
        return sum(step.operation not in STARTING for step in steps)


async def test_killed_at_any_step_the_job_ends_exactly_once() -> None:
    """Cut off before or after each of its calls, the ledger is empty, and a second agent ends the
    job.

    Cases 2, 20 and 33: one result, one message removed, and the end told at least once.
    """
    for nth in range(1, await count_steps() + 1):
        bus = MemoryBus()
        reached = asyncio.Event()
        seen = 0

        async def cut(step: Step, nth: int = nth, reached: asyncio.Event = reached) -> None:
            nonlocal seen
            seen += step.operation not in STARTING
            if seen >= nth:
                reached.set()
                await asyncio.Event().wait()

        engine = ScriptedEngine()
        async with an_agent(bus=bus, engine=engine, fault=cut) as stage:
            engine.say("job-1", Chunk(data=b"{}", output_tokens=1), an_answer())
            await stage.submit(a_job(stream=True))
            dispatching = asyncio.ensure_future(stage.dispatch(a_job(stream=True), timeout_s=0.05))
            await reached.wait()
            stage.work.cancel()
            await asyncio.wait([stage.work, dispatching])
            dispatching.exception()
            assert stage.agent.ledger.running == {}, nth
            assert engine.running == set(), nth
            told = ends(stage)
            delivery = stage.deliveries["job-1"]
        second = ScriptedEngine()
        second.say("job-1", an_answer())
        async with an_agent(bus=bus, engine=second) as stage:
            stage.deliveries["job-1"] = delivery
            await stage.dispatch(a_job(stream=True), attempt=an_attempt(2))
            await stage.end_of("job-1")
            await stage.acknowledged()
            assert await stage.queued() == 0, nth
            assert (await stage.record("job-1")).kind is Kind.COMPLETED
            assert told + ends(stage) >= 1, nth
            runs = ("job-1" in engine.requests) + ("job-1" in second.requests)
            assert runs <= 2
        await bus.close()


async def test_an_abort_while_the_record_is_written_changes_nothing() -> None:
    """The answer is there: the revoked attempt's record stands, and it says so."""
    engine = ScriptedEngine()
    gate = Gate("append")
    async with an_agent(engine=engine, fault=gate) as stage:
        await stage.dispatch(a_job())
        engine.say("job-1", an_answer())
        await gate.reached.wait()
        running = stage.agent.ledger.running[f"{LANE}.job-1"]
        await stage.abort(Reason.WORKER_LOST)
        assert running.stop is None
        gate.open.set()
        finished = await stage.end_of("job-1")
        assert (finished.outcome, finished.kind) == (Outcome.SETTLED, Kind.COMPLETED)
        assert ends(stage) == 1


async def test_an_abort_before_the_engine_was_asked_stops_it_there() -> None:
    """While the agent looks for a record, a cancelled job never reaches the engine."""
    engine = ScriptedEngine()
    gate = Gate("last_message")
    async with an_agent(engine=engine, fault=gate) as stage:
        await stage.dispatch(a_job())
        await gate.reached.wait()
        await stage.abort(Reason.CANCELLED)
        gate.open.set()
        assert (await stage.end_of("job-1")).kind is Kind.CANCELLED
        assert engine.requests == {}


async def test_two_aborts_count_as_the_first() -> None:
    """A cancelled job that is then revoked is cancelled."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await stage.dispatch(a_job())
        await until(lambda: "job-1" in engine.running)
        await asyncio.gather(stage.abort(Reason.CANCELLED), stage.abort(Reason.WORKER_LOST))
        assert (await stage.end_of("job-1")).kind is Kind.CANCELLED


async def test_a_fault_in_a_duty_stops_neither_it_nor_the_jobs() -> None:
    """A renewal that fails by a fault of ours is begun again; the job beside it ends."""
    engine = ScriptedEngine()
    faulty_renewal = Failing("renew", ZeroDivisionError("bug"))
    renewed: list[Step] = []

    def both(step: Step) -> None:
        faulty_renewal(step)
        if step.operation == "renew" and step.when == "after":
            renewed.append(step)

    async with an_agent(engine=engine, fault=both, renew_s=0.01, duty_pause_s=0.01) as stage:
        await stage.dispatch(a_job())
        await until(lambda: len(renewed) >= 2)
        assert faulty_renewal.raised == 1
        engine.say("job-1", an_answer())
        assert (await stage.end_of("job-1")).kind is Kind.COMPLETED


async def test_a_link_that_comes_back_pays_the_acks_at_once() -> None:
    """Not after the back-off, which may have grown long."""
    engine = ScriptedEngine()
    lost = Failing("ack", LinkDown("cut"))
    async with an_agent(engine=engine, fault=lost, retry_base_s=60.0, retry_s_max=60.0) as stage:
        await stage.dispatch(a_job())
        engine.say("job-1", an_answer())
        await stage.end_of("job-1")
        await until(lambda: lost.raised == 1)
        stage.link.disconnect()
        stage.link.reconnect()
        await stage.acknowledged()
        assert await stage.queued() == 0


async def test_an_engine_that_ignores_its_end_is_cut_off_all_the_same() -> None:
    """One that swallows the cancellation and goes on gets no new time, and its answer counts."""

    class Stubborn(ScriptedEngine):
        async def run(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
            self.requests[request.request_id] = request
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            yield Chunk(output_tokens=1)
            yield an_answer()

    async with an_agent(engine=Stubborn()) as stage:
        await stage.dispatch(a_job(), stall_s=0.01)
        finished = await stage.end_of("job-1")
        assert finished.outcome is Outcome.SETTLED
        assert (await stage.record("job-1")).kind is Kind.COMPLETED


async def test_a_deadline_that_passes_while_the_record_is_looked_for_ends_the_job() -> None:
    """The engine is not asked for an answer that is late already."""
    engine = ScriptedEngine()
    now_s = [1000.0]

    def pass_time(step: Step) -> None:
        if step.operation == "last_message" and step.when == "after":
            now_s[0] = 2000.0

    async with an_agent(engine=engine, fault=pass_time) as stage:
        stage.agent._supervisor._now_s = lambda: now_s[0]
        await stage.dispatch(a_job(deadline_at_s=1500.0))
        assert (await stage.end_of("job-1")).kind is Kind.EXPIRED
        assert engine.requests == {}
