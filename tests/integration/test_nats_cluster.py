"""Three servers as one: the bus moves to another when its own dies, and streams live on."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack

import pytest

from broker.bus.base import Appended, BucketSpec, BusError
from broker.bus.nats import NatsBus, connect
from ops.nats.server import NatsServer, ServerOptions
from tests.buses import CONSUMER, STREAM, SUBJECT, a_consumer, a_stream, pulling

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


@pytest.mark.timeout(120)
async def test_node_dies_and_everything_goes_on(nodes: list[NatsServer]) -> None:
    """The bus's own server is killed: it finds another by itself, and no stored job is lost."""
    # Only one is named: the others are told of by the cluster.
    bus = await connect(nodes[0].url, name="t")
    await settled(bus)
    epoch = await bus.kv_create("LEADER", "leader", b"me", ttl_s=60)
    puller = await pulling(bus, window=10)
    for number in range(20):
        await append_until_stored(bus, f"before-{number}")
    await puller.heard.count(20)
    await asyncio.to_thread(nodes[0].kill)
    for number in range(20):
        await append_until_stored(bus, f"after-{number}")
    async with asyncio.timeout(ELECTION_S_MAX):
        while len({one.data for one in puller.heard.items}) < 40:  # As below.
            await asyncio.sleep(0.05)
    assert bus.counts["links_rebuilt"] >= 1
    assert (await bus.server_info()).name in {"node-1", "node-2"}
    assert (await bus.stream_state(STREAM)).messages == 40
    assert (await bus.kv_get("LEADER", "leader")).revision == epoch
    for delivery in {one.sequence: one for one in puller.heard.items}.values():
        await bus.ack(delivery.ack_subject)
    assert (await bus.stream_state(STREAM)).messages == 0
    assert puller.pull is not None
    await puller.pull.stop()
    assert (await bus.consumer_state(STREAM, CONSUMER)).waiting == 0
    await bus.close()
