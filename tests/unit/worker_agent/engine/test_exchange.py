"""What is sent to an engine for a job, and what each kind of reply means."""

from typing import Any

import orjson
import pytest

from broker.wire.messages import Reason, Usage
from worker_agent.engine import exchange as exchange_module
from worker_agent.engine.base import (
    DETAIL_CHARS_MAX,
    AnswerTooLarge,
    Chunk,
    EngineBusy,
    EngineError,
    EngineFailed,
    EngineGarbage,
    EngineRefused,
    EngineRequest,
)
from worker_agent.engine.door import LOCATION_CHARS_MAX, door_advice
from worker_agent.engine.exchange import Exchange, error_for, open_exchange


def a_request(body: Any = None, **fields: Any) -> EngineRequest:
    """A chat whose caller reads along, with a field that nobody knows."""
    given: dict[str, Any] = {"model": "m", "messages": [], "seed": 2**63, "x_new": [1.5]}
    packed = body if isinstance(body, bytes) else orjson.dumps({**given, **(body or {})})
    defaults: dict[str, Any] = {
        "request_id": "r1",
        "endpoint": "/v1/chat/completions",
        "body": packed,
        "stream_to_client": True,
        "prompt_tokens": 30,
    }
    return EngineRequest(**{**defaults, **fields})


def sent(body: Any = None, **fields: Any) -> dict[str, Any]:
    """The body that goes to the engine."""
    return orjson.loads(open_exchange(a_request(body, **fields)).body)


def a_chunk(*, usage: Any = None, **choice: Any) -> bytes:
    """A chunk of one choice, or of none when it has a usage."""
    choices = [] if usage else [{"index": 0, "delta": {}, "finish_reason": None, **choice}]
    return orjson.dumps({"id": "c", "choices": choices, "usage": usage})


USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 16},
}


