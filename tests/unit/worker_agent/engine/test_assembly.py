"""A stream, put together again, is the answer the engine gives when it doesn't stream."""

from typing import Any

import pytest

from broker.wire.messages import Usage
from worker_agent.engine.assembly import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    RESPONSES,
    assembly_for,
    usage_in,
)
from worker_agent.engine.base import EngineFailed, EngineGarbage

TOP = {"id": "c1", "created": 5, "model": "m", "object": "chat.completion.chunk"}


def a_chunk(*choices: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A chunk of a chat stream."""
    return {**TOP, "choices": list(choices), **fields}


def a_delta(delta: Any, *, index: int = 0, finish: str | None = None, **fields: Any) -> Any:
    """A choice of a chat chunk."""
    return {"index": index, "delta": delta, "finish_reason": finish, **fields}


def assembled(endpoint: str, *events: Any, choices: int = 1) -> dict[str, Any]:
    """The whole answer of these events."""
    assembly = assembly_for(endpoint, choices=choices)
    assert assembly is not None
    for event in events:
        assembly.add(event)
    whole: Any = assembly.whole()
    return whole


def message_of(*deltas: Any) -> dict[str, Any]:
    """The message that a chat stream of these deltas makes."""
    chunks = [a_chunk(a_delta(delta)) for delta in deltas]
    whole = assembled(CHAT, *chunks, a_chunk(a_delta({}, finish="stop")))
    return whole["choices"][0]["message"]


def test_chat_stream_of_llama_cpp() -> None:
    """The chunks of a running llama.cpp make the object that it answers with unstreamed."""
    whole = assembled(
        CHAT,
        a_chunk(a_delta({"role": "assistant", "content": None})),
        a_chunk(a_delta({"content": "l"})),
        a_chunk(a_delta({"content": "x"})),
        a_chunk(a_delta({}, finish="length")),
        a_chunk(usage={"prompt_tokens": 22}, timings={"cache_n": 21}, service_tier=None),
    )
    assert whole == {
        "id": "c1",
        "created": 5,
        "model": "m",
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "finish_reason": "length",
                "message": {"role": "assistant", "content": "lx"},
            }
        ],
        "usage": {"prompt_tokens": 22},
        "timings": {"cache_n": 21},
    }


def test_choices_interleave() -> None:
    """With n > 1 each choice is put together for itself and listed by its index."""
    whole = assembled(
        CHAT,
        a_chunk(a_delta({"content": "b"}, index=1)),
        a_chunk(a_delta({"content": "a"}), a_delta({"content": "b"}, index=1)),
        a_chunk(a_delta({}, index=1, finish="length"), a_delta({}, finish="stop")),
        choices=2,
    )
    found = [(c["index"], c["message"]["content"], c["finish_reason"]) for c in whole["choices"]]
    assert found == [(0, "a", "stop"), (1, "bb", "length")]


def test_tool_calls_are_joined_by_index() -> None:
    """Arguments come in pieces, names once; two calls at a time stay two."""
    message = message_of(
        {"role": "assistant", "content": None},
        {"tool_calls": [_call(0, "c0", "weather", "")]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city":'}}]},
        {
            "tool_calls": [
                _call(1, "c1", "time", "{}"),
                {"index": 0, "function": {"arguments": '"x"}'}},
            ]
        },
    )
    assert message == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "c0",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city":"x"}'},
            },
            {"id": "c1", "type": "function", "function": {"name": "time", "arguments": "{}"}},
        ],
    }


@pytest.mark.parametrize("index", [{}, {"index": None}])
def test_tool_calls_without_an_index_are_told_apart(index: dict[str, None]) -> None:
    """By their ids and names: two calls became one, with both arguments behind each other."""
    assembly = assembly_for(CHAT, choices=1)
    assert assembly is not None
    for call in (
        {"id": "1", "function": {"name": "f", "arguments": "{"}},
        {"function": {"arguments": "}"}},
        {"id": "2", "function": {"name": "g", "arguments": "[]"}},
        {"function": {"name": "h", "arguments": ""}},
        {"id": "2", "function": {"arguments": " "}},
    ):
        assembly.add({"choices": [{"index": 0, "delta": {"tool_calls": [{**call, **index}]}}]})
    assembly.add({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    whole: Any = assembly.whole()
    assert whole["choices"][0]["message"]["tool_calls"] == [
        {"id": "1", "function": {"name": "f", "arguments": "{}"}},
        {"id": "2", "function": {"name": "g", "arguments": "[] "}},
        {"function": {"name": "h", "arguments": ""}},
    ]


def test_an_empty_finish_reason_is_no_end() -> None:
    """An engine that says "" until the end, and breaks off, gave half an answer as a whole one."""
    assembly = assembly_for(CHAT, choices=1)
    assert assembly is not None
    assembly.add({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": ""}]})
    with pytest.raises(EngineGarbage, match="half a stream"):
        assembly.whole()
    assembly.add({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    whole: Any = assembly.whole()
    assert whole["choices"][0]["finish_reason"] == "stop"


def test_tool_call_that_repeats_its_name() -> None:
    """Engines that say a call's id and name in each delta don't make them longer."""
    message = message_of(
        {"tool_calls": [_call(0, "c0", "weather", "{")]},
        {"tool_calls": [_call(0, "c0", "weather", "}")]},
    )
    function = message["tool_calls"][0]["function"]
    assert function == {"name": "weather", "arguments": "{}"}
    assert message["tool_calls"][0]["id"] == "c0"


def _call(index: int, name_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": name_id, "type": "function", "function": function}


def test_reasoning_and_unknown_fields_survive() -> None:
    """Text of any name is joined, lists are extended, the rest is kept as last said."""
    message = message_of(
        {"role": "assistant", "reasoning_content": "let ", "content": ""},
        {"reasoning_content": "me think", "annotations": [1], "score": 1},
        {"content": "Yes", "annotations": [2], "score": 2, "audio": {"id": "a", "data": "x"}},
        {"content": ".", "audio": {"data": "y"}, "refusal": None},
    )
    assert message == {
        "role": "assistant",
        "reasoning_content": "let me think",
        "content": "Yes.",
        "annotations": [1, 2],
        "score": 2,
        "audio": {"id": "a", "data": "xy"},
        "refusal": None,
    }


def test_logprobs_are_listed_on() -> None:
    """Each chunk's logprobs add to the list; a null at the end does not wipe it."""
    chunks = [
        a_chunk(a_delta({"content": t}, logprobs={"content": [{"token": t}], "refusal": None}))
        for t in "ab"
    ]
    whole = assembled(CHAT, *chunks, a_chunk(a_delta({}, finish="stop", logprobs=None)))
    logprobs = whole["choices"][0]["logprobs"]
    assert logprobs == {"content": [{"token": "a"}, {"token": "b"}], "refusal": None}


def test_lists_beside_a_delta_are_extended() -> None:
    """As the ids of its tokens, which come with each piece; why it ended is one word, said last."""
    whole = assembled(
        CHAT,
        a_chunk({**a_delta({"content": "a"}), "token_ids": [1, 2], "stop_reason": None}),
        a_chunk({**a_delta({"content": "b"}), "token_ids": [3], "stop_reason": "x"}),
        a_chunk({**a_delta({}, finish="stop"), "token_ids": None, "stop_reason": "END"}),
    )
    (choice,) = whole["choices"]
    assert (choice["token_ids"], choice["stop_reason"]) == ([1, 2, 3], "END")


def test_text_completion() -> None:
    """Completions: text is joined, and the old form of logprobs list by list."""

    def piece(text: str, finish: str | None = None) -> dict[str, Any]:
        logprobs = {"tokens": [text], "text_offset": [1]} if text else None
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return {**TOP, "object": "text_completion", "choices": [choice]}

    whole = assembled(COMPLETIONS, piece("a"), piece("b"), piece("", "length"))
    assert whole["object"] == "text_completion"
    assert whole["choices"] == [
        {
            "index": 0,
            "text": "ab",
            "logprobs": {"tokens": ["a", "b"], "text_offset": [1, 1]},
            "finish_reason": "length",
        }
    ]


def test_response_is_its_last_event() -> None:
    """/v1/responses: the answer stands whole in response.completed (or incomplete)."""
    for kind in ("response.completed", "response.incomplete"):
        whole = assembled(
            RESPONSES,
            {"type": "response.output_text.delta", "delta": "x"},
            {"type": kind, "response": {"id": "r", "output": []}},
        )
        assert whole == {"id": "r", "output": []}


def test_response_that_failed() -> None:
    """A response that failed is the engine's failure, not an answer."""
    with pytest.raises(EngineFailed, match="out of memory"):
        assembled(RESPONSES, {"type": "response.failed", "response": {"error": "out of memory"}})


@pytest.mark.parametrize(
    ("endpoint", "event"),
    [
        (CHAT, a_chunk(a_delta({"content": "a"}))),
        (CHAT, a_chunk(a_delta({}, finish="stop"))),
        (COMPLETIONS, a_chunk()),
        (RESPONSES, {"type": "response.output_text.delta", "delta": "x"}),
    ],
)
def test_half_a_stream_is_no_answer(endpoint: str, event: Any) -> None:
    """A stream that ends before each choice has said why it ended is not taken for an answer."""
    with pytest.raises(EngineGarbage, match="half a stream"):
        assembled(endpoint, event, choices=2)


@pytest.mark.parametrize(
    "event",
    [
        {"object": "no choices"},
        {"choices": {}},
        {"choices": [None]},
        {"choices": [{"index": "first", "delta": {}}]},
        {"choices": [{"index": 0, "delta": "text"}]},
        {"choices": [{"index": 0, "delta": {"tool_calls": ["x"]}}]},
        {"choices": [{"index": 0, "message": "text"}]},
        {"type": "response.completed", "response": None},
    ],
)
def test_event_of_another_shape_is_garbage(event: Any) -> None:
    """What is no chunk is called so."""
    with pytest.raises(EngineGarbage):
        assembled(RESPONSES if "type" in event else CHAT, event)


@pytest.mark.parametrize("odd", ["text", {"a": 1}, 5, [], None])
def test_tool_calls_of_another_shape_are_passed_on(odd: Any) -> None:
    """Nothing here reads them: what is no list is replaced by the next, and harms nobody."""
    told = assembled(
        CHAT,
        a_chunk(a_delta({"tool_calls": odd})),
        a_chunk(a_delta({"tool_calls": [{"id": "c"}]})),
        a_chunk({**a_delta({}), "finish_reason": "tool_calls"}),
    )
    assert told["choices"][0]["message"]["tool_calls"] == [{"id": "c"}]
    end = a_chunk({**a_delta({"tool_calls": odd}), "finish_reason": "stop"})
    assert assembled(CHAT, end)["choices"][0]["message"]["tool_calls"] == odd
    whole = {"index": 0, "message": {"tool_calls": [odd]}, "finish_reason": "stop"}
    assert assembled(CHAT, a_chunk(whole))["choices"][0]["message"]["tool_calls"] == [odd]
    more = a_chunk(a_delta({"tool_calls": [{"id": "c", "index": 9}]}))
    told = assembled(CHAT, a_chunk(whole), more)
    assert told["choices"][0]["message"]["tool_calls"] == [odd, {"id": "c"}]


@pytest.mark.parametrize(
    ("delta", "tokens"),
    [
        ({"role": "assistant"}, 0),
        ({"role": "assistant", "content": ""}, 0),
        ({"content": "a"}, 1),
        ({"reasoning_content": "a"}, 1),
        ({"tool_calls": [{"index": 0}]}, 1),
        (None, 0),
    ],
)
def test_tokens_are_counted_by_deltas(delta: Any, tokens: int) -> None:
    """A delta that brings something is taken for a token; naming the role is none."""
    assembly = assembly_for(CHAT, choices=1)
    assert assembly is not None
    assert assembly.add(a_chunk(a_delta(delta))) == tokens


def test_embeddings_do_not_stream() -> None:
    """For other endpoints there is nothing to put together."""
    assert assembly_for(EMBEDDINGS, choices=1) is None


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (None, None),
        ({}, (Usage(0, 0, 0), None)),
        ({"prompt_tokens": 9, "completion_tokens": 2}, (Usage(9, 0, 2), None)),
        (
            {
                "prompt_tokens": 9,
                "completion_tokens": 2,
                "prompt_tokens_details": {"cached_tokens": 8},
            },
            (Usage(9, 8, 2), 8),
        ),
        ({"prompt_tokens": 9, "prompt_tokens_details": None}, (Usage(9, 0, 0), None)),
        (
            {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 99_999}},
            (Usage(9, 9, 0), 9),
        ),
        ({"prompt_tokens_details": {"cached_tokens": 8}}, (Usage(0, 0, 0), None)),
        (
            {"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 0}},
            (Usage(9, 0, 2), 0),
        ),
        ({"prompt_tokens": -1, "completion_tokens": True}, (Usage(0, 0, 0), None)),
        ({"prompt_tokens": 2**60, "completion_tokens": "2"}, (Usage(0, 0, 0), None)),
        ({"prompt_tokens": 2**32 - 1, "completion_tokens": 2**31 - 1}, (Usage(0, 0, 0), None)),
    ],
)
def test_usage(usage: Any, expected: Any) -> None:
    """Both spellings are read; cached tokens not told are unknown, not 0; nonsense is 0."""
    assert usage_in({"usage": usage}) == expected


@pytest.mark.parametrize("nonsense", [-1, 2**32 - 1, 2**63, 1e9, True, "9", None])
def test_what_a_usage_does_not_say_was_counted(nonsense: object) -> None:
    """A counter that ran below zero shut a lane out for years, and every prompt of its model."""
    counted = Usage(9, 0, 2)
    spoilt = {"prompt_tokens": nonsense, "completion_tokens": nonsense}
    assert usage_in({"usage": spoilt}, counted=counted) == (counted, None)
    spoilt = {"prompt_tokens": 7, "completion_tokens": nonsense}
    assert usage_in({"usage": spoilt}, counted=counted) == (Usage(7, 0, 2), None)
