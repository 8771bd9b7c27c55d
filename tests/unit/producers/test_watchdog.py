"""What is lost on the way is found again: ends, records, jobs, links."""

import asyncio

import pytest

from broker.bus.base import StoredMessage, Timeout
from broker.bus.memory import MemoryBus
from broker.wire import subjects
from broker.wire.codec import encode
from broker.wire.messages import (
    End,
    Kind,
    LaneOffer,
    Reason,
    StoredEnd,
    Tokens,
)
from producers.client import Client
from producers.config import ClientConfig
from producers.errors import UnknownModel
from tests.builders import LANE, MODEL, a_chat_body, a_job
from tests.lanes import QUICK, a_lane, link_of, until
from tests.responder import ATTEMPT, Responder, a_rejection


async def test_a_lost_end_is_found_in_the_results() -> None:
    """Nothing is heard; the ticket looks by itself and finds the record."""
    async with a_lane() as (client, responder):
        responder.loses_end = lambda _: True
        ticket = await client.submit(a_chat_body())
        assert (await ticket.result(5)).kind is Kind.COMPLETED
        assert client.watchdog_counts.healed == 1
        assert client.watchdog_counts.resubmitted == 0


async def test_an_end_said_twice_is_taken_once() -> None:
    """The second is a stray, counted and without effect."""
    async with a_lane() as (client, responder):
        responder.ends = 2
        assert (await (await client.submit(a_chat_body())).result(5)).kind is Kind.COMPLETED
        await (await client.submit(a_chat_body())).result(5)
        assert client.counts.ended == 2
        assert client.counts.strays >= 1


async def test_a_record_too_large_to_say_is_fetched() -> None:
    """`stored` on the wire leads to the record in RESULTS."""
    async with a_lane(config=ClientConfig()) as (client, responder):
        responder.stores_end = True
        ticket = await client.submit(a_chat_body())
        assert (await ticket.result(5)).body


async def test_a_job_that_is_nowhere_is_submitted_again() -> None:
    """Absent from the queue and from RESULTS: the next submission, and one run."""
    async with a_lane() as (client, responder):
        responder.may_run.clear()
        ticket = await client.submit(a_chat_body())
        await responder.started.wait()
        stream = subjects.jobs_stream(LANE, 2)
        assert await responder.bus.delete_message(stream, ticket.sequence)
        await until(lambda: ticket.submission > 0)
        responder.may_run.set()
        assert (await ticket.result(5)).kind is Kind.COMPLETED
        assert client.watchdog_counts.resubmitted == 1


async def test_a_job_that_waits_is_never_submitted_again() -> None:
    """However long it waits: its message is in the stream, and looks grow rarer."""
    async with a_lane() as (client, responder):
        responder.may_run.clear()
        ticket = await client.submit(a_chat_body())
        await until(lambda: not (client.watchdog_counts.looks < 4))
        assert ticket.look_in_s == QUICK.watchdog_s_max
        responder.may_run.set()
        await ticket.result(5)
        assert responder.deliveries[ticket.job_id] == 1
        assert client.watchdog_counts.resubmitted == 0


class BlindBus(MemoryBus):
    """A bus whose answers to looks can be arranged."""

    looks_fail = 0
    hidden = ""

    async def message_at(
        self, stream: str, sequence: int, *, timeout_s: float = 5.0
    ) -> StoredMessage:
        if self.looks_fail:
            self.looks_fail -= 1
            message = "no answer"
            raise Timeout(message)
        return await super().message_at(stream, sequence, timeout_s=timeout_s)


async def test_looks_that_get_no_answer_prove_nothing() -> None:
    """A time-out is not absence: the ticket looks again instead of submitting again."""
    bus = MemoryBus()
    blind = BlindBus(bus.server)
    blind.looks_fail = 5
    async with Responder(bus) as responder, Client(blind, lane=LANE, config=QUICK) as client:
        responder.may_run.clear()
        ticket = await client.submit(a_chat_body())
        await until(lambda: not (blind.looks_fail))
        responder.may_run.set()
        await ticket.result(5)
        assert client.watchdog_counts.resubmitted == 0
    await bus.close()


async def test_ends_said_while_the_link_was_down_are_found_after_it() -> None:
    """A reconnect makes every ticket look soon, long before its watchdog is due."""
    config = ClientConfig(sweep_s=0.02, reconnect_spread_s=0.01)
    async with a_lane(config=config) as (client, responder):
        responder.may_run.clear()
        tickets = [await client.submit(a_chat_body()) for _ in range(20)]
        await responder.started.wait()
        link_of(client).disconnect()
        responder.may_run.set()
        await until(lambda: not (sum(responder.runs.values()) < 20))
        link_of(client).reconnect()
        for ticket in tickets:
            assert (await ticket.result(5)).kind is Kind.COMPLETED
        assert max(responder.runs.values()) == 1


