"""A worker whose engine fails every job, on a real cluster: it is left alone, and tried again."""

import asyncio
from collections.abc import AsyncGenerator

import orjson
import pytest
import pytest_asyncio

from broker.core.decisions import HeldBy
from broker.core.policy import BreakerPolicy
from broker.sim.decisions import LoggedJob, read_jobs
from broker.wire.ids import BATCH_BAND
from broker.wire.messages import Kind, TerminalRecord
from tests.acceptance.commands import inferlane
from tests.acceptance.engine_cluster import (
    LANE,
    ODD_LANE,
    SLOTS,
    EngineCluster,
    a_chat,
    an_engine_cluster,
    ends,
)
from tests.engines import Behaviour

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAILURES_MAX = BreakerPolicy().failures_max
JOBS = 40
IMAGE_LINES = 400

CHAT_BAND = 0
"""Of the chats beside them, and of no other job here."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[EngineCluster]:
    """Two workers with breakers as they ship."""
    folder = tmp_path_factory.mktemp("breaker")
    async with an_engine_cluster(folder, breaker_failures_max=FAILURES_MAX) as found:
        yield found
        await found.lives_on()


async def turn_of(cluster: EngineCluster, worker: str) -> str:
    """Read a worker's breaker as `inferlane workers` tells it."""
    told = orjson.loads((await inferlane(cluster.cluster, "workers", "--json")).out)
    return next(one["breaker"] for one in told["workers"] if one["worker"] == worker)


async def test_a_sick_worker_gets_a_bounded_few_and_serves_again_once_it_is_well(
    cluster: EngineCluster,
) -> None:
    """Of forty jobs it is asked for the three that open its breaker, what was on its way, and a
    probe or two; all forty complete at the other. Well again, its next probe closes the breaker.
    """
    with cluster.one_engine(0, Behaviour.FAILS):
        async with cluster.client() as client:
            tickets = [
                await client.submit(a_chat(f"chat {number}", tag="sick")) for number in range(JOBS)
            ]
            records = await ends(tickets)
        asked = len([seen for seen in cluster.engines[0].seen if seen.body.get("tag") == "sick"])
        assert await turn_of(cluster, "worker-1") == "open"
    assert {record.kind for record in records} == {Kind.COMPLETED}
    assert {record.worker for record in records} == {"worker-2"}
    probes = 2
    assert FAILURES_MAX <= asked <= FAILURES_MAX + SLOTS + probes
    counts = await cluster.counts()
    assert counts['inferlane_worker_breaker{worker="worker-1"}'] >= 1
    assert counts['inferlane_worker_breaker_openings{worker="worker-1"}'] >= 1
    async with cluster.client() as client, asyncio.timeout(25):
        while await turn_of(cluster, "worker-1") != "closed":
            await ends([await client.submit(a_chat("still sick?")) for _ in range(2)])
            await asyncio.sleep(0.2)
        records = await ends([await client.submit(a_chat(f"{n}")) for n in range(8)])
    assert {record.worker for record in records} == {"worker-1", "worker-2"}


def an_image(number: int) -> dict[str, object]:
    """A chat that no text-only model can answer."""
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{number:04d}"}}
    return {**a_chat(tag="image"), "messages": [{"role": "user", "content": [image]}]}


async def chats_told(cluster: EngineCluster, count: int) -> list[LoggedJob]:
    """Read the chats' jobs from the decision log, once it tells the end of all."""
    folder = cluster.cluster.folder / "state-broker-1"
    async with asyncio.timeout(30):
        while True:
            paths = sorted(folder.glob("decisions*.jsonl"))
            lines = (line for path in paths for line in path.read_bytes().splitlines())
            chats = [job for job in read_jobs(lines) if job.lane == LANE and job.band == CHAT_BAND]
            if len(chats) >= count:
                return chats
            await asyncio.sleep(0.05)


async def test_one_lanes_images_for_a_text_model_shut_no_worker_for_other_lanes(
    cluster: EngineCluster,
) -> None:
    """Four hundred lines of batch fail at once wherever they run, each three times. Beside them
    another lane's chats, one after the other until the last line is over, all complete at their
    first try, and none of them waits until a breaker's time is over.
    """
    chats: list[TerminalRecord] = []
    with cluster.all_engines(Behaviour.TEXT_ONLY):
        async with cluster.client(ODD_LANE) as sweeper, cluster.client() as client:
            lines = [
                await sweeper.submit(an_image(number), band=BATCH_BAND)
                for number in range(IMAGE_LINES)
            ]
            async with asyncio.TaskGroup() as group:
                over = group.create_task(ends(lines, timeout_s=240.0))
                while not over.done():
                    chat = await client.submit(a_chat("meanwhile", tag="chat"), band=CHAT_BAND)
                    chats += await ends([chat])
    assert {record.kind for record in over.result()} == {Kind.DEAD_LETTERED}
    assert cluster.runs("image") >= IMAGE_LINES
    assert {record.kind for record in chats} == {Kind.COMPLETED}
    assert len(chats) == cluster.runs("chat")
    told = await chats_told(cluster, len(chats))
    shut_out_s = [job.queue_s for job in told if job.held_by == HeldBy.BREAKER]
    assert max(shut_out_s, default=0.0) < BreakerPolicy().open_s
