"""Users who do odd things that are allowed: each gets an answer, and nobody else notices.

After each test a good job completes and the queues are empty. All tests share one cluster, in any
order.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import orjson
import pytest
import pytest_asyncio

from broker.wire import subjects
from broker.wire.codec import encode
from broker.wire.ids import TOKEN_CHARS_MAX
from broker.wire.messages import Kind
from producers.answer import answer_text, piece_text
from producers.client import Client
from producers.config import ClientConfig
from producers.request import Wish, build_job
from tests.acceptance.engine_cluster import (
    LANE,
    ODD_LANE,
    ODD_MODEL,
    EngineCluster,
    a_chat,
    an_engine_cluster,
    ends,
)
from tests.engines import Behaviour

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOUR_S = 3600.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[EngineCluster]:
    """The cluster of all tests here."""
    async with an_engine_cluster(tmp_path_factory.mktemp("odd-users")) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(shared: EngineCluster) -> AsyncGenerator[EngineCluster]:
    """The cluster, which must be well when the test is over."""
    yield shared
    await shared.lives_on(LANE, ODD_LANE)


ODD_BODIES: dict[str, dict[str, Any]] = {
    "no messages": {"messages": []},
    "no messages at all": {"messages": None},
    "messages of another kind": {"messages": "hello"},
    "no answer wanted": {"max_tokens": 0},
    "less than no answer": {"max_tokens": -5},
    "as many tokens as can be said": {"max_tokens": 2**63},
    "a number of tokens that is none": {"max_tokens": "many"},
    "emoji": {"messages": [{"role": "user", "content": "👩‍👩‍👧‍👦 漢字 \x00 \u202e"}]},
    "half a character": {"messages": [{"role": "user", "content": "x" * 255 + "é" * 300}]},
    "an image": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    "fields of another engine": {"tools": [1], "metadata": {"a": {"b": [None]}}, "n": 10**9},
}


@pytest.mark.parametrize("odd", ODD_BODIES.values(), ids=ODD_BODIES)
async def test_a_body_that_is_odd_reaches_the_engine_as_it_is(
    cluster: EngineCluster, odd: dict[str, Any]
) -> None:
    """What a body may say is the engine's matter: nothing is changed, lost or refused on the way.

    But for what asks the engine to stream, which is the agent's.
    """
    tag = str(time.monotonic_ns())
    body = a_chat(tag=tag, **odd)
    async with cluster.client() as client:
        (record,) = await ends([await client.submit(body)])
    assert record.kind is Kind.COMPLETED, record.message
    assert answer_text(record.body) == "t0 t1 t2 t3 "
    (seen,) = cluster.seen(tag)
    sent = {name: value for name, value in seen.items() if not name.startswith("stream")}
    assert sent == orjson.loads(orjson.dumps(body))


async def test_a_body_that_just_fits_runs(cluster: EngineCluster) -> None:
    """7.8 MB of prompt, in three-byte characters, there and back."""
    content = "漢" * (7_800_000 // 3)
    async with cluster.client() as client:
        (record,) = await ends([await client.submit(a_chat(content, tag="huge"))])
    assert record.kind is Kind.COMPLETED, record.message
    (seen,) = cluster.seen("huge")
    assert seen["messages"][0]["content"] == content


async def test_a_model_with_slashes_colons_and_dots_is_served(cluster: EngineCluster) -> None:
    """Its name is free text, streamed or not, in a lane that is called like a stream."""
    body = a_chat(model=ODD_MODEL, tag="odd model")
    async with cluster.client(ODD_LANE) as client:
        assert client.offer is not None
        assert ODD_MODEL in client.offer.models
        streamed = await client.submit(body, stream=True, band=1)
        text = "".join([piece_text(chunk.data) async for chunk in streamed.stream()])
        records = await ends([streamed, await client.submit(body, band=3)])
    assert text == "t0 t1 t2 t3 "
    assert {(record.kind, record.model) for record in records} == {(Kind.COMPLETED, ODD_MODEL)}
    name = f'inferlane_jobs_dispatched_total{{band="3",lane="{ODD_LANE}",model="{ODD_MODEL}"}}'
    assert (await cluster.counts())[name]


async def test_ids_as_long_as_they_may_be(cluster: EngineCluster) -> None:
    """Job and client at their bound, with all characters a token may have."""
    job_id = ("aZ09_-" * TOKEN_CHARS_MAX)[:TOKEN_CHARS_MAX]
    client_id = "c" * TOKEN_CHARS_MAX
    async with cluster.client(client_id=client_id) as client:
        ticket = await client.submit(
            a_chat(), job_id=job_id, session="s" * 256, request_id="é" * 256
        )
        (record,) = await ends([ticket])
    assert (record.kind, record.job, record.client) == (Kind.COMPLETED, job_id, client_id)


async def test_a_job_id_like_that_of_a_broken_message_is_a_job_like_others(
    cluster: EngineCluster,
) -> None:
    """`bad-j<n>` is where records of unreadable messages stand: neither may hide the other."""
    appended = await cluster.bus.append(subjects.jobs(LANE, 2, "tiny"), b"broken")
    await cluster.record(LANE, f"bad-j{appended.sequence}")
    async with cluster.client() as client:
        ticket = await client.submit(a_chat(), job_id="bad-j1000000")
        (record,) = await ends([ticket])
    assert record.kind is Kind.COMPLETED


async def test_five_hundred_jobs_at_once_from_one_client(cluster: EngineCluster) -> None:
    """All are stored, all end once; the broker holds a few at a time."""
    async with cluster.client() as client:
        tickets = await asyncio.gather(
            *(client.submit(a_chat(f"chat {number}"), band=3) for number in range(500))
        )
        records = await ends(tickets)
    assert {record.kind for record in records} == {Kind.COMPLETED}
    assert len({record.job for record in records}) == 500
    assert {record.worker for record in records} == {"worker-1", "worker-2"}


async def test_a_client_that_leaves_finds_its_answer_later(cluster: EngineCluster) -> None:
    """Closing a client ends its waits, not its jobs."""
    async with cluster.talking(tokens=500):
        async with cluster.client() as client:
            ticket = await client.submit(a_chat(behaviour=Behaviour.SLOW, tag="left"), stream=True)
            async with asyncio.timeout(10):
                while not cluster.runs("left"):
                    await asyncio.sleep(0.01)
        cluster.talk_to_the_end(tokens=500)
        record = await cluster.record(LANE, ticket.job_id)
    assert record.kind is Kind.COMPLETED
    async with cluster.client() as later:
        assert await later.find_record(ticket.job_id) == record


async def test_two_clients_under_one_name_disturb_nobody(cluster: EngineCluster) -> None:
    """Each hears of the other's jobs and lets them pass."""
    async with cluster.client(client_id="same") as one, cluster.client(client_id="same") as other:
        tickets = [
            await client.submit(a_chat(f"chat {number}"), stream=True)
            for number in range(5)
            for client in (one, other)
        ]
        records = await ends(tickets)
        strays = (one.counts.strays, other.counts.strays)
    assert [record.job for record in records] == [ticket.job_id for ticket in tickets]
    assert {record.kind for record in records} == {Kind.COMPLETED}
    assert all(strays)


