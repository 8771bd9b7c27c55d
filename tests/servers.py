"""Real nats-servers for tests: a server of its own for each test that asks, which costs 20 ms.

`nats_server` runs and can be killed and started again (`server.kill()`, `server.start()`: same
port, same store); `nats_bus` is a bus connected to it. `connections` opens more, and closes them at
the end. Tests that need other options use `NatsServer` as a context manager themselves.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from broker.bus.nats import NatsBus, connect
from ops.nats.server import NatsServer

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
