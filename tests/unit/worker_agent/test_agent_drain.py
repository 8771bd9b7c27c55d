"""Draining and leaving: nothing new, all old finishes, then `drained` (case 28)."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from broker.bus.base import Timeout
from broker.wire import subjects
from broker.wire.codec import encode
from broker.wire.messages import Answer, DrainWorker, Heartbeat, Kind, Outcome, Reason
from tests.agents import WORKER, ScriptedEngine, Stage, an_agent, an_answer
from tests.builders import a_job, an_attempt
from tests.crashing import Failing, Gate
from tests.turns import until
from worker_agent.agent import Superseded
from worker_agent.engine.base import EngineOutput, EngineRequest


async def drain(stage: Stage, *, draining: bool = True) -> Answer:
    """Order the worker to drain, or take it back."""
    order = DrainWorker(epoch=1, number=stage.next_number(), draining=draining)
    return (await stage.order(order)).answer


async def test_a_draining_worker_takes_nothing_new_and_finishes_what_it_has() -> None:
    """`drained` comes when the last job is acknowledged, and not before."""
    engine = ScriptedEngine()
    ack = Gate("ack")
    async with an_agent(engine=engine, fault=ack) as stage:
        await stage.dispatch(a_job())
        assert await drain(stage) is Answer.ACCEPTED
        reply = await stage.dispatch(a_job(id="job-2"), attempt=an_attempt(2))
        assert reply.answer is Answer.DRAINING
        await stage.beat(lambda beat: beat.draining)
        assert not stage.beats[-1].drained
        engine.say("job-1", an_answer())
        await ack.reached.wait()
        await stage.beat(lambda beat: not beat.inflight)
        assert not stage.beats[-1].drained
        ack.open.set()
        await stage.beat(lambda beat: beat.drained)
        assert (await stage.record("job-1")).kind is Kind.COMPLETED


async def test_a_drain_is_told_at_once() -> None:
    """Neither `draining` nor `drained` waits for the next heartbeat's time."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine, heartbeat_s=60.0) as stage:
        await stage.dispatch(a_job())
        await drain(stage)
        await stage.beat(lambda beat: beat.draining)
        engine.say("job-1", an_answer())
        await stage.beat(lambda beat: beat.drained)


async def test_a_drain_can_be_taken_back() -> None:
    """The worker takes jobs again."""
    async with an_agent() as stage:
        await drain(stage)
        await stage.beat(lambda beat: bool(beat.drained))
        await drain(stage, draining=False)
        await stage.beat(lambda beat: not beat.draining)
        assert (await stage.dispatch(a_job())).answer is Answer.ACCEPTED
        await stage.end_of("job-1")


async def test_an_order_can_not_take_back_a_leave() -> None:
    """The process is about to end, whatever a broker wishes."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await stage.dispatch(a_job())
        stage.agent.leave()
        await drain(stage, draining=False)
        reply = await stage.dispatch(a_job(id="job-2"), attempt=an_attempt(2))
        assert reply.answer is Answer.DRAINING
        engine.say("job-1", an_answer())
        await stage.work


async def test_leaving_finishes_what_runs() -> None:
    """Then the agent's work is over, with all acks confirmed."""
    engine = ScriptedEngine()
    lost = Failing("ack", Timeout("?"), times=3)
    async with an_agent(engine=engine, fault=lost) as stage:
        await stage.dispatch(a_job())
        await until(lambda: bool(engine.running))
        stage.agent.leave()
        engine.say("job-1", an_answer())
        await stage.work
        assert (await stage.record("job-1")).kind is Kind.COMPLETED
        assert await stage.queued() == 0
        assert stage.agent.report(0).heartbeat.drained


async def test_leaving_hands_back_what_runs_too_long() -> None:
    """After `drain_s_max`: aborted in the engine, for another worker, charged to nobody."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine, drain_s_max=0.02) as stage:
        await stage.dispatch(a_job())
        await until(lambda: bool(engine.running))
        stage.agent.leave()
        await stage.work
        (finished,) = stage.ended("job-1")
        assert (finished.outcome, finished.reason) == (Outcome.RETRY, Reason.HANDED_BACK)
        assert not finished.charged
        assert engine.aborted == ["job-1"]
        assert await stage.queued() == 1
        assert finished in stage.agent.report(0).heartbeat.finished


async def test_leaving_is_bounded_even_when_a_record_can_not_be_written() -> None:
    """The record's fate stays open; the message is there, so the job is run or found again."""
    engine = ScriptedEngine()
    silent = Failing("append", Timeout("?"), times=1_000_000)
    async with an_agent(engine=engine, fault=silent, drain_s_max=0.02, leave_s_max=0.02) as stage:
        await stage.dispatch(a_job())
        engine.say("job-1", an_answer())
        stage.agent.leave()
        await stage.work
        assert stage.agent.ledger.running == {}
        assert await stage.queued() == 1