def test_only_the_stream_fields_are_set() -> None:
    """Every field of the caller goes through as it is, the unknown ones too."""
    assert sent() == {
        "model": "m",
        "messages": [],
        "seed": 2**63,
        "x_new": [1.5],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize("streams", [True, False])
def test_the_callers_numbers_stay_as_he_wrote_them(streams: bool) -> None:
    """One beyond 64 bits became a float on the way: another seed, another id in a tool's call."""
    body = (
        b'{"model": "m", "messages": [], "seed": 18446744073709551616, "t": 1.10, "stream": false'
    )
    body += b"}" if streams else b', "best_of": 2}'
    for endpoint in ("/v1/chat/completions", "/v1/responses"):
        request = a_request(body, endpoint=endpoint, stream_to_client=False)
        made = open_exchange(request).body
        assert b'"seed":18446744073709551616,"t":1.10,' in made
        assert orjson.loads(made)["stream"] is streams


def test_other_stream_options_stay() -> None:
    """Of the caller's stream options only include_usage is set."""
    options = {"include_usage": False, "continuous_usage_stats": True}
    assert sent({"stream_options": options})["stream_options"] == {
        "include_usage": True,
        "continuous_usage_stats": True,
    }


def test_stream_is_asked_for_without_a_reader() -> None:
    """Also for a caller who wants the answer whole: a stall shows only in a stream."""
    assert sent({"stream": False}, stream_to_client=False)["stream"] is True


def test_responses_stream_without_stream_options() -> None:
    """/v1/responses knows no stream options: its last event has the usage."""
    assert "stream_options" not in sent(endpoint="/v1/responses")
    assert sent(endpoint="/v1/responses")["stream"] is True


def test_embeddings_go_through_untouched() -> None:
    """Where nothing streams, the body is the caller's to the byte."""
    request = a_request(b'{"model":  "m", "input": "x"}', endpoint="/v1/embeddings")
    assert open_exchange(request).body == request.body
    assert open_exchange(request).assembly is None


@pytest.mark.parametrize("field", [{"best_of": 3}, {"use_beam_search": True}])
def test_what_engines_refuse_to_stream_goes_in_one_piece(field: dict[str, Any]) -> None:
    """A request that can't be streamed is not, as long as its caller doesn't insist."""
    opened = open_exchange(a_request({**field, "stream": True}, stream_to_client=False))
    assert opened.assembly is None
    assert orjson.loads(opened.body)["stream"] is False
    assert open_exchange(a_request(field)).assembly is not None


@pytest.mark.parametrize("body", [b"{", b"[]", b"null", b"\xff"])
def test_body_that_is_no_object_is_refused(body: bytes) -> None:
    """A job without a JSON object is its own error, told as an engine would."""
    with pytest.raises(EngineRefused) as raised:
        open_exchange(a_request(body))
    assert raised.value.status_code == 400
    assert orjson.loads(raised.value.body)["error"]["code"] == "invalid_json"


NESTED = b"[" * 300 + b"]" * 300
"""Deep enough to be read and not to be written again."""


def test_nesting_that_cannot_be_written_is_whose_it_is() -> None:
    """A caller's is his own error, at once, and no worker's fault; an engine's is garbage."""
    with pytest.raises(EngineRefused, match="nested too deep"):
        open_exchange(a_request(b'{"model": "m", "tools": %s}' % NESTED))
    opened = open_exchange(a_request(b"{}"))
    delta = b'{"index": 0, "delta": {"x": %s}, "finish_reason": "stop"}' % NESTED
    opened.chunk(b'{"choices": [%s]}' % delta)
    with pytest.raises(EngineGarbage, match="can't be written"):
        opened.streamed(200)
    error = error_for(500, b'{"error": %s}' % NESTED)
    assert error.detail.startswith('HTTP 500: {"error": [[[')


@pytest.mark.parametrize(
    "endpoint", ["/v1/load_lora_adapter", "@evil.example/", "//evil.example", "/v1/../metrics", ""]
)
def test_endpoint_that_steers_the_engine_is_refused(endpoint: str) -> None:
    """Only endpoints that generate are reachable through a job."""
    with pytest.raises(EngineRefused, match="is not served"):
        open_exchange(a_request(endpoint=endpoint))


def fed(opened: Exchange, *events: bytes) -> list[Chunk]:
    """The chunks that these events make."""
    return [opened.chunk(event) for event in events]


def test_stream_to_a_reader() -> None:
    """Each event goes on untouched, with the tokens so far; the engine's count wins at the end."""
    opened = open_exchange(a_request({"stream_options": {"include_usage": True}}))
    events = (
        a_chunk(delta={"role": "assistant"}),
        a_chunk(delta={"content": "a"}),
        a_chunk(finish_reason="stop"),
        a_chunk(usage=USAGE),
    )
    assert fed(opened, *events) == [
        Chunk(data=events[0], output_tokens=0),
        Chunk(data=events[1], output_tokens=1),
        Chunk(data=events[2], output_tokens=1),
        Chunk(data=events[3], output_tokens=2, cached_tokens=16),
    ]
    completed = opened.streamed(200)
    assert (completed.usage, completed.cached_tokens) == (Usage(20, 16, 2), 16)
    assert orjson.loads(completed.body)["choices"][0]["message"]["content"] == "a"


@pytest.mark.parametrize("told", [0, -1, 2**32 - 1, None])
def test_a_count_that_stays_behind_hides_no_progress(told: int | None) -> None:
    """An engine that reports its usage with each event, and no tokens until the end, was taken
    for a stalled one.
    """
    opened = open_exchange(a_request())
    usage = {"prompt_tokens": 20, "completion_tokens": told}
    chunks = [*(a_chunk(delta={"content": "a"}) for _ in range(3)), a_chunk(finish_reason="stop")]
    events = [orjson.dumps({**orjson.loads(chunk), "usage": usage}) for chunk in chunks]
    assert [chunk.output_tokens for chunk in fed(opened, *events)] == [1, 2, 3, 3]
    assert opened.streamed(200).usage == Usage(20, 0, told if told == 0 else 3)


def test_usage_report_is_kept_from_a_caller_who_did_not_ask() -> None:
    """The report that only the agent wanted is progress without data."""
    opened = open_exchange(a_request())
    first, report = fed(opened, a_chunk(delta={"content": "a"}), a_chunk(usage=USAGE))
    assert first.data
    assert report == Chunk(data=b"", output_tokens=2, cached_tokens=16)


def test_chunks_have_no_data_without_a_reader() -> None:
    """A caller who doesn't stream gets nothing on the way, and the agent sees progress."""
    opened = open_exchange(a_request(stream_to_client=False))
    assert fed(opened, a_chunk(delta={"content": "a"})) == [Chunk(output_tokens=1)]


def test_answer_without_usage_is_counted() -> None:
    """Without a usage the deltas were counted, and the cache's part is unknown."""
    opened = open_exchange(a_request())
    fed(opened, a_chunk(delta={"content": "a"}, finish_reason="stop"))
    completed = opened.streamed(200)
    assert (completed.usage, completed.cached_tokens) == (Usage(30, 0, 1), None)


@pytest.mark.parametrize(
    ("event", "kind", "words"),
    [
        (b'{"choices": [', EngineGarbage, "broken JSON"),
        (b"[1]", EngineGarbage, "no JSON object"),
        (b'{"error": {"message": "cuda"}}', EngineFailed, "cuda"),
        (b'{"error": "cuda"}', EngineFailed, "cuda"),
        (b'{"error": {"message": "too long", "code": 400}}', EngineRefused, "too long"),
        (b'{"error": {"message": "slow down", "code": 429}}', EngineBusy, "slow down"),
        (b'{"error": {"message": "cuda", "code": 500}}', EngineFailed, "cuda"),
        (b'{"error": {"message": "odd", "code": 7}}', EngineFailed, "odd"),
    ],
)
def test_event_that_is_no_chunk(event: bytes, kind: type[EngineError], words: str) -> None:
    """Broken JSON is garbage; an error in mid-stream is told by its own code."""
    with pytest.raises(kind, match=words) as raised:
        open_exchange(a_request()).chunk(event)
    assert type(raised.value) is kind


@pytest.mark.parametrize(
    ("status_code", "kind", "reason", "retriable"),
    [
        (400, EngineRefused, Reason.ENGINE_REFUSED, False),
        (404, EngineRefused, Reason.ENGINE_REFUSED, False),
        (413, EngineRefused, Reason.ENGINE_REFUSED, False),
        (422, EngineRefused, Reason.ENGINE_REFUSED, False),
        (501, EngineRefused, Reason.ENGINE_REFUSED, False),
        (408, EngineBusy, Reason.ENGINE_FAILED, True),
        (429, EngineBusy, Reason.ENGINE_FAILED, True),
        (401, EngineFailed, Reason.ENGINE_FAILED, True),
        (403, EngineFailed, Reason.ENGINE_FAILED, True),
        (405, EngineFailed, Reason.ENGINE_FAILED, True),
        (500, EngineFailed, Reason.ENGINE_FAILED, True),
        (503, EngineFailed, Reason.ENGINE_FAILED, True),
        (599, EngineFailed, Reason.ENGINE_FAILED, True),
        (307, EngineGarbage, Reason.ENGINE_GARBAGE, True),
        (600, EngineGarbage, Reason.ENGINE_GARBAGE, True),
    ],
)
def test_status_codes(
    status_code: int, kind: type[EngineError], reason: Reason, retriable: bool
) -> None:
    """4xx is the job's own error; busy and a closed door are not; 5xx is the engine's."""
    error = error_for(status_code, b'{"error": {"message": "why"}}')
    assert type(error) is kind
    assert (error.reason, error.retriable) == (reason, retriable)
    assert error.status_code == status_code
    assert error.detail.startswith(f"HTTP {status_code}")
    assert error.detail.endswith(": why")


@pytest.mark.parametrize(
    ("status_code", "location", "told"),
    [
        (302, "https://sso.example/login?token=x", "HTTP 302 to https://sso.example/login, which"),
        (302, "http://me:word@[::1]:81/x", "HTTP 302 to http://[::1]:81/x, which"),
        (307, "/v1/chat/completions/", "HTTP 307 to /v1/chat/completions/, which is not followed"),
        (302, "http://[", "HTTP 302, which is not followed"),
        (302, "", "give the engine's own address as base_url"),
        (401, "", "give its key as api_key in [worker]"),
        (403, "", "give its key as api_key in [worker]"),
        (407, "", "a proxy wants a password"),
        (405, "", "is base_url an engine's address?"),
    ],
)
def test_an_answer_at_the_wrong_door_says_what_to_set(
    status_code: int, location: str, told: str
) -> None:
    """Where a redirect points, and the setting to mend; nothing secret, no colon before nothing."""
    detail = error_for(status_code, b" \n", location=location).detail
    assert told in detail
    assert not detail.rstrip().endswith(":")
    assert "token" not in detail
    assert "word@" not in detail


def test_where_a_redirect_points_is_cut() -> None:
    """LOCATION_CHARS_MAX, and what can't be printed is left out."""
    detail = door_advice(302, location="http://h/\x1b" + "x" * 1000)
    assert "\x1b" not in detail
    assert f" to http://h/{'x' * (LOCATION_CHARS_MAX - len('http://h/'))}, which" in detail


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b'{"error": {"message": "why", "code": 1}}', "why"),
        (b'{"error": "why"}', "why"),
        (b'{"object": "error", "message": "why"}', "why"),
        (b'{"detail": [{"msg": "why"}]}', '[{"msg":"why"}]'),
        (b"<h1>why</h1>", "<h1>why</h1>"),
        (b"", ""),
    ],
)
def test_error_message_is_found(body: bytes, detail: str) -> None:
    """Each engine puts its words elsewhere; people read them either way."""
    assert error_for(400, body).detail == "HTTP 400" + (f": {detail}" if detail else "")


