"""Bad input on a real cluster: whatever comes in at the door, each case ends in a clear reason.

After each test a good job completes, the queues are empty, and no loop has met a surprise. All
tests share one cluster, in any order.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import orjson
import pytest
import pytest_asyncio

from broker.bus.base import NoStream, PayloadTooLarge
from broker.wire import subjects
from broker.wire.codec import MESSAGE_BYTES_MAX, decode_out, encode
from broker.wire.messages import BODY_BYTES_MAX, End, Job, Kind, Reason, StoredEnd, TerminalRecord
from producers.client import Client
from producers.errors import BadRequest, BodyTooLarge, UnknownLane, UnknownModel
from tests.acceptance.engine_cluster import (
    LANE,
    NARROW,
    WINDOW_JOBS,
    EngineCluster,
    a_chat,
    an_engine_cluster,
    ends,
)
from tests.engines import Behaviour

pytestmark = pytest.mark.asyncio(loop_scope="module")

SUBJECT = subjects.jobs(LANE, 2, "tiny")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[EngineCluster]:
    """The cluster of all tests here."""
    async with an_engine_cluster(tmp_path_factory.mktemp("bad-input")) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(shared: EngineCluster) -> AsyncGenerator[EngineCluster]:
    """The cluster, which must be well when the test is over."""
    yield shared
    await shared.lives_on(LANE, NARROW)


def a_job(job_id: str, **fields: Any) -> Job:
    """A good job as a foreign producer would publish it."""
    defaults: dict[str, Any] = {
        "id": job_id,
        "lane": LANE,
        "band": 2,
        "model": "tiny",
        "client": "foreign",
        "body": orjson.dumps(a_chat(tag=job_id)),
    }
    return Job(**{**defaults, **fields})


def _but(**fields: object) -> bytes:
    """A good job with some fields spoiled, as no library of ours would send it."""
    good = msgspec.msgpack.decode(encode(a_job("spoiled")))
    return msgspec.msgpack.encode({**good, **fields})


def _nested(name: str) -> bytes:
    """A good job with a field of lists in lists in lists."""
    job = _but()
    count = job[0] - 0x80  # A map of under 16 fields says so in its first byte.
    field = msgspec.msgpack.encode(name) + b"\x91" * 200_000 + b"\x90"
    return bytes([0x80 | (count + 1)]) + job[1:] + field


MALFORMED = {
    "empty": (b"", "truncated"),
    "garbage": (b"\xc1\xff\x00 not msgpack", "malformed"),
    "no job": (b'{"model": "tiny", "messages": []}', "missing required field"),
    "text": (b"tell me a story", "Expected `object`"),
    "truncated": (encode(a_job("cut"))[:-20], "truncated"),
    "trailing bytes": (encode(a_job("more")) + b"\x00\x01", "trailing"),
    "a list": (msgspec.msgpack.encode([1, 2, 3]), "Expected `object`"),
    "no body": (msgspec.msgpack.encode({"id": "x", "lane": LANE}), "missing required field"),
    "deep nesting": (b"\x91" * 200_000, "Expected `object`"),
    "deep nesting in a field we know": (_nested("adapter"), "$.adapter"),
    "deep nesting in a field of a newer peer": (_nested("news"), "recursion"),
    "id of no token": (_but(id="a.b"), "$.id"),
    "id too long": (_but(id="a" * 65), "$.id"),
    "unknown band": (_but(band=9), "$.band"),
    "another band than its subject": (_but(band=1), "its subject"),
    "another lane than its subject": (_but(lane="offline"), "its subject"),
    "another model than its subject": (_but(model="other"), "its subject"),
    "no number": (_but(prompt_tokens="many"), "$.prompt_tokens"),
    "half a hash": (_but(blocks=b"1234567"), "block hashes"),
    "larger than any message of ours": (b"\x00" * (MESSAGE_BYTES_MAX + 1), "8000001 bytes"),
}


@pytest.mark.parametrize(("data", "said"), MALFORMED.values(), ids=MALFORMED)
async def test_a_malformed_message_has_a_record_of_its_own(
    cluster: EngineCluster, data: bytes, said: str
) -> None:
    """It ends as rejected, under its sequence, with what is wrong in it; and is counted once."""
    before = await cluster.counts()
    appended = await cluster.bus.append(SUBJECT, data)
    record = await cluster.record(LANE, f"bad-j{appended.sequence}")
    assert (record.kind, record.reason) == (Kind.REJECTED, Reason.MALFORMED)
    assert said.lower() in record.message.lower()
    assert len(record.message) < 1000
    await cluster.until_counted(before, 'inferlane_messages_malformed_total{where="job"}')
    rejected = 'inferlane_jobs_rejected_total{band="2",lane="online",reason="malformed"}'
    await cluster.until_counted(before, rejected)


async def test_a_malformed_message_that_names_its_caller_tells_him(cluster: EngineCluster) -> None:
    """What can be read of it is enough to answer whoever waits."""
    heard: asyncio.Queue[End | StoredEnd] = asyncio.Queue()

    def hear(message: Any) -> None:
        event = decode_out(message.data)
        if isinstance(event, End | StoredEnd):
            heard.put_nowait(event)

    hearing = await cluster.bus.subscribe(subjects.out(LANE, "foreign", "spoiled"), hear)
    await cluster.bus.append(SUBJECT, _but(output_tokens_max=-1))
    async with asyncio.timeout(10):
        event = await heard.get()
    await hearing.unsubscribe()
    assert isinstance(event, End)
    record = msgspec.msgpack.decode(event.record, type=TerminalRecord)
    assert (record.job, record.reason) == ("spoiled", Reason.MALFORMED)
    assert "$.output_tokens_max" in record.message


async def test_what_no_queue_takes_is_refused_by_the_server_itself(cluster: EngineCluster) -> None:
    """An unknown lane, band or model has no stream, and a message over the bound no way in."""
    for subject in ("jobs.nobody.2.tiny", f"jobs.{LANE}.7.tiny", f"jobs.{LANE}.2.other"):
        with pytest.raises(NoStream):
            await cluster.bus.append(subject, encode(a_job("lost")))
    with pytest.raises(PayloadTooLarge):
        await cluster.bus.append(SUBJECT, b"x" * 9_000_000)


UNFIT = {
    "unknown model": (LANE, a_chat(model="tinny"), {}, UnknownModel, "it offers: tiny, "),
    "no model": (LANE, {"messages": []}, {}, BadRequest, 'add "model"'),
    "two models": (LANE, a_chat(), {"model": "other"}, BadRequest, "name one"),
    "no such band": (LANE, a_chat(), {"band": 7}, BadRequest, "band 7 is none of (0, 1, 2, 3)"),
    "a band not for this lane": (NARROW, a_chat(), {"band": 0}, UnknownModel, "it takes: 1, 2, 3"),
    "too large": (LANE, a_chat("x" * BODY_BYTES_MAX), {}, BodyTooLarge, "shorten the prompt"),
    "no JSON": (LANE, b"{", {}, BadRequest, "no JSON"),
    "no object": (LANE, b"[]", {}, BadRequest, "send an OpenAI request body"),
    "id of no token": (LANE, a_chat(), {"job_id": "a b"}, BadRequest, "1 to 64 of the characters"),
    "no such endpoint": (LANE, a_chat(), {"endpoint": "/x"}, BadRequest, "/v1/chat/completions"),
}


@pytest.mark.parametrize(("lane", "body", "wish", "error", "said"), UNFIT.values(), ids=UNFIT)
async def test_a_client_is_told_at_once_what_is_wrong_and_what_would_be_right(
    cluster: EngineCluster,
    lane: str,
    body: Any,
    wish: dict[str, Any],
    error: type[Exception],
    said: str,
) -> None:
    """Nothing is stored, the refusal says what to do, the client counts it."""
    async with cluster.client(lane) as client:
        with pytest.raises(error) as raised:
            await client.submit(body, **wish)
        assert said in str(raised.value)
        assert client.open_tickets == 0
        assert client.counts.refused == 1
    assert await cluster.audit.queued(lane) == 0


async def test_an_unknown_lane_is_told_with_those_there_are(cluster: EngineCluster) -> None:
    """No stream takes the job, and CONFIG says why."""
    async with Client(cluster.bus, lane="onlin") as client:
        with pytest.raises(UnknownLane) as raised:
            await client.submit(a_chat())
    assert str(raised.value).endswith("it has: JOBS_x, narrow, online, scarce")


@pytest.mark.parametrize("job_bytes", [BODY_BYTES_MAX + 50_000, MESSAGE_BYTES_MAX - 50])
async def test_a_body_that_fits_a_message_but_no_order_is_refused(
    cluster: EngineCluster, job_bytes: int
) -> None:
    """A foreign producer may go beyond our bound: rejected, and no worker is troubled."""
    job = a_job(f"huge-{job_bytes}")
    filler = b"x" * (job_bytes - len(encode(job)))
    before = await cluster.counts()
    await cluster.bus.append(SUBJECT, encode(msgspec.structs.replace(job, body=filler)))
    record = await cluster.record(LANE, job.id)
    if job_bytes < MESSAGE_BYTES_MAX - 1000:
        assert (record.kind, record.status_code) == (Kind.FAILED, 400)  # The body is no JSON.
        return
    assert (record.kind, record.reason) == (Kind.REJECTED, Reason.PAYLOAD_TOO_LARGE)
    assert "send less" in record.message
    rejected = 'inferlane_jobs_rejected_total{band="2",lane="online",reason="payload_too_large"}'
    await cluster.until_counted(before, rejected)


@pytest.mark.parametrize("deadline_s", [0.0, 0.001, -3600.0])
async def test_a_deadline_that_has_passed_ends_the_job_unrun(
    cluster: EngineCluster, deadline_s: float
) -> None:
    """Also of a client whose clock is an hour behind."""
    before = await cluster.counts()
    async with cluster.client() as client:
        ticket = await client.submit(a_chat(tag=f"late{deadline_s}"), deadline_s=deadline_s)
        (record,) = await ends([ticket])
    assert (record.kind, record.reason) == (Kind.EXPIRED, Reason.DEADLINE_EXPIRED)
    assert "deadline passed" in record.message
    assert cluster.runs(f"late{deadline_s}") == 0
    ended = 'inferlane_jobs_ended_total{band="2",kind="expired",lane="online"}'
    await cluster.until_counted(before, ended)


async def test_a_deadline_that_passes_while_the_job_runs_aborts_it(cluster: EngineCluster) -> None:
    """The engine's request is given up too."""
    aborted = cluster.aborted
    async with cluster.client() as client, cluster.talking():
        ticket = await client.submit(a_chat(behaviour=Behaviour.SLOW, tag="over"), deadline_s=1.0)
        (record,) = await ends([ticket])
        await cluster.until_idle()
    assert (record.kind, record.reason) == (Kind.EXPIRED, Reason.DEADLINE_EXPIRED)
    assert record.worker
    assert cluster.aborted == aborted + 1
    assert cluster.runs("over") == 1


