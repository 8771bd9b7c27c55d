"""Files and batches of a real cluster through the unmodified `openai` client that waits."""

import asyncio
import io
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from openai.types import Batch, FileObject

from ops.demo.setting import ONLINE_KEY
from tests.acceptance.conftest import StartCluster
from tests.batches import a_line, lines
from tests.cluster_batches import ENDED, ENDPOINT

MANY = 400
"""Lines that one worker doesn't get through in seconds."""

LOOK_S = 0.1


@asynccontextmanager
async def a_counter(start_cluster: StartCluster) -> AsyncGenerator[openai.OpenAI]:
    """A cluster with a gateway, and a client of it."""
    cluster, _ = await start_cluster(workers=1)
    gateway = cluster.add_gateway("gateway-1", cluster.folder / "inferlane.toml")
    await gateway.start()
    url = f"{gateway.said['http']}/v1"
    with openai.OpenAI(base_url=url, api_key=ONLINE_KEY, max_retries=0) as client:
        yield client


async def test_from_upload_to_results(start_cluster: StartCluster, tmp_path: Path) -> None:
    """Create, wait, poll, read in three ways, delete; what is told of each object on the way."""
    async with a_counter(start_cluster) as client:
        await asyncio.to_thread(_from_upload_to_results, client, tmp_path)


def _from_upload_to_results(client: openai.OpenAI, folder: Path) -> None:
    source = folder / "in.jsonl"
    source.write_bytes(b"\n".join([*lines(30), b"{no json"]))
    made = client.files.create(file=source, purpose="batch")
    assert (made.object, made.filename, made.purpose) == ("file", "in.jsonl", "batch")
    assert made.bytes == source.stat().st_size
    assert client.files.wait_for_processing(made.id, max_wait_seconds=10).status == "processed"
    raw = client.batches.with_raw_response.create(
        input_file_id=made.id,
        endpoint=ENDPOINT,
        completion_window="24h",
        metadata={"run": "7"},
    )
    assert (raw.status_code, raw.headers["content-type"]) == (200, "application/json")
    batch = raw.parse()
    assert (batch.status, batch.input_file_id, batch.errors) == ("validating", made.id, None)
    ended = until(client, batch.id, lambda now: now.status in ENDED)
    assert (ended.status, dict(ended.metadata or {})["run"]) == ("completed", "7")
    assert ended.request_counts is not None
    assert ended.request_counts.to_dict() == {"total": 31, "completed": 30, "failed": 1}
    assert ended.usage is not None
    assert ended.usage.total_tokens > 0
    assert ended.output_file_id
    whole = client.files.content(ended.output_file_id)
    found = [orjson.loads(line) for line in whole.text.splitlines()]
    assert {line["custom_id"] for line in found} == {f"id-{number}" for number in range(30)}
    assert {line["response"]["status_code"] for line in found} == {200}
    with client.files.with_streaming_response.content(ended.output_file_id) as content:
        content.stream_to_file(folder / "out.jsonl")
    assert (folder / "out.jsonl").read_bytes() == whole.content
    output = client.files.with_raw_response.retrieve(ended.output_file_id).parse()
    assert (output.purpose, output.status, output.bytes) == (
        "batch_output",
        "processed",
        len(whole.content),
    )
    assert client.files.wait_for_processing(output.id, max_wait_seconds=10).id == output.id
    assert errors_of(client, ended) == Counter(["invalid_json_line"])
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)


async def test_lists_go_by_cursors(start_cluster: StartCluster) -> None:
    """Pages follow each other without a gap or a double, newest first, and say when they end."""
    async with a_counter(start_cluster) as client:
        await asyncio.to_thread(_lists_go_by_cursors, client)


def _lists_go_by_cursors(client: openai.OpenAI) -> None:
    made = [upload(client, [a_line(f"id-{number}")]) for number in range(5)]
    batches = [create(client, one.id) for one in made]
    for batch in batches:
        until(client, batch.id, lambda now: now.status in ENDED)
    assert [one.id for one in client.batches.list(limit=2)] == [b.id for b in reversed(batches)]
    first = client.batches.list(limit=3)
    assert (len(first.data), first.has_more) == (3, True)
    second = first.get_next_page()
    assert [one.id for one in second.data] == [one.id for one in reversed(batches[:2])]
    assert (second.has_more, second.has_next_page()) == (False, False)
    after = client.batches.list(after=batches[1].id)
    assert [one.id for one in after.data] == [batches[0].id]
    inputs = client.files.list(purpose="batch", limit=2, order="asc")
    assert [one.id for one in inputs] == [one.id for one in made]
    outputs = {one.id for one in client.files.list(purpose="batch_output")}
    assert outputs == {client.batches.retrieve(one.id).output_file_id for one in batches}
    with pytest.raises(openai.BadRequestError) as refused:
        client.batches.list(after="batch_none")
    assert refused.value.param == "after"


async def test_cancelled_and_expired(start_cluster: StartCluster) -> None:
    """What was finished stays, each other line is in the errors with the reason; once each."""
    async with a_counter(start_cluster) as client:
        await asyncio.to_thread(_cancelled_and_expired, client)


