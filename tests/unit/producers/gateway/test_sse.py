"""Streamed answers as bytes: pieces, what was missed, ends and errors."""

from typing import Any

import orjson
import pytest

from broker.wire.messages import Attempt
from producers.gateway.errors import ApiError
from producers.gateway.sse import CantContinue, Relay
from producers.token_stream import Chunk

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
FIRST, SECOND = Attempt(1, 1), Attempt(1, 2)


def _chunk(data: object, **fields: Any) -> Chunk:
    packed = data if isinstance(data, bytes) else orjson.dumps(data)
    wanted: dict[str, Any] = {"attempt": FIRST, **fields}
    return Chunk(packed, **wanted)


def _delta(index: int = 0, **delta: Any) -> Chunk:
    return _chunk({"choices": [{"index": index, "delta": delta, "finish_reason": None}]})


def _whole(*messages: dict[str, Any], **fields: Any) -> Chunk:
    choices = [
        {"index": index, "message": message, "finish_reason": "stop"}
        for index, message in enumerate(messages)
    ]
    answer = {"id": "x", "object": "chat.completion", "choices": choices, "usage": {"n": 1}}
    return _chunk(answer, whole=True, **fields)


def _events(data: bytes) -> list[Any]:
    return [orjson.loads(block.removeprefix(b"data: ")) for block in data.split(b"\n\n")[:-1]]


def test_a_piece_goes_out_untouched() -> None:
    """Byte by byte as it came from the engine, spaces and unknown fields too."""
    raw = b'{ "choices":[{"delta":{"content":"a"}}],  "odd": 1.50 }'
    relay = Relay(CHAT, usage_asked=False)
    assert relay.event(_chunk(raw)) == b"data: " + raw + b"\n\n"
    assert relay.done() == b"data: [DONE]\n\n"


def test_json_over_several_lines_stays_one_event() -> None:
    """A line without `data:` before it would be dropped by its reader."""
    relay = Relay(CHAT, usage_asked=False)
    assert relay.event(_chunk(b'{\r\n"choices":[]\n}')) == (
        b'data: {\ndata: "choices":[]\ndata: }\n\n'
    )


def test_events_of_responses_have_names() -> None:
    """As the endpoint has them; and no [DONE]."""
    relay = Relay(RESPONSES, usage_asked=False)
    raw = b'{"type":"response.output_text.delta","delta":"a"}'
    assert relay.event(_chunk(raw)) == (
        b"event: response.output_text.delta\ndata: " + raw + b"\n\n"
    )
    assert relay.event(_chunk(b'{"type":"a\\nb"}')) == b'data: {"type":"a\\nb"}\n\n'
    assert relay.done() == b""


def test_the_whole_answer_where_nothing_was_sent() -> None:
    """One piece with all of it, as a stream's reader knows it."""
    relay = Relay(CHAT, usage_asked=False)
    (event,) = _events(relay.event(_whole({"role": "assistant", "content": "hello"})))
    assert event == {
        "id": "x",
        "object": "chat.completion.chunk",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "delta": {"role": "assistant", "content": "hello"},
            }
        ],
    }
    assert relay.caught_up


def test_only_what_was_missed_is_sent() -> None:
    """By choice and field: text, reasoning, tool calls with half their arguments."""
    relay = Relay(CHAT, usage_asked=True)
    relay.event(_delta(role="assistant", content="he", reasoning_content="be"))
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    relay.event(_delta(tool_calls=[call]))
    relay.event(_delta(tool_calls=[{"index": 0, "function": {"arguments": '{"a'}}]))
    relay.event(_delta(1, role="assistant", content="other"))
    whole_call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    next_call = {"id": "d", "type": "function", "function": {"name": "g", "arguments": "{}"}}
    rest, usage = _events(
        relay.event(
            _whole(
                {
                    "role": "assistant",
                    "content": "hello",
                    "reasoning_content": "because",
                    "tool_calls": [whole_call, next_call],
                    "audio": {"id": "a"},
                    "refusal": None,
                },
                {"role": "assistant", "content": "other"},
            )
        )
    )
    first, second = rest["choices"]
    assert first["delta"] == {
        "content": "llo",
        "reasoning_content": "cause",
        "tool_calls": [{"index": 0, "function": {"arguments": '":1}'}}, {"index": 1, **next_call}],
        "audio": {"id": "a"},
    }
    assert second == {"index": 1, "finish_reason": "stop", "delta": {}}
    assert (usage["choices"], usage["usage"]) == ([], {"n": 1})


def test_text_completions_are_continued_too() -> None:
    """Theirs is a bare text."""
    relay = Relay(TEXT, usage_asked=False)
    relay.event(_chunk({"choices": [{"index": 0, "text": "he"}]}))
    answer = {"object": "text_completion", "choices": [{"index": 0, "text": "hello"}]}
    (event,) = _events(relay.event(_chunk(answer, whole=True)))
    assert event["choices"] == [{"index": 0, "text": "llo", "finish_reason": None}]
    assert event["object"] == "text_completion"


