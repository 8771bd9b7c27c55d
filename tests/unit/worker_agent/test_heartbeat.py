"""Heartbeats leave from their own thread, also while the agent's loop is busy."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from broker.bus.base import Bus, LinkDown, Message
from broker.bus.memory import MemoryBus
from broker.wire import subjects
from broker.wire.codec import decode
from broker.wire.messages import CacheSummary, Heartbeat
from tests.agents import WORKER
from tests.crashing import Failing, faulty
from tests.turns import until
from worker_agent.heartbeat import HeartbeatThread, Pulse, Report


def a_report(number: int = 1, **fields: Any) -> Report:
    """A report with a summary."""
    defaults: dict[str, Any] = {"summary": CacheSummary(sequence=number, full=True)}
    heartbeat = Heartbeat(
        worker=WORKER,
        incarnation=1,
        sequence=0,
        epoch=1,
        echo=number,
        at_s=0.0,
        models=(),
        slots=1,
        **{**defaults, **fields},
    )
    return Report(number, heartbeat)


class Agent:
    """An agent's side: makes reports, unless it is busy."""

    def __init__(self) -> None:
        self.reports = 0
        self.sent: list[int] = []
        self.busy = False

    async def fetch(self, sent_number: int) -> Report | None:
        if self.busy:
            return None
        self.sent.append(sent_number)
        self.reports += 1
        return a_report(self.reports)


async def a_pulse(
    agent: Agent,
    *,
    now_s: Callable[[], float] = time.time,
    tick_s: Callable[[], float] = time.monotonic,
    **fault: Any,
) -> tuple[Pulse, list[Heartbeat]]:
    """A pulse on a bus of its own, and what is heard of it."""
    bus = MemoryBus()
    heard: list[Heartbeat] = []
    await bus.subscribe(
        subjects.heartbeat(WORKER),
        lambda message: heard.append(decode(message.data, Heartbeat)),
    )
    wrapped = faulty(bus, Failing(**fault)) if fault else bus
    pulse = Pulse(
        wrapped,
        agent.fetch,
        worker=WORKER,
        interval_s=60.0,
        stuck_s_max=10.0,
        now_s=now_s,
        tick_s=tick_s,
    )
    return pulse, heard


async def test_each_beat_is_numbered_and_stamped() -> None:
    """Number and time are the sender's own."""
    pulse, heard = await a_pulse(Agent(), now_s=lambda: 77.0)
    await pulse.beat()
    await pulse.beat()
    await until(lambda: len(heard) == 2)
    assert [(beat.sequence, beat.echo, beat.at_s) for beat in heard] == [(1, 1, 77.0), (2, 2, 77.0)]


async def test_a_busy_agents_last_report_is_repeated_without_its_summary() -> None:
    """The broker keeps hearing what runs; no delta is told twice."""
    agent = Agent()
    pulse, heard = await a_pulse(agent)
    await pulse.beat()
    agent.busy = True
    await pulse.beat()
    await until(lambda: len(heard) == 2)
    first, second = heard
    assert (first.echo, second.echo) == (1, 1)
    assert (first.summary is None, second.summary is None) == (False, True)
    assert second.sequence == 2


async def test_a_stuck_agent_falls_silent() -> None:
    """After `stuck_s_max` it is not busy any more: the broker's probe shall find out."""
    agent = Agent()
    now_s = [100.0]
    pulse, heard = await a_pulse(agent, now_s=lambda: now_s[0], tick_s=lambda: now_s[0])
    await pulse.beat()
    agent.busy = True
    now_s[0] = 110.0
    await pulse.beat()
    now_s[0] = 110.1
    await pulse.beat()
    agent.busy = False
    await pulse.beat()
    await until(lambda: len(heard) == 3)
    assert [beat.at_s for beat in heard] == [100.0, 110.0, 110.1]
    assert [beat.echo for beat in heard] == [1, 1, 2]


async def test_before_its_first_report_an_agent_is_silent() -> None:
    """Nothing is made up."""
    agent = Agent()
    agent.busy = True
    pulse, heard = await a_pulse(agent, tick_s=lambda: 0.0)
    await pulse.beat()
    agent.busy = False
    await pulse.beat()
    await until(lambda: len(heard) == 1)
    assert heard[0].sequence == 1


async def test_an_unsent_beat_is_not_counted_as_sent() -> None:
    """The agent hears which report went out last, and makes up for the others."""
    agent = Agent()
    pulse, _ = await a_pulse(agent, operation="publish", error=LinkDown("cut"))
    await pulse.beat()
    await pulse.beat()
    await pulse.beat()
    assert agent.sent == [0, 0, 2]


