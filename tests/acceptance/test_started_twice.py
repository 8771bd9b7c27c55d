"""What is started twice by mistake: a copied unit file, a second terminal, a shared home."""

import asyncio
import signal

import pytest

from broker.wire.messages import Kind
from ops.cluster import ClusterError
from producers.client import Client
from tests.acceptance.audit import Audit, all_completed
from tests.acceptance.commands import inferlane
from tests.acceptance.conftest import StartCluster

LANE = "online"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


@pytest.mark.timeout(150)
async def test_a_second_broker_of_one_state_dir_says_who_has_it(
    start_cluster: StartCluster,
) -> None:
    """At once, in a sentence; the first's `kill -9` frees the folder. One of the same name with a
    folder of its own is a standby like any other: the epoch tells them apart, not the name.
    """
    cluster, bus = await start_cluster()
    first = cluster.members["broker-1"]
    flags = first.command[first.command.index("broker") :]
    refused = await inferlane(cluster, *flags)
    assert (refused.code, refused.out) == (1, "")
    assert f"in use by another broker (process {first.pid} on " in refused.err
    assert len(refused.err.splitlines()) == 1
    twin = cluster.add("twin", (*first.command[:-1], str(cluster.folder / "twin")))
    await twin.start()
    audit = await Audit(bus).begin()
    async with Client(bus, lane=LANE) as client, asyncio.timeout(40):
        tickets = [await client.submit(CHAT, band=2) for _ in range(8)]
        await first.kill()
        kinds = {(await ticket.result()).kind for ticket in tickets}
        await first.start()
    assert kinds == {Kind.COMPLETED}
    await audit.until_empty(LANE)
    all_completed(await audit.records(LANE), [ticket.job_id for ticket in tickets])


@pytest.mark.timeout(150)
async def test_a_second_worker_of_one_name_lets_the_first_live(start_cluster: StartCluster) -> None:
    """It says who has the name, as often as a supervisor starts it, and no stream is broken off.
    Once the first is leaving, it waits, and serves after it.
    """
    cluster, bus = await start_cluster(workers=1)
    first = cluster.members["worker-1"]
    second = cluster.add("second", first.command)
    chat = {**CHAT, "max_tokens": 200, "stream": True}
    async with Client(bus, lane=LANE) as client, asyncio.timeout(100):
        tickets = [await client.submit(chat, band=2) for _ in range(6)]
        for _ in range(3):
            with pytest.raises(ClusterError, match="ended with code 4") as refused:
                await second.start()
            told = f"another agent runs as worker worker-1 (process {first.pid} on "
            assert told in str(refused.value)
        first.signal(signal.SIGTERM)
        starting = asyncio.create_task(second.start())
        assert await first.ended() == 0
        await starting
        records = [await ticket.result() for ticket in tickets]
    assert {(record.kind, record.failures) for record in records} == {(Kind.COMPLETED, ())}
