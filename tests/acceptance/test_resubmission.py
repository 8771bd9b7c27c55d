"""A server that was restarted has forgotten the ids of finished jobs; their records have not."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio

from broker.bus.base import Message
from broker.wire import subjects
from broker.wire.codec import decode_out, encode
from broker.wire.messages import End, Kind
from producers.request import Wish, build_job
from tests.acceptance.engine_cluster import LANE, EngineCluster, a_chat, an_engine_cluster, ends

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[EngineCluster]:
    """The cluster of all tests here."""
    async with an_engine_cluster(tmp_path_factory.mktemp("resubmission")) as cluster:
        yield cluster


async def restarted(cluster: EngineCluster) -> None:
    """Kill the server and start it on the same store."""
    lost = cluster.bus.counts["links_rebuilt"]
    await asyncio.to_thread(cluster.cluster.server.kill)
    await asyncio.to_thread(cluster.cluster.server.start)
    async with asyncio.timeout(20):
        while cluster.bus.counts["links_rebuilt"] == lost:
            await asyncio.sleep(0.02)


async def test_a_client_that_submits_a_finished_job_again_gets_its_result(
    cluster: EngineCluster,
) -> None:
    """In a new life of the client, after the server's: no second message, no second run."""
    async with cluster.client() as client:
        ticket = await client.submit(a_chat(tag="again"), job_id="again")
        (first,) = await ends([ticket])
    await restarted(cluster)
    async with cluster.client() as client:
        (second,) = await ends([await client.submit(a_chat(tag="again"), job_id="again")])
    assert (first.kind, first) == (Kind.COMPLETED, second)
    assert cluster.runs("again") == 1
    await cluster.lives_on(LANE)


async def test_a_producer_that_does_not_look_gets_the_stored_result_too(
    cluster: EngineCluster,
) -> None:
    """It publishes the very message again, under the same id: taken as new, found recorded by the
    agent that is given it, told, acknowledged, not run.
    """
    async with cluster.client() as client:
        wish = Wish(job_id="careless", band=2)
        job = build_job(a_chat(tag="careless"), wish, lane=LANE, client=client.client_id)
        (first,) = await ends([await client.submit_job(job)])
    await cluster.audit.until_empty(LANE)
    await restarted(cluster)
    told: asyncio.Queue[End] = asyncio.Queue()

    def hear(message: Message) -> None:
        event = decode_out(message.data)
        if isinstance(event, End):
            told.put_nowait(event)

    await cluster.bus.subscribe(subjects.out(LANE, job.client, job.id), hear)
    subject = subjects.jobs(LANE, job.band, job.model)
    appended = await cluster.bus.append(subject, encode(job), message_id=f"{job.id}.0")
    assert not appended.duplicate
    async with asyncio.timeout(20):
        end = await told.get()
    assert end.record == encode(first)
    await cluster.audit.until_empty(LANE)
    assert cluster.runs("careless") == 1
    assert await cluster.record(LANE, job.id) == first
