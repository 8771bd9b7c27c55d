"""Chat, completions, embeddings, responses over HTTP: a whole cluster in this process."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from broker.wire.codec import encode
from broker.wire.messages import Job, Kind, LaneOffer, Reason, TerminalRecord
from broker.wire.subjects import CONFIG_BUCKET, lane_offer_key
from producers.request import NESTING_MAX
from tests.builders import LANE
from tests.clusters import Cluster, a_chat, a_cluster
from tests.gateways import Front, a_front, a_gateway
from tests.responder import a_record, a_rejection
from worker_agent.models import ModelNames

ASKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": a_chat(),
    "/v1/completions": {"model": "tiny", "prompt": "hello", "max_tokens": 8},
    "/v1/embeddings": {"model": "tiny", "input": "hello"},
    "/v1/responses": {"model": "tiny", "input": "hello", "max_output_tokens": 8},
}
STREAMED = [path for path in ASKS if path != "/v1/embeddings"]


@asynccontextmanager
async def a_whole(
    folder: Path, *, cluster: dict[str, Any] | None = None, **fields: Any
) -> AsyncGenerator[tuple[Front, Cluster]]:
    """A gateway before a cluster with a modelled engine."""
    async with a_cluster(folder, **(cluster or {})) as whole:
        link = whole.bus.connection()
        async with a_gateway(link, **fields) as front:
            yield front, whole
        await link.close()


def text_of(answer: dict[str, Any]) -> str:
    """The text of an answer of any endpoint."""
    if "output" in answer:
        return "".join(part["text"] for item in answer["output"] for part in item["content"])
    if answer["object"] == "list":
        return str(answer["data"][0]["embedding"])
    choice = answer["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def a_completion(text: str) -> bytes:
    """A chat answer in one piece."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return orjson.dumps({"id": "x", "object": "chat.completion", "choices": [choice]})


def events_of(raw: bytes) -> list[tuple[str, Any]]:
    """The events of a stream: name and data."""
    found: list[tuple[str, Any]] = []
    for block in raw.decode().split("\n\n")[:-1]:
        if block.startswith(":"):
            continue
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        data = lines["data"]
        found.append((lines.get("event", ""), data if data == "[DONE]" else orjson.loads(data)))
    return found


def streamed_text(events: list[tuple[str, Any]]) -> str:
    """The text that a stream's pieces make."""
    text = ""
    for name, event in events:
        if name == "response.output_text.delta":
            text += event["delta"]
        for choice in event.get("choices", ()) if isinstance(event, dict) else ():
            text += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    return text


@pytest.mark.parametrize("path", ASKS)
async def test_an_answer_in_one_piece(tmp_path: Path, path: str) -> None:
    """The engine's own answer, and in headers what became of the job."""
    async with a_whole(tmp_path) as (front, cluster):
        status, answer, headers = await front.ask_all(path, ASKS[path])
        record = await cluster.record(headers["X-Inferlane-Job-Id"])
    assert status == 200, answer
    assert text_of(answer)
    assert record is not None
    assert record.body == orjson.dumps(answer)
    assert headers["X-Inferlane-Worker"] == "w1"
    assert int(headers["X-Inferlane-Queue-Ms"]) >= 0
    assert headers["X-Inferlane-Cached-Tokens"] == str(record.usage.cached_tokens)
    assert headers["X-Request-Id"] == record.request_id


@pytest.mark.parametrize("path", STREAMED)
async def test_an_answer_as_a_stream(tmp_path: Path, path: str) -> None:
    """Pieces as they come, that make the same text, and their end in the endpoint's own way."""
    async with a_whole(tmp_path) as (front, _):
        _, whole = await front.ask(path, ASKS[path])
        ask = {**ASKS[path], "stream": True}
        async with front.session.post(path, json=ask) as answer:
            assert answer.status == 200
            assert answer.content_type == "text/event-stream"
            assert answer.headers["X-Inferlane-Worker"] == "w1"
            assert answer.headers["X-Inferlane-Job-Id"]
            events = events_of(await answer.read())
    assert streamed_text(events) == text_of(whole)
    assert len(events) >= 2, "pieces, which a busy machine may join, and their end"
    if path == "/v1/responses":
        assert events[-1][0] == "response.completed"
        assert text_of(events[-1][1]["response"]) == text_of(whole)
    else:
        assert events[-1] == ("", "[DONE]")
        assert all("usage" not in event for _, event in events[:-1])


