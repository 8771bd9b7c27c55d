"""The stage of a chaos run: a local cluster of real processes, each behind a link that can be cut.

Beside the cluster stand an observer's connection, which no fault touches but those of the server,
and what it hears: who is in flight where, who leads, what has ended.
"""

import asyncio
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from broker.bus.base import Bus, BusError, Message, NotFound
from broker.bus.nats import connect
from broker.wire import subjects
from broker.wire.codec import MalformedMessage, decode, decode_out
from broker.wire.messages import End, Heartbeat, Leader, StoredEnd
from ops.chaos import nodes
from ops.chaos.crowd import Crowd
from ops.chaos.engine import mode_file
from ops.chaos.nodes import Link
from ops.chaos.plants import Plant
from ops.chaos.producer import stop_file
from ops.chaos.setting import BATCH_PRODUCER, CHAT_PRODUCER, Setting, write_config
from ops.chaos.spy import Place, orders_file, standing_file
from ops.chaos.worker import NO_PLANT
from ops.cluster import LocalCluster, Member

CHAT_PRODUCERS = 2

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


class Stage:
    """The processes of a run, by name, and all that a fault may touch."""

    def __init__(
        self,
        folder: Path,
        *,
        brokers: int,
        workers: int,
        nats_nodes: int = 1,
        plant: Plant | None = None,
    ) -> None:
        """Prepare; nothing runs yet."""
        self.folder = folder
        self.servers = nodes.make_servers(folder, nats_nodes)
        self.setting = Setting.of(nats_nodes)
        self.cluster = LocalCluster(folder, server=self.servers[0])
        self.brokers = [f"broker-{number + 1}" for number in range(brokers)]
        self.workers = [f"worker-{number + 1}" for number in range(workers)]
        self.chatters = [f"{CHAT_PRODUCER}-{number + 1}" for number in range(CHAT_PRODUCERS)]
        self.producers = [*self.chatters, BATCH_PRODUCER]
        self.links: dict[str, Link] = {}
        self.heard = Heard()
        self.crowd = Crowd()
        self._members: dict[str, Member] = {}
        self._plant = plant.value if plant else NO_PLANT
        self._stack = AsyncExitStack()
        self._bus: Bus | None = None

    @property
    def bus(self) -> Bus:
        """The observer's connection."""
        assert self._bus is not None, "not open"
        return self._bus

    def member(self, name: str) -> Member:
        """Return the process that has a name now."""
        return self._members[name]

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            # Ended after the cluster's processes, which are their clients.
            stack.push_async_callback(self._stop_servers)
            await stack.enter_async_context(self.cluster)
            await nodes.start(self.servers[1:], self.cluster.mark)
            ports = [server.port for server in self.servers]
            for name in (*self.brokers, *self.workers, *self.producers):
                self.links[name] = await stack.enter_async_context(Link(ports))
                self._add(name)
            url = ",".join(server.url for server in self.servers)
            self._bus = await connect(url, name="chaos")
            stack.push_async_callback(self._bus.close)
            await self._listen(self._bus)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        # Processes that were stopped can't end.
        for name in self._members:
            self.resume(name)
        await self._stack.aclose()

    async def start(self) -> None:
        """Start brokers and workers, wait until they take jobs, then the producers."""
        began_s = time.time()
        await self.cluster.start(*(self.member(name) for name in (*self.brokers, *self.workers)))
        count = len(self.workers)
        await self.heard.until(
            lambda: self.heard.ready(since_s=began_s) == count, timeout_s=LEADER_S_MAX
        )
        await self.cluster.start(*(self.member(name) for name in self.producers))

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

    async def replace(self, name: str) -> None:
        """Start a second process under a name; the first notices, and ends."""
        old = self.member(name)
        new = self.cluster.add(f"{name}.{old.starts}.{id(old) % 1000}", old.command)
        self._members[name] = new
        await new.start()
        await old.ended()

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
        await nodes.start(down, self.cluster.mark)
        for server in self.servers:
            server.resume()

    def stop_load(self) -> None:
        """Tell the producers to make no new jobs."""
        stop_file(self.folder).touch()

    # ---- inside ----

    async def _stop_servers(self) -> None:
        for server in self.servers[1:]:
            await asyncio.to_thread(server.stop)

    def _add(self, name: str) -> None:
        url = self.links[name].url
        config = write_config(self.folder, name=name, url=url, setting=self.setting)
        folder, python = str(self.folder), (sys.executable, "-m")
        if name in self.brokers:
            command = (*python, "ops.chaos.broker", folder, self._plant, str(config))
        elif name in self.workers:
            flags = ("--config", str(config), "--worker", name)
            command = (*python, "ops.chaos.worker", folder, self._plant, *flags)
        else:
            what = CHAT_PRODUCER if name in self.chatters else BATCH_PRODUCER
            command = (*python, "ops.chaos.producer", folder, name, what, url)
        self._members[name] = self.cluster.add(name, command)

    async def _listen(self, bus: Bus) -> None:
        await bus.subscribe(subjects.HEARTBEATS, self._beat)
        await bus.subscribe(subjects.ALL_OUT, self._out)

    def _beat(self, message: Message) -> None:
        try:
            beat = decode(message.data, Heartbeat)
        except MalformedMessage:
            return
        if beat.worker in self.workers:
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
