"""Real clusters of real processes, one for each test that asks."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import pytest

from broker.bus.nats import NatsBus, connect
from ops.cluster import LocalCluster
from ops.demo.run import until_ready
from ops.demo.setting import Setting, write_config

StartCluster = Callable[..., Awaitable[tuple[LocalCluster, NatsBus]]]


@pytest.fixture
async def start_cluster(tmp_path: Path) -> AsyncGenerator[StartCluster, None]:
    """Start a broker and workers with modelled engines; all ends with the test."""
    clusters: list[LocalCluster] = []
    buses: list[NatsBus] = []

    async def start(*, workers: int = 2, **setting: object) -> tuple[LocalCluster, NatsBus]:
        folder = tmp_path / f"cluster-{len(clusters)}"
        cluster = LocalCluster(folder)
        clusters.append(cluster)
        await cluster.__aenter__()
        config = write_config(
            Setting(folder=folder, url=cluster.url, **{"engine": "fake", **setting})  # pyright: ignore[reportArgumentType]
        )
        members = [cluster.add_broker("broker-1", config)]
        members += [cluster.add_worker(f"worker-{number + 1}", config) for number in range(workers)]
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
