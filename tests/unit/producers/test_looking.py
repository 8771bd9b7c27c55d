"""Looking at any job of a lane: ended, running, held, beyond the window, nowhere."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from broker.service.held import Stage
from broker.wire import subjects
from broker.wire.codec import encode
from broker.wire.messages import Kind, Started
from producers.client import Client
from producers.errors import Unreachable
from producers.looking import JobLook, Place
from producers.ticket import Ticket, TicketState
from tests.builders import LANE, a_chat_body, a_job, an_attempt
from tests.lanes import QUICK, a_lane, link_of
from tests.leaders import Desk, Worker, a_desk
from tests.responder import a_record
from tests.turns import until


@asynccontextmanager
async def a_desk_and_client(*parts: str, **fields: Any) -> AsyncGenerator[tuple[Desk, Client]]:
    """A leader's parts, and a client of their lane."""
    async with a_desk(*parts, **fields) as desk:
        own = desk.bus.connection()
        async with Client(own, lane=LANE, client_id="looker", config=QUICK) as client:
            yield desk, client
        await own.close()


async def looked(desk: Desk, client: Client, job_id: str, **fields: Any) -> JobLook | None:
    """Look, while the loop has its turns."""
    looking = asyncio.create_task(client.look(job_id, **fields))
    while not looking.done():
        desk.turn()
        await asyncio.sleep(0)
    return looking.result()


async def test_an_ended_job_gives_its_record() -> None:
    """Whoever submitted it."""
    async with a_lane() as (client, responder):
        ticket = await client.submit(a_chat_body(), job_id="job-1")
        await ticket.result(5)
        other = Client(link_of(client), lane=LANE, config=QUICK)
        look = await other.look("job-1")
        assert look is not None
        assert (look.state, look.worker, look.wait_s) == (TicketState.ENDED, "worker-1", 0.0)
        assert look.record is not None
        assert look.record.kind is Kind.COMPLETED
        assert responder.runs["job-1"] == 1


async def test_a_job_that_waits_at_the_broker_is_told_with_its_place() -> None:
    """Position and wait as of now, and what it waits for."""
    async with a_desk_and_client("control") as (desk, client):
        desk.allow()
        for number in range(3):
            await desk.hold(a_job(id=f"job-{number}"))
        look = await looked(desk, client, "job-2")
        assert look is not None
        assert (look.state, look.position, look.held_by) == (TicketState.QUEUED, 2, "no_workers")
        assert look.place is None


async def test_a_running_job_is_told_with_its_worker() -> None:
    """And no wait."""
    async with a_desk_and_client("control", "outbox", worker=True) as (desk, client):
        await Worker(desk.bus).listen()
        desk.allow()
        await desk.hold(a_job())
        await until(lambda: desk.held().stage is Stage.RUNNING)
        look = await looked(desk, client, "job-1")
        assert look is not None
        assert (look.state, look.position, look.wait_s) == (TicketState.STARTED, None, 0.0)
        assert (look.worker, look.attempt) == ("w1", desk.held().sent)


async def test_a_job_beyond_the_window_stands_behind_all_that_is_held_or_pending() -> None:
    """Its place is found by a search; with it the next look is cheap, and says the same."""
    async with a_desk_and_client("control") as (desk, client):
        desk.allow()
        await desk.hold(a_job(id="held-0"))
        await desk.hold(a_job(id="held-1"))
        for number in range(4):
            await desk.publish(a_job(id=f"far-{number}"))
        look = await looked(desk, client, "far-2")
        assert look is not None
        assert (look.state, look.position) == (TicketState.QUEUED, 2 + 2)
        assert look.place == Place(f"JOBS_{LANE}", 5)
        assert await looked(desk, client, "far-2", place=look.place) is not None
        batch = await desk.publish(a_job(id="line-1", band=3))
        line = await looked(desk, client, "line-1")
        assert line is not None
        assert (line.position, line.place) == (0, Place(f"BATCH_{LANE}", batch))


async def test_a_ticket_knows_where_its_job_is() -> None:
    """Its publisher was told the sequence: nothing is searched."""
    async with a_desk_and_client("control") as (desk, client):
        desk.allow()
        await client.submit(a_chat_body(), job_id="job-1")
        look = await looked(desk, client, "job-1")
        assert look is not None
        assert (look.state, look.position, look.place) == (TicketState.QUEUED, 0, None)


async def test_a_job_that_is_nowhere_is_none() -> None:
    """With a broker, and at a place where another job stands."""
    async with a_desk_and_client("control") as (desk, client):
        sequence = await desk.publish(a_job())
        assert await looked(desk, client, "other") is None
        assert await looked(desk, client, "other", place=Place(f"JOBS_{LANE}", sequence)) is None


