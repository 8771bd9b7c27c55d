"""One request and its answer over the OpenAI API, as bytes: what is sent, what the reply means.

Pure, so that each odd answer of an engine has a test without a socket. The agent asks for a stream
even when its caller does not: only a stream shows progress, and a stalled engine must be noticed.
Of the caller's body nothing is changed but `stream` and `stream_options.include_usage`: the bytes
of all other fields are his.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import orjson

from broker.wire.messages import Usage
from broker.wire.splice import with_fields
from worker_agent.engine.assembly import (
    ENDPOINTS,
    RESPONSES,
    Assembly,
    Json,
    as_object,
    assembly_for,
    usage_in,
)
from worker_agent.engine.base import (
    RESPONSE_BYTES_MAX,
    AnswerTooLarge,
    Chunk,
    Completed,
    EngineBusy,
    EngineError,
    EngineFailed,
    EngineGarbage,
    EngineRefused,
    EngineRequest,
    refusal,
)
from worker_agent.engine.door import DOOR_CODES, door_advice

JSON_TYPE = "application/json"
STREAM_TYPE = "text/event-stream"

NESTING_MAX = 254
"""Levels that are written (orjson), and that each engine can be held to read."""

CHOICES_MAX = 128
"""Largest `n` that is believed; OpenAI's own bound."""

_TOO_LARGE = f"the answer is longer than {RESPONSE_BYTES_MAX} bytes"

_BUSY_CODES = (408, 429)
_NOT_OFFERED_CODE = 501
_JOB_ERRORS = range(400, 500)
_ENGINE_ERRORS = range(500, 600)


@dataclass(slots=True)
class Exchange:
    """What is sent for one request, and what has come back so far."""

    request: EngineRequest
    body: bytes
    model: str
    assembly: Assembly | None
    """None: the answer comes in one piece."""
    usage_asked: bool
    output_tokens: int = 0
    cached_tokens: int | None = None

    def chunk(self, data: bytes) -> Chunk:
        """Take one event of the stream. Raises EngineError."""
        assert self.assembly is not None
        event = as_object(_parsed(data), "an event of the stream")
        if isinstance(error := event.get("error"), (dict, str)) and "choices" not in event:
            raise _reported(cast("Json | str", error), data)
        brought = self.assembly.add(event)
        self.output_tokens += brought
        found = usage_in(event)
        if found is not None:
            # Some engines say 0 until the end: no sign that nothing comes.
            self.output_tokens = max(self.output_tokens, found[0].output_tokens)
            self.cached_tokens = found[1]
        forward = self.request.stream_to_client and (self.usage_asked or not _only_usage(event))
        return Chunk(
            data=data if forward else b"",
            output_tokens=self.output_tokens,
            cached_tokens=self.cached_tokens,
        )

    def streamed(self, status_code: int) -> Completed:
        """Return the whole answer after the stream's end. Raises EngineGarbage on half a stream."""
        assert self.assembly is not None
        whole = self.assembly.whole()
        try:
            body = orjson.dumps(whole)
        except orjson.JSONEncodeError as error:  # What can be read may be nested too deep to write.
            message = f"the answer can't be written ({error})"
            raise EngineGarbage(message, status_code=status_code) from error
        if len(body) > RESPONSE_BYTES_MAX:
            raise AnswerTooLarge(_TOO_LARGE)
        return self._completed(status_code, body, whole)

    def in_one_piece(self, status_code: int, content_type: str, body: bytes) -> Completed:
        """Return an answer that was not streamed. Raises EngineError.

        Some engines don't stream where they were asked to: good enough if nobody reads along.
        """
        streams = self.assembly is not None and self.request.stream_to_client
        wanted = STREAM_TYPE if streams else JSON_TYPE
        if content_type != wanted:
            message = f"the answer is {content_type or 'of no type'}, not {wanted}: {_text(body)}"
            raise EngineGarbage(message, status_code=status_code)
        if len(body) > RESPONSE_BYTES_MAX:
            raise AnswerTooLarge(_TOO_LARGE)
        return self._completed(status_code, body, as_object(_parsed(body), "the answer"))

    def _completed(self, status_code: int, body: bytes, whole: Json) -> Completed:
        counted = Usage(self.request.prompt_tokens, 0, self.output_tokens)
        usage, cached_tokens = usage_in(whole, counted=counted) or (counted, None)
        return Completed(
            status_code=status_code, body=body, usage=usage, cached_tokens=cached_tokens
        )


