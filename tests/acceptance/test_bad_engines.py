"""Engines that misbehave, on a real cluster: who is blamed, what is tried again, what is kept.

After each test the engines are well again, a good job completes, and the queues are empty. All
tests share one cluster, in any order.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from itertools import pairwise
from typing import Any

import orjson
import pytest
import pytest_asyncio

from broker.wire.messages import Kind, Reason
from tests.acceptance.commands import inferlane
from tests.acceptance.engine_cluster import (
    FAILURES_MAX,
    LANE,
    STALL_S,
    EngineCluster,
    a_chat,
    an_engine_cluster,
    ends,
)
from tests.engines import Behaviour

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[EngineCluster]:
    """The cluster of all tests here."""
    async with an_engine_cluster(tmp_path_factory.mktemp("bad-engines")) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(shared: EngineCluster) -> AsyncGenerator[EngineCluster]:
    """The cluster, which must be well when the test is over."""
    yield shared
    await shared.lives_on()


TROUBLES = {
    Behaviour.BROKEN_JSON: (Reason.ENGINE_GARBAGE, "broken JSON"),
    Behaviour.WRONG_TYPE: (Reason.ENGINE_GARBAGE, "text/html, not application/json"),
    Behaviour.HALF_STREAM: (Reason.ENGINE_GARBAGE, "half a stream"),
    Behaviour.REDIRECTS: (Reason.ENGINE_GARBAGE, "HTTP 307"),
    Behaviour.DROPS: (Reason.ENGINE_FAILED, "broke off"),
    Behaviour.DROPS_AT_ONCE: (Reason.ENGINE_FAILED, "disconnected"),
    Behaviour.ERROR_IN_STREAM: (Reason.ENGINE_FAILED, "out of memory"),
    Behaviour.FAILS: (Reason.ENGINE_FAILED, "HTTP 500: told to: fails"),
    Behaviour.FAILS_AT_LENGTH: (Reason.ENGINE_FAILED, "HTTP 500: xxx"),
    Behaviour.UNAVAILABLE: (Reason.ENGINE_FAILED, "HTTP 503"),
    Behaviour.FORBIDS: (Reason.ENGINE_FAILED, "HTTP 401"),
    Behaviour.SILENT: (Reason.STALLED, f"no new token for {STALL_S:g} s"),
    Behaviour.HANGS: (Reason.STALLED, f"no new token for {STALL_S:g} s"),
}
"""What is not the job's fault, as it is told."""


async def test_what_is_the_engines_fault_is_tried_elsewhere_and_then_kept(
    cluster: EngineCluster,
) -> None:
    """Each is tried three times, on both workers, later each time; then it is a dead letter.

    All at once, so that none may disturb another. Case 29: each can be listed and read.
    """
    before = await cluster.counts()
    async with cluster.client() as client:
        tickets = [
            await client.submit(a_chat(behaviour=behaviour, tag=f"bad-{behaviour}"))
            for behaviour in TROUBLES
        ]
        records = await ends(tickets)
    for (behaviour, (reason, said)), record in zip(TROUBLES.items(), records, strict=True):
        assert (record.kind, record.reason) == (Kind.DEAD_LETTERED, reason), behaviour
        assert said in record.message, behaviour
        assert "inferlane dlq" in record.message
        assert len(record.failures) == FAILURES_MAX == cluster.runs(f"bad-{behaviour}")
        assert {failure.worker for failure in record.failures} == {"worker-1", "worker-2"}
        assert all(failure.charged and said in failure.detail for failure in record.failures)
        times = [failure.at_s for failure in record.failures]
        waits = [later - earlier for earlier, later in pairwise(times)]
        assert waits[0] >= 0.075, behaviour
        assert waits[1] >= 0.15, behaviour
    await cluster.until_idle()
    for reason in Reason:
        count = sum(FAILURES_MAX for told, _ in TROUBLES.values() if told is reason)
        name = f'inferlane_attempts_failed_total{{reason="{reason}"}}'
        await cluster.until_counted(before, name, count)
    dead = f'inferlane_jobs_dead_lettered_total{{lane="{LANE}"}}'
    await cluster.until_counted(before, dead, len(TROUBLES))
    listed = await inferlane(cluster.cluster, "dlq", "list", LANE, "--json")
    letters = {letter["job"] for letter in map(orjson.loads, listed.out.splitlines())}
    assert {f"{LANE}.{ticket.job_id}" for ticket in tickets} <= letters


async def test_one_bad_engine_costs_nobody_his_answer(cluster: EngineCluster) -> None:
    """What fails on one worker completes on the other, and its record tells the history."""
    with cluster.one_engine(0, Behaviour.FAILS):
        async with cluster.client() as client:
            tickets = [await client.submit(a_chat(f"chat {number}")) for number in range(8)]
            records = await ends(tickets)
    assert {record.kind for record in records} == {Kind.COMPLETED}
    assert {record.worker for record in records} == {"worker-2"}
    failed = [failure for record in records for failure in record.failures]
    assert failed
    assert {failure.worker for failure in failed} == {"worker-1"}


OWN_ERRORS = {
    Behaviour.REFUSES: (400, Reason.ENGINE_REFUSED, "told to: refuses"),
    Behaviour.NOT_FOUND: (404, Reason.ENGINE_REFUSED, "404 page not found"),
    Behaviour.HUGE: (0, Reason.PAYLOAD_TOO_LARGE, "longer than 7900000 bytes"),
}


