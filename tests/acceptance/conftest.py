"""Real clusters of real processes, one for each test that asks."""

import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import pytest

from broker.bus.nats import NatsBus, connect
from ops.cluster import LocalCluster, Member
from ops.demo.run import until_ready
from ops.demo.setting import Setting, write_config
from ops.nats.server import NatsServer

FAST = {"engine": "fake", "leader_ttl_s": 2.0}
"""Modelled engines, and a dead leader's key that runs out soon."""

StartCluster = Callable[..., Awaitable[tuple[LocalCluster, NatsBus]]]


@pytest.fixture
async def start_cluster(tmp_path: Path) -> AsyncGenerator[StartCluster, None]:
    """Start a broker and workers with modelled engines; all ends with the test."""
    clusters: list[LocalCluster] = []
    buses: list[NatsBus] = []

    async def start(
        *,
        workers: int = 2,
        broker_place: str = "",
        agent_place: str = "",
        server: NatsServer | None = None,
        **setting: object,
    ) -> tuple[LocalCluster, NatsBus]:
        folder = tmp_path / f"cluster-{len(clusters)}"
        cluster = LocalCluster(folder, server=server)
        clusters.append(cluster)
        await cluster.__aenter__()
        options = Setting(**{"folder": folder, "url": cluster.url, **FAST, **setting})  # pyright: ignore[reportArgumentType]
        config = write_config(options)
        members = [_broker(cluster, config, broker_place)]
        for number in range(workers):
            dies = agent_place if number == 0 else ""
            members.append(_worker(cluster, f"worker-{number + 1}", config, dies))
        await cluster.start(*members)
        bus = await connect(cluster.url, name="test")
        buses.append(bus)
        await until_ready(bus, workers=workers)
        return cluster, bus

    yield start
    for bus in buses:
        await bus.close()
    for cluster in clusters:
        await cluster.close()


def _broker(cluster: LocalCluster, config: Path, place: str) -> Member:
    """Add a broker; one that will die at a place has a sound one, not started, as its successor."""
    if not place:
        return cluster.add_broker("broker-1", config)
    cluster.add_broker("broker-2", config)
    command = (sys.executable, "-m", "tests.crashing_broker", place, str(config))
    return cluster.add("broker-1", command)


def _worker(cluster: LocalCluster, name: str, config: Path, place: str) -> Member:
    if not place:
        return cluster.add_worker(name, config)
    command = (sys.executable, "-m", "tests.crashing_agent", place, "--config", str(config))
    return cluster.add(name, (*command, "--worker", name))
