"""A stage for tests of the agent: a lane on a bus, and the broker's side played by the test."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

from broker.bus.base import Bus, ConsumerSpec, Delivery, Message, NotFound, StreamSpec
from broker.bus.memory import MemoryBus
from broker.engine_model.profile import DEMO
from broker.wire import subjects
from broker.wire.codec import decode, decode_note, decode_out, encode
from broker.wire.messages import (
    Attempt,
    AttemptEnded,
    Dispatch,
    Heartbeat,
    Job,
    OutEvent,
    TerminalRecord,
    WorkerNote,
    WorkReply,
)
from tests.builders import LANE, MODEL, an_attempt
from worker_agent.agent import Agent
from worker_agent.config import WorkerConfig
from worker_agent.engine.base import Engine
from worker_agent.engine.fake import FakeEngine
from worker_agent.heartbeat import Pulse, Report

WORKER = "worker-1"


def a_config(**fields: Any) -> WorkerConfig:
    """An impatient worker."""
    defaults: dict[str, Any] = {
        "worker": WORKER,
        "engine": "fake",
        "models": {MODEL: MODEL},
        "heartbeat_s": 0.05,
        "poll_s": 0.05,
        "retry_base_s": 0.005,
        "retry_s_max": 0.02,
        "prefix_tokens_min": 0,
    }
    return WorkerConfig(**{**defaults, **fields})


def a_fake_engine(**fields: Any) -> FakeEngine:
    """A fast engine of four slots."""
    defaults: dict[str, Any] = {"models": (MODEL,), "slots": 4, "speed": 50.0}
    return FakeEngine(DEMO, **{**defaults, **fields})


class Stage:
    """The broker's and the caller's side of one lane."""

    def __init__(self, bus: Bus, agent: Agent) -> None:
        self.bus = bus
        self.agent = agent
        self.out: list[OutEvent] = []
        self.notes: list[WorkerNote] = []
        self.beats: list[Heartbeat] = []
        self.deliveries: dict[str, Delivery] = {}
        self.changed = asyncio.Condition()
        self._numbers: dict[int, int] = {}

    async def set_up(self) -> None:
        """Make the lane's streams and hear all that the agent says."""
        await self.bus.ensure_stream(
            StreamSpec(
                name=f"JOBS_{LANE}",
                subjects=(subjects.jobs(LANE, 2, MODEL),),
                work_queue=True,
            )
        )
        await self.bus.ensure_stream(
            StreamSpec(
                name=subjects.results_stream(LANE),
                subjects=(subjects.result(LANE, "*"),),
                max_msgs_per_subject=1,
                discard_new_per_subject=True,
                allow_msg_ttl=True,
            )
        )
        await self.bus.ensure_consumer(
            ConsumerSpec(
                stream=f"JOBS_{LANE}", name="b2", filter_subject=subjects.jobs(LANE, 2, MODEL)
            )
        )
        await self.bus.subscribe(f"out.{LANE}.>", self._heard(self.out, decode_out))
        await self.bus.subscribe(subjects.WORKER_NOTES, self._heard(self.notes, decode_note))
        await self.bus.subscribe(
            subjects.HEARTBEATS, self._heard(self.beats, lambda data: decode(data, Heartbeat))
        )
        await self.bus.pull(f"JOBS_{LANE}", "b2", self._pulled, window=100)

    def _heard(self, into: list[Any], read: Callable[[bytes], Any]) -> Any:
        async def hear(message: Message) -> None:
            into.append(read(message.data))
            async with self.changed:
                self.changed.notify_all()

        return hear

    def _pulled(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            self.deliveries[decode(delivery.data, Job).id] = delivery

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something heard makes it true."""
        async with self.changed:
            await self.changed.wait_for(condition)

    async def submit(self, job: Job) -> Delivery:
        """Publish a job and pull it."""
        await self.bus.append(subjects.jobs(job.lane, job.band, job.model), encode(job))
        while job.id not in self.deliveries:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return self.deliveries[job.id]

    async def dispatch(
        self, job: Job, *, attempt: Attempt | None = None, **fields: Any
    ) -> WorkReply:
        """Submit a job if it isn't yet, and order the worker to run it."""
        delivery = self.deliveries.get(job.id) or await self.submit(job)
        attempt = attempt or an_attempt()
        defaults: dict[str, Any] = {
            "epoch": attempt.epoch,
            "number": self.next_number(attempt.epoch),
            "attempt": attempt,
            "lane": job.lane,
            "stream": delivery.stream,
            "stream_sequence": delivery.sequence,
            "ack_subject": delivery.ack_subject,
            "job": delivery.data,
            "run_s_max": 60.0,
            "stall_s": 10.0,
        }
        return await self.order(Dispatch(**{**defaults, **fields}))

    def next_number(self, epoch: int = 1) -> int:
        """Number of the next order."""
        self._numbers[epoch] = self._numbers.get(epoch, 0) + 1
        return self._numbers[epoch]

    async def order(self, order: Any) -> WorkReply:
        """Send an order and return the answer."""
        data = order if isinstance(order, bytes) else encode(order)
        reply = await self.bus.request(subjects.work(WORKER), data, timeout_s=2.0)
        return decode(reply.data, WorkReply)

    async def settled(self, key: str) -> None:
        """Wait until an attempt's end was told and its ack is done."""
        await self.until(
            lambda: any(
                isinstance(note, AttemptEnded) and note.finished.key == key for note in self.notes
            )
        )
        while self.agent.ledger.unacknowledged:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def record(self, job_id: str) -> TerminalRecord:
        """Read a job's record. Raises NotFound."""
        stored = await self.bus.last_message(
            subjects.results_stream(LANE), subjects.result(LANE, job_id)
        )
        return decode(stored.data, TerminalRecord)

    async def has_record(self, job_id: str) -> bool:
        """Whether a record stands."""
        try:
            await self.record(job_id)
        except NotFound:
            return False
        return True

    async def queued(self) -> int:
        """Jobs in the lane's stream."""
        return (await self.bus.stream_state(f"JOBS_{LANE}")).messages


@asynccontextmanager
async def an_agent(
    *, bus: MemoryBus | None = None, engine: Engine | None = None, **fields: Any
) -> AsyncGenerator[Stage]:
    """An agent that serves until the block ends, then leaves."""
    broker_bus = bus or MemoryBus()
    agent_bus = broker_bus.connection()
    engine = engine or a_fake_engine()
    await engine.start()
    agent = Agent(config=a_config(**fields), bus=agent_bus, engine=engine)
    stage = Stage(broker_bus, agent)
    await stage.set_up()

    async def fetch(sent_number: int) -> Report:
        return agent.report(sent_number)

    pulse = Pulse(agent_bus.connection(), fetch, worker=WORKER, interval_s=0.05, stuck_s_max=60.0)
    agent.on_urgent = pulse.wake
    try:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(agent.run())
            beating = group.create_task(pulse.run())
            await agent.up.wait()
            yield stage
            agent.leave()
            await running
            beating.cancel()
    finally:
        await engine.stop()
        await agent_bus.close()