# ---- the same id twice


async def test_the_same_id_at_the_same_time_runs_once(cluster: EngineCluster) -> None:
    """One client gets one ticket; another client, under its own name, the same answer."""
    body = a_chat(behaviour=Behaviour.SLOW, tag="twice")
    async with cluster.talking(tokens=500), cluster.client() as client, cluster.client() as other:
        first = await client.submit(body, job_id="twice")
        assert await client.submit(body, job_id="twice") is first
        second = await other.submit(body, job_id="twice")
        cluster.talk_to_the_end(tokens=500)
        records = await ends([first, second])
    assert records[0] == records[1]
    assert records[0].kind is Kind.COMPLETED
    assert cluster.runs("twice") == 1


async def test_the_same_id_in_a_second_message_waits_for_the_first_ones_end(
    cluster: EngineCluster,
) -> None:
    """Before, while and after the first runs: one run, one record, all callers told, all counted.

    Messages that differ in their submission are kept by the server, so that the broker has to tell.
    """
    before = await cluster.counts()
    told: asyncio.Queue[str] = asyncio.Queue()

    def hear(message: Any) -> None:
        if isinstance(decode_out(message.data), End | StoredEnd):
            told.put_nowait(message.subject)

    hearing = await cluster.bus.subscribe(f"out.{LANE}.*.doubled", hear)
    body = orjson.dumps(a_chat(behaviour=Behaviour.SLOW, tag="doubled"))
    async with cluster.talking(tokens=500):
        for number in range(3):
            twin = a_job("doubled", body=body, client=f"caller-{number}")
            await cluster.bus.append(SUBJECT, encode(twin))
            async with asyncio.timeout(10):
                while not cluster.runs("doubled"):
                    await asyncio.sleep(0.01)
        counted = 'inferlane_jobs_rejected_total{band="2",lane="online",reason="duplicate"}'
        await cluster.until_counted(before, counted, 2)
        cluster.talk_to_the_end(tokens=500)
        record = await cluster.record(LANE, "doubled")
    async with asyncio.timeout(10):
        heard = {await told.get() for _ in range(3)}
    assert heard == {f"out.{LANE}.caller-{number}.doubled" for number in range(3)}
    await cluster.bus.append(SUBJECT, encode(a_job("doubled", body=body, client="late")))
    async with asyncio.timeout(10):
        assert await told.get() == f"out.{LANE}.late.doubled"
    await hearing.unsubscribe()
    await cluster.audit.until_empty(LANE)
    assert await cluster.record(LANE, "doubled") == record
    assert cluster.runs("doubled") == 1


