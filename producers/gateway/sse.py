"""Server-sent events of a streamed answer, as bytes. Pure.

An answer's pieces go out as they came from the engine. When some are missing (a slow reader's
buffer was full, a link was lost), the whole answer comes at the end, and what of it was not sent
goes out as one last piece: so a reader never gets a word twice, or one too few.
"""

from collections.abc import Mapping
from typing import cast

import msgspec
import orjson

from broker.wire.messages import Attempt
from producers.gateway.checks import CHAT, RESPONSES
from producers.gateway.errors import ApiError
from producers.token_stream import Chunk

CONTENT_TYPE = "text/event-stream"

DONE = b"data: [DONE]\n\n"
"""Ends the stream of a completed chat or completion; without it the answer is not whole."""

WAITING = b": waiting\n\n"
"""A comment, which every reader of events passes over."""

_NAMES = frozenset(("id", "type", "role", "name"))
"""Text that names something: sent once, never in pieces."""

Json = Mapping[str, object]


class CantContinue(Exception):
    """The rest of an answer can't be told from what was sent; the text says why."""


class _Choice(msgspec.Struct):
    """What is looked at of a choice in a piece; the rest is skipped unread."""

    index: int = 0
    delta: dict[str, object] | None = None
    text: str | None = None
    logprobs: dict[str, object] | None = None


class _Piece(msgspec.Struct):
    """A piece as nearly all are."""

    choices: list[_Choice] = []


_pieces = msgspec.json.Decoder(_Piece)


class Relay:
    """One streamed answer on its way to its reader."""

    def __init__(self, endpoint: str, *, usage_asked: bool) -> None:
        self._endpoint = endpoint
        self._usage_asked = usage_asked
        self._sent: dict[int, dict[str, int]] = {}
        """Of each choice, by field: how many characters or entries were sent."""
        self._attempt: Attempt | None = None
        self._events = 0
        self.caught_up = False
        """The rest came in one piece."""

    def event(self, chunk: Chunk) -> bytes:
        """Return what to send for a chunk. Raises CantContinue."""
        if chunk.whole:
            return self._rest(chunk)
        if chunk.restart:
            message = "another worker began anew after a part was sent"
            raise CantContinue(message)
        self._attempt = chunk.attempt
        self._events += 1
        data = chunk.data
        if self._endpoint == RESPONSES:
            return _named(_parsed(data).get("type"), data)
        try:
            choices = _pieces.decode(data).choices
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self._note_odd(data)
        else:
            for choice in choices:
                self._note(choice.index, choice.delta, choice.text)
                if choice.logprobs is not None:
                    self._note_logprobs(choice.index, choice.logprobs)
        return _data(data)

    def done(self) -> bytes:
        """Return what ends the stream of a completed answer."""
        return b"" if self._endpoint == RESPONSES else DONE

    def failed(self, error: ApiError) -> bytes:
        """Return the event that says that the answer will not become whole."""
        if self._endpoint != RESPONSES:
            return _data(error.body)
        fields = error.fields
        # `error` beside it: what the client of this API raises on.
        told = {**fields, "type": "error", "sequence_number": self._events, "error": fields}
        return _named("error", orjson.dumps(told))

    def _note(self, index: int, delta: Mapping[str, object] | None, text: str | None) -> None:
        """Remember how much of a choice was sent."""
        sent = self._sent.get(index)
        if sent is None:
            sent = self._sent[index] = {}
        if text is not None:
            sent["text"] = sent.get("text", 0) + len(text)
        for name, value in delta.items() if delta is not None else ():
            if isinstance(value, str):
                sent[name] = sent.get(name, 0) + len(value)
            elif name == "tool_calls":
                for call in _objects(value):
                    self._note_call(sent, call)
            elif value is not None:
                sent[name] = 1

    def _note_odd(self, data: bytes) -> None:
        """Remember as much as can be made out of a piece that is not as it should be."""
        for choice in _objects(_parsed(data).get("choices")):
            text = choice.get("text")
            delta = dict(_fields(choice.get("delta")))
            self._note(_index(choice), delta, text if isinstance(text, str) else None)
            self._note_logprobs(_index(choice), dict(_fields(choice.get("logprobs"))))

    def _note_logprobs(self, index: int, logprobs: Mapping[str, object]) -> None:
        """Remember how many entries of each of their lists were sent."""
        sent = self._sent.setdefault(index, {})
        for name, value in logprobs.items():
            if isinstance(value, list):
                at = f"logprobs.{name}"
                sent[at] = sent.get(at, 0) + len(cast("list[object]", value))

    @staticmethod
    def _note_call(sent: dict[str, int], call: Json) -> None:
        function = call.get("function")
        arguments = cast("Json", function).get("arguments") if isinstance(function, dict) else None
        name = f"tool_calls.{_index(call)}"
        sent[name] = sent.get(name, 0) + (len(arguments) if isinstance(arguments, str) else 0)

    def _rest(self, chunk: Chunk) -> bytes:
        """Return what was not sent yet of a whole answer."""
        if self._events and chunk.attempt != self._attempt:
            message = "another worker gave the answer after a part was sent"
            raise CantContinue(message)
        self.caught_up = True
        whole = _parsed(chunk.data)
        if self._endpoint == RESPONSES:
            told = {
                "type": "response.completed",
                "sequence_number": self._events,
                "response": orjson.Fragment(chunk.data),
            }
            return _named("response.completed", orjson.dumps(told))
        choices = [self._rest_of(choice) for choice in _objects(whole.get("choices"))]
        top = {name: value for name, value in whole.items() if name not in ("choices", "usage")}
        if self._endpoint == CHAT:
            top["object"] = "chat.completion.chunk"
        events = _data(orjson.dumps({**top, "choices": choices}))
        usage = whole.get("usage")
        if self._usage_asked and usage is not None:
            events += _data(orjson.dumps({**top, "choices": [], "usage": usage}))
        return events

    def _rest_of(self, choice: Json) -> dict[str, object]:
        sent = self._sent.get(_index(choice), {})
        end = {
            **_rest_beside(choice, sent),
            "index": _index(choice),
            "finish_reason": choice.get("finish_reason"),
        }
        if self._endpoint != CHAT:
            return {**end, "text": _cut(choice.get("text"), sent.get("text", 0))}
        delta: dict[str, object] = {}
        for name, value in _fields(choice.get("message")):
            if name == "tool_calls":
                calls = enumerate(_objects(value))
                rest = [one for at, call in calls if (one := _rest_of_call(at, call, sent))]
                delta |= {name: rest} if rest else {}
            elif isinstance(value, str) and name not in _NAMES:
                rest_text = _cut(value, sent.get(name, 0))
                delta |= {name: rest_text} if rest_text else {}
            elif name not in sent and value is not None:
                delta[name] = value
        return {**end, "delta": delta}


