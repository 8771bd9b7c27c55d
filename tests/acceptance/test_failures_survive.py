"""How often a job failed outlives everybody: it is a record of its own, not the server's count."""

import asyncio
import signal
from pathlib import Path

from broker.bus.base import NotFound
from broker.wire.codec import decode
from broker.wire.ids import job_key
from broker.wire.messages import JobAttempts, Kind
from broker.wire.subjects import ATTEMPTS_BUCKET
from tests.acceptance.engine_cluster import (
    FAILURES_MAX,
    LANE,
    EngineCluster,
    a_chat,
    an_engine_cluster,
    ends,
)
from tests.engines import Behaviour

REST_S = 6.0
"""Between two tries: long enough to kill everything in one of these pauses."""


async def test_failures_are_counted_across_kills_of_broker_and_server(tmp_path: Path) -> None:
    """Case 30: kill -9 of both after the second failure; the third one is the last, and told."""
    async with an_engine_cluster(tmp_path, rest_s=REST_S) as cluster:
        with cluster.all_engines(Behaviour.FAILS):
            async with cluster.client() as client:
                ticket = await client.submit(a_chat(tag="failing"))
                async with asyncio.timeout(30):
                    while await _failures(cluster, ticket.job_id) < FAILURES_MAX - 1:
                        await asyncio.sleep(0.05)
                broker = cluster.cluster.members["broker-1"]
                assert await broker.kill() == -signal.SIGKILL
                await asyncio.to_thread(cluster.cluster.server.kill)
                assert cluster.runs("failing") == FAILURES_MAX - 1
                await asyncio.to_thread(cluster.cluster.server.start)
                await broker.start()
                (record,) = await ends([ticket])
        assert record.kind is Kind.DEAD_LETTERED
        assert len(record.failures) == FAILURES_MAX == cluster.runs("failing")
        assert len({failure.attempt.epoch for failure in record.failures}) == 2
        await cluster.lives_on()
        assert await _failures(cluster, ticket.job_id) == 0


async def _failures(cluster: EngineCluster, job_id: str) -> int:
    """Count the failures on record."""
    try:
        entry = await cluster.bus.kv_get(ATTEMPTS_BUCKET, job_key(LANE, job_id))
    except NotFound:
        return 0
    return len(decode(entry.value, JobAttempts).failures)