async def test_an_id_whose_job_has_ended_gives_its_result_again(cluster: EngineCluster) -> None:
    """Also to a client that was not there: nothing runs."""
    async with cluster.client() as client:
        (record,) = await ends([await client.submit(a_chat(tag="again"), job_id="again")])
    async with cluster.client() as other:
        (same,) = await ends([await other.submit(a_chat(tag="again"), job_id="again")])
    assert same == record
    assert cluster.runs("again") == 1


# ---- cancelling


async def test_a_running_job_is_cancelled_in_its_engine_within_a_second(
    cluster: EngineCluster,
) -> None:
    """Case 35: the engine's request is aborted, slot and quota are free, the record says so."""
    before, aborted = await cluster.counts(), cluster.aborted
    clock = asyncio.get_running_loop()
    async with cluster.client() as client, cluster.talking():
        ticket = await client.submit(a_chat(behaviour=Behaviour.SLOW), stream=True)
        async with asyncio.timeout(10):
            await anext(aiter(ticket.stream()))
        cancelled_at_s = clock.time()
        assert await ticket.cancel()
        async with asyncio.timeout(10):
            await cluster.until_idle()
        assert clock.time() - cancelled_at_s < 1.0
        (record,) = await ends([ticket])
    assert (record.kind, record.reason) == (Kind.CANCELLED, Reason.CANCELLED)
    assert cluster.aborted == aborted + 1
    ended = 'inferlane_jobs_ended_total{band="2",kind="cancelled",lane="online"}'
    await cluster.until_counted(before, ended)