def test_what_stands_beside_the_text_is_not_lost() -> None:
    """Log probabilities by entry, and what engines add: where all comes at the end, and a part."""
    entries = [{"token": token, "logprob": -1.0} for token in ("he", "l", "lo")]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "hello"},
        "logprobs": {"content": entries, "refusal": None},
        "finish_reason": "stop",
        "stop_reason": 7,
        "token_ids": [1, 2, 3],
    }
    whole = _chunk({"object": "chat.completion", "choices": [choice]}, whole=True)
    (event,) = _events(Relay(CHAT, usage_asked=False).event(whole))
    (all_of_it,) = event["choices"]
    assert all_of_it.pop("delta") == choice["message"]
    assert all_of_it == {name: value for name, value in choice.items() if name != "message"}
    relay = Relay(CHAT, usage_asked=False)
    piece = {"index": 0, "delta": {"content": "he"}, "logprobs": {"content": entries[:1]}}
    relay.event(_chunk({"choices": [piece]}))
    relay.event(_chunk({"choices": [{**piece, "delta": {"content": "l"}, "index": 0.0}]}))
    (event,) = _events(relay.event(whole))
    assert event["choices"] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": "lo"},
            "logprobs": {"content": entries[2:], "refusal": None},
            "finish_reason": "stop",
            "stop_reason": 7,
        }
    ]
    text_choice = {"index": 0, "text": "hello", "logprobs": {"tokens": ["he", "llo"]}}
    relay = Relay(TEXT, usage_asked=False)
    relay.event(_chunk({"choices": [{"text": "he", "logprobs": {"tokens": ["he"]}}]}))
    (event,) = _events(relay.event(_chunk({"choices": [text_choice]}, whole=True)))
    assert event["choices"] == [
        {"index": 0, "text": "llo", "logprobs": {"tokens": ["llo"]}, "finish_reason": None}
    ]


def test_a_response_is_told_whole() -> None:
    """Its last event has all of it anyway."""
    relay = Relay(RESPONSES, usage_asked=False)
    relay.event(_chunk({"type": "response.output_text.delta", "delta": "he"}))
    sent = relay.event(_chunk({"id": "r", "output": []}, whole=True)).decode()
    assert sent == (
        'event: response.completed\ndata: {"type":"response.completed","sequence_number":1,'
        '"response":{"id":"r","output":[]}}\n\n'
    )


@pytest.mark.parametrize("chunk", [_whole({"content": "x"}, attempt=SECOND), _delta(content="x")])
def test_attempts_never_mix(chunk: Chunk) -> None:
    """What another worker says doesn't follow on what was sent."""
    relay = Relay(CHAT, usage_asked=False)
    relay.event(_delta(content="he"))
    if not chunk.whole:
        chunk = Chunk(chunk.data, attempt=SECOND, restart=True)
    with pytest.raises(CantContinue, match="another worker"):
        relay.event(chunk)


def test_another_attempt_where_nothing_was_sent() -> None:
    """Then there is nothing to mix with."""
    relay = Relay(CHAT, usage_asked=False)
    assert _events(relay.event(_whole({"content": "x"}, attempt=SECOND)))


def test_an_error_in_the_midst() -> None:
    """An event that clients raise on; in /v1/responses one of its own kind."""
    error = ApiError(503, "worker_lost", "Lost.")
    assert _events(Relay(CHAT, usage_asked=False).failed(error)) == [
        {
            "error": {
                "message": "Lost.",
                "type": "service_unavailable_error",
                "param": None,
                "code": "worker_lost",
            }
        }
    ]
    relay = Relay(RESPONSES, usage_asked=False)
    relay.event(_chunk({"type": "response.created"}))
    name, data = relay.failed(error).decode().rstrip("\n").split("\n")
    told = orjson.loads(data.removeprefix("data: "))
    assert name == "event: error"
    assert (told["type"], told["code"], told["sequence_number"]) == ("error", "worker_lost", 1)
    assert told["error"]["code"] == "worker_lost"


@pytest.mark.parametrize(
    "raw",
    [
        b"no json",
        b"[1]",
        b'{"choices":1}',
        b'{"choices":[1,{"index":"x","delta":1}]}',
        b'{"choices":[{"delta":{"tool_calls":[{"function":1},2]}}]}',
    ],
)
def test_what_an_engine_may_say_all_the_same(raw: bytes) -> None:
    """It goes through: to judge it is its reader's."""
    relay = Relay(CHAT, usage_asked=False)
    assert relay.event(_chunk(raw)) == b"data: " + raw + b"\n\n"
