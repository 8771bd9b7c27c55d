"""Three servers as one: the bus moves to another when its own dies, and streams live on."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, suppress

import pytest

from broker.bus.base import Appended, BucketSpec, BusError, Delivery
from broker.bus.nats import NatsBus, connect
from ops.nats.server import NatsServer, ServerOptions
from tests.buses import CONSUMER, STREAM, SUBJECT, Puller, a_consumer, a_stream, pulling

NODES = 3
ELECTION_S_MAX = 30.0
"""Elections take 4 to 9 s on a quiet machine."""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; servers must know each other's before they start."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def a_node(number: int, ports: list[int]) -> NatsServer:
    """One server of a cluster."""
    routes = ", ".join(f"nats-route://127.0.0.1:{port}" for port in ports)
    cluster = f"cluster {{ name: test, listen: 127.0.0.1:{ports[number]}, routes: [{routes}] }}"
    return NatsServer(options=ServerOptions(name=f"node-{number}", extra=cluster))


@pytest.fixture
async def nodes() -> AsyncIterator[list[NatsServer]]:
    """Three servers that know each other."""
    ports = free_ports(NODES)
    servers = [a_node(number, ports) for number in range(NODES)]
    await asyncio.gather(*(asyncio.to_thread(server.start) for server in servers))
    yield servers
    for server in servers:
        server.kill()
        server.close()


async def settled(bus: NatsBus) -> None:
    """Make the streams, as soon as the cluster has a leader that can."""
    async with asyncio.timeout(ELECTION_S_MAX):
        while True:
            try:
                await bus.ensure_stream(a_stream(replicas=3, max_msgs_per_subject=10_000))
                await bus.ensure_consumer(a_consumer())
                await bus.ensure_bucket(BucketSpec("LEADER", replicas=3))
            except BusError:
                await asyncio.sleep(0.2)
            else:
                return


async def append_until_stored(bus: NatsBus, name: str) -> Appended:
    """Append as a client does: the same id, until its word comes."""
    async with asyncio.timeout(ELECTION_S_MAX):
        while True:
            try:
                return await bus.append(SUBJECT, name.encode(), message_id=name, timeout_s=2)
            except BusError:
                await asyncio.sleep(0.1)


@pytest.fixture
async def bus(nodes: list[NatsServer]) -> AsyncIterator[NatsBus]:
    """A bus that is told of one server only: the others it hears of from the cluster."""
    one = await connect(nodes[0].url, name="t")
    yield one
    await one.close()


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait through an election, in which questions may go unanswered."""
    async with asyncio.timeout(ELECTION_S_MAX):
        while True:
            with suppress(BusError):
                if await holds():
                    return
            await asyncio.sleep(0.1)


@pytest.mark.timeout(120)
async def test_node_dies_and_everything_goes_on(nodes: list[NatsServer], bus: NatsBus) -> None:
    """The bus's own server is killed: it finds another by itself, and no stored job is lost."""
    await settled(bus)
    epoch = await bus.kv_create("LEADER", "leader", b"me", ttl_s=60)
    puller = await pulling(bus, window=10)
    for number in range(20):
        await append_until_stored(bus, f"before-{number}")
    await puller.heard.count(20)
    await asyncio.to_thread(nodes[0].kill)
    for number in range(20):
        await append_until_stored(bus, f"after-{number}")
    await eventually(lambda: _all_seen(puller, 40))
    assert bus.counts["links_rebuilt"] >= 1
    assert bus._link.wire.info["server_name"] in {"node-1", "node-2"}
    await eventually(lambda: _stored(bus, 40))
    await eventually(lambda: _led(bus, epoch))
    for delivery in {one.sequence: one for one in puller.heard.items}.values():
        await eventually(lambda delivery=delivery: _acked(bus, delivery))
    # The replicas agree on an ack before they agree that its message is gone.
    await eventually(lambda: _stored(bus, 0))
    assert puller.pull is not None
    await puller.pull.stop()
    assert (await bus.consumer_state(STREAM, CONSUMER)).waiting == 0


async def _all_seen(puller: Puller, jobs: int) -> bool:
    return len({one.data for one in puller.heard.items}) == jobs


async def _stored(bus: NatsBus, jobs: int) -> bool:
    return (await bus.stream_state(STREAM)).messages == jobs


async def _led(bus: NatsBus, epoch: int) -> bool:
    return (await bus.kv_get("LEADER", "leader")).revision == epoch


async def _acked(bus: NatsBus, delivery: Delivery) -> bool:
    await bus.ack(delivery.ack_subject)
    return True