def test_refusal_passes_on_words_that_clients_can_read() -> None:
    """The engine's own JSON goes on as it is; anything else is put in OpenAI's form."""
    own = b'{"error": {"message": "why"}, "n_ctx": 4096}'
    assert error_for(400, own).body == own
    for body in (b"<h1>why</h1>", b"[]"):
        told = orjson.loads(error_for(404, body).body)
        assert set(told["error"]) == {"message", "type", "param", "code"}


def test_detail_is_bounded() -> None:
    """An error text is cut at what fits a record."""
    assert len(EngineFailed("x" * 10_000).detail) == DETAIL_CHARS_MAX


def test_answer_in_one_piece() -> None:
    """An unstreamed answer is passed on to the byte."""
    body = b'{"data":  [], "usage": {"prompt_tokens": 5, "total_tokens": 5}}'
    opened = open_exchange(a_request(endpoint="/v1/embeddings"))
    completed = opened.in_one_piece(200, "application/json", body)
    assert (completed.body, completed.usage) == (body, Usage(5, 0, 0))


@pytest.mark.parametrize(
    ("content_type", "body", "words"),
    [
        ("text/html", b"<html>", "text/html"),
        ("application/json", b'{"a"', "broken JSON"),
        ("application/json", b"[]", "no JSON object"),
        ("application/octet-stream", b"{}", "application/octet-stream"),
    ],
)
def test_piece_that_is_no_answer(content_type: str, body: bytes, words: str) -> None:
    """A success of the wrong type or shape is garbage."""
    opened = open_exchange(a_request(endpoint="/v1/embeddings"))
    with pytest.raises(EngineGarbage, match=words):
        opened.in_one_piece(200, content_type, body)


