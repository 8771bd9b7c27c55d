"""The Batch API of a cluster of real processes, through the unmodified OpenAI client."""

import asyncio
import io
import time
from dataclasses import dataclass
from typing import Any, cast

import openai
import orjson
from openai.types import Batch

from ops.cluster import LocalCluster
from ops.demo.setting import ONLINE_KEY
from tests.batches import a_line

ENDPOINT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def client_of(said: dict[str, Any]) -> openai.AsyncOpenAI:
    """A client of the gateway that said so when it was ready."""
    return openai.AsyncOpenAI(base_url=f"{said['http']}/v1", api_key=ONLINE_KEY)


async def created(client: openai.AsyncOpenAI, given: list[bytes], *, window: str = "24h") -> Batch:
    """Upload these lines, and make their batch."""
    data = io.BytesIO(b"\n".join(given))
    made = await client.files.create(file=("in.jsonl", data), purpose="batch")
    return await client.batches.create(
        input_file_id=made.id,
        endpoint=ENDPOINT,
        completion_window=cast("Any", window),  # The client's types know only one.
    )


async def until_results(client: openai.AsyncOpenAI, batch_id: str) -> Batch:
    """The batch, once results can be read of it."""
    async with asyncio.timeout(30):
        while not (running := await client.batches.retrieve(batch_id)).output_file_id:
            await asyncio.sleep(0.05)
    return running


async def until_ended(
    client: openai.AsyncOpenAI, batch_id: str, *, patience_s: float = 40.0
) -> Batch:
    """The batch, once it has ended."""
    async with asyncio.timeout(patience_s):
        while (found := await client.batches.retrieve(batch_id)).status not in ENDED:
            await asyncio.sleep(0.1)
    return found


async def lines_of(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """Lines of a result file, which must be there."""
    assert file_id
    content = await client.files.content(file_id)
    return [orjson.loads(line) for line in content.text.splitlines()]


@dataclass(frozen=True, slots=True)
class Spoiled:
    """What became of a batch with a bad line under which a worker was killed."""

    results: int
    errors: int
    killed_at_line: int
    seconds: float


async def spoil(cluster: LocalCluster, count: int, *, patience_s: float = 40.0) -> Spoiled:
    """Run lines of which one is bad, and kill a worker under them: one error line, else results.

    The cluster has two workers, and one is never started again.
    """
    gateway = cluster.add_gateway("gateway-1", cluster.folder / "inferlane.toml")
    await gateway.start()
    given = [a_line(f"id-{number}") for number in range(count)]
    bad = count // 3
    given[bad] = b"{no json"
    began_s = time.monotonic()
    async with client_of(gateway.said) as client:
        batch = await created(client, given)
        running = await until_results(client, batch.id)
        await cluster.members["worker-1"].kill()
        ended = await until_ended(client, batch.id, patience_s=patience_s)
        seconds = time.monotonic() - began_s
        output = await lines_of(client, ended.output_file_id)
        errors = await lines_of(client, ended.error_file_id)
    assert ended.status == "completed"
    wanted = {f"id-{number}" for number in range(count) if number != bad}
    assert len(output) == count - 1
    assert {line["custom_id"] for line in output} == wanted
    assert [(line["custom_id"], line["error"]["code"]) for line in errors] == [
        (None, "invalid_json_line")
    ]
    assert f"line {bad + 1}:" in errors[0]["error"]["message"]
    assert running.request_counts is not None
    at = running.request_counts.completed
    assert at < count - 1, "it had ended before the worker was killed"
    return Spoiled(len(output), len(errors), at, seconds)
