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


def beside_text(body: bytes) -> str:
    """Say what an answer has beside the text of its first choice; empty for nothing."""
    answer = _mapping(_parsed(body))
    choices = _list(answer.get("choices"))
    message = _mapping(_mapping(_first(choices)).get("message"))
    calls = len(_list(message.get("tool_calls"))) + sum(
        str(_mapping(item).get("type", "")).endswith("_call")
        for item in _list(answer.get("output"))
    )
    found = (
        f"{len(choices)} choices" if len(choices) > 1 else "",
        f"{calls} calls of tools" if calls else "",
    )
    return " and ".join(filter(None, found))


def piece_text(data: bytes) -> str:
    """Text of one server-sent event of a streamed answer: of its first choice, as of the whole."""
    event = _mapping(_parsed(data))
    choices = map(_mapping, _list(event.get("choices")))
    choice = _mapping(next((one for one in choices if not one.get("index")), None))
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