def test_unstreamed_answer_to_a_reader_is_garbage() -> None:
    """One piece is good enough for a caller who doesn't read along, and only for him."""
    body = b'{"choices": []}'
    quiet = open_exchange(a_request(stream_to_client=False))
    assert quiet.in_one_piece(200, "application/json", body).body == body
    with pytest.raises(EngineGarbage, match="not text/event-stream"):
        open_exchange(a_request()).in_one_piece(200, "application/json", body)


def test_answer_too_large_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer beyond the bound is not retried: it would be as long elsewhere."""
    monkeypatch.setattr(exchange_module, "RESPONSE_BYTES_MAX", 100)
    opened = open_exchange(a_request())
    fed(opened, a_chunk(delta={"content": "x" * 100}, finish_reason="stop"))
    with pytest.raises(AnswerTooLarge) as raised:
        opened.streamed(200)
    assert (raised.value.reason, raised.value.retriable) == (Reason.PAYLOAD_TOO_LARGE, False)
    piece = orjson.dumps({"text": "x" * 100})
    with pytest.raises(AnswerTooLarge):
        open_exchange(a_request(endpoint="/v1/embeddings")).in_one_piece(
            200, "application/json", piece
        )


@pytest.mark.parametrize(("n", "choices"), [(None, 1), (2, 2), (0, 1), (10**9, 1), ("2", 1)])
def test_choices_asked_for_must_all_come(n: Any, choices: int) -> None:
    """A stream is whole when as many choices ended as were asked for; nonsense counts as one."""
    opened = open_exchange(a_request({"n": n}))
    for index in range(choices):
        event = {"choices": [{"index": index, "delta": {}, "finish_reason": "stop"}]}
        if index:
            with pytest.raises(EngineGarbage):
                opened.streamed(200)
        opened.chunk(orjson.dumps(event))
    assert opened.streamed(200).status_code == 200
