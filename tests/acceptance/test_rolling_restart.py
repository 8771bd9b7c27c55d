"""Everything is restarted in turn under load in two lanes: no job fails, or runs twice for it."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from broker.bus.nats import NatsBus
from broker.service.election import leader_now
from broker.wire.messages import Kind, TerminalRecord
from ops.cluster import LocalCluster, Member
from producers.client import Client
from tests.acceptance.audit import Audit
from tests.acceptance.conftest import FAST, StartCluster

LANES = {"online": 1, "offline": 3}
"""Lanes under load, and the band of their jobs."""

IN_FLIGHT = 12
"""Jobs that each lane keeps in flight or waiting: more than a worker has slots."""

WORKERS = 2
DRAIN_S_MAX = 30.0


@dataclass(slots=True)
class Load:
    """Producers that keep a number of jobs in flight until told to stop."""

    bus: NatsBus
    streamed: bool = True
    """Whether chats are streamed: of one whose first token was told nothing can be run again."""
    ended: list[TerminalRecord] = field(default_factory=list[TerminalRecord])
    _stopping: bool = False
    _more: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def produce(self, lane: str, band: int) -> None:
        """Keep one lane busy."""
        async with Client(self.bus, lane=lane) as client, asyncio.TaskGroup() as group:
            for number in range(IN_FLIGHT):
                group.create_task(self._one_after_the_other(client, band, number))

    async def _one_after_the_other(self, client: Client, band: int, number: int) -> None:
        while not self._stopping:
            request = {
                "model": "tiny",
                "messages": [{"role": "user", "content": f"hello {number}"}],
                "max_tokens": 30,
                "stream": self.streamed and band == LANES["online"],
            }
            ticket = await client.submit(request, band=band)
            record = await ticket.result(raise_for_kind=False)
            async with self._more:
                self.ended.append(record)
                self._more.notify_all()

    async def goes_on(self, jobs: int = 2 * IN_FLIGHT) -> None:
        """Wait until so many more have ended."""
        wanted = len(self.ended) + jobs
        async with asyncio.timeout(30), self._more:
            await self._more.wait_for(lambda: len(self.ended) >= wanted)

    async def runs_at(self, worker: str, *, since: int) -> None:
        """Wait until a job that ended since then ran at a worker."""
        async with asyncio.timeout(30), self._more:
            await self._more.wait_for(
                lambda: any(one.worker == worker for one in self.ended[since:])
            )

    def stop(self) -> None:
        """Submit nothing more."""
        self._stopping = True


@asynccontextmanager
async def under_load(bus: NatsBus) -> AsyncGenerator[Load]:
    """Keep both lanes busy until the block ends; then wait for the last jobs."""
    load = Load(bus)
    async with asyncio.TaskGroup() as group:
        for lane, band in LANES.items():
            group.create_task(load.produce(lane, band))
        await load.goes_on()
        try:
            yield load
        finally:
            load.stop()


async def restarted(member: Member) -> None:
    """End a process as an operator does, and start it under the same name."""
    assert await member.stop(timeout_s=DRAIN_S_MAX) == 0
    await member.start()


async def handed_over(cluster: LocalCluster, bus: NatsBus, load: Load) -> float:
    """Restart the leader; returns how long nobody led."""
    before = await leader_now(bus)
    assert before is not None
    stopping = asyncio.create_task(restarted(cluster.members["broker-1"]))
    async with asyncio.timeout(30):
        while (now := await leader_now(bus)) is not None and now[1] == before[1]:
            await asyncio.sleep(0.005)
        gone_at_s = time.monotonic()
        while await leader_now(bus) is None:
            await asyncio.sleep(0.005)
    took_s = time.monotonic() - gone_at_s
    await stopping
    await load.goes_on()
    return took_s


@pytest.mark.timeout(180)
async def test_everything_is_restarted_under_load_without_one_failed_job(
    start_cluster: StartCluster,
) -> None:
    """Each worker, the standby, the leader; at last a worker's successor starts before its end."""
    cluster, bus = await start_cluster(workers=WORKERS)
    config = cluster.folder / "inferlane.toml"
    standby = cluster.add_broker("broker-2", config)
    await standby.start()
    audit = await Audit(bus).begin()
    async with under_load(bus) as load:
        for number in range(1, WORKERS + 1):
            await restarted(cluster.members[f"worker-{number}"])
            await load.runs_at(f"worker-{number}", since=len(load.ended))
        await restarted(standby)
        await load.goes_on()
        assert await handed_over(cluster, bus, load) < float(FAST["leader_ttl_s"])
        reruns = audit.reruns
        failures = [one.failures for one in load.ended if one.failures]
        load.streamed = False
        await load.goes_on(4 * IN_FLIGHT)
        older = cluster.members["worker-1"]
        newer = cluster.add_worker("worker-1b", config)
        newer.command = (*older.command, "--replace")
        await newer.start()
        assert await older.ended() == 4  # Superseded.
        await load.runs_at("worker-1", since=len(load.ended))
        await load.goes_on()
    assert (reruns, failures) == (0, [])
    assert {one.kind for one in load.ended} == {Kind.COMPLETED}
    for lane in LANES:
        await audit.until_empty(lane)
    stand = [record for lane in LANES for record in (await audit.records(lane)).values()]
    assert sorted(one.job for one in stand) == sorted(one.job for one in load.ended)