async def test_a_slow_reader_gets_the_whole_answer(cluster: EngineCluster) -> None:
    """Beyond its buffer chunks are dropped, and the record's answer comes in their place."""
    config = ClientConfig(stream_chunks_max=2)
    for engine in cluster.engines:
        engine.tokens = 50
    async with Client(cluster.bus, lane=LANE, config=config) as client:
        ticket = await client.submit(a_chat(), stream=True)
        (record,) = await ends([ticket])  # Reads nothing until the end.
        chunks = [chunk async for chunk in ticket.stream()]
    for engine in cluster.engines:
        engine.tokens = 4
    assert chunks[-1].whole
    assert answer_text(chunks[-1].data) == "".join(f"t{index} " for index in range(50))
    assert record.usage.output_tokens == 4


@pytest.mark.parametrize("skew_s", [HOUR_S, -HOUR_S])
async def test_a_client_whose_clock_is_wrong(cluster: EngineCluster, skew_s: float) -> None:
    """It changes nothing: of a deadline counts what lies between it and the submission."""
    wish = Wish(job_id=f"skew{skew_s:.0f}")
    job = build_job(a_chat(), wish, lane=LANE, client="skewed")
    job = msgspec.structs.replace(job, submitted_at_s=job.submitted_at_s + skew_s)
    dated = msgspec.structs.replace(
        job, id=f"dated{skew_s:.0f}", deadline_at_s=job.submitted_at_s + 60.0
    )
    for one in (job, dated):
        await cluster.bus.append(subjects.jobs(LANE, 2, "tiny"), encode(one))
    record = await cluster.record(LANE, job.id)
    assert record.kind is Kind.COMPLETED
    assert abs(record.ended_at_s - time.time()) < 60
    late = await cluster.record(LANE, dated.id)
    assert (late.kind, late.reason) == (Kind.COMPLETED, None)
    url = 'inferlane_queue_seconds_sum{band="2",lane="online"}'
    assert (await cluster.counts())[url] < 300
