"""On real processes: any job is looked at and cancelled by its id, and a whole lane at once."""

import asyncio
import re

import pytest

from broker.bus.nats import NatsBus
from broker.service.lane_cancel import STEP_JOBS_MAX
from broker.wire import subjects
from broker.wire.codec import encode
from broker.wire.messages import Kind
from ops.cluster import LocalCluster
from producers.client import Client
from producers.ticket import Ticket, TicketState
from tests.acceptance.audit import Audit
from tests.acceptance.commands import inferlane
from tests.acceptance.conftest import StartCluster
from tests.builders import a_job

LANE = "online"
LONG_TOKENS = 3_000
"""A minute on a modelled engine: it ends because it is cancelled."""


async def submit(client: Client, count: int, *, band: int = 2) -> list[Ticket]:
    """Jobs that would run for a minute."""
    return [
        await client.submit(
            {
                "model": "tiny",
                "messages": [{"role": "user", "content": f"hello {number}"}],
                "max_tokens": LONG_TOKENS,
            },
            band=band,
        )
        for number in range(count)
    ]


async def until_running(tickets: list[Ticket], count: int) -> None:
    """Wait until so many were started."""
    async with asyncio.timeout(20):
        while sum(one.state is TicketState.STARTED for one in tickets) < count:
            await asyncio.sleep(0.02)


async def kinds(tickets: list[Ticket]) -> set[Kind]:
    """How they ended."""
    async with asyncio.timeout(30):
        return {(await one.result(raise_for_kind=False)).kind for one in tickets}


async def test_a_lane_is_cancelled_whoever_waits_or_runs(start_cluster: StartCluster) -> None:
    """By its owner, with a count first; running engines stop, and other lanes go on."""
    cluster, bus = await start_cluster(workers=1, slots=2)
    audit = await Audit(bus).begin()
    async with Client(bus, lane=LANE) as client, Client(bus, lane="offline") as others:
        theirs = await submit(others, 1)
        await until_running(theirs, 1)
        tickets = await submit(client, 8)
        batch = await submit(client, 700, band=3)
        await until_running(tickets, 1)

        await _look(cluster, client, [*tickets, *batch])
        unsure = await inferlane(cluster, "cancel", "--lane", LANE)
        assert (unsure.code, "708 jobs of lane online, " in unsure.err) == (2, True)
        one = await inferlane(cluster, "cancel", f"{LANE}.{batch[-1].job_id}")
        assert one.code == 0, one.err
        assert await kinds(batch[-1:]) == {Kind.CANCELLED}
        band = await inferlane(cluster, "cancel", "--lane", LANE, "--band", "3", "--yes")
        assert band.out.startswith("699 jobs cancelled, 0 of them"), band
        assert await kinds(batch) == {Kind.CANCELLED}
        assert not any(ticket.record for ticket in tickets)
        rest = await inferlane(cluster, "cancel", "--lane", LANE, "-y")
        assert rest.out.startswith("8 jobs cancelled, "), rest
        assert await kinds(tickets) == {Kind.CANCELLED}
        await audit.until_empty(LANE)
        assert theirs[0].record is None
        await theirs[0].cancel()
    records = await audit.records(LANE)
    assert len(records) == 708
    assert {record.kind for record in records.values()} == {Kind.CANCELLED}
    await _nothing_left(cluster, tickets[0].job_id)


async def _look(cluster: LocalCluster, client: Client, tickets: list[Ticket]) -> None:
    """Running, held, and beyond the window of 512: by id alone, as any gateway would."""
    runs = next(one for one in tickets if one.state is TicketState.STARTED)
    seen = (await inferlane(cluster, "job", runs.job_id, "--lane", LANE, "--json")).json
    assert (seen["state"], seen["worker"]) == ("started", "worker-1")
    far = (await inferlane(cluster, "job", f"{LANE}.{tickets[-1].job_id}", "--json")).json
    assert (far["state"], far["position"]) == ("queued", 699)
    assert far["wait_s"] > 0
    look = await client.look(tickets[-1].job_id)
    assert look is not None
    assert look.position == 699


async def _nothing_left(cluster: LocalCluster, job_id: str) -> None:
    """What has ended can't be cancelled, and says how it ended."""
    again = await inferlane(cluster, "cancel", f"{LANE}.{job_id}")
    assert (again.code, "it has ended (cancelled)" in again.err) == (1, True)
    ended = await inferlane(cluster, "job", f"{LANE}.{job_id}")
    assert ended.out.splitlines()[0] == f"{LANE}.{job_id}: ended"
    unknown = await inferlane(cluster, "job", f"{LANE}.nobody")
    assert (unknown.code, "no job nobody" in unknown.err) == (1, True)
    none = await inferlane(cluster, "cancel", "--lane", LANE, "--yes")
    assert none.out.startswith("No jobs of lane online")


MANY = 5_000


@pytest.mark.timeout(180)
async def test_a_leader_that_dies_while_it_cancels_hands_over(start_cluster: StartCluster) -> None:
    """The owner's command goes on with the next one: each job ends once, and it says how many."""
    cluster, bus = await start_cluster(workers=0)
    await cluster.start(cluster.add_broker("broker-2", cluster.folder / "inferlane.toml"))
    audit = await Audit(bus).begin()
    await _fill(bus, MANY)
    cancelling = asyncio.create_task(
        inferlane(cluster, "cancel", "--lane", LANE, "--band", "3", "--yes")
    )
    async with asyncio.timeout(60):
        while await audit.queued(LANE) > MANY * 4 // 5:
            await asyncio.sleep(0.01)
    assert not cancelling.done()
    await cluster.members["broker-1"].kill()
    ended = await cancelling
    assert ended.code == 0, ended
    # What the dead one ended of the step that it was in, it told nobody.
    (told,) = re.findall(r"^([0-9,]+) jobs cancelled", ended.out)
    assert MANY - STEP_JOBS_MAX <= int(told.replace(",", "")) <= MANY
    await audit.until_empty(LANE)
    records = await audit.records(LANE)
    assert len(records) == MANY
    assert {record.kind for record in records.values()} == {Kind.CANCELLED}


async def _fill(bus: NatsBus, count: int) -> None:
    """Queue batch jobs."""
    room = asyncio.Semaphore(256)

    async def one(number: int) -> None:
        job = a_job(id=f"line-{number}", lane=LANE, band=3)
        async with room:
            await bus.append(subjects.jobs(LANE, 3, job.model), encode(job))

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(one(number))
