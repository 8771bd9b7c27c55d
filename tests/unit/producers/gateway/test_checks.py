"""What a caller reads of a body that can't be served: what it is, and what it has to be."""

from typing import Any

import pytest

from producers.gateway.checks import CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, check
from producers.gateway.errors import ApiError

LIST = "it must be a string or an array."
A_MESSAGE = 'an object such as {"role": "user", "content": "Hello"}'
A_NAME = "it must be a model's name; GET /v1/models lists them."
MESSAGES = f"it must be an array of at least one message, each {A_MESSAGE}."
ONE: dict[str, Any] = {"model": "tiny"}


def _chat(**fields: Any) -> dict[str, Any]:
    return {**ONE, "messages": [{"role": "user", "content": "hi"}], **fields}


@pytest.mark.parametrize(
    ("endpoint", "fields", "said"),
    [
        (CHAT, {}, f"`model` is missing; {A_NAME}"),
        (CHAT, {"model": None}, f"`model` is null; {A_NAME}"),
        (CHAT, {"model": ""}, f"`model` is an empty string; {A_NAME}"),
        (CHAT, {"model": 7}, f"`model` is a number; {A_NAME}"),
        (
            CHAT,
            {**ONE, "messages": []},
            f"`messages` is an empty array; {MESSAGES}",
        ),
        (
            CHAT,
            {**ONE, "messages": {"role": "user"}},
            f"`messages` is an object; {MESSAGES}",
        ),
        (
            CHAT,
            {**ONE, "messages": [{}, "hi"]},
            f"`messages[1]` is a string; it must be {A_MESSAGE}.",
        ),
        (
            CHAT,
            {**ONE, "messages": [None]},
            f"`messages[0]` is null; it must be {A_MESSAGE}.",
        ),
        (CHAT, _chat(stream="yes"), "`stream` is a string; it must be true or false."),
        (
            CHAT,
            _chat(stream_options=""),
            "`stream_options` is an empty string; it must be an object.",
        ),
        (COMPLETIONS, {**ONE, "prompt": True}, f"`prompt` is true; {LIST}"),
        (EMBEDDINGS, {**ONE, "input": {}}, f"`input` is an empty object; {LIST}"),
        (RESPONSES, {**ONE, "input": 1.5}, f"`input` is a number; {LIST}"),
    ],
)
def test_what_is_wrong_is_told_in_the_words_of_json(
    endpoint: str, fields: dict[str, Any], said: str
) -> None:
    """Which value it is, what it is now, and what it has to be."""
    with pytest.raises(ApiError) as wrong:
        check(endpoint, fields)
    assert wrong.value.message == said
    assert wrong.value.status == 400