@pytest.mark.parametrize(
    ("behaviour", "status_code", "reason", "said"),
    [(behaviour, *expected) for behaviour, expected in OWN_ERRORS.items()],
)
async def test_the_jobs_own_error_is_told_and_not_tried_again(
    cluster: EngineCluster, behaviour: Behaviour, status_code: int, reason: Reason, said: str
) -> None:
    """4xx, or an answer that fits no record: one run, the engine's words, no worker blamed."""
    before = await cluster.counts()
    async with cluster.client() as client:
        (record,) = await ends([await client.submit(a_chat(behaviour=behaviour, tag=behaviour))])
        good = await ends([await client.submit(a_chat(f"chat {number}")) for number in range(4)])
    assert (record.kind, record.reason) == (Kind.FAILED, reason)
    assert record.status_code == status_code
    assert said in record.message
    assert record.failures == ()
    assert cluster.runs(behaviour) == 1
    if status_code:
        assert orjson.loads(record.body)["error"]["message"]
    assert {other.worker for other in good} == {"worker-1", "worker-2"}
    ended = f'inferlane_jobs_ended_total{{band="2",kind="failed",lane="{LANE}"}}'
    await cluster.until_counted(before, ended)


async def test_a_busy_engine_is_asked_again_later_and_nobody_is_charged(
    cluster: EngineCluster,
) -> None:
    """Case 26: 429 passes; until it does, the job comes back by the curve and not at once."""
    before = await cluster.counts()
    with cluster.all_engines(Behaviour.BUSY):
        async with cluster.client() as client:
            ticket = await client.submit(a_chat(tag="busy"))
            async with asyncio.timeout(20):
                while cluster.runs("busy") < 5:
                    await asyncio.sleep(0.02)
            began_s = time.monotonic()
            runs = cluster.runs("busy")
            while time.monotonic() < began_s + 2.0:
                await asyncio.sleep(0.1)
            assert cluster.runs("busy") - runs <= 8
            for engine in cluster.engines:
                engine.behaviour = Behaviour.FINE
            (record,) = await ends([ticket])
    assert record.kind is Kind.COMPLETED
    assert not any(failure.charged for failure in record.failures)
    failed = 'inferlane_attempts_failed_total{reason="engine_failed"}'
    assert (await cluster.counts())[failed] > before[failed]


STREAMED = (
    Behaviour.HALF_STREAM,
    Behaviour.DROPS,
    Behaviour.BROKEN_JSON,
    Behaviour.ERROR_IN_STREAM,
    Behaviour.SILENT,
)
"""Troubles that come after the first token."""


async def test_a_stream_that_broke_is_not_begun_anew_behind_its_reader(
    cluster: EngineCluster,
) -> None:
    """After the first token a failed attempt ends the job, and says why and what to do."""
    async with cluster.client() as client:
        tickets = [
            await client.submit(a_chat(behaviour=behaviour, tag=f"read-{behaviour}"), stream=True)
            for behaviour in STREAMED
        ]
        records = await ends(tickets)
    for behaviour, record in zip(STREAMED, records, strict=True):
        reason, said = TROUBLES[behaviour]
        assert (record.kind, record.reason) == (Kind.FAILED, reason), behaviour
        assert said in record.message, behaviour
        assert "submit the request again" in record.message
        assert cluster.runs(f"read-{behaviour}") == 1


async def test_a_reader_who_wants_it_sees_his_stream_begin_anew(cluster: EngineCluster) -> None:
    """`restart_visible`: the second attempt's first chunk is marked, and the answer is whole."""
    with cluster.one_engine(0, Behaviour.HALF_STREAM):
        async with cluster.client() as client:
            restarts = 0
            for number in range(8):
                ticket = await client.submit(
                    a_chat(f"chat {number}"), stream=True, restart_visible=True
                )
                async for chunk in ticket.stream():
                    restarts += chunk.restart
                (record,) = await ends([ticket])
                assert record.kind is Kind.COMPLETED
    assert restarts


async def test_a_dead_letter_runs_again_once_the_engine_is_well(cluster: EngineCluster) -> None:
    """Case 29: listed, read, replayed; the new job really runs; the old record stands."""
    with cluster.all_engines(Behaviour.FAILS):
        async with cluster.client() as client:
            ticket = await client.submit(a_chat("please", tag="replayed"))
            (record,) = await ends([ticket])
    assert record.kind is Kind.DEAD_LETTERED
    key = f"{LANE}.{ticket.job_id}"
    shown = await inferlane(cluster.cluster, "dlq", "show", key)
    assert "HTTP 500: told to: fails" in shown.out
    assert "please" in shown.out
    replayed = await inferlane(cluster.cluster, "dlq", "replay", key, "--json")
    assert replayed.code == 0, replayed.err
    new_id = _only(replayed.out)["to"].removeprefix(f"{LANE}.")
    assert (await cluster.record(LANE, new_id)).kind is Kind.COMPLETED
    assert cluster.runs("replayed") == FAILURES_MAX + 1
    assert await cluster.record(LANE, ticket.job_id) == record
    assert (await inferlane(cluster.cluster, "dlq", "show", key)).code == 1


def _only(lines: str) -> Any:
    (line,) = lines.splitlines()
    return orjson.loads(line)