async def test_a_duplicates_answer_is_not_the_jobs_end() -> None:
    """`duplicate` says that another copy is known: the ticket goes on to wait for that one."""
    async with a_lane() as (client, responder):
        responder.may_run.clear()
        ticket = await client.submit(a_chat_body())
        await responder.started.wait()
        answer = a_rejection(ticket.job, Reason.DUPLICATE)
        await responder.say(ticket.job, End(job=ticket.job_id, record=encode(answer)))
        await asyncio.sleep(0.05)
        assert ticket.record is None
        responder.may_run.set()
        assert (await ticket.result(5)).kind is Kind.COMPLETED


async def test_garbage_on_the_answer_subject_is_counted_and_survived() -> None:
    """Bytes that are no message, and records that are none, change nothing."""
    async with a_lane() as (client, responder):
        responder.may_run.clear()
        ticket = await client.submit(a_chat_body())
        await responder.started.wait()
        subject = subjects.out(LANE, "client-1", ticket.job_id)
        for data in (b"", b"\xc1", encode(End(job=ticket.job_id, record=b"junk"))):
            await responder.bus.publish(subject, data)
        await responder.bus.publish(subjects.queue_state(LANE), b"junk")
        await asyncio.sleep(0.01)
        assert client.counts.garbage == 4
        responder.may_run.set()
        assert (await ticket.result(5)).kind is Kind.COMPLETED


async def test_an_unreadable_stored_record_ends_the_job_as_failed() -> None:
    """Garbage in RESULTS: the ticket ends with a reason instead of never."""
    async with a_lane() as (client, responder):
        responder.may_run.clear()
        ticket = await client.submit(a_chat_body())
        await responder.started.wait()
        await responder.bus.append(subjects.result(LANE, ticket.job_id), b"junk")
        await responder.say(ticket.job, StoredEnd(job=ticket.job_id))
        record = await ticket.result(5)
        assert (record.kind, record.reason) == (Kind.FAILED, Reason.MALFORMED)


async def test_a_stream_whose_end_was_lost_ends_in_the_whole_answer() -> None:
    """Without the end on the wire nobody knows whether the last chunk came."""
    async with a_lane() as (client, responder):
        responder.chunks = lambda job: [Tokens(job=job.id, index=0, attempt=ATTEMPT, data=b"0")]
        responder.loses_end = lambda _: True
        ticket = await client.submit(a_chat_body(stream=True))
        got = [chunk async for chunk in ticket.stream()]
        assert [chunk.whole for chunk in got] == [False, True]


async def test_a_client_with_the_same_id_takes_up_the_jobs_of_its_past_life() -> None:
    """Known sequence and message still there: the job isn't stored again, and its end is heard."""
    async with a_lane() as (client, responder):
        responder.may_run.clear()
        first = await client.submit(a_chat_body(), job_id="old")
        job, sequence = first.job, first.sequence
        await client.__aexit__(None, None, None)
        later = Client(responder.bus, lane=LANE, client_id="client-1", config=ClientConfig())
        async with later:
            ticket = await later.submit_job(job, known=True, sequence=sequence)
            responder.may_run.set()
            assert (await ticket.result(5)).kind is Kind.COMPLETED
            assert later.watchdog_counts.healed == 0
            assert responder.deliveries["old"] == 1


async def test_a_lost_job_waits_for_room_before_it_is_submitted_again() -> None:
    """The queue filled up meanwhile: refused, noted under the next number, tried again later."""
    async with a_lane(jobs_max=1) as (client, responder):
        responder.may_run.clear()
        ticket = await client.submit(a_chat_body())
        await responder.started.wait()
        await responder.bus.delete_message(subjects.jobs_stream(LANE, 2), ticket.sequence)
        other = await client.submit(a_chat_body())
        await until(lambda: ticket.submission > 0)
        assert client.watchdog_counts.resubmitted == 0
        responder.may_run.set()
        await other.result(5)
        assert (await ticket.result(5)).kind is Kind.COMPLETED


async def test_a_lost_job_of_a_model_that_is_gone_ends_with_a_reason() -> None:
    """Nobody will ever take it again: whoever waits is told, instead of waiting for ever."""
    async with a_lane() as (client, responder):
        responder.may_run.clear()
        ticket = await client.submit(a_chat_body())
        await responder.started.wait()
        offer = encode(LaneOffer(lane=LANE, models=("other",)))
        await responder.bus.kv_put(subjects.CONFIG_BUCKET, subjects.lane_offer_key(LANE), offer)
        del link_of(client).server.streams[subjects.jobs_stream(LANE, 2)]
        responder.models = ("other",)
        await responder.set_up()
        with pytest.raises(UnknownModel, match="other"):
            await ticket.result(5)
        assert client.open_tickets == 0


async def test_another_message_in_the_jobs_place_is_not_the_job() -> None:
    """After a stream was made anew its sequences start over: the content is compared."""
    async with a_lane() as (client, responder):
        responder.may_run.clear()
        ticket = await client.submit(a_chat_body())
        await responder.started.wait()
        del link_of(client).server.streams[subjects.jobs_stream(LANE, 2)]
        await responder.set_up()
        subject = subjects.jobs(LANE, 2, MODEL)
        for data in (encode(a_job(id="stranger")), b"junk"):
            await responder.bus.append(subject, data)
        await until(lambda: ticket.submission > 0)
        assert client.watchdog_counts.resubmitted == 1
