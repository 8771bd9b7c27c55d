"""A leader's parts on the in-process bus, wired as in production, moved by hand.

    async with a_desk() as desk:
        delivery = await desk.deliver(a_job())
        desk.take(delivery)
        desk.turn()          # the loop handles all that it was told

Time stands still until `desk.clock.advance`. Workers are told what to answer.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from broker.bus import topology
from broker.bus.base import Delivery, Message, NotFound
from broker.bus.memory import MemoryBus
from broker.bus.memory_clock import ManualClock
from broker.core import decisions as do
from broker.core.events import DispatchAllowed, Event, JobSpec
from broker.core.policy import LanePolicy, LeasePolicy, Policy
from broker.service.config import BrokerConfig, Config, StreamsConfig
from broker.service.departures import Departures
from broker.service.election import Term
from broker.service.fleet import Fleet
from broker.service.held import Held, Shelf
from broker.service.leadership import Leadership
from broker.service.learned import Learned
from broker.service.queues import topology_of
from broker.service.stages import Stage
from broker.service.views import Snapshots
from broker.wire import subjects
from broker.wire.codec import decode, decode_order, decode_out, encode
from broker.wire.ids import job_key
from broker.wire.messages import (
    Answer,
    Attempt,
    Finished,
    Heartbeat,
    InFlight,
    Job,
    Kind,
    Outcome,
    OutEvent,
    TerminalRecord,
    WorkReply,
)
from broker.wire.subjects import JobAddress
from tests.builders import LANE, MODEL
from tests.crashing import Fault, faulty
from tests.turns import until

OTHER_LANE = "beta"
WORKER = "w1"
ADDRESS = JobAddress(LANE, 2, MODEL)

QUICK_LEASES = LeasePolicy(
    heartbeat_s=0.1,
    lease_s=0.4,
    revoke_s=1.0,
    grace_s=0.2,
    retry_base_s=0.02,
    retry_s_max=0.1,
    dispatch_answer_s=0.5,
)
"""Impatient, for tests in real time."""


def a_config(
    *,
    lanes: tuple[LanePolicy, ...] = (),
    policy: dict[str, Any] | None = None,
    streams: dict[str, Any] | None = None,
    **broker: Any,
) -> Config:
    """Two lanes, one model; `broker`, `policy` and `streams` go into the tables of that name."""
    lanes = lanes or (LanePolicy(name=LANE), LanePolicy(name=OTHER_LANE))
    wanted: dict[str, Any] = {"models": (MODEL,), "lanes": lanes, **(policy or {})}
    ours: dict[str, Any] = {"decision_log_bytes_max": 0, "http_port": 0, **broker}
    return Config(
        policy=Policy(**wanted),
        broker=BrokerConfig(**ours),
        streams=StreamsConfig(**(streams or {})),
    )


class Window:
    """A pull that counts the places it is given back."""

    def __init__(self) -> None:
        self.released = 0

    def release(self, count: int = 1) -> None:
        self.released += count

    def resize(self, window: int) -> None:
        raise NotImplementedError

    async def stop(self) -> list[Delivery]:
        raise NotImplementedError


class Seen:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.decisions: list[do.Decision] = []
        self.bad: Counter[str] = Counter()
        self.duplicates: Counter[tuple[str, int]] = Counter()
        self.differences: Counter[str] = Counter()
        self.counted: Counter[str] = Counter()
        self.gone: Counter[str] = Counter()
        self.ended: list[tuple[TerminalRecord, bool]] = []
        self.errors: Counter[str] = Counter()
        self.lags: list[float] = []

    def heard(self, event: Event) -> None:
        self.events.append(event)

    def decided(self, decision: do.Decision, held: Held | None, *, at_s: float) -> None:
        del held, at_s
        self.decisions.append(decision)

    def malformed(self, where: str) -> None:
        self.bad[where] += 1

    def duplicate(self, lane: str, band: int) -> None:
        self.duplicates[lane, band] += 1

    def difference(self, kind: str) -> None:
        self.differences[kind] += 1

    def usage_counted(self, lane: str, records: int) -> None:
        self.counted[lane] += records

    def usage_gone(self, lane: str, records: int) -> None:
        self.gone[lane] += records

    def closed(self, record: TerminalRecord, *, won: bool, job: JobSpec | None = None) -> None:
        del job
        self.ended.append((record, won))

    def loop_error(self, where: str) -> None:
        self.errors[where] += 1

    def lag(self, seconds: float, *, held_s: float) -> None:
        assert 0.0 <= held_s <= seconds
        self.lags.append(seconds)

    def of(self, *kinds: type[Any]) -> list[Any]:
        """Decisions of these kinds."""
        return [one for one in self.decisions if isinstance(one, kinds)]


def a_delivery(job: Job | bytes, *, sequence: int = 1, **fields: Any) -> Delivery:
    """A job's message as pulled; `sequence` is also the mark of this very delivery."""
    defaults: dict[str, Any] = {
        "subject": subjects.jobs(LANE, 2, MODEL),
        "stream": f"JOBS_{LANE}",
        "consumer": "b2-tiny",
        "sequence": sequence,
        "data": job if isinstance(job, bytes) else encode(job),
        "ack_subject": f"$JS.ACK.JOBS_{LANE}.b2-tiny.1.{sequence}.1.0.0",
        "stored_at_s": 1000.0,
        "pending": 0,
    }
    return Delivery(**{**defaults, **fields})