def open_exchange(request: EngineRequest) -> Exchange:
    """Read a request and lay out what to send. Raises EngineRefused when it is none.

    The endpoint comes from a caller: only what generates is let through, and not what steers the
    engine (vLLM loads adapters under /v1, too).
    """
    if request.endpoint not in ENDPOINTS:
        raise refusal(404, f"{request.endpoint} is not served.", "not_found")
    try:
        parsed: object = orjson.loads(request.body)
    except orjson.JSONDecodeError as error:
        raise refusal(400, f"The body is not JSON: {error}", "invalid_json") from error
    if not isinstance(parsed, dict):
        raise refusal(400, "The body is not a JSON object.", "invalid_json")
    fields = cast("Json", parsed)
    assembly = None
    if request.stream_to_client or not _needs_one_piece(fields):
        assembly = assembly_for(request.endpoint, choices=_choices(fields))
    options = fields.get("stream_options")
    asked = cast("Json", options) if isinstance(options, dict) else {}
    try:
        body = _body(request, fields, asked, streams=assembly is not None)
    except orjson.JSONEncodeError as error:
        raise refusal(400, f"The body is nested too deep: {error}", "invalid_json") from error
    return Exchange(
        request=request,
        body=body,
        model=str(fields.get("model", "")),
        assembly=assembly,
        usage_asked=bool(asked.get("include_usage")),
    )


def error_for(status_code: int, body: bytes, *, location: str = "") -> EngineError:
    """Return what an answer that is no success means. 4xx is the job's own error, with exceptions.

    Busy (408, 429) passes. A closed door (401, 403, 407) is the agent's wrong key, and one that
    takes no requests (405) its wrong address. "Not implemented" (501, llama.cpp without
    embeddings) is so on every worker of this model. `location` is where a redirect points.
    """
    said = _message(body).strip()
    advice = door_advice(status_code, location=location)
    detail = f"HTTP {status_code}{advice}" + (f": {said}" if said else "")
    if status_code in _BUSY_CODES:
        return EngineBusy(detail, status_code=status_code, body=body)
    if status_code in DOOR_CODES:
        return EngineFailed(detail, status_code=status_code, body=body)
    if status_code in _JOB_ERRORS or status_code == _NOT_OFFERED_CODE:
        return EngineRefused(
            detail, status_code=status_code, body=_error_body(status_code, body, detail)
        )
    if status_code in _ENGINE_ERRORS:
        return EngineFailed(detail, status_code=status_code, body=body)
    return EngineGarbage(detail, status_code=status_code)


def _body(request: EngineRequest, fields: Json, options: Json, *, streams: bool) -> bytes:
    if not streams and "stream" not in fields:
        return request.body
    if request.body.count(b"[") + request.body.count(b"{") > NESTING_MAX:
        orjson.dumps(fields)  # Raises where they are nested that deep.
    changes: Json = {"stream": streams}
    if streams and request.endpoint != RESPONSES:
        changes["stream_options"] = {**options, "include_usage": True}
    return with_fields(request.body, changes)


def _needs_one_piece(fields: Mapping[str, object]) -> bool:
    """Tell whether engines refuse to stream this (vLLM: beam search, best_of)."""
    best_of = fields.get("best_of")
    return bool(fields.get("use_beam_search")) or (isinstance(best_of, int) and best_of > 1)


def _choices(fields: Mapping[str, object]) -> int:
    n = fields.get("n")
    return n if isinstance(n, int) and 1 <= n <= CHOICES_MAX else 1


def _only_usage(event: Json) -> bool:
    return event.get("choices") == [] and bool(event.get("usage"))


def _parsed(data: bytes) -> object:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        message = f"broken JSON ({error}): {_text(data)}"
        raise EngineGarbage(message) from error


def _reported(error: Json | str, data: bytes) -> EngineError:
    """Return what an error in mid-stream means: by its code, or else a failure."""
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, int) and (code in _JOB_ERRORS or code in _ENGINE_ERRORS):
        return error_for(code, data)
    return EngineFailed(f"in mid-stream: {_message(data)}", body=data)


def _message(body: bytes) -> str:
    """Return an error's message, wherever the engine put it."""
    try:
        parsed: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        return _text(body)
    for name in ("error", "message", "detail"):
        if isinstance(parsed, dict) and name in parsed:
            parsed = cast("Json", parsed)[name]
    if isinstance(parsed, str):
        return parsed
    try:
        return _text(orjson.dumps(parsed))
    except orjson.JSONEncodeError:
        return _text(body)


def _error_body(status_code: int, body: bytes, detail: str) -> bytes:
    """Return the engine's own words if a client can read them, else the same in OpenAI's form."""
    try:
        if isinstance(orjson.loads(body), dict):
            return body
    except orjson.JSONDecodeError:
        pass
    return refusal(status_code, detail, "engine_refused").body


def _text(body: bytes) -> str:
    return body[:500].decode(errors="replace")