async def test_without_a_broker_a_stored_job_waits() -> None:
    """Position and wait nobody can say."""
    async with a_desk_and_client() as (desk, client):
        await desk.publish(a_job())
        look = await client.look("job-1")
        assert look == JobLook("job-1", TicketState.QUEUED, place=Place(f"JOBS_{LANE}", 1))
        assert await client.look("other") is None


async def test_a_job_that_ends_while_it_is_searched_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The record is looked for again after the search: absent from both is proof."""
    async with a_desk_and_client() as (desk, client):
        job = a_job()
        search = client._looks.search

        async def ends_meanwhile(job_id: str) -> Place | None:
            await desk.bus.append(subjects.result(LANE, job.id), encode(a_record(job)))
            return await search(job_id)

        monkeypatch.setattr(client._looks, "search", ends_meanwhile)
        look = await client.look(job.id)
        assert look is not None
        assert look.state is TicketState.ENDED


async def test_a_search_is_bounded() -> None:
    """`look_jobs_max` messages, then it says so: what it did not read may hold the job."""
    async with a_desk_and_client() as (desk, client):
        client._looks._jobs_max = 3
        for number in range(4):
            await desk.publish(a_job(id=f"job-{number}"))
        assert await client.look("job-2") is not None
        with pytest.raises(Unreachable, match="first 3 jobs"):
            await client.look("job-3")


async def test_a_broken_message_has_no_name() -> None:
    """It is passed over."""
    async with a_desk_and_client() as (desk, client):
        await desk.bus.append(subjects.jobs(LANE, 2, "tiny"), b"\xc1")
        await desk.publish(a_job())
        look = await client.look("job-1")
        assert look is not None


async def test_a_lost_link_is_unreachable() -> None:
    """Not a job that does not exist."""
    async with a_desk_and_client() as (_, client):
        link_of(client).disconnect()
        with pytest.raises(Unreachable, match="looked at"):
            await client.look("job-1")


async def test_a_job_of_another_client_is_cancelled_in_its_stream() -> None:
    """The search finds where it waits."""
    async with a_desk_and_client("control", "closer") as (desk, client):
        await desk.publish(a_job())
        cancelling = asyncio.create_task(client.cancel_job("job-1"))
        while not cancelling.done() or await desk.queued():
            desk.turn()
            await asyncio.sleep(0)
        assert cancelling.result()
        record = await desk.record()
        assert record is not None
        assert record.kind is Kind.CANCELLED
        again = asyncio.create_task(client.cancel_job("other"))
        while not again.done():
            desk.turn()
            await asyncio.sleep(0)
        assert not again.result()


async def ticket_looked(desk: Desk, ticket: Ticket) -> JobLook | None:
    """Look by a ticket, while the loop has its turns."""
    looking = asyncio.create_task(ticket.look())
    while not looking.done():
        desk.turn()
        await asyncio.sleep(0)
    return looking.result()


async def test_a_ticket_shows_queued_then_started_then_the_result() -> None:
    """Beyond the window nobody tells it; it asks, and shows what it was told."""
    async with a_desk_and_client("control", "outbox", worker=True) as (desk, client):
        worker = Worker(desk.bus)
        await worker.listen()
        await desk.hold(a_job(id="before"))
        ticket = await client.submit(a_chat_body(), job_id="job-1")
        assert (ticket.state, ticket.position) == (TicketState.QUEUED, None)
        await ticket_looked(desk, ticket)
        assert (ticket.state, ticket.position) == (TicketState.QUEUED, 1)
        assert ticket.wait_s is not None

        desk.allow()
        held = await desk.hold(ticket.job)
        await until(lambda: held.stage is Stage.RUNNING)
        ticket.state = TicketState.QUEUED  # As if `started` had been lost.
        ticket.attempt = None
        await ticket_looked(desk, ticket)
        assert (ticket.state, ticket.worker, ticket.position) == (TicketState.STARTED, "w1", None)

        record = a_record(ticket.job)
        await desk.bus.append(subjects.result(LANE, ticket.job_id), encode(record))
        look = await ticket_looked(desk, ticket)
        assert look is not None
        assert look.record == record


async def test_what_a_ticket_hears_while_it_looks_is_newer() -> None:
    """An answer that is older than the news does not take it back."""
    async with a_desk_and_client("control") as (desk, client):
        desk.allow()
        ticket = await client.submit(a_chat_body(), job_id="job-1")
        looking = asyncio.create_task(ticket.look())
        await asyncio.sleep(0)
        ticket.hear(Started(job="job-1", attempt=an_attempt(), worker="w9"))
        while not looking.done():
            desk.turn()
            await asyncio.sleep(0)
        assert looking.result() is not None
        assert (ticket.state, ticket.worker) == (TicketState.STARTED, "w9")
