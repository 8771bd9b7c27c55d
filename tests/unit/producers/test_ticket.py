"""What a ticket tells: place, wait, result, stream, cancellation."""

import asyncio

import pytest

from broker.bus.memory import MemoryBus
from broker.wire.messages import (
    Attempt,
    Kind,
    QueueState,
    Reason,
    Tokens,
)
from producers.client import Client
from producers.config import ClientConfig
from producers.errors import (
    JobFailed,
    JobRejected,
    ResultTimeout,
    Unreachable,
    rejection_of,
)
from producers.ticket import Ticket, TicketState
from tests.builders import LANE, MODEL, a_chat_body
from tests.lanes import QUICK, a_lane
from tests.responder import ATTEMPT, Responder, a_record, a_rejection
from tests.turns import until


def a_piece(index: int, *, attempt: Attempt = ATTEMPT, job: str = "job-1") -> Tokens:
    """One chunk of an answer."""
    return Tokens(job=job, attempt=attempt, index=index, data=b"%d" % index)


async def test_a_ticket_tells_position_and_wait_until_it_runs() -> None:
    """Receipts give position and wait; once started there is nothing to wait for."""
    async with a_lane() as (client, responder):
        responder.may_run.clear()
        ticket = await client.submit(a_chat_body())
        await responder.started.wait()
        await asyncio.sleep(0)
        assert ticket.state is TicketState.QUEUED
        assert (ticket.position, ticket.wait_s) == (3, 1.5)
        responder.may_run.set()
        await ticket.result(5)
        assert (ticket.position, ticket.wait_s) == (None, 0.0)


async def test_before_a_receipt_the_wait_is_the_queues() -> None:
    """A ticket that heard nothing yet tells the wait of its queue, as the broker says it."""
    async with a_lane() as (client, responder):
        queue = QueueState(
            band=2, model=MODEL, queued_jobs=9, queued_jobs_max=10, inflight_jobs=1, wait_s=7.0
        )
        await responder.tell_state(queue)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert client.queue_wait_s(2, MODEL) == 7.0
        assert client.queue_wait_s(1, MODEL) is None


@pytest.mark.parametrize("kind", [Kind.FAILED, Kind.EXPIRED, Kind.CANCELLED, Kind.DEAD_LETTERED])
async def test_a_failed_job_is_a_record_not_an_exception(kind: Kind) -> None:
    """`result` returns any kind; only `raise_for_kind` makes an error of it."""
    async with a_lane() as (client, responder):
        responder.answer = lambda job: a_record(job, kind=kind, reason=Reason.ENGINE_FAILED)
        ticket = await client.submit(a_chat_body())
        assert (await ticket.result(5)).kind is kind
        with pytest.raises(JobFailed, match=kind):
            await ticket.result(5, raise_for_kind=True)


async def test_a_rejection_says_reason_row_and_retry_after() -> None:
    """A caller can branch on why it was turned away, and knows when to come again."""
    async with a_lane() as (client, responder):
        responder.reject = a_rejection
        record = await (await client.submit(a_chat_body())).result(5)
        rejection = rejection_of(record)
        assert rejection is not None
        assert rejection.reason is Reason.QUOTA_EXCEEDED
        assert (rejection.row, rejection.retry_after_s) == ("lane=acme", 1.0)
        assert rejection.message
        with pytest.raises(JobRejected):
            await (await client.submit(a_chat_body())).result(5, raise_for_kind=True)


async def test_a_result_that_is_late_can_be_asked_for_again() -> None:
    """A time-out of the wait is not an end of the job."""
    async with a_lane() as (client, responder):
        responder.may_run.clear()
        ticket = await client.submit(a_chat_body())
        with pytest.raises(ResultTimeout):
            await ticket.result(0.01)
        responder.may_run.set()
        assert (await ticket.result(5)).kind is Kind.COMPLETED


async def test_cancel_ends_the_job_as_cancelled() -> None:
    """The broker is asked, and the record says so."""
    async with a_lane() as (client, responder):
        responder.may_run.clear()
        ticket = await client.submit(a_chat_body())
        await responder.started.wait()
        assert await ticket.cancel()
        responder.may_run.set()
        assert (await ticket.result(5)).kind is Kind.CANCELLED
        assert not await ticket.cancel()


async def test_cancel_without_a_broker_is_told() -> None:
    """Nobody answers within `cancel_s`."""
    bus = MemoryBus()
    await Responder(bus).set_up()
    async with Client(bus, lane=LANE, config=QUICK) as client:
        ticket = await client.submit(a_chat_body())
        with pytest.raises(Unreachable, match="no broker"):
            await ticket.cancel()
    await bus.close()


