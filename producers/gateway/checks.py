"""What of a request's body is judged at the door: what we can't serve, and what no engine could.

Everything else is the engine's, which knows its own fields. But an engine that fails at a wrong
type with a 500 is held to be sick, so the few fields that every engine reads have the right types
before a job is made.
"""

from collections.abc import Callable, Mapping
from typing import cast

from producers.gateway.errors import ApiError, bad_request

Fields = Mapping[str, object]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"

_HELD_BY_ONE_ENGINE = {
    "previous_response_id": "send the earlier turns as `input` instead",
    "conversation": "send the earlier turns as `input` instead",
    "background": "send the header `Prefer: respond-async` instead",
}
"""Fields of /v1/responses that mean state inside one engine: the next request may meet another."""

_MESSAGE = 'an object such as {"role": "user", "content": "Hello"}'
_MESSAGES = f"an array of at least one message, each {_MESSAGE}"


def check(endpoint: str, fields: Fields) -> None:
    """Judge a body. Raises ApiError (400)."""
    _require(fields, "model", _is_name, "a model's name; GET /v1/models lists them")
    _allow(fields, "stream", lambda value: isinstance(value, bool), "true or false")
    _allow(fields, "stream_options", lambda value: isinstance(value, dict), "an object")
    match endpoint:
        case "/v1/chat/completions":
            _require(fields, "messages", _is_filled_list, _MESSAGES)
            _check_messages(cast("list[object]", fields["messages"]))
        case "/v1/completions":
            _require(fields, "prompt", _is_text_or_list, "a string or an array")
        case "/v1/embeddings":
            _require(fields, "input", _is_text_or_list, "a string or an array")
        case _:
            _check_response(fields)


def wants_stream(endpoint: str, fields: Fields) -> bool:
    """Say whether the answer is to be streamed. Embeddings come in one piece whatever is said."""
    return fields.get("stream") is True and endpoint != EMBEDDINGS


def _check_response(fields: Fields) -> None:
    for name, instead in _HELD_BY_ONE_ENGINE.items():
        if fields.get(name):
            message = (
                f"`{name}` needs state that one engine holds, and any engine may serve the next"
                f" request; {instead}."
            )
            raise bad_request(message, code=f"{name}_unsupported", param=name)
    # `prompt` names a stored template, with `input` or without; engines judge it.
    if fields.get("prompt") is None:
        _require(fields, "input", _is_text_or_list, "a string or an array")


def _check_messages(messages: list[object]) -> None:
    for place, message in enumerate(messages):
        if not isinstance(message, dict):
            where = f"messages[{place}]"
            raise _invalid(where, message, _MESSAGE, param="messages")


def _require(fields: Fields, name: str, holds: Callable[[object], bool], allowed: str) -> None:
    if fields.get(name) is None:
        lack = "null" if name in fields else "missing"
        message = f"`{name}` is {lack}; it must be {allowed}."
        raise bad_request(message, code="missing_required_parameter", param=name)
    _allow(fields, name, holds, allowed)


def _allow(fields: Fields, name: str, holds: Callable[[object], bool], allowed: str) -> None:
    value = fields.get(name)
    if value is not None and not holds(value):
        raise _invalid(name, value, allowed, param=name)


def _invalid(name: str, value: object, allowed: str, *, param: str) -> ApiError:
    message = f"`{name}` is {_described(value)}; it must be {allowed}."
    return bad_request(message, code="invalid_type", param=param)


def _described(value: object) -> str:
    """Say what a value is, in JSON's words; an empty one is told as such."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    article, kind = _JSON_NAMES[type(value)]
    is_empty = isinstance(value, str | list | dict) and not value
    return f"an empty {kind}" if is_empty else f"{article} {kind}"


_JSON_NAMES: Mapping[type, tuple[str, str]] = {
    str: ("a", "string"),
    list: ("an", "array"),
    dict: ("an", "object"),
    int: ("a", "number"),
    float: ("a", "number"),
}


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_filled_list(value: object) -> bool:
    return isinstance(value, list) and bool(cast("list[object]", value))


def _is_text_or_list(value: object) -> bool:
    return isinstance(value, str | list)
