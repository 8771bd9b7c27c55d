"""The worlds that the suite of promises runs in."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from broker.bus.memory import MemoryBus
from broker.bus.memory_clock import ManualClock
from broker.bus.nats import connect
from ops.nats.server import NatsServer
from tests.buses import World, until


async def _memory() -> AsyncIterator[World]:
    clock = ManualClock()
    bus = MemoryBus(clock=clock)
    peer = bus.connection()

    async def pass_time(seconds: float) -> None:
        clock.advance(seconds)
        await asyncio.sleep(0)

    async def cut() -> None:
        bus.disconnect()
        peer.disconnect()

    async def mend() -> None:
        bus.reconnect()
        peer.reconnect()

    yield World(bus, peer, pass_time, cut, mend, ack_wait_s=60.0)
    await bus.close()
    await peer.close()


async def _nats() -> AsyncIterator[World]:
    with NatsServer() as server:
        bus = await connect(server.url, name="bus")
        peer = await connect(server.url, name="peer")

        async def both(connected: bool) -> bool:
            return bus.connected == peer.connected == connected

        async def cut() -> None:
            server.kill()
            await until(lambda: both(False))

        async def mend() -> None:
            server.start()
            await until(lambda: both(True))

        yield World(bus, peer, asyncio.sleep, cut, mend, ack_wait_s=1.0)
        await bus.close()
        await peer.close()


@pytest.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.server)])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """A fresh server, in process or a real one, and two connections."""
    async for one in _memory() if request.param == "memory" else _nats():
        yield one
