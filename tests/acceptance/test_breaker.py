"""A worker whose engine fails every job, on a real cluster: it is left alone, and tried again."""

import asyncio
from collections.abc import AsyncGenerator

import orjson
import pytest
import pytest_asyncio

from broker.core.policy import BreakerPolicy
from broker.wire.messages import Kind
from tests.acceptance.commands import inferlane
from tests.acceptance.engine_cluster import (
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