def a_beat(*, sequence: int = 1, **fields: Any) -> Heartbeat:
    """A word of worker `w1`: idle, ready, four slots."""
    defaults: dict[str, Any] = {
        "worker": WORKER,
        "incarnation": 1,
        "sequence": sequence,
        "epoch": 1,
        "echo": 0,
        "at_s": 0.0,
        "models": (MODEL,),
        "slots": 4,
    }
    return Heartbeat(**{**defaults, **fields})


def a_listing(job_id: str = "job-1", *, sequence: int = 1, **fields: Any) -> InFlight:
    """A worker's word of a job that it runs for an earlier leader."""
    defaults: dict[str, Any] = {
        "key": job_key(LANE, job_id),
        "attempt": Attempt(0, 7),
        "stream_sequence": sequence,
        "band": 2,
        "model": MODEL,
        "prompt_tokens": 10,
        "cached_tokens": 0,
        "output_tokens_max": 16,
        "output_tokens": 1,
        "prefilled": True,
        "enqueued_at_s": 1000.0,
        "started_at_s": 1000.0,
        "ack_subject": f"$JS.ACK.JOBS_{LANE}.b2-tiny.1.{sequence}.1.0.0",
        "client": "client-1",
    }
    return InFlight(**{**defaults, **fields})


class Worker:
    """A worker's side of its orders: it notes them and answers as it is told."""

    def __init__(self, bus: MemoryBus, name: str = WORKER) -> None:
        self.bus = bus
        self.name = name
        self.orders: list[Any] = []
        self.answer: Answer | None = Answer.ACCEPTED
        """None: it hears, and does not answer."""
        self.held_back: list[Message] = []

    async def listen(self) -> None:
        """Be there."""
        await self.bus.subscribe(subjects.work(self.name), self._take)

    async def _take(self, message: Message) -> None:
        self.orders.append(decode_order(message.data))
        if self.answer is None:
            self.held_back.append(message)
        else:
            await self.reply(message, self.answer)

    async def reply(self, message: Message, answer: Answer) -> None:
        """Answer an order."""
        await self.bus.publish(
            message.reply, encode(WorkReply(answer=answer, epoch=1, incarnation=1))
        )

    def of(self, kind: type[Any]) -> list[Any]:
        """Orders of a kind."""
        return [order for order in self.orders if isinstance(order, kind)]