@pytest.mark.parametrize("path", STREAMED[:2])
async def test_usage_at_the_end_for_who_asked(tmp_path: Path, path: str) -> None:
    """`stream_options.include_usage`: the last event before the end has it."""
    ask = {**ASKS[path], "stream": True, "stream_options": {"include_usage": True}}
    async with a_whole(tmp_path) as (front, _), front.session.post(path, json=ask) as answer:
        events = events_of(await answer.read())
    assert events[-1] == ("", "[DONE]")
    assert events[-2][1]["choices"] == []
    assert events[-2][1]["usage"]["completion_tokens"] == 8


async def test_embeddings_come_in_one_piece_whatever_is_said(tmp_path: Path) -> None:
    """`stream` means nothing to them."""
    ask = {**ASKS["/v1/embeddings"], "stream": True}
    async with a_whole(tmp_path) as (front, _):
        status, answer = await front.ask("/v1/embeddings", ask)
    assert (status, answer["object"]) == (200, "list")


async def test_headers_make_the_job() -> None:
    """Band, deadline, session, ids and the key's name are the job's; the body goes untouched."""
    sent = {
        "X-Inferlane-Band": "standard",
        "X-Inferlane-Deadline": "5m",
        "X-Inferlane-Session": "s-1",
        "X-Inferlane-Job-Id": "job-7",
        "X-Request-Id": "r-7",
        "Content-Type": "application/json",
    }
    raw = b'{ "model":"tiny","messages":[{"role":"user","content":"hi"}],\n "frobnicate": [1.0] }'
    async with a_front() as (front, played):
        async with front.session.post("/v1/chat/completions", data=raw, headers=sent) as answer:
            assert answer.status == 200
            assert answer.headers["X-Inferlane-Job-Id"] == "job-7"
        (job,) = played.seen
    assert (job.id, job.band, job.session, job.request_id) == ("job-7", 2, "s-1", "r-7")
    assert job.api_key_name == "tester"
    assert job.deadline_at_s is not None
    assert job.deadline_at_s - job.submitted_at_s == pytest.approx(300.0)
    assert job.body == raw
    assert (job.stream, job.endpoint, job.lane) == (False, "/v1/chat/completions", LANE)


async def test_without_headers_the_key_decides() -> None:
    """Its lane and its band."""
    async with a_front() as (front, played):
        await front.ask("/v1/chat/completions", a_chat())
        (job,) = played.seen
    assert (job.lane, job.band, job.deadline_at_s, job.session) == (LANE, 1, None, "")


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"X-Inferlane-Band": "4"}, "X-Inferlane-Band"),
        ({"X-Inferlane-Band": "urgent"}, "X-Inferlane-Band"),
        ({"X-Inferlane-Band": ""}, "X-Inferlane-Band"),
        ({"X-Inferlane-Deadline": "soon"}, "X-Inferlane-Deadline"),
        ({"X-Inferlane-Deadline": "0"}, "X-Inferlane-Deadline"),
        ({"X-Inferlane-Deadline": "-1"}, "X-Inferlane-Deadline"),
        ({"X-Inferlane-Deadline": "nan"}, "X-Inferlane-Deadline"),
        ({"X-Inferlane-Deadline": "8d"}, "X-Inferlane-Deadline"),
        ({"X-Inferlane-Session": "x" * 257}, "X-Inferlane-Session"),
        ({"X-Inferlane-Session": "ü"}, "X-Inferlane-Session"),
        ({"X-Inferlane-Job-Id": "a.b"}, "X-Inferlane-Job-Id"),
        ({"X-Inferlane-Job-Id": ""}, "X-Inferlane-Job-Id"),
        ({"Idempotency-Key": ""}, "Idempotency-Key"),
        ({"Idempotency-Key": "x" * 257}, "Idempotency-Key"),
        ({"Idempotency-Key": "k", "X-Inferlane-Job-Id": "j"}, "X-Inferlane-Job-Id"),
    ],
)
async def test_headers_that_can_not_be(headers: dict[str, str], param: str) -> None:
    """400, which header it is, and no retry; nothing is submitted."""
    async with a_front() as (front, played):
        status, told, answered = await front.ask_all(
            "/v1/chat/completions", a_chat(), headers=headers
        )
        assert played.seen == []
    assert (status, told["error"]["param"]) == (400, param)
    assert answered["x-should-retry"] == "false"


CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        (CHAT, {"messages": [{}]}, "missing_required_parameter", "model"),
        (CHAT, {"model": 1, "messages": [{}]}, "invalid_type", "model"),
        (CHAT, {"model": "", "messages": [{}]}, "invalid_type", "model"),
        (CHAT, {"model": "tiny"}, "missing_required_parameter", "messages"),
        (CHAT, {"model": "tiny", "messages": []}, "invalid_type", "messages"),
        (CHAT, {"model": "tiny", "messages": "hi"}, "invalid_type", "messages"),
        (CHAT, {"model": "tiny", "messages": ["hi"]}, "invalid_type", "messages"),
        (CHAT, a_chat(stream="yes"), "invalid_type", "stream"),
        (CHAT, a_chat(stream=True, stream_options=1), "invalid_type", "stream_options"),
        ("/v1/completions", {"model": "tiny"}, "missing_required_parameter", "prompt"),
        ("/v1/completions", {"model": "tiny", "prompt": {}}, "invalid_type", "prompt"),
        ("/v1/embeddings", {"model": "tiny", "input": 1}, "invalid_type", "input"),
        ("/v1/responses", {"model": "tiny"}, "missing_required_parameter", "input"),
        (
            "/v1/responses",
            {"model": "tiny", "input": "x", "previous_response_id": "resp_1"},
            "previous_response_id_unsupported",
            "previous_response_id",
        ),
        (
            "/v1/responses",
            {"model": "tiny", "input": "x", "background": True},
            "background_unsupported",
            "background",
        ),
        (
            "/v1/responses",
            {"model": "tiny", "input": "x", "conversation": {"id": "c"}},
            "conversation_unsupported",
            "conversation",
        ),
    ],
)
async def test_bodies_that_no_engine_could_serve(
    path: str, body: dict[str, Any], code: str, param: str
) -> None:
    """400 with the field that is wrong, before a job is made."""
    async with a_front() as (front, played):
        status, told = await front.ask(path, body)
        assert played.seen == []
    assert (status, told["error"]["code"], told["error"]["param"]) == (400, code, param)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b"{" * 100_000,
        b'{"model":"tiny","messages":' + b"[" * 100_000,
        b'{"model":"tiny","messages":[{"x":' + b"[" * 300 + b"]" * 300 + b"}]}",
        b'{"model":"\\ud800","messages":[{}]}',
        b'{"model":"tiny","messages":[{}],"x":1e999}x',
    ],
    ids=["empty", "half", "list", "null", "text", "no text", "deep", "deeper", "254", "half rune",
         "more"],
)  # fmt: skip
async def test_bodies_that_are_no_json_object(raw: bytes) -> None:
    """400 whatever it is, nesting bombs too."""
    json = {"Content-Type": "application/json"}
    async with a_front() as (front, played):
        async with front.session.post(CHAT, data=raw, headers=json) as answer:
            assert answer.status == 400, await answer.text()
            told = (await answer.json())["error"]
            assert set(told) == {"message", "type", "param", "code"}
            assert told["code"] == "invalid_json", told
        assert played.seen == []


