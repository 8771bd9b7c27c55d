"""The client on a real NATS server: refusals as the server words them, restarts, lost links, large
bodies.
"""

import asyncio

import pytest

from broker.wire.messages import Job, Kind, Reason, TerminalRecord
from ops.nats.server import NatsServer
from producers.client import Client
from producers.config import ClientConfig
from producers.errors import BodyTooLarge, QueueFull, UnknownLane, UnknownModel, Unreachable
from producers.ticket import Ticket
from tests.builders import LANE, a_chat_body
from tests.responder import Responder, a_record, a_rejection
from tests.servers import Connections

WATCHFUL = ClientConfig(watchdog_s=0.3, sweep_s=0.1, reconnect_spread_s=0.1, lookup_retry_s=0.2)


async def test_five_hundred_jobs_over_a_real_server(connections: Connections) -> None:
    """Each ends once, and the watchdog has nothing to do."""
    async with (
        Responder(await connections()) as responder,
        Client(await connections(), lane=LANE) as client,
    ):
        tickets = [await client.submit(a_chat_body()) for _ in range(500)]
        kinds = {(await ticket.result(20)).kind for ticket in tickets}
        assert kinds == {Kind.COMPLETED}
        assert set(responder.runs.values()) == {1}
        assert client.watchdog_counts.looks == 0


async def test_the_server_is_killed_under_open_tickets(
    connections: Connections, nats_server: NatsServer
) -> None:
    """Kill -9 and a restart on the same store: every accepted job ends, none runs twice."""
    async with (
        Responder(await connections()) as responder,
        Client(await connections(), lane=LANE, config=WATCHFUL) as client,
    ):
        responder.run_s = 0.05
        tickets = [await client.submit(a_chat_body()) for _ in range(100)]
        await responder.started.wait()
        nats_server.kill()
        await asyncio.sleep(0.3)
        nats_server.start()
        kinds = {(await ticket.result(40)).kind for ticket in tickets}
        assert kinds == {Kind.COMPLETED}
        assert len(responder.runs) == 100


async def test_submitting_while_the_server_is_down_waits_for_it(
    connections: Connections, nats_server: NatsServer
) -> None:
    """The call returns once the server is back; the job is stored once."""
    async with (
        Responder(await connections()) as responder,
        Client(await connections(), lane=LANE, config=WATCHFUL) as client,
    ):
        nats_server.kill()
        async with asyncio.TaskGroup() as tasks:
            waiting = [
                tasks.create_task(client.submit(a_chat_body(), job_id=f"job-{number}"))
                for number in range(10)
            ]
            await asyncio.sleep(0.3)
            nats_server.start()
        for task in waiting:
            assert (await task.result().result(20)).kind is Kind.COMPLETED
        assert set(responder.runs.values()) == {1}


async def test_refusals_of_a_real_server_are_told_apart(connections: Connections) -> None:
    """Full queue, unknown model, unknown lane, too large: each its own error, at once."""
    async with (
        Responder(await connections(), jobs_max=2) as responder,
        Client(await connections(), lane=LANE) as client,
        Client(await connections(), lane="nobody") as stranger,
    ):
        responder.may_run.clear()
        for _ in range(2):
            await client.submit(a_chat_body())
        with pytest.raises(QueueFull) as full:
            await client.submit(a_chat_body())
        assert full.value.retry_after_s >= 1.0
        with pytest.raises(UnknownModel, match="tiny"):
            await client.submit({"model": "huge", "messages": []})
        with pytest.raises(UnknownLane, match="acme"):
            await stranger.submit(a_chat_body())
        with pytest.raises(BodyTooLarge):
            await client.submit(a_chat_body(user="x" * 8_000_000))


async def test_the_largest_body_goes_through(connections: Connections) -> None:
    """Just under the bound, record around it and prefix hashes included."""
    async with (
        Responder(await connections()) as responder,
        Client(await connections(), lane=LANE) as client,
    ):
        body = a_chat_body(user="x" * 7_899_800)
        assert 7_899_900 < len(body) < 7_900_000
        ticket = await client.submit(body)
        assert (await ticket.result(30)).kind is Kind.COMPLETED
        assert responder.seen[0].body == body


async def test_a_rejection_is_waited_out_until_its_record_has_gone(
    connections: Connections,
) -> None:
    """The record's life is the server's; the next submission succeeds only after it."""
    async with (
        Responder(await connections()) as responder,
        Client(await connections(), lane=LANE) as client,
    ):

        def reject_once(job: Job) -> TerminalRecord | None:
            return a_rejection(job, Reason.QUEUE_FULL) if job.submission == 0 else None

        responder.reject = reject_once
        ticket = await client.submit(a_chat_body(), queue_full_wait_s=60.0)
        assert (await ticket.result(20)).kind is Kind.COMPLETED
        assert ticket.submission == 1
        assert responder.runs[ticket.job_id] == 1


async def test_a_second_submission_of_the_same_id_is_the_same_job(
    connections: Connections,
) -> None:
    """From another process (here another client), at once or after the end: one run."""
    async with (
        Responder(await connections()) as responder,
        Client(await connections(), lane=LANE, client_id="one", config=WATCHFUL) as one,
        Client(await connections(), lane=LANE, client_id="two", config=WATCHFUL) as two,
    ):
        first = await one.submit(a_chat_body(), job_id="same")
        second = await two.submit(a_chat_body(), job_id="same")
        records = await _all([first, second])
        third = await two.submit(a_chat_body(), job_id="same")
        records += await _all([third])
        assert len(set(records)) == 1
        assert responder.runs["same"] == 1


async def _all(tickets: list[Ticket]) -> list[bytes]:
    return [(await ticket.result(20)).body for ticket in tickets]


async def test_no_server_is_one_sentence(nats_server: NatsServer) -> None:
    """`connect` gives up within seconds."""
    nats_server.kill()
    with pytest.raises(Unreachable, match="no NATS server"):
        async with Client.connect(nats_server.url, lane=LANE):
            pass


def test_the_record_of_the_responder_is_a_success() -> None:
    """So that `COMPLETED` above means what it says."""
    job = Job(id="a", lane="l", band=2, model="m", client="c", body=b"")
    assert a_record(job).kind is Kind.COMPLETED
