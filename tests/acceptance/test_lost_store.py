"""A message server that is started anew without its store, as in a container without a volume."""

import asyncio
import shutil
from pathlib import Path

import pytest

from broker.bus.base import Bus, BusError
from broker.wire import subjects
from tests.acceptance.engine_cluster import LANE, an_engine_cluster


@pytest.mark.parametrize("brokers", ["stay", "restart"])
async def test_a_server_without_its_store_is_served_again(tmp_path: Path, brokers: str) -> None:
    """Whoever was told to wait for a restart of the broker waited for ever, and after it the
    workers, who knew a later epoch, took no orders.
    """
    async with an_engine_cluster(tmp_path) as stage:
        await stage.lives_on(LANE)
        broker, server = stage.cluster.members["broker-1"], stage.cluster.server
        if brokers == "restart":
            await broker.kill()
            await broker.start()
            await stage.lives_on(LANE)  # With an epoch that a new store does not reach.
            await broker.kill()
        await asyncio.to_thread(server.kill)
        shutil.rmtree(server.folder / "jetstream")
        await asyncio.to_thread(server.start)
        if brokers == "restart":
            await broker.start()
        async with asyncio.timeout(30):
            while not await _stands(stage.bus):
                await asyncio.sleep(0.1)
        await stage.lives_on(LANE)


async def _stands(bus: Bus) -> bool:
    try:
        await bus.stream_state(subjects.results_stream(LANE))
    except BusError:
        return False
    return True