class Desk:
    """One leader's parts, and what surrounds them."""

    def __init__(
        self, bus: MemoryBus, clock: ManualClock, config: Config, fault: Fault | None
    ) -> None:
        self.bus = bus
        self.clock = clock
        self.config = config
        self.link = bus.connection()
        """The leader's own connection."""
        self.seen = Seen()
        self.learned = Learned()
        self.departures = Departures()
        self.fleet = Fleet(now=clock.now_s, malformed=self.seen.malformed)
        self.snapshots = Snapshots(config, self.learned, self.departures, now=clock.now_s)
        self.leader = Leadership(
            faulty(self.link, fault) if fault else self.link,
            self.fleet,
            config,
            Term(epoch=1),
            snapshots=self.snapshots,
            learned=self.learned,
            observer=self.seen,
            now=clock.now_s,
        )
        self.snapshots.leads(self.leader)
        self.out: list[OutEvent] = []
        self.window = Window()
        self.beats = 0

    @property
    def shelf(self) -> Shelf:
        return self.leader.shelf

    def held(self, job_id: str = "job-1") -> Held:
        """A job that must be on the shelf."""
        held = self.shelf.get(job_key(LANE, job_id))
        assert held is not None
        return held

    async def set_up(self) -> None:
        """Make the streams, and hear what callers are told."""
        await topology.apply(self.bus, topology_of(self.config))
        await self.bus.subscribe("out.>", lambda message: self.out.append(decode_out(message.data)))

    def turn(self) -> None:
        """Let the loop handle all that it was told."""
        while self.leader.loop.backlog:
            self.leader.loop._slice()

    def allow(self) -> None:
        """Let the leader dispatch, as at the end of its start."""
        self.leader.loop.tell(DispatchAllowed(self.clock.now_s()))
        self.turn()

    def beat(self, **fields: Any) -> None:
        """Let worker `w1` report."""
        self.beats += 1
        self.leader.loop.heartbeat(a_beat(**{"sequence": self.beats, **fields}))
        self.turn()

    def take(self, delivery: Delivery, address: JobAddress = ADDRESS) -> None:
        """Take one delivery in, and let the loop handle it."""
        self.leader.intake.take(delivery, address, self.window)
        self.turn()

    async def publish(self, job: Job) -> int:
        """Publish a job; returns its sequence."""
        subject = subjects.jobs(job.lane, job.band, job.model)
        return (await self.bus.append(subject, encode(job))).sequence

    async def deliver(self, job: Job) -> Delivery:
        """Publish a job and pull it."""
        sequence = await self.publish(job)
        got: list[Delivery] = []
        stream = subjects.jobs_stream(job.lane, job.band)
        consumer = subjects.job_consumer(job.band, job.model)
        pull = await self.bus.pull(stream, consumer, got.extend, window=100)
        await until(lambda: any(one.sequence == sequence for one in got))
        await pull.stop()
        return next(one for one in got if one.sequence == sequence)

    async def hold(self, job: Job) -> Held:
        """Publish a job, pull it and take it in."""
        self.take(await self.deliver(job))
        return self.held(job.id)

    async def queued(self, stream: str = f"JOBS_{LANE}") -> int:
        """Messages in a stream."""
        return (await self.bus.stream_state(stream)).messages

    async def record(self, job_id: str = "job-1") -> TerminalRecord | None:
        """A job's record, if it stands."""
        try:
            stored = await self.bus.last_message(
                subjects.results_stream(LANE), subjects.result(LANE, job_id)
            )
        except NotFound:
            return None
        return decode(stored.data, TerminalRecord)

    def settled(self, job_id: str = "job-1", **fields: Any) -> Finished:
        """A worker's word of a job that ended."""
        held = self.held(job_id)
        assert held.sent is not None
        defaults: dict[str, Any] = {
            "key": held.key,
            "attempt": held.sent,
            "outcome": Outcome.SETTLED,
            "kind": Kind.COMPLETED,
        }
        return Finished(**{**defaults, **fields})


@asynccontextmanager
async def a_desk(
    *parts: str, fault: Fault | None = None, worker: bool = False, **config: Any
) -> AsyncGenerator[Desk]:
    """A leader whose named parts (`outbox`, `closer`, `book`, `control`) are at work."""
    clock = ManualClock()
    bus = MemoryBus(clock=clock)
    desk = Desk(bus, clock, a_config(**config), fault)
    await desk.set_up()
    tasks = [asyncio.create_task(_run(desk, part)) for part in parts]
    try:
        await asyncio.sleep(0)
        if worker:
            desk.beat()
        yield desk
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await desk.link.close()
        await bus.close()


def _run(desk: Desk, part: str) -> Coroutine[Any, Any, None]:
    return getattr(desk.leader, part).run()


def is_waiting(held: Held) -> bool:
    """Whether a job waits for a worker."""
    return held.stage is Stage.WAITING
