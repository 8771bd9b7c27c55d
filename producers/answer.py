"""What of an engine's answer is text for people: whole answers, and pieces of streamed ones."""

from collections.abc import Mapping
from typing import Any, cast

import orjson


def answer_text(body: bytes) -> str:
    """Text of a chat, completions or responses answer: its first choice; empty without one."""
    answer = _mapping(_parsed(body))
    choice = _mapping(_first(answer.get("choices")))
    message = _mapping(choice.get("message"))
    for found in (message.get("content"), choice.get("text")):
        if isinstance(found, str):
            return found
    return "".join(_output_texts(answer.get("output")))


def piece_text(data: bytes) -> str:
    """Text of one server-sent event of a streamed answer; empty for all others."""
    event = _mapping(_parsed(data))
    choice = _mapping(_first(event.get("choices")))
    for found in (_mapping(choice.get("delta")).get("content"), choice.get("text")):
        if isinstance(found, str):
            return found
    delta = event.get("delta")
    return delta if isinstance(delta, str) else ""


def error_text(body: bytes) -> str:
    """Message of an engine's error answer; empty when it has none."""
    error = _mapping(_parsed(body)).get("error")
    message = _mapping(error).get("message", error)
    return message if isinstance(message, str) else ""


def _output_texts(output: object) -> list[str]:
    """Texts of the `output` of a responses answer."""
    contents = [_list(_mapping(item).get("content")) for item in _list(output)]
    texts = [_mapping(part).get("text") for content in contents for part in content]
    return [text for text in texts if isinstance(text, str)]


def _parsed(data: bytes) -> object:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return None


def _mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []


def _first(value: object) -> object:
    return next(iter(_list(value)), None)
