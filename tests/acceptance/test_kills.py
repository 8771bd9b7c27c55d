"""Case 20: kill -9 of each process while jobs run: every accepted job ends exactly once."""

import asyncio
import time
from collections.abc import Sequence

from broker.bus.nats import NatsBus
from producers.client import Client
from producers.ticket import Ticket
from tests.acceptance.audit import Audit, all_completed
from tests.acceptance.conftest import StartCluster

LANE = "online"


def a_chat(*, user: str = "hello", tokens: int = 40) -> dict[str, object]:
    """A chat that runs for about half a second on a modelled engine."""
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": user}],
        "max_tokens": tokens,
    }


async def submit(client: Client, count: int, *, tokens: int = 40) -> list[Ticket]:
    """Submit jobs of the interactive band."""
    return [
        await client.submit(a_chat(user=f"hello {number}", tokens=tokens), band=2)
        for number in range(count)
    ]


async def results(tickets: Sequence[Ticket], *, timeout_s: float = 40.0) -> None:
    """Wait for all; each ticket hears of its job's end."""
    async with asyncio.timeout(timeout_s):
        for ticket in tickets:
            await ticket.result(raise_for_kind=False)


async def test_a_killed_broker_loses_nothing_and_reruns_nothing(
    start_cluster: StartCluster,
) -> None:
    """Running jobs go on without a broker; held ones are served by the next."""
    cluster, bus = await start_cluster()
    audit = await Audit(bus).begin()
    async with Client(bus, lane=LANE) as client:
        tickets = await submit(client, 60)
        await audit.first_start.wait()
        await cluster.members["broker-1"].kill()
        tickets += await submit(client, 20)
        await cluster.members["broker-1"].start()
        await results(tickets)
    await audit.until_empty(LANE)
    all_completed(await audit.records(LANE), [ticket.job_id for ticket in tickets])
    assert audit.reruns == 0
    assert max(audit.ended.values()) == 1


async def test_a_killed_workers_jobs_run_elsewhere_within_seconds(
    start_cluster: StartCluster,
) -> None:
    """Case 31: no redelivery is waited for. The broker probes, revokes and dispatches anew."""
    cluster, bus = await start_cluster()
    audit = await Audit(bus).begin()
    async with Client(bus, lane=LANE) as client:
        tickets = await submit(client, 12, tokens=300)
        async with asyncio.timeout(10):
            while sum(audit.started.values()) < 12:
                await asyncio.sleep(0.02)
        await cluster.members["worker-1"].kill()
        killed_at_s = time.monotonic()
        async with asyncio.timeout(20):
            while audit.reruns < 6:
                await asyncio.sleep(0.02)
        assert time.monotonic() - killed_at_s < 8
        await results(tickets)
    await audit.until_empty(LANE)
    records = await audit.records(LANE)
    all_completed(records, [ticket.job_id for ticket in tickets])
    assert {record.worker for record in records.values()} == {"worker-2"}


async def test_a_killed_nats_server_loses_nothing_and_reruns_nothing(
    start_cluster: StartCluster,
) -> None:
    """Work goes on through the outage; records, acks and submissions follow when it is back."""
    cluster, bus = await start_cluster()
    audit = await Audit(bus).begin()
    async with Client(bus, lane=LANE) as client:
        tickets = await submit(client, 40)
        await audit.first_start.wait()
        await asyncio.to_thread(cluster.server.kill)
        await asyncio.to_thread(cluster.server.start)
        tickets += await submit(client, 10)
        await results(tickets)
    await audit.until_empty(LANE)
    all_completed(await audit.records(LANE), [ticket.job_id for ticket in tickets])
    assert audit.reruns == 0


async def test_a_restarted_lone_broker_serves_held_jobs_before_newer_ones(
    start_cluster: StartCluster,
) -> None:
    """Within T + 1 s, and in order: what the dead broker held comes first."""
    cluster, bus = await start_cluster(workers=1, slots=1)
    async with Client(bus, lane=LANE) as client:
        held = await submit(client, 4, tokens=100)
        await cluster.members["broker-1"].kill()
        killed_at_s = time.monotonic()
        newer = await submit(client, 2, tokens=10)
        await cluster.members["broker-1"].start()
        order = await _order_of_start(bus, [*held, *newer])
        first_at_s = time.monotonic() - killed_at_s
    assert order[:3] == [ticket.job_id for ticket in held[1:]]
    assert first_at_s < 30


async def _order_of_start(bus: NatsBus, tickets: Sequence[Ticket]) -> list[str]:
    """Wait for all, and sort the jobs by when they were dispatched."""
    records = [await ticket.result(raise_for_kind=False) for ticket in tickets]
    by_start = sorted(records, key=lambda record: record.dispatched_at_s)
    return [record.job for record in by_start if record.job != tickets[0].job_id]