def _cancelled_and_expired(client: openai.OpenAI) -> None:
    source = upload(client, lines(MANY))
    batch = create(client, source.id)
    running = until(client, batch.id, lambda now: now.output_file_id)
    assert running.output_file_id
    grown = client.files.retrieve(running.output_file_id)
    assert grown.status == "uploaded"
    with pytest.raises(openai.ConflictError) as refused:
        client.files.delete(source.id)
    assert refused.value.code == "file_in_use"
    assert client.batches.cancel(batch.id).status == "cancelling"
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    cancelled = until(client, batch.id, lambda now: now.status in ENDED)
    assert cancelled.status == "cancelled"
    check(client, cancelled, "batch_cancelled")
    assert client.batches.cancel(batch.id).status == "cancelled"
    expired = create(client, source.id, completion_window="2s")
    ended = until(client, expired.id, lambda now: now.status in ENDED)
    assert ended.status == "expired"
    assert ended.expired_at is not None
    assert ended.expires_at is not None
    assert ended.expired_at >= ended.expires_at
    check(client, ended, "batch_expired")


async def test_errors_are_those_of_the_client(start_cluster: StartCluster) -> None:
    """Each mistake is the class that programs catch, with code, param and all four keys."""
    async with a_counter(start_cluster) as client:
        await asyncio.to_thread(_errors_are_those_of_the_client, client)


def _errors_are_those_of_the_client(client: openai.OpenAI) -> None:
    source = upload(client, [a_line("a")])
    mistakes: list[tuple[Callable[[], object], type[openai.APIStatusError], str | None]] = [
        (lambda: client.batches.retrieve("batch_none"), openai.NotFoundError, None),
        (lambda: client.batches.cancel("batch_none"), openai.NotFoundError, None),
        (lambda: client.files.retrieve("file-none"), openai.NotFoundError, None),
        (lambda: client.files.content("file-none"), openai.NotFoundError, None),
        (lambda: client.files.delete("file-none"), openai.NotFoundError, None),
        (lambda: client.batches.list(limit=101), openai.BadRequestError, "limit"),
        (
            lambda: create(client, source.id, endpoint="/v1/images/generations"),
            openai.BadRequestError,
            "endpoint",
        ),
        (
            lambda: create(client, source.id, completion_window="soon"),
            openai.BadRequestError,
            "completion_window",
        ),
        (lambda: create(client, "file-none"), openai.NotFoundError, None),
        (
            lambda: client.files.create(file=b"a", purpose="fine-tune"),
            openai.BadRequestError,
            "purpose",
        ),
        (
            client.with_options(api_key="sk-none").batches.list,
            openai.AuthenticationError,
            None,
        ),
    ]
    for ask, kind, param in mistakes:
        with pytest.raises(kind) as refused:
            ask()
        error = refused.value
        assert error.param == param
        assert error.response.headers["x-should-retry"] == "false"
        assert error.response.json()["error"].keys() == {"message", "type", "param", "code"}
    assert [one.id for one in client.files.list()] == [source.id]
    assert client.batches.list().data == []
    raw = client.files.with_raw_response.list(limit=1)
    assert raw.status_code == 200
    assert raw.headers["x-request-id"]


def upload(client: openai.OpenAI, content: list[bytes]) -> FileObject:
    """An uploaded input."""
    data = io.BytesIO(b"\n".join(content))
    return client.files.create(file=("in.jsonl", data), purpose="batch")


def create(client: openai.OpenAI, file_id: str, **fields: Any) -> Batch:
    """A batch of an input."""
    asked: dict[str, Any] = {"endpoint": ENDPOINT, "completion_window": "24h", **fields}
    return client.batches.create(input_file_id=file_id, **asked)


def until(client: openai.OpenAI, batch_id: str, holds: Callable[[Batch], object]) -> Batch:
    """Ask for a batch until it is so: as programs do that wait."""
    give_up_at_s = time.monotonic() + 40
    while not holds(batch := client.batches.retrieve(batch_id)):
        assert time.monotonic() < give_up_at_s, batch
        time.sleep(LOOK_S)
    return batch


def errors_of(client: openai.OpenAI, batch: Batch) -> Counter[str]:
    """How often each code stands in a batch's error file."""
    if not batch.error_file_id:
        return Counter()
    told = client.files.content(batch.error_file_id).text.splitlines()
    return Counter(orjson.loads(line)["error"]["code"] for line in told)


def check(client: openai.OpenAI, batch: Batch, code: str) -> None:
    """Each of MANY lines stands once: in the output, or in the errors with this code."""
    found: Counter[str] = Counter()
    for file_id in (batch.output_file_id, batch.error_file_id):
        if file_id:
            text = client.files.content(file_id).text
            found.update(orjson.loads(line)["custom_id"] for line in text.splitlines())
    assert found == Counter(f"id-{number}" for number in range(MANY))
    counts = batch.request_counts
    assert counts is not None
    assert 0 < counts.failed <= MANY
    assert errors_of(client, batch) == Counter({code: counts.failed})