@pytest.mark.parametrize(("deeper", "status"), [(0, 200), (1, 400)])
async def test_how_deep_a_body_may_be(deeper: int, status: int) -> None:
    """NESTING_MAX levels, the body itself included."""
    levels = NESTING_MAX - 1 + deeper
    raw = orjson.dumps(a_chat())[:-1] + b',"x":' + b"[" * levels + b"]" * levels + b"}"
    json = {"Content-Type": "application/json"}
    async with (
        a_front() as (front, _),
        front.session.post(CHAT, data=raw, headers=json) as answer,
    ):
        assert answer.status == status, await answer.text()


async def test_many_brackets_are_not_deep() -> None:
    """A long conversation is wide."""
    messages = [{"role": "user", "content": "hi"}] * (2 * NESTING_MAX)
    async with a_front() as (front, _):
        assert (await front.ask(CHAT, {"model": "tiny", "messages": messages}))[0] == 200


async def test_a_model_that_is_not_offered() -> None:
    """404 at once, with those that are; also a name that no subject can carry."""
    async with a_front() as (front, _):
        for name in ("gpt-9", "x" * 300, "ü" * 60, "a b.*>"):
            status, told = await front.ask(CHAT, a_chat() | {"model": name})
            assert (status, told["error"]["code"]) == (404, "model_not_found")
            assert "there are: tiny" in told["error"]["message"]


async def test_a_lane_that_is_not_there() -> None:
    """A key of a lane that no broker serves: 404 with the lanes there are."""
    async with a_front() as (front, _):
        other = {"Authorization": "Bearer sk-bolt-1"}
        status, told = await front.ask(CHAT, a_chat(), headers=other)
    assert (status, told["error"]["code"]) == (404, "model_not_found")
    assert "no lane 'bolt'" in told["error"]["message"]


async def test_a_band_that_is_not_offered() -> None:
    """400 with those that are."""
    async with a_front() as (front, played):
        await front.ask(CHAT, a_chat())
        client = await front.gateway.lanes.of(LANE)
        assert client.offer is not None
        narrow = type(client.offer)(lane=LANE, models=("tiny",), bands=(2, 3))
        client._door._offer = narrow
        status, told = await front.ask(CHAT, a_chat())
        assert len(played.seen) == 1
    assert (status, told["error"]["param"]) == (400, "X-Inferlane-Band")
    assert "it takes: 2, 3" in told["error"]["message"]


