"""The Batch API over HTTP, asked by the unmodified OpenAI client."""

import asyncio
import io
from collections.abc import AsyncIterator
from typing import Any, cast

import aiohttp
import openai
import orjson
import pytest

from broker.bus.topology import Bounds
from producers.batches.config import BatchesConfig
from tests.batches import a_line, lines
from tests.builders import LANE
from tests.gateways import KEY
from tests.shops import ENDPOINT, a_shop, uploaded


async def polled(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    """The batch once it has ended, asked for again and again as users do."""
    async with asyncio.timeout(20):
        while (batch := await client.batches.retrieve(batch_id)).status not in (
            "completed",
            "failed",
            "expired",
            "cancelled",
        ):
            await asyncio.sleep(0.02)
    return batch


async def test_a_batch_from_upload_to_results() -> None:
    """As in everybody's first script; results are the engine's answers, one line each."""
    async with a_shop() as (client, place, _):
        file_id = await uploaded(client, lines(40))
        batch = await client.batches.create(
            input_file_id=file_id,
            endpoint=ENDPOINT,
            completion_window="24h",
            metadata={"run": "7"},
        )
        assert (batch.status, batch.object, batch.input_file_id) == ("validating", "batch", file_id)
        assert batch.errors is None
        assert batch.expires_at == batch.created_at + 86_400
        ended = await polled(client, batch.id)
        assert (ended.status, ended.error_file_id) == ("completed", None)
        assert ended.request_counts is not None
        assert ended.request_counts.to_dict() == {"total": 40, "completed": 40, "failed": 0}
        assert ended.metadata is not None
        assert ended.metadata["run"] == "7"
        assert ended.usage is not None
        assert ended.usage.total_tokens == ended.usage.input_tokens + ended.usage.output_tokens > 0
        assert ended.created_at <= ended.in_progress_at <= ended.completed_at
        content = await client.files.content(ended.output_file_id)
        assert content.text.count("\n") == 40
        await place.check(await place.shelf.get(batch.id), (f"id-{number}" for number in range(40)))
        output = await client.files.retrieve(ended.output_file_id)
        assert (output.purpose, output.status, output.bytes) == (
            "batch_output",
            "processed",
            len(content.content),
        )
        assert output.expires_at is not None
        assert (await client.files.wait_for_processing(output.id)).id == output.id


async def test_an_unusable_input_fails_later_with_lines() -> None:
    """Create answers `validating`; the errors come with the state."""
    async with a_shop() as (client, _, _):
        file_id = await uploaded(client, [b"{", a_line(url="/v1/embeddings")])
        batch = await client.batches.create(
            input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h"
        )
        ended = await polled(client, batch.id)
        assert ended.status == "failed"
        assert [(one.code, one.line, one.param) for one in ended.errors.data] == [
            ("invalid_json_line", 1, None),
            ("url_mismatch", 2, None),
        ]


async def test_cancel_is_idempotent() -> None:
    """At once `cancelling`, later `cancelled`; again changes nothing."""
    async with a_shop() as (client, place, _):
        place.responder.run_s = 0.02
        file_id = await uploaded(client, lines(200))
        batch = await client.batches.create(
            input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h"
        )
        await place.when(batch.id, lambda one: one.counts.completed > 0)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        ended = await polled(client, batch.id)
        assert ended.status == "cancelled"
        assert (await client.batches.cancel(batch.id)).status == "cancelled"
        await place.check(await place.shelf.get(batch.id), (f"id-{n}" for n in range(200)))
        text = (await client.files.content(ended.error_file_id)).text
        assert text.count("batch_cancelled") >= ended.request_counts.failed


async def test_lists_have_cursors() -> None:
    """The client's own paging sees each batch and file once, newest first."""
    async with a_shop(batches=BatchesConfig(batches_running_max=0)) as (client, _, _):
        file_id = await uploaded(client, lines(1))
        made = [
            await client.batches.create(
                input_file_id=file_id, endpoint=ENDPOINT, completion_window=cast("Any", f"{hours}h")
            )
            for hours in range(1, 8)
        ]
        found = [batch.id async for batch in client.batches.list(limit=3)]
        assert found == [batch.id for batch in reversed(made)]
        first = await client.batches.list(limit=3)
        assert (first.has_more, len(first.data)) == (True, 3)
        other = await uploaded(client, lines(1))
        assert [one.id async for one in client.files.list(limit=1)] == [other, file_id]
        assert [one.id async for one in client.files.list(order="asc")] == [file_id, other]
        assert [one.id async for one in client.files.list(purpose="batch_output")] == []
        with pytest.raises(openai.BadRequestError) as error:
            await client.batches.list(after="batch_none")
        assert error.value.param == "after"
        for limit in (0, 101):
            with pytest.raises(openai.BadRequestError):
                await client.batches.list(limit=limit)


async def test_a_repeated_request_makes_one_batch() -> None:
    """Its answer was lost, and the client sends it again; a new request is a new batch."""
    async with a_shop(batches=BatchesConfig(batches_running_max=0)) as (client, _, _):
        file_id = await uploaded(client, lines(1))

        async def create(**headers: str) -> str:
            batch = await client.batches.create(
                input_file_id=file_id,
                endpoint=ENDPOINT,
                completion_window="24h",
                extra_headers={name.replace("_", "-"): value for name, value in headers.items()},
            )
            return batch.id

        first = await create()
        assert await create(x_stainless_retry_count="1") == first
        second = await create()
        assert second != first
        assert await create(x_stainless_retry_count="2") == second
        keyed = await create(Idempotency_Key="k1")
        assert keyed not in (first, second)
        assert await create(Idempotency_Key="k1") == keyed
        assert await create(Idempotency_Key="k2") != keyed
        with pytest.raises(openai.BadRequestError):
            await client.batches.create(
                input_file_id=file_id,
                endpoint="/v1/embeddings",
                completion_window="24h",
                extra_headers={"Idempotency-Key": "k1"},
            )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("endpoint", "/v1/images"),
        ("completion_window", "soon"),
        ("completion_window", "31d"),
        ("completion_window", 5),
        ("metadata", {f"k{number}": "" for number in range(17)}),
        ("metadata", {"k": "v" * 513}),
        ("metadata", {"k" * 65: "v"}),
        ("output_expires_after", {"anchor": "created_at", "seconds": 60}),
        ("output_expires_after", {"anchor": "now", "seconds": 3600}),
    ],
)
async def test_what_can_not_be_asked_for(field: str, value: object) -> None:
    """400 with the parameter at fault, and no other try."""
    async with a_shop() as (client, _, _):
        file_id = await uploaded(client, lines(1))
        asked = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
        with pytest.raises(openai.BadRequestError) as error:
            await client.post("/batches", body={**asked, field: value}, cast_to=object)
        assert error.value.param == field
        assert error.value.response.headers["x-should-retry"] == "false"


