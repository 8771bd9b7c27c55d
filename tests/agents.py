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
from broker.wire.ids import job_key
from broker.wire.messages import (
    Abort,
    Attempt,
    AttemptEnded,
    Dispatch,
    Finished,
    Heartbeat,
    Job,
    Load,
    OutEvent,
    Reason,
    TerminalRecord,
    Usage,
    WorkerNote,
    WorkReply,
)
from tests.builders import LANE, MODEL, an_attempt
from tests.crashing import Fault, faulty
from tests.turns import until
from worker_agent.agent import Agent
from worker_agent.config import WorkerConfig
from worker_agent.engine.base import (
    Completed,
    Engine,
    EngineOutput,
    EngineRequest,
    Facts,
    Readiness,
)
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


Said = EngineOutput | Exception | None
"""What a scripted engine may do next; None ends its stream without a result."""


class ScriptedEngine:
    """An engine whose every output is the test's: `say` to all requests, or to one by job id."""

    def __init__(self, *, slots: int = 4) -> None:
        self.slots = slots
        self.incarnation = 1
        self.kv_tokens_max = 0
        self.is_ready = True
        self.is_away = False
        """Its process has ended."""
        self.models: tuple[str, ...] = (MODEL,)
        self.requests: dict[str, EngineRequest] = {}
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.decode_tokens_s = 0.0
        self._outputs: dict[str, asyncio.Queue[Said]] = {}

    @property
    def facts(self) -> Facts:
        return Facts(self.slots, self.kv_tokens_max, self.incarnation)

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    async def ready(self) -> Readiness:
        ready = self.is_ready and not self.is_away
        return Readiness(
            ready=ready, models=self.models, detail="told so by the test", away=self.is_away
        )

    async def load(self) -> Load:
        return Load(running=len(self.running), decode_tokens_s=self.decode_tokens_s)

    def say(self, job_id: str, *outputs: Said) -> None:
        """Give a request its next outputs."""
        for output in outputs:
            self._of(job_id).put_nowait(output)

    def left(self, job_id: str) -> int:
        """Outputs that nobody has read yet."""
        return self._of(job_id).qsize()

    def _of(self, job_id: str) -> asyncio.Queue[Said]:
        return self._outputs.setdefault(job_id, asyncio.Queue())

    async def run(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        job_id = request.request_id.partition(".")[2]
        self.requests[job_id] = request
        self.running.add(job_id)
        is_whole = False
        try:
            while (output := await self._of(job_id).get()) is not None:
                if isinstance(output, Exception):
                    is_whole = True
                    raise output
                is_whole = isinstance(output, Completed)
                yield output
            is_whole = True
        finally:
            self.running.discard(job_id)
            if not is_whole:
                self.aborted.append(job_id)


def an_answer(text: str = "hi", **fields: Any) -> Completed:
    """A whole answer of one token."""
    defaults: dict[str, Any] = {
        "status_code": 200,
        "body": text.encode(),
        "usage": Usage(prompt_tokens=40, cached_tokens=0, output_tokens=1),
        "cached_tokens": 0,
    }
    return Completed(**{**defaults, **fields})


class Lane:
    """The broker's and the caller's side of one lane."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.out: list[OutEvent] = []
        self.notes: list[WorkerNote] = []
        self.beats: list[Heartbeat] = []
        self.deliveries: dict[str, Delivery] = {}
        self.delivered = 0
        """Deliveries so far, repeated ones included."""
        self._changed = asyncio.Event()
        self._numbers: dict[int, int] = {}

    async def set_up(self, *, ack_wait_s: float = 60.0) -> None:
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
                stream=f"JOBS_{LANE}",
                name="b2",
                filter_subject=subjects.jobs(LANE, 2, MODEL),
                ack_wait_s=ack_wait_s,
            )
        )
        await self.bus.subscribe(f"out.{LANE}.>", self._heard(self.out, decode_out))
        await self.bus.subscribe(subjects.WORKER_NOTES, self._heard(self.notes, decode_note))
        await self.bus.subscribe(
            subjects.HEARTBEATS, self._heard(self.beats, lambda data: decode(data, Heartbeat))
        )
        await self.bus.pull(f"JOBS_{LANE}", "b2", self._pulled, window=100)

    def _heard(self, into: list[Any], read: Callable[[bytes], Any]) -> Any:
        def hear(message: Message) -> None:
            into.append(read(message.data))
            self._changed.set()

        return hear

    def _pulled(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            self.deliveries[decode(delivery.data, Job).id] = delivery
            self.delivered += 1
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something heard makes it true."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def beat(self, condition: Callable[[Heartbeat], bool] = lambda _: True) -> Heartbeat:
        """Wait until the newest heartbeat is such a one, and return it."""
        await self.until(lambda: bool(self.beats) and condition(self.beats[-1]))
        return self.beats[-1]

    async def submit(self, job: Job) -> Delivery:
        """Publish a job and pull it."""
        await self.bus.append(subjects.jobs(job.lane, job.band, job.model), encode(job))
        await self.until(lambda: job.id in self.deliveries)
        return self.deliveries[job.id]

    async def dispatch(
        self, job: Job, /, *, attempt: Attempt | None = None, timeout_s: float = 2.0, **fields: Any
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
        return await self.order(Dispatch(**{**defaults, **fields}), timeout_s=timeout_s)

    def next_number(self, epoch: int = 1) -> int:
        """Number of the next order."""
        self._numbers[epoch] = self._numbers.get(epoch, 0) + 1
        return self._numbers[epoch]

    async def order(self, order: Any, *, timeout_s: float = 2.0) -> WorkReply:
        """Send an order and return the answer."""
        data = order if isinstance(order, bytes) else encode(order)
        reply = await self.bus.request(subjects.work(WORKER), data, timeout_s=timeout_s)
        return decode(reply.data, WorkReply)

    async def abort(self, reason: Reason, *, job_id: str = "job-1", number: int = 1) -> WorkReply:
        """Order the worker to stop an attempt."""
        return await self.order(
            Abort(
                epoch=1,
                number=self.next_number(),
                key=job_key(LANE, job_id),
                attempt=an_attempt(number),
                reason=reason,
            )
        )

    def ended(self, job_id: str) -> list[Finished]:
        """Ends that notes told of a job."""
        key = job_key(LANE, job_id)
        notes = [note for note in self.notes if isinstance(note, AttemptEnded)]
        return [note.finished for note in notes if note.finished.key == key]

    async def end_of(self, job_id: str) -> Finished:
        """Wait until a note tells a job's end."""
        await self.until(lambda: bool(self.ended(job_id)))
        return self.ended(job_id)[-1]

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


class Stage(Lane):
    """A lane with an agent in this process."""

    work: asyncio.Task[None]
    """The agent at work; cancelled, it is gone at once."""

    def __init__(self, bus: MemoryBus, agent: Agent, *, link: MemoryBus) -> None:
        super().__init__(bus)
        self.agent = agent
        self.link = link
        """The agent's connection, to cut and mend; ..."""
        self.pulse_link = bus.connection()
        """... and that of its heartbeats."""

    def stalls_at(self, job_id: str) -> float:
        """When a running attempt has stalled, on the loop's clock, unless a token comes."""
        return self.agent._supervisor._watches[job_key(LANE, job_id)].limit_ends_tick_s

    def looks_at(self, job_id: str) -> float:
        """When an attempt's limits are looked at next, on the loop's clock."""
        look = self.agent._supervisor._watches[job_key(LANE, job_id)].look
        assert look is not None
        return look.when()

    async def acknowledged(self) -> None:
        """Wait until no record waits for its ack."""
        await until(lambda: self.agent.ledger.unacknowledged == 0)


@asynccontextmanager
async def an_agent(
    *,
    bus: MemoryBus | None = None,
    engine: Engine | None = None,
    fault: Fault | None = None,
    waits_up: bool = True,
    **fields: Any,
) -> AsyncGenerator[Stage]:
    """An agent that serves until the block ends, then leaves. `fault` stands around its bus."""
    broker_bus = bus or MemoryBus()
    link = broker_bus.connection()
    engine = engine or a_fake_engine()
    await engine.start()
    agent_bus = faulty(link, fault) if fault else link
    agent = Agent(config=a_config(**fields), bus=agent_bus, engine=engine)
    stage = Stage(broker_bus, agent, link=link)
    await stage.set_up()

    async def fetch(sent_number: int) -> Report:
        return agent.report(sent_number)

    pulse = Pulse(
        stage.pulse_link,
        fetch,
        worker=WORKER,
        interval_s=agent.config.heartbeat_s,
        stuck_s_max=agent.config.stuck_s_max,
    )
    agent.on_urgent = pulse.wake
    try:
        async with asyncio.TaskGroup() as group:
            stage.work = group.create_task(agent.run())
            beating = group.create_task(pulse.run())
            if waits_up:
                await agent.up.wait()
            yield stage
            agent.leave()
            await asyncio.wait([stage.work])
            beating.cancel()
    finally:
        await engine.stop()
        await stage.pulse_link.close()
        await link.close()
        if bus is None:
            await broker_bus.close()