async def test_a_model_that_is_new_is_found() -> None:
    """What a lane offers is read anew before a model is refused."""
    async with a_front(responder={"models": ("tiny", "big")}) as (front, _):
        client = await front.gateway.lanes.of(LANE)
        assert client.offer is not None
        client._door._offer = type(client.offer)(lane=LANE, models=("tiny",))
        status, _ = await front.ask(CHAT, a_chat() | {"model": "big"})
    assert status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reason", "status", "pause"),
    [
        (Reason.QUEUE_FULL, 429, "2500"),
        (Reason.NO_WORKERS, 503, "2500"),
        (Reason.DEADLINE_INFEASIBLE, 408, None),
    ],
)
async def test_a_rejection(reason: Reason, status: int, pause: str | None, stream: bool) -> None:
    """The broker's reason is the code, its wait the pause; a stream is refused the same way."""

    def reject(job: Job) -> TerminalRecord:
        return a_rejection(job, reason, retry_after_s=2.5)

    async with a_front() as (front, played):
        played.reject = reject
        found, told, headers = await front.ask_all(CHAT, a_chat(stream=stream))
    assert (found, told["error"]["code"]) == (status, reason)
    assert headers.get("retry-after-ms") == pause
    assert headers["X-Inferlane-Job-Id"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_engines_refusal_is_passed_on(tmp_path: Path, stream: bool) -> None:
    """Its status, its code, its words; the job is not tried again."""
    async with a_whole(tmp_path) as (front, _):
        ask = a_chat(max_tokens=999_999, stream=stream)
        status, told, headers = await front.ask_all(CHAT, ask)
    assert (status, told["error"]["code"]) == (400, "context_length_exceeded")
    assert headers["x-should-retry"] == "false"


async def test_a_full_queue() -> None:
    """429 with the queue's own wait."""
    async with a_front(responder={"jobs_max": 1, "window": 1}) as (front, played):
        played.may_run.clear()
        first = asyncio.create_task(front.ask(CHAT, a_chat()))
        await played.started.wait()
        status, told, headers = await front.ask_all(CHAT, a_chat())
        assert (status, told["error"]["code"]) == (429, "queue_full")
        assert int(headers["retry-after-ms"]) > 0
        played.may_run.set()
        assert (await first)[0] == 200


async def test_an_answer_that_takes_too_long() -> None:
    """`answer_s_max`: 408 with the job's id; the job is given up."""
    async with a_front(answer_s_max=0.05) as (front, played):
        played.may_run.clear()
        status, told, headers = await front.ask_all(CHAT, a_chat())
        assert (status, told["error"]["code"]) == (408, "answer_timeout")
        job_id = headers.get("X-Inferlane-Job-Id") or played.seen[0].id
        while job_id not in played.cancelled:
            await asyncio.sleep(0)
        played.may_run.set()


async def test_the_cluster_is_away() -> None:
    """503, after the client library has tried for as long as it may."""
    async with a_front() as (front, _):
        assert (await front.ask(CHAT, a_chat()))[0] == 200
        link = front.gateway.bus
        link.disconnect()  # pyright: ignore[reportAttributeAccessIssue]
        status, told, headers = await front.ask_all(CHAT, a_chat())
        assert (status, told["error"]["code"]) == (503, "unreachable")
        assert headers["retry-after-ms"] == "1000"
        link.reconnect()  # pyright: ignore[reportAttributeAccessIssue]
        assert (await front.ask(CHAT, a_chat()))[0] == 200


async def test_a_record_of_another_kind() -> None:
    """A job that failed for the cluster's own reasons: 503, and no retry of what was retried."""

    def fail(job: Job) -> TerminalRecord:
        return a_record(job, kind=Kind.DEAD_LETTERED, reason=Reason.WORKER_LOST, status_code=0)

    async with a_front() as (front, played):
        played.answer = fail
        status, told, headers = await front.ask_all(CHAT, a_chat())
    assert (status, told["error"]["code"]) == (503, "worker_lost")
    assert headers["x-should-retry"] == "false"


async def test_models() -> None:
    """What the lane offers; one of them by its name."""
    model = {"id": "tiny", "object": "model", "created": 0, "owned_by": "inferlane"}
    slashed = {**model, "id": "org/Big:70b"}
    async with a_front(responder={"models": ("tiny", "org/Big:70b")}) as (front, _):
        assert await front.ask("/v1/models") == (
            200,
            {"object": "list", "data": [model, slashed]},
        )
        assert await front.ask("/v1/models/tiny") == (200, model)
        assert await front.ask("/v1/models/org/Big:70b") == (200, slashed)
        assert await front.ask("/v1/models/org%2FBig%3A70b") == (200, slashed)
        status, told = await front.ask("/v1/models/none")
    assert (status, told["error"]["code"]) == (404, "model_not_found")


async def test_an_alias_of_an_adapter_from_the_list_to_the_engine() -> None:
    """It is listed, its job is the model's with the adapter, and the engine is asked for that."""
    offer = LaneOffer(
        lane=LANE,
        models=("tiny",),
        aliases={"german": "tiny-de", "mini": "tiny", "elsewhere": "big-de"},
        adapters={"tiny": ("tiny-de",)},
    )
    async with a_front() as (front, played):
        await played.bus.kv_put(CONFIG_BUCKET, lane_offer_key(LANE), encode(offer))
        _, told = await front.ask("/v1/models")
        assert [one["id"] for one in told["data"]] == ["tiny", "german", "mini", "tiny-de"]
        assert (await front.ask("/v1/models/german"))[0] == 200
        assert (await front.ask("/v1/models/elsewhere"))[0] == 404
        assert (await front.ask(CHAT, a_chat(model="german")))[0] == 200
        (job,) = played.seen
    assert (job.model, job.adapter) == ("tiny", "tiny-de")
    assert b'"tiny-de"' in ModelNames({}).body(job)
