"""Accounts of a real cluster equal the sum of its terminal records, whoever is killed when."""

import asyncio
import csv
import io
from collections import Counter

import pytest

from broker.bus.nats import NatsBus
from broker.bus.usage import uncounted_records
from ops.cluster import Member
from producers.client import Client
from tests.acceptance.audit import Audit
from tests.acceptance.commands import inferlane
from tests.acceptance.conftest import StartCluster
from tests.accounts import accounts, sums_of_records, total

LANE = "online"
KEYS = ("alice", "bob", "")

PLACES = {
    "before a day's first sums": "kv_create:3:before:USAGE",
    "sums stand, the mark does not": "kv_create:3:after:USAGE",
    "the mark stands": "kv_update:1:after:USAGE",
    "before further sums": "kv_update:2:before:USAGE",
    "further sums stand, the mark does not": "kv_update:2:after:USAGE",
}


async def run_some(client: Client, count: int = 6) -> int:
    """Run jobs of several keys to their ends; returns how many."""
    tickets = [
        await client.submit(
            {
                "model": "tiny",
                "messages": [{"role": "user", "content": f"hello {number}"}],
                "max_tokens": 5 + number,
            },
            api_key_name=KEYS[number % len(KEYS)],
        )
        for number in range(count)
    ]
    async with asyncio.timeout(60):
        for ticket in tickets:
            await ticket.result()
    return count


async def until_counted(bus: NatsBus) -> None:
    """Wait until every record that stands is in an account."""
    async with asyncio.timeout(30):
        while await uncounted_records(bus, LANE):
            await asyncio.sleep(0.05)


async def run_until_it_dies(client: Client, member: Member, successor: Member) -> int:
    """Run jobs until a process killed itself and its successor ended the rest; returns how many."""
    assert member.process is not None
    jobs = 0
    async with asyncio.timeout(90), asyncio.TaskGroup() as tasks:
        dying = tasks.create_task(member.process.wait())
        while not dying.done():
            running = tasks.create_task(run_some(client))
            await asyncio.wait({dying, running}, return_when=asyncio.FIRST_COMPLETED)
            if dying.done():
                await successor.start()
            jobs += await running
    assert dying.result() < 0
    return jobs


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
async def test_a_broker_that_dies_while_it_counts(start_cluster: StartCluster, place: str) -> None:
    """The next one goes on where the sums say, and counts nothing twice."""
    cluster, bus = await start_cluster(broker_place=place)
    dying, successor = cluster.members["broker-1"], cluster.members["broker-2"]
    async with Client(bus, lane=LANE) as client:
        jobs = await run_until_it_dies(client, dying, successor)
        jobs += await run_some(client)
    await until_counted(bus)
    told = await accounts(bus, LANE)
    assert told == await sums_of_records(bus, LANE)
    assert total(told) == jobs


async def test_accounts_survive_kills_at_any_time(start_cluster: StartCluster) -> None:
    """Broker, worker and message server, again and again, while jobs run; then exported."""
    cluster, bus = await start_cluster()
    audit = await Audit(bus).begin()
    broker = cluster.members["broker-1"]
    async with Client(bus, lane=LANE) as client:
        jobs = 0
        for victim in ("broker", "server", "broker", "worker", "broker"):
            running = asyncio.create_task(run_some(client, 24))
            await audit.first_start.wait()
            audit.first_start.clear()
            match victim:
                case "broker":
                    await broker.kill()
                    await broker.start()
                case "worker":
                    await cluster.members["worker-1"].kill()
                    await cluster.members["worker-1"].start()
                case _:
                    await asyncio.to_thread(cluster.server.kill)
                    await asyncio.to_thread(cluster.server.start)
            jobs += await running
    await audit.until_empty(LANE)
    await until_counted(bus)
    told = await accounts(bus, LANE)
    assert told == await sums_of_records(bus, LANE)
    assert total(told) == jobs == 5 * 24

    exported = await inferlane(cluster, "usage", "--lane", LANE, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(exported.out)))
    assert Counter(row["key"] for row in rows).keys() == set(KEYS)
    assert sum(int(row["jobs"]) for row in rows) == jobs
    alice = await inferlane(cluster, "usage", "--key", "alice", "--by", "key", "--format", "json")
    assert alice.json["key"] == "alice"
    assert alice.json["output_tokens"] == total(
        {name: numbers for name, numbers in told.items() if name[1] == "alice"}, ["output_tokens"]
    )
    table = await inferlane(cluster, "usage", "--by", "model")
    assert f"{jobs:,}" in table.out
    wrong = await inferlane(cluster, "usage", "--lane", "onlin")
    assert (wrong.code, 'Did you mean "online"' in wrong.err) == (1, True)


async def test_what_is_deleted_stays_in_the_accounts(start_cluster: StartCluster) -> None:
    """Results of ended jobs go at once and are overwritten; numbers stay."""
    cluster, bus = await start_cluster()
    async with Client(bus, lane=LANE) as client:
        jobs = await run_some(client)
    await until_counted(bus)
    before = await accounts(bus, LANE)
    unsure = await inferlane(cluster, "erase", "--lane", LANE, "--all")
    assert (unsure.code, "give --yes" in unsure.err) == (2, True)
    young = await inferlane(cluster, "erase", "--lane", LANE, "--older", "1h", "--yes")
    assert young.out.startswith("0 results and 0 dead letters")
    erased = await inferlane(cluster, "erase", "--lane", LANE, "--all", "--yes")
    assert erased.out.startswith(f"{jobs} results and 0 dead letters"), erased
    assert not await sums_of_records(bus, LANE)
    async with Client(bus, lane=LANE) as client:
        jobs += await run_some(client)
    await until_counted(bus)
    told = await accounts(bus, LANE)
    assert total(told) == jobs == 2 * total(before)