async def test_a_stream_gives_chunks_in_order_and_ends_with_the_job() -> None:
    """What was streamed comes as it came, nothing twice, nothing whole."""
    async with a_lane() as (client, responder):
        responder.chunks = lambda job: [a_piece(index, job=job.id) for index in range(5)]
        ticket = await client.submit(a_chat_body(stream=True))
        got = [chunk async for chunk in ticket.stream()]
        assert [chunk.data for chunk in got] == [b"0", b"1", b"2", b"3", b"4"]
        assert not any(chunk.whole or chunk.restart for chunk in got)
        assert responder.seen[0].stream


async def test_a_stream_with_a_gap_ends_in_the_whole_answer() -> None:
    """A lost chunk is never papered over: the record's answer replaces what was read."""
    async with a_lane() as (client, responder):
        responder.chunks = lambda job: [a_piece(index, job=job.id) for index in (0, 1, 3)]
        ticket = await client.submit(a_chat_body(stream=True))
        got = [chunk async for chunk in ticket.stream()]
        assert [chunk.data for chunk in got[:-1]] == [b"0", b"1"]
        assert got[-1].whole
        assert got[-1].data == (await ticket.result()).body


async def test_a_stream_whose_end_was_lost_ends_in_the_whole_answer() -> None:
    """Without the end on the wire nobody knows whether the last chunk came."""
    async with a_lane() as (client, responder):
        responder.chunks = lambda job: [a_piece(0, job=job.id)]
        responder.loses_end = lambda _: True
        ticket = await client.submit(a_chat_body(stream=True))
        got = [chunk async for chunk in ticket.stream()]
        assert [chunk.whole for chunk in got] == [False, True]


async def test_streaming_a_job_that_was_not_streamed_gives_one_whole_answer() -> None:
    """A reader needs no second way for short answers."""
    async with a_lane() as (client, _):
        ticket = await client.submit(a_chat_body())
        got = [chunk async for chunk in ticket.stream()]
        assert [chunk.whole for chunk in got] == [True]


async def test_a_stream_of_a_failed_job_raises_after_its_chunks() -> None:
    """A cut-off answer must not look like a complete one."""
    async with a_lane() as (client, responder):
        responder.chunks = lambda job: [a_piece(0, job=job.id)]
        responder.answer = lambda job: a_record(job, kind=Kind.FAILED, reason=Reason.WORKER_LOST)
        ticket = await client.submit(a_chat_body(stream=True))
        got: list[bytes] = []
        with pytest.raises(JobFailed, match="worker_lost"):
            await _read_into(got, ticket)
        assert got == [b"0"]


async def _read_into(got: list[bytes], ticket: Ticket) -> None:
    async for chunk in ticket.stream():
        got += [chunk.data]  # An error may end it: what came before counts.


async def test_a_slow_reader_gets_the_whole_answer_at_the_end() -> None:
    """The buffer is bounded: what doesn't fit is dropped, and the record makes up for it."""
    config = ClientConfig(stream_chunks_max=10)
    async with a_lane(config=config) as (client, responder):
        responder.chunks = lambda job: [a_piece(index, job=job.id) for index in range(100)]
        ticket = await client.submit(a_chat_body(stream=True))
        await ticket.result(5)
        got = [chunk async for chunk in ticket.stream()]
        assert [chunk.index for chunk in got[:-1]] == list(range(10))
        assert got[-1].whole


async def test_chunks_are_told_to_whoever_sees_to_them() -> None:
    """`on_chunks`: while it says that it does, nobody is woken; once it doesn't, the waiter is."""
    async with a_lane() as (client, responder):
        responder.may_run.clear()
        ticket = await client.submit(a_chat_body(stream=True))
        seen: list[bytes] = []
        left = [True, True, False]

        def take() -> bool:
            if not (takes := left.pop(0)):
                return False
            chunk = ticket.ready_chunk(plain=True)
            assert chunk is not None
            seen.append(chunk.data)
            return takes

        ticket.on_chunks = take
        waiting = asyncio.create_task(ticket.next_chunk())
        for index in range(3):
            await responder.say(ticket.job, a_piece(index, job=ticket.job_id))
        chunk = await waiting
        assert chunk is not None
        assert (seen, chunk.data, left) == ([b"0", b"1"], b"2", [])
        responder.may_run.set()


async def test_a_restart_is_not_plain() -> None:
    """Who may only go on with what was read before has to leave it."""
    async with a_lane() as (client, responder):
        responder.may_run.clear()
        ticket = await client.submit(a_chat_body(stream=True))
        await responder.say(ticket.job, a_piece(0, job=ticket.job_id))
        assert await ticket.next_chunk() is not None
        later = Attempt(ATTEMPT.epoch, ATTEMPT.number + 1)
        await responder.say(ticket.job, a_piece(0, attempt=later, job=ticket.job_id))
        await until(lambda: ticket.has_chunks)
        assert ticket.ready_chunk(plain=True) is None
        chunk = ticket.ready_chunk()
        assert chunk is not None
        assert chunk.restart
        responder.may_run.set()
