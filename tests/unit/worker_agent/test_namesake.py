"""A second agent of one name refuses, unless the first is leaving, or answers nobody."""

import asyncio
import os

import pytest

from broker.bus.base import Message
from broker.bus.memory import MemoryBus
from broker.wire import codec, subjects
from broker.wire.messages import Answer, WorkReply
from tests.agents import WORKER, ScriptedEngine, an_agent, an_answer
from tests.builders import a_job
from tests.turns import until
from worker_agent.namesake import NameTaken, question, require_own_name


async def asks(bus: MemoryBus, *, ask_s_max: float = 5.0) -> None:
    """Start a second agent, so far."""
    await require_own_name(bus, WORKER, ask_s_max=ask_s_max, poll_s=0.01)


async def test_a_name_that_nobody_has_is_free_at_once() -> None:
    """No wait: the server knows that nobody listens."""
    async with asyncio.timeout(1):
        await asks(MemoryBus(), ask_s_max=60.0)


async def test_a_live_agent_keeps_its_name_and_its_jobs() -> None:
    """The second is told where the first runs and what to do; the first hears no order in it."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await stage.dispatch(a_job())
        echo = stage.agent.fence.echo
        told = rf"as worker {WORKER} \(process {os.getpid()} on .*, started 20.* UTC\).*--replace"
        with pytest.raises(NameTaken, match=told):
            await asks(stage.link.connection())
        assert (stage.agent.fence.epoch, stage.agent.fence.echo) == (1, echo)
        assert stage.agent.ledger.running
        engine.say("job-1", an_answer())
        await stage.end_of("job-1")


async def test_an_operators_drain_frees_no_name() -> None:
    """The worker stays, and may be told to go on."""
    async with an_agent() as stage:
        stage.agent._desk.is_draining = True
        with pytest.raises(NameTaken):
            await asks(stage.link.connection())


async def test_who_is_leaving_is_waited_for() -> None:
    """A restart may begin before the old process has ended: it keeps what it runs till then."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await stage.dispatch(a_job())
        await until(lambda: bool(engine.running))
        stage.agent.leave()
        second = asyncio.create_task(asks(stage.link.connection()))
        await stage.beat(lambda beat: beat.draining)
        assert not second.done()
        assert not engine.aborted
        engine.say("job-1", None)
        async with asyncio.timeout(5):
            await second


async def test_who_answers_nobody_is_not_waited_for() -> None:
    """A host without power, a stopped process: the server still knows its connection."""
    bus = MemoryBus()
    heard: list[bytes] = []
    await bus.subscribe(subjects.work(WORKER), lambda message: heard.append(message.data))
    await asks(bus.connection(), ask_s_max=0.01)
    assert heard == [codec.encode(question())]


@pytest.mark.parametrize("answer", [b"garbage", None])
async def test_an_agent_that_knows_no_such_question(answer: bytes | None) -> None:
    """One of an older version refuses it as a stale order, and lives; garbage is nobody's word."""
    bus = MemoryBus()
    stale = WorkReply(answer=Answer.STALE_EPOCH, epoch=3, incarnation=1_000, detail="stale")

    async def reply(message: Message) -> None:
        await bus.publish(message.reply, codec.encode(stale) if answer is None else answer)

    await bus.subscribe(subjects.work(WORKER), reply)
    if answer is None:
        with pytest.raises(NameTaken, match=r"\(started 1970-01-01 00:00:01 UTC\)"):
            await asks(bus.connection())
    else:
        await asks(bus.connection())


async def test_a_link_that_is_down_is_waited_for() -> None:
    """Nothing is known till then."""
    async with an_agent() as stage:
        link = stage.link.connection()
        link.disconnect()
        second = asyncio.create_task(asks(link))
        await asyncio.sleep(0)
        link.reconnect()
        with pytest.raises(NameTaken):
            await second
