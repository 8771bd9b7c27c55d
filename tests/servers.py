"""Real nats-servers for tests: a server of its own for each test that asks, which costs 20 ms.

`nats_server` runs and can be killed and started again (`server.kill()`, `server.start()`: same
port, same store); `nats_bus` is a bus connected to it. `connections` opens more, and closes them at
the end. Tests that need other options use `NatsServer` as a context manager themselves.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from broker.bus.nats import NatsBus, connect
from ops.chaos.proxy import Proxy
from ops.nats.server import NatsServer
from tests.buses import CONSUMER, PATIENCE_S, STREAM, until

Connections = Callable[[], Awaitable[NatsBus]]


@pytest.fixture
def nats_server() -> Iterator[NatsServer]:
    """A running server with an empty store."""
    with NatsServer() as server:
        yield server


@pytest.fixture
async def connections(nats_server: NatsServer) -> AsyncIterator[Connections]:
    """How to open connections to `nats_server`; each is closed when the test ends."""
    opened: list[NatsBus] = []

    async def open_one() -> NatsBus:
        bus = await connect(nats_server.url, name=f"test-{len(opened)}")
        opened.append(bus)
        return bus

    yield open_one
    for bus in opened:
        await bus.close()


@pytest.fixture
async def nats_bus(connections: Connections) -> NatsBus:
    """A bus connected to `nats_server`."""
    return await connections()


@pytest.fixture
async def proxy(nats_server: NatsServer) -> AsyncIterator[Proxy]:
    """A breakable way to `nats_server`."""
    async with Proxy(nats_server.port) as one:
        yield one


@pytest.fixture
async def bus(proxy: Proxy) -> AsyncIterator[NatsBus]:
    """A bus that goes through the proxy."""
    one = await connect(proxy.url, name="through-proxy")
    yield one
    await one.close()


async def relinked(bus: NatsBus, times: int = 1) -> None:
    """Wait until the link was lost and made anew so many times."""
    await until(lambda: bus.counts["links_rebuilt"] >= times and bus.connected)


async def publish_until_down(bus: NatsBus, subject: str, data: bytes) -> None:
    """Publish until the link refuses."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            await bus.publish(subject, data)
            await asyncio.sleep(0)


async def pulls_waiting(bus: NatsBus, pulls: int) -> bool:
    """Whether so many pulls stand at the test queue's consumer."""
    return (await bus.consumer_state(STREAM, CONSUMER)).waiting == pulls
