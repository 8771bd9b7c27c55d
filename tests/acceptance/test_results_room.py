"""A lane whose results take all the room that a row gives them, on a real cluster."""

import asyncio
from collections.abc import AsyncGenerator

import orjson
import pytest
import pytest_asyncio

from broker.wire import subjects
from broker.wire.messages import Kind, Reason
from ops.cli.doctor_facts import gather
from ops.cli.doctor_findings import Finding, Level
from ops.cli.doctor_judge import judge
from ops.cli.durability import UNKNOWN
from tests.acceptance.engine_cluster import (
    LANE,
    ODD_LANE,
    SCARCE,
    SCARCE_BYTES,
    SLOTS,
    EngineCluster,
    a_chat,
    an_engine_cluster,
    ends,
)
from tests.engines import Behaviour

RUNNING = 2 * SLOTS - 2
"""Jobs of a lane that both workers share, with slots left to others."""

STREAM_API = "$JS.API.STREAM"

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


async def bounded(cluster: EngineCluster, lane: str, bytes_max: int) -> None:
    """Set the bound of a lane's results at the server, as an operator's tool might."""
    name = subjects.results_stream(lane)
    told = orjson.loads(
        (await cluster.bus.request(f"{STREAM_API}.INFO.{name}", b"", timeout_s=5)).data
    )
    update = orjson.dumps({**told["config"], "max_bytes": bytes_max})
    answer = await cluster.bus.request(f"{STREAM_API}.UPDATE.{name}", update, timeout_s=5)
    assert "error" not in orjson.loads(answer.data)


async def judged(cluster: EngineCluster, about: str) -> list[Finding]:
    """Look at the cluster as `inferlane doctor` does."""
    facts = await gather(cluster.bus, config=None, durability=UNKNOWN, listen_s=0.1)
    return [one for one in judge(facts, line_bytes=2000) if one.about == about]


async def until_told(cluster: EngineCluster, name: str, value: int) -> None:
    """Wait until /metrics tells a value."""
    async with asyncio.timeout(20):
        while (await cluster.counts())[name] != value:
            await asyncio.sleep(0.05)


async def test_a_full_results_stream_is_alarmed_stops_its_lane_alone_and_recovers(
    cluster: EngineCluster,
) -> None:
    """What ran keeps its record until there is room; what comes is refused; other lanes go on."""
    stream = subjects.results_stream(LANE)
    (alarm, notices) = (
        'inferlane_watchdog_alarm{watchdog="results"}',
        'inferlane_worker_notice{worker="worker-1"}',
    )
    async with cluster.client(LANE) as client, cluster.client(ODD_LANE) as other:
        await ends([await client.submit(a_chat())])
        assert (await cluster.counts())[alarm] == 0
        with cluster.all_engines(Behaviour.SLOW):
            running = [await client.submit(a_chat(tag="runs")) for _ in range(RUNNING)]
            async with asyncio.timeout(20):
                while cluster.runs("runs") < RUNNING:
                    await asyncio.sleep(0.02)
            await bounded(cluster, LANE, (await cluster.bus.stream_state(stream)).bytes)
            cluster.talk_to_the_end(tokens=4 * RUNNING)
            await until_told(cluster, notices, 1)
            await until_told(cluster, alarm, 1)
        (found,) = await judged(cluster, "results")
        assert found.level is Level.FAIL
        assert f"lane {LANE} takes no jobs until it has room" in found.found
        assert any(one.found.startswith("results: ") for one in await judged(cluster, "watchdogs"))
        assert "results stream full" in str(await judged(cluster, "workers"))
        (record,) = await ends([await other.submit(a_chat())])
        assert record.kind is Kind.COMPLETED
        refused = await client.submit(a_chat(tag="refused"))
        await bounded(cluster, LANE, -1)
        assert {one.kind for one in await ends(running)} == {Kind.COMPLETED}
        (record,) = await ends([refused])
        assert (record.kind, record.reason) == (Kind.REJECTED, Reason.RESULTS_FULL)
        assert cluster.runs("refused") == 0
        await until_told(cluster, notices, 0)
        (found,) = await judged(cluster, "results")
        assert found.level is Level.OK
    await cluster.lives_on(LANE)
