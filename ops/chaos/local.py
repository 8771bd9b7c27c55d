"""A whole cluster of a chaos run's own, on this machine: servers, brokers, workers, producers."""

import asyncio
import sys
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from broker.bus.nats import connect
from ops.chaos import nodes
from ops.chaos.nodes import Link
from ops.chaos.plants import Plant
from ops.chaos.setting import Load, Setting, write_config
from ops.chaos.stage import LEADER_S_MAX, Stage
from ops.chaos.worker import NO_PLANT
from ops.cluster import LocalCluster


class LocalStage(Stage):
    """Servers, brokers, workers and producers, each a process."""

    def __init__(
        self,
        folder: Path,
        *,
        brokers: int,
        workers: int,
        nats_nodes: int = 1,
        plant: Plant | None = None,
    ) -> None:
        """Prepare; nothing runs yet. Raises ServerUnavailable without a nats-server."""
        super().__init__(folder, setting=Setting.of(nats_nodes), load=Load())
        self.servers = nodes.make_servers(folder, nats_nodes)
        self.brokers = [f"broker-{number + 1}" for number in range(brokers)]
        self.workers = [f"worker-{number + 1}" for number in range(workers)]
        self._cluster = LocalCluster(folder, server=self.servers[0])
        self._plant = plant.value if plant else NO_PLANT

    @property
    def mark(self) -> Mapping[str, str]:
        """That of the cluster."""
        return self._cluster.mark

    async def _open(self, stack: AsyncExitStack) -> None:
        # Ended after the cluster's processes, which are their clients.
        stack.push_async_callback(self._stop_servers)
        await stack.enter_async_context(self._cluster)
        await nodes.start(self.servers[1:], self.mark)
        addresses = [("127.0.0.1", server.port) for server in self.servers]
        for name in (*self.brokers, *self.workers, *self.producers):
            self.links[name] = await stack.enter_async_context(Link(addresses))
            self._add(name)
        self._bus = await connect(",".join(server.url for server in self.servers), name="chaos")
        stack.push_async_callback(self._bus.close)
        await self._listen(self._bus)

    async def start(self) -> None:
        """Start brokers and workers, wait until they take jobs, then the producers."""
        began_s = time.time()
        await self._cluster.start(*(self.member(name) for name in (*self.brokers, *self.workers)))
        await self.heard.until(lambda: self.has_recovered(since_s=began_s), timeout_s=LEADER_S_MAX)
        await self._cluster.start(*(self.member(name) for name in self.producers))

    def has_recovered(self, *, since_s: float) -> bool:
        """Say whether all workers said since then that they take orders."""
        return self.heard.ready(since_s=since_s) == len(self.workers)

    async def replace(self, name: str) -> None:
        """Start a second process under a name; the first notices, and ends."""
        old = self.member(name)
        new = self._cluster.add(f"{name}.{old.starts}.{id(old) % 1000}", old.command)
        self._members[name] = new
        new.command = (*old.command, "--replace")
        await new.start()
        new.command = old.command
        await old.ended()

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
            command = self.load.command(name, folder=self.folder, url=url)
        self._members[name] = self._cluster.add(name, command)
