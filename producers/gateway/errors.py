"""What went wrong, as OpenAI clients read it: status, the four keys, and whether to try again.

A client of theirs tries again on 408, 409, 429 and 5xx, after `retry-after-ms` or `Retry-After`,
unless `x-should-retry` says otherwise. So each error here says it outright where another try can't
help, and after how long where it can.
"""

import math
from collections.abc import Mapping
from typing import cast

import orjson
from aiohttp import web

from broker.wire.messages import Kind, Reason, TerminalRecord
from producers.errors import (
    ClientClosed,
    ProducerError,
    Refused,
    ResultTimeout,
    Unreachable,
)

RETRY_AFTER_S = 1.0
"""Told where another try may help and nobody knows when."""

RETRY_AFTER_S_MAX = 120.0
"""Longest pause that is told: OpenAI clients obey nothing longer."""

_TYPES = {
    401: "authentication_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
"""`error.type` by status; all others are the request's own fault."""

_STATUSES = {
    Reason.QUEUE_FULL: 429,
    Reason.QUOTA_EXCEEDED: 429,
    Reason.RESULTS_FULL: 429,
    Reason.NO_WORKERS: 503,
    Reason.DRAINING: 503,
    Reason.LANE_PAUSED: 503,
    Reason.WAIT_EXPIRED: 503,
    Reason.DEADLINE_INFEASIBLE: 408,
    Reason.DEADLINE_EXPIRED: 408,
    Reason.RUN_TIME_EXCEEDED: 408,
    Reason.CANCELLED: 409,
    Reason.DUPLICATE: 409,
    Reason.PAYLOAD_TOO_LARGE: 413,
    Reason.UNKNOWN_MODEL: 404,
    Reason.MALFORMED: 400,
    Reason.ENGINE_REFUSED: 400,
}
"""Reasons that are not here are the cluster's own trouble: 503."""

_TRANSIENT = frozenset(
    (
        Reason.QUEUE_FULL,
        Reason.QUOTA_EXCEEDED,
        Reason.RESULTS_FULL,
        Reason.NO_WORKERS,
        Reason.DRAINING,
        Reason.LANE_PAUSED,
        Reason.WAIT_EXPIRED,
    )
)
"""Another try may escape these. A dead letter's may not: it failed as often as is allowed."""

_CODES = {Reason.UNKNOWN_MODEL: "model_not_found", Reason.MALFORMED: "invalid_request"}
"""OpenAI's own words, where there is one; else the reason itself."""

_ENGINE_ERRORS = range(400, 500)


class ApiError(Exception):
    """A request that is not answered as it wished."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`retry_after_s` None: another try can't help, and the client is told so."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.extra_headers = dict(headers or {})

    @property
    def body(self) -> bytes:
        """The error as JSON, all four keys present."""
        return orjson.dumps({"error": self.fields})

    @property
    def fields(self) -> dict[str, str | None]:
        """What stands under `error`."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"message": self.message, "type": kind, "param": self.param, "code": self.code}

    @property
    def headers(self) -> dict[str, str]:
        """What tells a client whether, and when, to try again."""
        if self.retry_after_s is None:
            return {"x-should-retry": "false", **self.extra_headers}
        pause_s = min(max(self.retry_after_s, 0.0), RETRY_AFTER_S_MAX)
        return {
            "Retry-After": str(math.ceil(pause_s)),
            "retry-after-ms": str(math.ceil(pause_s * 1000)),
            **self.extra_headers,
        }

    def response(self) -> web.Response:
        """Make the HTTP answer."""
        return web.Response(
            status=self.status,
            body=self.body,
            headers=self.headers,
            content_type="application/json",
        )


def bad_request(
    message: str, *, code: str = "invalid_request", param: str | None = None
) -> ApiError:
    """Make the error of a request that can't be understood (400)."""
    return ApiError(400, code, message, param=param)


def overloaded(message: str) -> ApiError:
    """Make the error of a gateway that is at one of its own limits (503)."""
    return ApiError(503, "gateway_overloaded", message, retry_after_s=RETRY_AFTER_S)


def of_producer(error: ProducerError) -> ApiError:
    """Say over HTTP why a job was not accepted, or can't be waited for."""
    match error:
        case Refused(reason=reason, retry_after_s=retry_after_s):
            return _told(reason, str(error), retry_after_s=retry_after_s)
        case Unreachable():
            return ApiError(503, "unreachable", str(error), retry_after_s=RETRY_AFTER_S)
        case ClientClosed():
            message = "This gateway is stopping; ask again."
            return ApiError(503, "gateway_stopping", message, retry_after_s=RETRY_AFTER_S)
        case ResultTimeout():
            return ApiError(408, "answer_timeout", str(error))
        case _:
            return ApiError(503, "unreachable", str(error), retry_after_s=RETRY_AFTER_S)


def of_record(record: TerminalRecord) -> ApiError:
    """Say over HTTP why a job did not complete. Only for a record that says so."""
    assert record.kind is not Kind.COMPLETED, "a completed job is no error"
    reason = record.reason or _reason_of(record.kind)
    message = record.message or f"The job ended as {record.kind}."
    if reason is Reason.ENGINE_REFUSED:
        return _of_engine(record, message)
    return _told(reason, message, retry_after_s=record.retry_after_s)


def _told(reason: Reason, message: str, *, retry_after_s: float) -> ApiError:
    pause_s = (retry_after_s or RETRY_AFTER_S) if reason in _TRANSIENT else None
    return ApiError(
        _STATUSES.get(reason, 503),
        _CODES.get(reason, str(reason)),
        message,
        param="model" if reason is Reason.UNKNOWN_MODEL else None,
        retry_after_s=pause_s,
    )


def _reason_of(kind: Kind) -> Reason:
    """Stand in for a record without a reason."""
    if kind is Kind.CANCELLED:
        return Reason.CANCELLED
    return Reason.DEADLINE_EXPIRED if kind is Kind.EXPIRED else Reason.ENGINE_FAILED


def _of_engine(record: TerminalRecord, message: str) -> ApiError:
    """Pass on what the engine said of a request that no engine could run, in OpenAI's form."""
    told = _engine_words(record.body)
    status = record.status_code if record.status_code in _ENGINE_ERRORS else 400
    code, param = told.get("code"), told.get("param")
    said = told.get("message")
    return ApiError(
        status,
        code if isinstance(code, str) and code else str(Reason.ENGINE_REFUSED),
        said if isinstance(said, str) and said else message,
        param=param if isinstance(param, str) else None,
    )


def _engine_words(body: bytes) -> Mapping[str, object]:
    """Find an engine's error object, wherever it put it; empty without one."""
    try:
        parsed: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    if not isinstance(parsed, dict):
        return {}
    said = cast("dict[str, object]", parsed)
    inner = said.get("error", said)
    if isinstance(inner, str):
        return {"message": inner}
    words = cast("dict[str, object]", inner) if isinstance(inner, dict) else {}
    detail = words.get("detail")
    return {**words, "message": detail} if isinstance(detail, str) else words
