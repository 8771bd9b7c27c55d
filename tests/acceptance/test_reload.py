"""Lanes come and go on a running cluster of real processes: SIGHUP, and no message is an orphan."""

import asyncio
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from broker.bus.base import NotFound
from broker.bus.nats import NatsBus
from broker.wire import subjects
from broker.wire.messages import Kind, Reason
from ops.cluster import LocalCluster
from producers.client import Client
from producers.errors import UnknownModel
from tests.acceptance.audit import Audit
from tests.acceptance.commands import inferlane
from tests.acceptance.conftest import StartCluster

LANE, NEW_LANE = "online", "extra"
WAITING = 40
"""Jobs of a lane on its way out: more than both workers have slots."""


def a_chat(*, tokens: int = 20) -> dict[str, object]:
    """A chat of so many tokens."""
    message = {"role": "user", "content": "hello"}
    return {"model": "tiny", "messages": [message], "max_tokens": tokens}


@asynccontextmanager
async def under_load(bus: NatsBus) -> AsyncGenerator[list[Kind]]:
    """Keep a lane busy until the block ends; how its jobs ended."""
    kinds: list[Kind] = []
    stopping = asyncio.Event()

    async def one_after_the_other(client: Client) -> None:
        while not stopping.is_set():
            ticket = await client.submit(a_chat(), band=1)
            kinds.append((await ticket.result(raise_for_kind=False)).kind)

    async with Client(bus, lane=LANE) as client, asyncio.TaskGroup() as group:
        for _ in range(6):
            group.create_task(one_after_the_other(client))
        try:
            yield kinds
        finally:
            stopping.set()


def reload(cluster: LocalCluster, text: str) -> None:
    """Write another configuration, and tell the broker."""
    (cluster.folder / "inferlane.toml").write_text(text)
    cluster.members["broker-1"].signal(signal.SIGHUP)


async def streams(bus: NatsBus, lane: str) -> list[str]:
    """A lane's streams that there are."""
    found: list[str] = []
    for name in (f"JOBS_{lane}", f"BATCH_{lane}", subjects.results_stream(lane)):
        try:
            await bus.stream_state(name)
        except NotFound:
            continue
        found.append(name)
    return found


async def until_streams(bus: NatsBus, lane: str, count: int) -> None:
    """Wait until a lane has so many streams."""
    async with asyncio.timeout(30):
        while len(await streams(bus, lane)) != count:
            await asyncio.sleep(0.05)


async def served(client: Client) -> None:
    """Submit as soon as the lane is offered, and see it served."""
    async with asyncio.timeout(20):
        while True:
            try:
                ticket = await client.submit(a_chat(), band=2)
                break
            except UnknownModel:
                await asyncio.sleep(0.05)
        assert (await ticket.result()).kind is Kind.COMPLETED


async def test_a_lane_comes_and_goes_under_load(start_cluster: StartCluster) -> None:
    """It serves without a restart; taken out, what ran ends, what waited is told, nothing stays."""
    cluster, bus = await start_cluster()
    file = cluster.folder / "inferlane.toml"
    before = file.read_text()
    more = before.replace(
        '[[policy.lanes]]\nname = "online"',
        f'[[policy.lanes]]\nname = "{NEW_LANE}"\n\n[[policy.lanes]]\nname = "online"',
    )
    audit = await Audit(bus).begin()
    async with under_load(bus) as kinds:
        reload(cluster, before.replace('name = "online"', 'name = "online"\nbands = [7]'))
        reload(cluster, more)
        await until_streams(bus, NEW_LANE, 3)
        async with Client(bus, lane=NEW_LANE) as client:
            await served(client)
            waiting = [await client.submit(a_chat(tokens=100), band=3) for _ in range(WAITING)]
            reload(cluster, before)
            async with asyncio.timeout(30):
                ends = [await ticket.result(raise_for_kind=False) for ticket in waiting]
            with pytest.raises(UnknownModel):
                await client.submit(a_chat(), band=2)
        await until_streams(bus, NEW_LANE, 1)
        assert {one.kind for one in ends} <= {Kind.COMPLETED, Kind.REJECTED}
        refused = [one for one in ends if one.kind is Kind.REJECTED]
        assert refused
        assert {one.reason for one in refused} == {Reason.UNKNOWN_MODEL}
        # Records of refusals run out by themselves.
        stand = (await audit.records(NEW_LANE)).values()
        done = [one for one in stand if one.kind is Kind.COMPLETED]
        assert len(done) == WAITING - len(refused) + 1
    assert set(kinds) == {Kind.COMPLETED}
    assert audit.reruns == 0
    assert (await inferlane(cluster, "reconcile", "--json")).json["differences"] == []
    lanes = (await inferlane(cluster, "lanes", "--json")).json["lanes"]
    assert NEW_LANE not in {one["lane"] for one in lanes}