def _rest_beside(choice: Json, sent: Mapping[str, int]) -> dict[str, object]:
    """Return a choice's fields beside its text: of log probabilities what was not sent yet."""
    rest = {name: value for name, value in choice.items() if name not in ("message", "text")}
    for name, value in choice.items():
        if name == "logprobs" and isinstance(value, dict):
            rest[name] = {
                field: entries[sent.get(f"logprobs.{field}", 0) :]
                if isinstance(entries, list)
                else entries
                for field, entries in cast("dict[str, object]", value).items()
            }
        elif isinstance(value, list) and sent:
            # Other lists grow with the text, and how far they were sent is not known.
            del rest[name]
    return rest


def _rest_of_call(at: int, call: Json, sent: Mapping[str, int]) -> dict[str, object]:
    """Return what was not sent of a tool call; empty when all was."""
    was_sent = sent.get(f"tool_calls.{at}")
    if was_sent is None:
        return {"index": at, **call}
    function = call.get("function")
    arguments = cast("Json", function).get("arguments") if isinstance(function, dict) else None
    rest = _cut(arguments, was_sent)
    return {"index": at, "function": {"arguments": rest}} if rest else {}


def _cut(value: object, sent: int) -> str:
    return value[sent:] if isinstance(value, str) else ""


def _data(data: bytes) -> bytes:
    """Write an event. JSON needs no line break, but may have some between its tokens."""
    if b"\n" in data or b"\r" in data:
        data = data.replace(b"\r", b"").replace(b"\n", b"\ndata: ")
    return b"data: " + data + b"\n\n"


def _named(kind: object, data: bytes) -> bytes:
    """Write an event with its name, as /v1/responses has them."""
    name = kind if isinstance(kind, str) and kind.isascii() and kind.isprintable() else ""
    return (f"event: {name}\n".encode() if name else b"") + _data(data)


def _parsed(data: bytes) -> Json:
    try:
        parsed: object = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    return cast("Json", parsed) if isinstance(parsed, dict) else {}


def _objects(value: object) -> list[Json]:
    entries = cast("list[object]", value) if isinstance(value, list) else []
    return [cast("Json", entry) for entry in entries if isinstance(entry, dict)]


def _fields(value: object) -> list[tuple[str, object]]:
    return list(cast("dict[str, object]", value).items()) if isinstance(value, dict) else []


def _index(entry: Json) -> int:
    index = entry.get("index", 0)
    return index if isinstance(index, int) else 0
