"""The Batch API before a real cluster: broker, worker, engine and gateways as processes."""

from typing import Any

from broker.bus.usage import uncounted_records
from tests.acceptance.conftest import StartCluster
from tests.batches import a_line, lines
from tests.cluster_batches import (
    client_of,
    created,
    lines_of,
    spoil,
    until_ended,
    until_results,
)
from tests.turns import until

LINES = 300
SMALL = 20


async def test_a_batch_outlives_the_gateway_that_took_it(start_cluster: StartCluster) -> None:
    """Its gateway is killed in the midst; another finishes it: every line once, one of them bad.

    Its results leave RESULTS once the accounts have them.
    """
    cluster, bus = await start_cluster(workers=1)
    config = cluster.folder / "inferlane.toml"
    first = cluster.add_gateway("gateway-1", config)
    second = cluster.add_gateway("gateway-2", config)
    await first.start()
    given = [a_line(f"id-{number}") for number in range(LINES)] + [b"{no json"]
    async with client_of(first.said) as client:
        batch = await created(client, given)
        running = await until_results(client, batch.id)
    assert running.status == "in_progress"
    await first.kill()
    await second.start()
    async with client_of(second.said) as client:
        ended = await until_ended(client, batch.id)
        assert ended.status == "completed"
        assert ended.request_counts is not None
        counts = ended.request_counts.to_dict()
        assert counts == {"total": LINES + 1, "completed": LINES, "failed": 1}
        output = await lines_of(client, ended.output_file_id)
        errors = await lines_of(client, ended.error_file_id)
    assert sorted(line["custom_id"] for line in output) == sorted(
        f"id-{number}" for number in range(LINES)
    )
    assert [line["error"]["code"] for line in errors] == ["invalid_json_line"]
    lane = (await _lanes(bus))[0]

    async def gone() -> bool:
        return not (await bus.stream_state(f"RESULTS_{lane}")).messages

    await until(gone)
    assert await uncounted_records(bus, lane) == 0


async def test_a_bad_line_and_a_dead_worker_cost_one_error_line(
    start_cluster: StartCluster,
) -> None:
    """One of two workers is killed under the lines, and one line is bad: all others are results.

    `tests/bench/batch_spoiled.py` does the same with 10,000 lines.
    """
    cluster, _ = await start_cluster()
    assert (await spoil(cluster, LINES)).results == LINES - 1


async def test_a_small_batch_is_not_stuck_behind_a_large_one(start_cluster: StartCluster) -> None:
    """Of one lane, with the same window, run by one gateway: handed in later, it ends first.

    `tests/bench/batch_beside.py` measures it.
    """
    cluster, _ = await start_cluster()
    gateway = cluster.add_gateway("gateway-1", cluster.folder / "inferlane.toml")
    await gateway.start()
    async with client_of(gateway.said) as client:
        large = await created(client, lines(2 * LINES))
        await until_results(client, large.id)
        before = await client.batches.retrieve(large.id)
        small = await created(client, lines(SMALL))
        ended = await until_ended(client, small.id)
        after = await client.batches.retrieve(large.id)
        assert (ended.status, after.status) == ("completed", "in_progress")
        assert before.request_counts is not None
        assert after.request_counts is not None
        # As many as the small one has, and what was under way before: never all that was there.
        meanwhile = after.request_counts.completed - before.request_counts.completed
        assert meanwhile < LINES
        assert (await client.batches.cancel(large.id)).status == "cancelling"


async def _lanes(bus: Any) -> list[str]:
    return [entry.key.split(".")[1] async for entry in bus.kv_entries("BATCHES", "batch.*.*")]