async def test_leaving_is_bounded_even_when_acks_are_not_confirmed() -> None:
    """The record stands: whoever gets the message next only acknowledges it."""
    engine = ScriptedEngine()
    silent = Failing("ack", Timeout("?"), times=1_000_000)
    async with an_agent(engine=engine, fault=silent, leave_s_max=0.02) as stage:
        await stage.dispatch(a_job())
        engine.say("job-1", an_answer())
        await stage.end_of("job-1")
        stage.agent.leave()
        await stage.work
        assert await stage.has_record("job-1")


async def test_leaving_at_once_aborts_all() -> None:
    """Cancelled, the agent's work ends now; the last report lists nothing as running."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        for number in (1, 2):
            await stage.dispatch(a_job(id=f"job-{number}"), attempt=an_attempt(number))
        await until(lambda: len(engine.running) == 2)
        stage.work.cancel()
        await asyncio.wait([stage.work])
        assert engine.running == set()
        assert stage.agent.report(0).heartbeat.inflight == ()


async def test_an_order_that_comes_while_all_ends_is_refused() -> None:
    """The engine still cleans up after the cancelled job; nothing new may be begun."""
    may_end = asyncio.Event()

    class Slow(ScriptedEngine):
        async def run(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
            self.running.add(request.request_id)
            try:
                await asyncio.Event().wait()
                yield an_answer()
            finally:
                await may_end.wait()

    engine = Slow()
    async with an_agent(engine=engine) as stage:
        await stage.dispatch(a_job())
        await until(lambda: bool(engine.running))
        stage.work.cancel()
        reply = await stage.dispatch(a_job(id="job-2"), attempt=an_attempt(2))
        assert reply.answer is Answer.DRAINING
        may_end.set()
        await asyncio.wait([stage.work])
        assert stage.agent.ledger.running == {}


def a_beat(incarnation: int, **fields: Any) -> bytes:
    """A heartbeat under this worker's name."""
    defaults: dict[str, Any] = {"sequence": 1, "epoch": 1, "echo": 0, "at_s": 1.0}
    beat = Heartbeat(
        worker=WORKER, incarnation=incarnation, models=(), slots=1, **{**defaults, **fields}
    )
    return encode(beat)


async def test_a_newer_agent_of_the_same_name_ends_this_one() -> None:
    """Two would answer the same orders: the older hands its jobs back at once and says why."""
    engine = ScriptedEngine()
    stages: list[Stage] = []
    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
        async with an_agent(engine=engine) as stage:
            stages.append(stage)
            await stage.dispatch(a_job())
            await until(lambda: bool(engine.running))
            newer = a_beat(stage.agent.incarnation + 1)
            await stage.bus.publish(subjects.heartbeat(WORKER), newer)
            await asyncio.Event().wait()
    assert caught.group_contains(Superseded, match="give each worker a name of its own")
    assert [one.reason for one in stages[0].ended("job-1")] == [Reason.HANDED_BACK]
    assert engine.aborted == ["job-1"]


async def test_a_newer_agent_ends_a_drain_too() -> None:
    """The older waits for nothing any more."""
    engine = ScriptedEngine()
    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
        async with an_agent(engine=engine, drain_s_max=1e6) as stage:
            await stage.dispatch(a_job())
            await until(lambda: bool(engine.running))
            stage.agent.leave()
            await stage.beat(lambda beat: beat.draining)
            newer = a_beat(stage.agent.incarnation + 1)
            await stage.bus.publish(subjects.heartbeat(WORKER), newer)
            await asyncio.Event().wait()
    assert caught.group_contains(Superseded)
    assert engine.aborted == ["job-1"]


async def test_an_older_agents_heartbeat_and_garbage_end_nobody() -> None:
    """A late word of an earlier life is ignored."""
    async with an_agent() as stage:
        subject = subjects.heartbeat(WORKER)
        await stage.bus.publish(subject, a_beat(stage.agent.incarnation - 1))
        await stage.bus.publish(subject, a_beat(stage.agent.incarnation))
        await stage.bus.publish(subject, b"\xc1")
        assert (await stage.dispatch(a_job())).answer is Answer.ACCEPTED
        await stage.end_of("job-1")