async def test_a_fault_in_a_report_silences_nobody() -> None:
    """The next beat is tried at its time, or when woken."""
    agent = Agent()
    faults = 1

    async def fetch(sent_number: int) -> Report | None:
        nonlocal faults
        if faults:
            faults -= 1
            raise ZeroDivisionError
        return await agent.fetch(sent_number)

    pulse, heard = await a_pulse(agent)
    pulse._fetch = fetch
    async with asyncio.TaskGroup() as group:
        beating = group.create_task(pulse.run())
        await until(lambda: faults == 0)
        pulse.wake()
        await until(lambda: len(heard) == 1)
        beating.cancel()


class ThreadedStage:
    """A heartbeat thread whose bus lives on the thread's own loop, heard from there."""

    def __init__(self, *, refusals: int = 0, is_silent: bool = False) -> None:
        self.is_silent = is_silent
        self.faults = 0
        self.heard: list[Heartbeat] = []
        self.reports = 0
        self.refusals = refusals
        self.closed = False

    async def connect(self) -> Bus:
        if self.is_silent:
            await asyncio.Event().wait()
        if self.refusals:
            self.refusals -= 1
            message = "not yet"
            raise LinkDown(message)
        bus = MemoryBus()
        await bus.subscribe(subjects.heartbeat(WORKER), self._hear)
        return bus

    def _hear(self, message: Message) -> None:
        self.heard.append(decode(message.data, Heartbeat))

    def report(self, _: int) -> Report:
        if self.faults:
            self.faults -= 1
            raise ZeroDivisionError
        self.reports += 1
        return a_report(self.reports)


def a_thread(stage: ThreadedStage, *, interval_s: float = 0.02) -> HeartbeatThread:
    """A thread that beats for this loop."""
    return HeartbeatThread(
        connect=stage.connect,
        report=stage.report,
        worker=WORKER,
        interval_s=interval_s,
        stuck_s_max=60.0,
    )


async def heard(stage: ThreadedStage, count: int) -> None:
    """Wait until another thread has heard so many."""
    while len(stage.heard) < count:
        await asyncio.sleep(0.005)


async def test_a_blocked_loop_does_not_silence_the_thread() -> None:
    """While this very loop does nothing but count, heartbeats go out (the broker sees a live
    worker).
    """
    stage = ThreadedStage()
    thread = a_thread(stage)
    thread.start()
    await heard(stage, 1)
    before = len(stage.heard)
    ends_s = time.monotonic() + 5.0
    while len(stage.heard) < before + 2 and time.monotonic() < ends_s:
        pass
    assert len(stage.heard) >= before + 2
    repeated = stage.heard[-1]
    await thread.stop()
    assert repeated.summary is None


async def test_a_waking_call_sends_a_beat_now() -> None:
    """From the agent's loop, long before the next one is due."""
    stage = ThreadedStage()
    thread = a_thread(stage, interval_s=60.0)
    thread.start()
    await heard(stage, 1)
    thread.wake()
    await heard(stage, 2)
    await thread.stop()


async def test_stopping_sends_a_last_beat_and_is_idempotent() -> None:
    """The last word tells the final state."""
    stage = ThreadedStage()
    thread = a_thread(stage, interval_s=60.0)
    thread.start()
    await heard(stage, 1)
    await thread.stop()
    await thread.stop()
    thread.wake()
    assert [beat.echo for beat in stage.heard] == [1, 2]


async def test_a_refused_connection_is_tried_again() -> None:
    """Heartbeats begin as soon as the server lets them."""
    stage = ThreadedStage(refusals=1)
    thread = a_thread(stage)
    thread.start()
    await heard(stage, 1)
    await thread.stop()


async def test_a_thread_that_never_connected_can_be_stopped() -> None:
    """Leaving does not wait for a server that is away, be it refusing or silent."""
    for stage in (ThreadedStage(refusals=1_000_000), ThreadedStage(is_silent=True)):
        thread = a_thread(stage)
        thread.start()
        await thread.stop()
        assert stage.heard == []


async def test_a_fault_in_the_agents_report_is_the_threads_to_log() -> None:
    """It reaches neither the agent's loop nor the thread's end: the next beat goes out."""
    stage = ThreadedStage()
    stage.faults = 1
    thread = a_thread(stage)
    thread.start()
    await heard(stage, 1)
    await thread.stop()
    assert stage.faults == 0
