"""One client for each lane, opened when first needed."""

import asyncio
from typing import Any

import pytest

from broker.bus.base import LinkDown
from broker.bus.memory import MemoryBus
from producers.client import Client
from producers.errors import ClientClosed, Unreachable
from producers.gateway.lanes import LaneClients
from tests.builders import LANE
from tests.lanes import QUICK
from tests.turns import until


async def test_a_lane_is_opened_once_and_shared() -> None:
    """Ten requests at once open one client; after the stop nothing is opened any more."""
    async with asyncio.TaskGroup() as group:
        lanes = LaneClients(MemoryBus(), QUICK, group)
        clients = await asyncio.gather(*(lanes.of(LANE) for _ in range(10)))
        assert len(set(map(id, clients))) == 1
        assert (await lanes.of("bolt")).client_id == clients[0].client_id
        lanes.stop()
        with pytest.raises(ClientClosed):
            await lanes.of(LANE)
    with pytest.raises(ClientClosed):
        await clients[0].submit({"model": "tiny"})


async def test_a_lane_that_can_not_be_opened_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who waits is told why; the next request opens it."""

    async def fail(self: Any, *_: Any) -> None:
        message = "no link"
        raise LinkDown(message)

    async with asyncio.TaskGroup() as group:
        lanes = LaneClients(MemoryBus(), QUICK, group)
        with monkeypatch.context() as patched:
            patched.setattr(MemoryBus, "subscribe", fail)
            with pytest.raises(Unreachable):
                await lanes.of(LANE)
        assert (await lanes.of(LANE)).lane == LANE
        lanes.stop()


async def test_a_caller_that_leaves_does_not_end_the_opening() -> None:
    """The others still get the client."""
    async with asyncio.TaskGroup() as group:
        lanes = LaneClients(MemoryBus(), QUICK, group)
        first = asyncio.create_task(lanes.of(LANE))
        await asyncio.sleep(0)
        first.cancel()
        assert (await lanes.of(LANE)).lane == LANE
        lanes.stop()


async def test_a_client_that_fails_takes_nobody_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lane is opened anew; the gateway's other tasks go on."""
    async with asyncio.TaskGroup() as group:
        lanes = LaneClients(MemoryBus(), QUICK, group)

        async def fail(self: Any) -> None:
            message = "a fault of ours"
            raise RuntimeError(message)

        with monkeypatch.context() as patched:
            patched.setattr("producers.watchdog.Watchdog.run", fail)
            first = await lanes.of(LANE)
            await until(lambda: first._closed)
        second = await lanes.of(LANE)
        assert isinstance(second, Client)
        assert second is not first
        lanes.stop()
