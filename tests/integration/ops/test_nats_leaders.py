"""Which server leads is asked of the servers: chaos kills that one on purpose."""

import asyncio
from pathlib import Path

from broker.bus.base import BusError
from broker.bus.nats import NatsBus, connect
from ops.chaos.nodes import leading, make_servers, start
from ops.nats.server import NatsServer
from tests.buses import STREAM, a_stream

ELECTION_S_MAX = 30.0
"""Elections take 4 to 9 s on a quiet machine."""


async def settled(bus: NatsBus) -> None:
    """Make the stream, as soon as the cluster has a leader that can."""
    while True:
        try:
            await bus.ensure_stream(a_stream(replicas=3))
        except BusError:
            await asyncio.sleep(0.1)
        else:
            return


async def led_by_another(servers: list[NatsServer], dead: NatsServer, stream: str) -> NatsServer:
    """Ask until another than the dead one leads."""
    while True:
        leader = await leading(servers, stream)
        if leader is not None and leader is not dead:
            return leader
        await asyncio.sleep(0.1)


async def test_three_servers_say_who_leads_a_stream_and_who_all(tmp_path: Path) -> None:
    """And who does so once that one is killed; a dead one says nothing, and is not asked."""
    servers = make_servers(tmp_path, 3)
    await start(servers, {})
    try:
        async with asyncio.timeout(ELECTION_S_MAX):
            bus = await connect(",".join(server.url for server in servers), name="t")
            await settled(bus)
            for stream in (STREAM, ""):
                first = await leading(servers, stream)
                assert first is not None
                await asyncio.to_thread(first.kill)
                assert (await led_by_another(servers, first, stream)).running
                await start([first], {})
            assert await leading(servers, "NO_SUCH_STREAM") is None
            await bus.close()
    finally:
        for server in servers:
            await asyncio.to_thread(server.kill)


async def test_a_single_server_says_nothing(tmp_path: Path) -> None:
    """It leads nobody, and has no monitor."""
    assert await leading(make_servers(tmp_path, 1)) is None