async def test_what_is_not_there() -> None:
    """404, also for another lane's."""
    async with a_shop() as (client, _, front):
        file_id = await uploaded(client, lines(1))
        batch = await client.batches.create(
            input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h"
        )
        async with openai.AsyncOpenAI(api_key="sk-bolt-1", base_url=f"{front.url}/v1") as other:
            for asking in (
                other.files.retrieve(file_id),
                other.files.content(file_id),
                other.files.delete(file_id),
                other.batches.retrieve(batch.id),
                other.batches.cancel(batch.id),
                other.batches.create(
                    input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h"
                ),
                client.files.retrieve("file-none"),
                client.batches.retrieve("a b.c>"),
            ):
                with pytest.raises(openai.NotFoundError):
                    await asking
            assert (await other.files.list()).data == []
            assert (await other.batches.list()).data == []


async def test_files_are_deleted_unless_a_batch_needs_them() -> None:
    """409 while it runs; deleted once, then not there."""
    async with a_shop() as (client, place, _):
        place.responder.may_run.clear()
        file_id = await uploaded(client, lines(3))
        batch = await client.batches.create(
            input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h"
        )
        with pytest.raises(openai.ConflictError):
            await client.with_options(max_retries=0).files.delete(file_id)
        place.responder.may_run.set()
        await polled(client, batch.id)
        assert (await client.files.delete(file_id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.delete(file_id)


async def test_a_file_expires_when_it_was_asked_to() -> None:
    """An hour to thirty days."""
    async with a_shop() as (client, _, _):
        data = io.BytesIO(b"x")
        made = await client.files.create(
            file=("a.jsonl", data),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        assert (await client.files.retrieve(made.id)).expires_at == made.created_at + 3600
        with pytest.raises(openai.BadRequestError) as error:
            await client.files.create(
                file=("a.jsonl", io.BytesIO(b"x")),
                purpose="batch",
                expires_after={"anchor": "created_at", "seconds": 3599},
            )
        assert error.value.param == "expires_after"
        assert len((await client.files.list()).data) == 1


@pytest.mark.parametrize(
    ("declared_bytes", "code", "told"),
    [
        (5_000_000, "files_full", ("4,934,464 bytes", "room for 4,000,000", "files_bytes_max")),
        (9_000_000, "file_too_large", ("6,000,000", "file_bytes_max")),
    ],
)
async def test_an_upload_that_can_not_fit_is_refused_before_it_is_sent(
    declared_bytes: int, code: str, told: tuple[str, ...]
) -> None:
    """By what it says of its length: not half-way through gigabytes."""
    bounds = Bounds(files_bytes_max=4_000_000)
    large = BatchesConfig(batches_running_max=0, file_bytes_max=6_000_000)
    async with a_shop(batches=large, bounds=bounds) as (_, place, front):
        host, port = front.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            f"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
            "Content-Type: multipart/form-data; boundary=b\r\n"
            f"Content-Length: {declared_bytes}\r\n\r\n--b\r\n".encode()
        )
        async with asyncio.timeout(20):
            assert b" 413 " in await reader.readline()
            await reader.readuntil(b"\r\n\r\n")
            error = orjson.loads(await reader.readuntil(b"}}"))["error"]
        writer.close()
        assert (error["code"], error["param"]) == (code, "file")
        assert all(words in error["message"] for words in told), error
        assert not await place.files.all()


async def test_an_upload_that_finds_no_room_as_it_comes() -> None:
    """In pieces it says no length: the chunk that doesn't fit ends it, and nothing stays."""
    bounds = Bounds(files_bytes_max=1_000_000)
    async with a_shop(bounds=bounds) as (_, place, front):

        async def body() -> AsyncIterator[bytes]:
            yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
            for _ in range(20):
                yield b"x" * 100_000
            yield b"\r\n--b--\r\n"

        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        async with front.session.post("/v1/files", data=body(), headers=headers) as answer:
            error = (await answer.json())["error"]
        assert (answer.status, error["code"]) == (413, "files_full")
        assert "files_bytes_max" in error["message"]
        assert not (await place.bus.stream_state(f"FILES_{LANE}")).messages


async def test_uploads_that_are_none() -> None:
    """Each is told what is wrong, and leaves no file."""
    small = BatchesConfig(batches_running_max=0, file_bytes_max=1000)
    async with a_shop(batches=small) as (client, place, front):
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.files.create(file=("a", io.BytesIO(b"x")), purpose="vision")
        assert wrong.value.param == "purpose"
        with pytest.raises(openai.APIStatusError) as large:
            await client.files.create(file=("a", io.BytesIO(b"x" * 1001)), purpose="batch")
        assert large.value.status_code == 413

        async def status(data: object, **headers: str) -> int:
            async with front.session.post("/v1/files", data=data, headers=headers) as answer:
                assert set((await answer.json())["error"]) == {"message", "type", "param", "code"}
                return answer.status

        assert await status(b"{}", **{"Content-Type": "application/json"}) == 415
        multipart = "multipart/form-data; boundary=x"
        assert await status(b"garbage", **{"Content-Type": multipart}) == 400
        assert await status(b"", **{"Content-Type": "multipart/form-data"}) == 400
        assert (
            await status(aiohttp.FormData({"purpose": "batch"}, default_to_multipart=True)) == 400
        )
        fields = [(f"f{number}", "x") for number in range(20)]
        many = aiohttp.FormData(fields, default_to_multipart=True)
        assert await status(many) == 400
        twice = aiohttp.FormData({"purpose": "batch"})
        for name in ("a", "b"):
            twice.add_field("file", b"x", filename=name)
        assert await status(twice) == 400
        half = (
            b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
            b"begun and never ended"
        )
        assert await status(half, **{"Content-Type": multipart}) == 400
        assert await place.files.all() == []
        assert (await place.bus.stream_state(f"FILES_{LANE}")).messages == 0


async def test_a_name_in_an_old_encoding() -> None:
    """The bytes of its name are no UTF-8, as curl sends them there: its content is what counts."""
    async with a_shop() as (_, _, front):
        body = (
            b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="caf\xe9"\r\n\r\n'
            b"line\r\n--b--\r\n"
        )
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        async with front.session.post("/v1/files", data=body, headers=headers) as answer:
            made = await answer.json()
        assert (answer.status, made.get("filename"), made.get("bytes")) == (200, "caf?", 4), made


async def test_fields_may_follow_the_file() -> None:
    """As some clients send them."""
    async with a_shop() as (client, _, front):
        form = aiohttp.FormData()
        form.add_field("file", b"line\n", filename="late.jsonl")
        form.add_field("purpose", "batch")
        async with front.session.post("/v1/files", data=form) as answer:
            made = await answer.json()
        assert (answer.status, made["filename"], made["bytes"]) == (200, "late.jsonl", 5)
        assert (await client.files.content(made["id"])).content == b"line\n"


async def test_a_running_batch_tells_how_long_it_takes() -> None:
    """Once its lane has shown a pace: at creation, in words and in numbers."""
    async with a_shop() as (client, _, _):
        file_id = await uploaded(client, lines(20))
        first = await client.batches.create(
            input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h"
        )
        assert first.metadata == {}
        await polled(client, first.id)
        second = await client.batches.create(
            input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h"
        )
        assert second.metadata is not None
        assert second.metadata["inferlane_takes"].startswith("at today's capacity this takes ")
        assert float(second.metadata["inferlane_takes_s"]) < 60
        assert second.metadata["inferlane_miss_chance"] == "0.00"
