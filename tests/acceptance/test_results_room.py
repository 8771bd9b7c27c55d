"""A lane whose results take all the room that a row gives them, on a real cluster."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio

from broker.wire import subjects
from broker.wire.messages import Kind, Reason
from tests.acceptance.engine_cluster import (
    SCARCE,
    SCARCE_BYTES,
    EngineCluster,
    a_chat,
    an_engine_cluster,
    ends,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

STREAM = subjects.results_stream(SCARCE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[EngineCluster]:
    """The cluster of all tests here."""
    async with an_engine_cluster(tmp_path_factory.mktemp("results-room")) as cluster:
        yield cluster


async def stands_as_told(cluster: EngineCluster) -> int:
    """Wait until the broker knows what the lane's results take now; return the bytes."""
    name = f'inferlane_row_result_bytes{{row="lane={SCARCE}"}}'
    while True:
        stored = (await cluster.bus.stream_state(STREAM)).bytes
        if (await cluster.counts())[name] == stored:
            return stored
        await asyncio.sleep(0.05)


async def test_a_lane_with_too_many_results_is_refused_until_some_are_taken_out(
    cluster: EngineCluster,
) -> None:
    """Online jobs are told why and what to do; batch waits, and runs by itself once there is room;
    nothing that ran lost its result.
    """
    async with cluster.client(SCARCE) as client, asyncio.timeout(60):
        kept = list[str]()
        while True:
            known = await stands_as_told(cluster)
            (record,) = await ends([await client.submit(a_chat(tag="kept"))])
            if record.kind is not Kind.COMPLETED:
                break
            kept.append(record.job)
        assert kept
        assert (record.kind, record.reason) == (Kind.REJECTED, Reason.RESULTS_FULL)
        assert record.row == f"lane={SCARCE} result_bytes"
        assert "take all the room" in record.message
        assert f"of {SCARCE_BYTES} used" in record.message
        assert record.retry_after_s == 30.0
        assert known <= SCARCE_BYTES
        for job in kept:
            assert (await cluster.record(SCARCE, job)).kind is Kind.COMPLETED

        line = await client.submit(a_chat(tag="line"), band=3)
        await stands_as_told(cluster)
        assert cluster.runs("line") == 0
        state = await cluster.bus.stream_state(STREAM)
        for sequence in range(state.first_sequence, state.last_sequence + 1):
            await cluster.bus.delete_message(STREAM, sequence)
        (record,) = await ends([line])
        assert record.kind is Kind.COMPLETED
    await cluster.lives_on(SCARCE)
