"""The whole answer out of its stream: what the engine would have said, had it not streamed.

Deltas are merged by kind of value, so that a field nobody here has heard of survives: text is
joined, lists are extended, objects are merged, anything else is replaced. Beside a choice's delta
lists are extended, too (the ids of its tokens), and anything else is replaced, as why it ended. Of
the fields beside the choices the last non-null one stands.
"""

from collections.abc import Mapping
from typing import Protocol, cast

import orjson

from broker.wire.messages import Usage
from worker_agent.engine.base import EngineFailed, EngineGarbage

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"
ENDPOINTS = (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES)

Json = dict[str, object]

TOKENS_MAX = 100_000_000
"""Most tokens of one request that are believed, ten times the longest context there is. Counters
that ran below zero say 2^32 - 1: charged to a lane, that shuts it out for as long as it would take
to write them, and its model's prompts would be estimated by it."""

_NOTHING = Usage()

_NAMES = frozenset({"id", "type", "role", "name", "index", "object"})
"""Text that names something: said once, or again in each delta, and never in pieces."""


class Assembly(Protocol):
    """Takes a stream's events, gives the whole answer."""

    def add(self, event: Json) -> int:
        """Take one event; returns how many tokens it brought, by the look of it."""
        ...

    def whole(self) -> Json:
        """Return the answer. Raises EngineGarbage when the stream ended before it did."""
        ...


def assembly_for(endpoint: str, *, choices: int) -> Assembly | None:
    """Return what assembles this endpoint's stream; None for an endpoint that doesn't stream."""
    match endpoint:
        case "/v1/chat/completions":
            return ChoicesAssembly("chat.completion", choices)
        case "/v1/completions":
            return ChoicesAssembly("text_completion", choices)
        case "/v1/responses":
            return ResponseAssembly()
        case _:
            return None


class ChoicesAssembly:
    """Chat and text completions: choices by index, each with its own end."""

    def __init__(self, kind: str, choices: int) -> None:
        self._kind = kind
        self._choices_min = choices
        self._top: Json = {}
        self._choices: dict[int, Json] = {}

    def add(self, event: Json) -> int:
        """Take one chunk."""
        choices = event.get("choices")
        if not isinstance(choices, list):
            message = "a chunk of the stream has no choices"
            raise EngineGarbage(message)
        top = self._top
        for name, value in event.items():
            if value is not None and name != "choices":
                top[name] = value
        brought = 0
        for choice in cast("list[object]", choices):
            brought += self._add_choice(choice)
        return brought

    def _add_choice(self, given: object) -> int:
        choice = as_object(given, "a choice")
        index = choice.get("index", 0)
        if not isinstance(index, int):
            message = f"a choice has the index {index!r:.40}"
            raise EngineGarbage(message)
        whole = self._choices.setdefault(index, {"index": index, "finish_reason": None})
        brought = False
        for name, value in choice.items():
            if name == "delta" and value is not None:
                delta = as_object(value, "a delta")
                message = cast("Json", whole.setdefault("message", {"role": "assistant"}))
                _merge(message, delta)
                brought = any(v for k, v in delta.items() if k not in _NAMES)
            elif name == "message" and value is not None:
                whole[name] = as_object(value, "a message")
            elif name in ("text", "logprobs"):
                _merge(whole, {name: value})
                brought = brought or bool(value)
            elif isinstance(value, list):
                _merge(whole, {name: value})
            elif value is not None and (value or name != "finish_reason"):
                whole[name] = value  # "" is how some engines say that there is more.
        return int(brought)

    def whole(self) -> Json:
        """Return the answer once each choice has said why it ended."""
        choices = [self._choices[index] for index in sorted(self._choices)]
        open_choices = sum(choice["finish_reason"] is None for choice in choices)
        if open_choices or len(choices) < self._choices_min:
            finished = len(choices) - open_choices
            message = f"half a stream: {finished} of {self._choices_min} choices came to their end"
            raise EngineGarbage(message)
        for choice in choices:
            if "message" in choice:
                _tidy(cast("Json", choice["message"]))
        return {**self._top, "object": self._kind, "choices": choices}


