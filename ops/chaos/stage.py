"""The stage of a chaos run: processes of its own, each behind a link that can be cut.

Beside them stand an observer's connection, which no fault touches but those of the server, and what
it hears: who is in flight where, what has ended. `local` is a whole cluster, `joined` the producers
alone, in a cluster that others run.
"""

import asyncio
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from broker.bus.base import Bus, BusError, Message, NotFound
from broker.wire import subjects
from broker.wire.codec import MalformedMessage, decode, decode_out
from broker.wire.messages import End, Heartbeat, Leader, StoredEnd
from ops.chaos import nodes
from ops.chaos.crowd import Crowd
from ops.chaos.engine import mode_file
from ops.chaos.nodes import Link
from ops.chaos.producer import stop_file
from ops.chaos.setting import Hit, Load, Setting
from ops.chaos.spy import Place, orders_file, standing_file
from ops.cluster import Member
from ops.nats.server import NatsServer

FRESH_S = 3.0
"""A worker that was heard within this is there."""

LEADER_S_MAX = 60.0
"""Longest wait for a leader: its key's life, and a start, several times."""


@dataclass(slots=True)
class Heard:
    """What the observer heard last."""

    beats: dict[str, tuple[float, Heartbeat]] = field(
        default_factory=dict[str, tuple[float, Heartbeat]]
    )
    ends: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def inflight(self) -> int:
        """Count jobs that workers list, those that were heard just now."""
        oldest_s = time.time() - FRESH_S
        fresh = (beat for at_s, beat in self.beats.values() if at_s >= oldest_s)
        return sum(len(beat.inflight) for beat in fresh)

    def ready(self, *, since_s: float) -> int:
        """Count workers that said since then that they take orders."""
        fresh = (beat for at_s, beat in self.beats.values() if at_s >= since_s)
        return sum(beat.ready and bool(beat.epoch) and not beat.draining for beat in fresh)

    async def until(self, holds: Callable[[], bool], *, timeout_s: float) -> bool:
        """Wait until something holds, looking whenever anything is heard; False: it never did."""
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            return False
        return True


def place_of(stream: str, sequence: int) -> str:
    """Name garbage by where it is stored."""
    return f"{stream}.{sequence}"


class Stage(ABC):
    """The processes of a run, by name, and all that a fault may touch."""

    def __init__(self, folder: Path, *, setting: Setting, load: Load) -> None:
        """Prepare; nothing runs yet."""
        self.folder = folder
        self.setting = setting
        self.load = load
        self.servers: list[NatsServer] = []
        self.brokers: list[str] = []
        self.workers: list[str] = []
        self.chatters = load.chatters
        self.producers = [*load.chatters, load.batcher]
        self.hits: tuple[Hit, ...] = ()
        self.garbage: set[str] = set()
        """Places of what was stored as jobs and is none."""
        self.links: dict[str, Link] = {}
        self.heard = Heard()
        self.crowd = Crowd()
        self._members: dict[str, Member] = {}
        self._stack = AsyncExitStack()
        self._bus: Bus | None = None

    @property
    def bus(self) -> Bus:
        """The observer's connection."""
        assert self._bus is not None, "not open"
        return self._bus

    @property
    def is_own(self) -> bool:
        """Whether all of the cluster is ours."""
        return bool(self.brokers)

    @property
    @abstractmethod
    def mark(self) -> Mapping[str, str]:
        """Environment of a process that is to end with this run, however that ends."""

    def member(self, name: str) -> Member:
        """Return the process that has a name now."""
        return self._members[name]

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._open(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        # Processes that were stopped can't end.
        for name in self._members:
            self.resume(name)
        await self._stack.aclose()

    @abstractmethod
    async def _open(self, stack: AsyncExitStack) -> None:
        """Open all that is needed before anything starts; `stack` closes it."""

    @abstractmethod
    async def start(self) -> None:
        """Start all processes, the producers last."""

    @abstractmethod
    def has_recovered(self, *, since_s: float) -> bool:
        """Say whether all workers of ours took orders since then."""

    @abstractmethod
    async def replace(self, name: str) -> None:
        """Start a second process under a name; the first notices, and ends."""

    # ---- who is who ----

    async def leader(self) -> str:
        """Name the broker that leads; the first one when nobody does for too long."""
        try:
            async with asyncio.timeout(LEADER_S_MAX):
                while True:
                    try:
                        key = await self.bus.kv_get(subjects.LEADER_BUCKET, subjects.LEADER_KEY)
                        return decode(key.value, Leader).broker
                    except (NotFound, BusError, MalformedMessage):
                        await asyncio.sleep(0.1)
        except TimeoutError:
            return self.brokers[0]

    # ---- processes ----

    def resume(self, name: str) -> None:
        """Let a stopped process go on; nothing happens to others."""
        self.member(name).signal(signal.SIGCONT)

    def doom(self, name: str, place: Place) -> None:
        """Tell a process where to die or stand."""
        orders = orders_file(self.folder, name)
        # Whole or not at all: the process may look at any moment.
        unread = orders.with_suffix(".unread")
        unread.write_text(place.order())
        unread.rename(orders)

    def stands(self, name: str) -> bool:
        """Say whether a process stands at its place."""
        return standing_file(orders_file(self.folder, name)).exists()

    def spare(self, name: str) -> None:
        """Take that back, and let it go on where it stands."""
        orders = orders_file(self.folder, name)
        for path in (orders, standing_file(orders)):
            path.unlink(missing_ok=True)

    def tell_engine(self, worker: str, mode: str) -> None:
        """Tell a worker's engine how to be."""
        mode_file(self.folder, worker).write_text(mode)

    async def restore_servers(self) -> None:
        """Start the servers that are down: a fault was broken off. Raises ServerUnavailable."""
        down = [server for server in self.servers if not server.running]
        await nodes.start(down, self.mark)
        for server in self.servers:
            server.resume()

    def stop_load(self) -> None:
        """Tell the producers to make no new jobs."""
        stop_file(self.folder).touch()

    # ---- inside ----

    async def _listen(self, bus: Bus) -> None:
        """Hear workers, and what the lanes of the load are told."""
        await bus.subscribe(subjects.HEARTBEATS, self._beat)
        for lane in (self.load.online, self.load.offline):
            await bus.subscribe(subjects.out(lane, "*", "*"), self._out)

    def _beat(self, message: Message) -> None:
        try:
            beat = decode(message.data, Heartbeat)
        except MalformedMessage:
            return
        if not self.workers or beat.worker in self.workers:
            at_s = time.time()
            self.crowd.note(at_s)
            self.heard.beats[beat.worker] = (at_s, beat)
            self.heard.changed.set()

    def _out(self, message: Message) -> None:
        try:
            event = decode_out(message.data)
        except MalformedMessage:
            return
        if isinstance(event, End | StoredEnd):
            self.heard.ends += 1
            self.heard.changed.set()
