"""Case 20: kill -9 between any two steps of a job's life on a real server; each job ends once.

The process under test kills itself at the named call to the bus (`tests/crashing.py`), another is
started as a user's supervisor would, and every accepted job must have one record, of the right
kind, and an empty queue.
"""

import asyncio
import sys

import pytest

from broker.wire.messages import Kind
from ops.cluster import Member
from producers.client import Client
from producers.ticket import Ticket
from tests.acceptance.audit import Audit
from tests.acceptance.conftest import StartCluster

LANE = "online"
JOBS = 6

BROKER_PLACES = {
    "pulled, nothing sent": "request:1:before:work.",
    "order sent, answer not seen": "request:1:after:work.",
    "answered, caller not told": "publish:1:before:out.",
    "second order sent": "request:2:after:work.",
    "a run ended, queue state not told": "publish:5:after:q.",
}

STARTING_PLACES = {
    "won, not announced": "kv_create:1:after",
    "announced": "publish:1:after:wrk.inventory",
    "consumer reset": "reset_consumer:1:after",
}

ENDING_PLACES = {
    "before its record": "append:1:before:results.",
    "record stands, caller not told": "append:1:after:results.",
    "told, message still there": "ack:1:before",
    "message removed": "ack:1:after",
}

AGENT_PLACES = {
    "order heard, not answered": "publish:1:before:_INBOX",
    "answered, not begun": "publish:1:after:_INBOX",
    "not looked for a record yet": "last_message:1:before:RESULTS",
    "before its record": "append:1:before:results.",
    "record stands, nobody told": "append:1:after:results.",
    "broker told, caller not": "publish:1:after:wrk.",
    "caller told, not acknowledged": "ack:1:before",
    "acknowledged": "ack:1:after",
}


async def submit(client: Client, *, tokens: int = 20, **wish: object) -> list[Ticket]:
    """Submit the jobs of a case."""
    return [
        await client.submit(
            {
                "model": "tiny",
                "messages": [{"role": "user", "content": f"hello {number}"}],
                "max_tokens": tokens,
            },
            band=2,
            **wish,  # pyright: ignore[reportArgumentType]
        )
        for number in range(JOBS)
    ]


async def ended_once(audit: Audit, tickets: list[Ticket], *, kind: Kind) -> None:
    """Check that each job has one record of this kind, told, and has left its queue."""
    async with asyncio.timeout(40):
        told = [await ticket.result(raise_for_kind=False) for ticket in tickets]
    await audit.until_empty(LANE)
    records = await audit.records(LANE)
    assert sorted(records) == sorted(ticket.job_id for ticket in tickets)
    assert {record.kind for record in records.values()} == {kind}
    assert all(records[record.job].attempt == record.attempt for record in told)


async def died(member: Member) -> None:
    """Wait until the process killed itself."""
    assert member.process is not None
    async with asyncio.timeout(30):
        assert await member.process.wait() < 0


@pytest.mark.parametrize("place", BROKER_PLACES.values(), ids=BROKER_PLACES)
async def test_a_broker_that_dies_between_two_steps(
    start_cluster: StartCluster, place: str
) -> None:
    """The next one adopts what runs and serves what was held."""
    cluster, bus = await start_cluster(broker_place=place)
    audit = await Audit(bus).begin()
    async with Client(bus, lane=LANE) as client:
        tickets = await submit(client)
        await died(cluster.members["broker-1"])
        await cluster.members["broker-2"].start()
        await ended_once(audit, tickets, kind=Kind.COMPLETED)
    assert audit.reruns == 0


@pytest.mark.parametrize("place", STARTING_PLACES.values(), ids=STARTING_PLACES)
async def test_a_broker_that_dies_while_it_takes_over(
    start_cluster: StartCluster, place: str
) -> None:
    """A half-done start is begun anew by the next."""
    cluster, bus = await start_cluster()
    audit = await Audit(bus).begin()
    dying = cluster.add(
        "broker-dying",
        (
            sys.executable,
            "-m",
            "tests.crashing_broker",
            place,
            str(cluster.folder / "inferlane.toml"),
        ),
    )
    async with Client(bus, lane=LANE) as client:
        tickets = await submit(client, tokens=1200)
        await audit.first_start.wait()
        await cluster.members["broker-1"].kill()
        await dying.start()
        await died(dying)
        await cluster.members["broker-1"].start()
        await ended_once(audit, tickets, kind=Kind.COMPLETED)
    assert audit.reruns == 0


@pytest.mark.parametrize("place", ENDING_PLACES.values(), ids=ENDING_PLACES)
async def test_a_broker_that_dies_while_it_ends_jobs(
    start_cluster: StartCluster, place: str
) -> None:
    """A record without an ack, an ack without a word: healed by redelivery and by the ticket.

    The deadline is over when the jobs are submitted, so that none can be quicker than it.
    """
    cluster, bus = await start_cluster(broker_place=place)
    audit = await Audit(bus).begin()
    async with Client(bus, lane=LANE) as client:
        tickets = await submit(client, deadline_s=-1.0)
        await died(cluster.members["broker-1"])
        await cluster.members["broker-2"].start()
        await ended_once(audit, tickets, kind=Kind.EXPIRED)
    assert not audit.started


@pytest.mark.parametrize("place", AGENT_PLACES.values(), ids=AGENT_PLACES)
async def test_an_agent_that_dies_between_two_steps(
    start_cluster: StartCluster, place: str
) -> None:
    """Its jobs run elsewhere, or are found recorded; none has two results."""
    cluster, bus = await start_cluster(agent_place=place)
    audit = await Audit(bus).begin()
    async with Client(bus, lane=LANE) as client:
        tickets = await submit(client)
        await died(cluster.members["worker-1"])
        await ended_once(audit, tickets, kind=Kind.COMPLETED)