class ResponseAssembly:
    """/v1/responses: the last event holds the whole response."""

    def __init__(self) -> None:
        self._response: Json | None = None

    def add(self, event: Json) -> int:
        """Take one event."""
        kind = event.get("type")
        if kind in ("response.completed", "response.incomplete"):
            self._response = as_object(event.get("response"), "the response")
        elif kind == "response.failed":
            raise EngineFailed(orjson.dumps(event).decode())
        return int(isinstance(kind, str) and kind.endswith(".delta"))

    def whole(self) -> Json:
        """Return the response once it came."""
        if self._response is None:
            message = "half a stream: no response.completed"
            raise EngineGarbage(message)
        return self._response


def usage_in(
    answer: Mapping[str, object], *, counted: Usage = _NOTHING
) -> tuple[Usage, int | None] | None:
    """Return an answer's (or event's) usage and cached tokens, which are None when it doesn't say.

    None when there is no usage at all; `counted` stands in for what it does not say, or what is
    nonsense.
    """
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return None
    counts = cast("Json", usage)
    details = counts.get("prompt_tokens_details") or counts.get("input_tokens_details")
    cached = _count(cast("Json", details), "cached_tokens") if isinstance(details, dict) else None
    prompt = _count(counts, "prompt_tokens", "input_tokens")
    if cached is not None:
        # More cached than asked is nonsense that every sum and hit ratio would carry on.
        cached = None if prompt is None else min(cached, prompt)
    output = _count(counts, "completion_tokens", "output_tokens")
    whole = Usage(
        counted.prompt_tokens if prompt is None else prompt,
        cached or 0,
        counted.output_tokens if output is None else output,
    )
    return whole, cached


def as_object(value: object, what: str) -> Json:
    """Return `value` if it is a JSON object. Raises EngineGarbage."""
    if not isinstance(value, dict):
        message = f"{what} is no JSON object: {orjson.dumps(value)[:80].decode(errors='replace')}"
        raise EngineGarbage(message)
    return cast("Json", value)


def _count(counts: Json, *names: str) -> int | None:
    for name in names:
        value = counts.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= TOKENS_MAX:
            return value
    return None


def _merge(whole: Json, delta: Json) -> None:
    """Merge `delta` into `whole`, in place."""
    for name, value in delta.items():
        old = whole.get(name)
        if value is None:
            whole.setdefault(name, None)
        elif isinstance(old, str) and isinstance(value, str):
            whole[name] = value if name in _NAMES else old + value
        elif isinstance(value, list) and name == "tool_calls":
            calls = cast("list[object]", old if isinstance(old, list) else [])
            whole[name] = _merge_calls(calls, cast("list[object]", value))
        elif isinstance(old, list) and isinstance(value, list):
            cast("list[object]", old).extend(cast("list[object]", value))
        elif isinstance(old, dict) and isinstance(value, dict):
            _merge(cast("Json", old), cast("Json", value))
        else:
            whole[name] = value


def _merge_calls(calls: list[object], deltas: list[object]) -> list[object]:
    """Merge tool calls: a delta belongs to the call of the same index."""
    for given in deltas:
        delta = as_object(given, "a tool call")
        known = [cast("Json", call) for call in calls if isinstance(call, dict)]
        index = delta.get("index")
        if isinstance(index, int):
            same = [call for call in known if call.get("index") == index]
        else:
            delta = {name: value for name, value in delta.items() if name != "index"}
            same, index = _call_without_index(known, delta), len(calls)
        if same:
            _merge(same[0], delta)
        else:
            calls.append({**delta, "index": index})
    return calls


def _call_without_index(calls: list[Json], delta: Json) -> list[Json]:
    """Find the call of a delta that some engines give no index: by its id, else the last begun.

    One that names its function, and no call that was heard of, begins another.
    """
    if call_id := delta.get("id"):
        return [call for call in calls if call.get("id") == call_id]
    function = delta.get("function")
    begins = isinstance(function, dict) and bool(cast("Json", function).get("name"))
    return [] if begins else calls[-1:]


def _tidy(message: Json) -> None:
    """Give a message the form it has outside streams."""
    message.setdefault("content", None)
    calls = message.get("tool_calls")
    for call in cast("list[object]", calls if isinstance(calls, list) else []):
        if isinstance(call, dict):
            cast("Json", call).pop("index", None)
