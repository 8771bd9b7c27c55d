"""The Batch API before a real cluster: broker, worker, engine and gateways as processes."""

import asyncio
import io
from typing import Any

import openai
import orjson

from broker.bus.usage import uncounted_records
from ops.demo.setting import ONLINE_KEY
from tests.acceptance.conftest import StartCluster
from tests.batches import a_line
from tests.turns import until

ENDPOINT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
LINES = 300


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
    async with _client(first.said) as client:
        data = io.BytesIO(b"\n".join(given))
        made = await client.files.create(file=("in.jsonl", data), purpose="batch")
        batch = await client.batches.create(
            input_file_id=made.id, endpoint=ENDPOINT, completion_window="24h"
        )
        async with asyncio.timeout(30):
            while not (running := await client.batches.retrieve(batch.id)).output_file_id:
                await asyncio.sleep(0.05)
    assert running.status == "in_progress"
    await first.kill()
    await second.start()
    async with _client(second.said) as client:
        async with asyncio.timeout(60):
            while (ended := await client.batches.retrieve(batch.id)).status not in ENDED:
                await asyncio.sleep(0.1)
        assert ended.status == "completed"
        assert ended.request_counts is not None
        counts = ended.request_counts.to_dict()
        assert counts == {"total": LINES + 1, "completed": LINES, "failed": 1}
        output = await _lines(client, ended.output_file_id)
        errors = await _lines(client, ended.error_file_id)
    assert sorted(line["custom_id"] for line in output) == sorted(
        f"id-{number}" for number in range(LINES)
    )
    assert [line["error"]["code"] for line in errors] == ["invalid_json_line"]
    lane = (await _lanes(bus))[0]

    async def gone() -> bool:
        return not (await bus.stream_state(f"RESULTS_{lane}")).messages

    await until(gone)
    assert await uncounted_records(bus, lane) == 0


def _client(said: dict[str, Any]) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{said['http']}/v1", api_key=ONLINE_KEY)


async def _lines(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id
    content = await client.files.content(file_id)
    return [orjson.loads(line) for line in content.text.splitlines()]


async def _lanes(bus: Any) -> list[str]:
    return [entry.key.split(".")[1] async for entry in bus.kv_entries("BATCHES", "batch.*.*")]
