"""The two buses behind one face, so that one suite runs on both, and what listens in tests."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from broker.bus.base import Bus, ConsumerSpec, Delivery, Message, Pull, StreamSpec

Item = TypeVar("Item")

POLL_S = 0.01
PATIENCE_S = 10.0
"""How long a test waits for what must come."""

STREAM, SUBJECT, CONSUMER = "JOBS_acme", "jobs.acme.2.tiny", "b2-tiny"


@dataclass
class World:
    """A server and two connections to it."""

    bus: Bus
    peer: Bus
    pass_time: Callable[[float], Awaitable[None]]
    """Let time go by for the server: at once on the in-process bus."""
    cut: Callable[[], Awaitable[None]]
    """Cut both connections."""
    mend: Callable[[], Awaitable[None]]
    """Mend both, and return when they stand."""
    ack_wait_s: float
    """A short ack-wait that suits this server."""


class Heard(Generic[Item]):
    """Collects what arrives, and lets a test wait for a number of them."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._news = asyncio.Event()

    def __call__(self, item: Item) -> None:
        self.add([item])

    def add(self, items: list[Item]) -> None:
        """Take note of several."""
        self.items += items
        self._news.set()

    async def count(self, wanted: int) -> list[Item]:
        """Wait until so many have come; returns all."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.items) < wanted:
                self._news.clear()
                await self._news.wait()
        return self.items


async def until(holds: Callable[[], bool | Awaitable[bool]]) -> None:
    """Ask again and again until something holds: for what nobody tells, as a server's own state."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            answer = holds()
            if answer if isinstance(answer, bool) else await answer:
                return
            await asyncio.sleep(POLL_S)


def a_stream(**fields: Any) -> StreamSpec:
    """A lane's work queue."""
    defaults: dict[str, Any] = {
        "name": STREAM,
        "subjects": (SUBJECT,),
        "work_queue": True,
        "max_msgs_per_subject": 1000,
        "discard_new_per_subject": True,
    }
    return StreamSpec(**{**defaults, **fields})


def a_consumer(**fields: Any) -> ConsumerSpec:
    """Its consumer."""
    defaults: dict[str, Any] = {
        "stream": STREAM,
        "name": CONSUMER,
        "filter_subject": SUBJECT,
    }
    return ConsumerSpec(**{**defaults, **fields})


@dataclass
class Puller:
    """A pull whose deliveries are collected and, unless `hold`, released at once."""

    hold: bool = False
    heard: Heard[Delivery] = field(default_factory=Heard[Delivery])
    pull: Pull | None = None

    def take(self, batch: list[Delivery]) -> None:
        """Handle a batch."""
        self.heard.add(batch)
        if not self.hold and self.pull is not None:
            self.pull.release(len(batch))

    @property
    def sequences(self) -> list[int]:
        """Stream sequences in order of arrival."""
        return [delivery.sequence for delivery in self.heard.items]


async def pulling(bus: Bus, *, window: int = 100, hold: bool = False, **names: str) -> Puller:
    """Start a pull."""
    puller = Puller(hold=hold)
    stream, consumer = names.get("stream", STREAM), names.get("consumer", CONSUMER)
    puller.pull = await bus.pull(stream, consumer, puller.take, window=window)
    return puller


async def listening(bus: Bus, subject: str, *, queue: str = "") -> Heard[Message]:
    """Collect messages of a subject; on return the server knows of it."""
    heard: Heard[Message] = Heard()
    await bus.subscribe(subject, heard, queue=queue)
    await bus.rtt_s()
    return heard