async def test_a_queued_job_is_cancelled_wherever_it_waits(cluster: EngineCluster) -> None:
    """Not pulled yet, held by the broker, running: each ends once, unrun or aborted.

    The lane runs one job at a time and the broker holds a few more, so the last ones are unpulled.
    """
    tags = [f"queued-{number}" for number in range(WINDOW_JOBS + 5)]
    async with cluster.client(NARROW) as client, cluster.talking():
        tickets = [
            await client.submit(a_chat(behaviour=Behaviour.SLOW, tag=tag), stream=True)
            for tag in tags
        ]
        async with asyncio.timeout(10):
            await anext(aiter(tickets[0].stream()))
        assert await cluster.unpulled(NARROW, 2, "tiny")
        for ticket in reversed(tickets):
            assert await ticket.cancel(), ticket.job_id
        records = await ends(tickets)
    assert {record.kind for record in records} == {Kind.CANCELLED}
    assert [cluster.runs(tag) for tag in tags] == [1] + [0] * (len(tags) - 1)


async def test_a_finished_job_cannot_be_cancelled(cluster: EngineCluster) -> None:
    """Its record stands; neither its ticket nor a stranger gets another answer."""
    async with cluster.client() as client:
        ticket = await client.submit(a_chat())
        (record,) = await ends([ticket])
        assert not await ticket.cancel()
        assert not await client.cancel_job(ticket.job_id)
        assert not await client.cancel_job("never-heard-of")
    assert await cluster.record(LANE, ticket.job_id) == record
    assert record.kind is Kind.COMPLETED
