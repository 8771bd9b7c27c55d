"""What went wrong, as OpenAI clients read it."""

from typing import Any

import orjson
import pytest

from broker.wire.messages import Kind, Reason, TerminalRecord
from producers.errors import (
    BadRequest,
    BodyTooLarge,
    ClientClosed,
    ProducerError,
    QueueFull,
    ResultTimeout,
    UnknownModel,
    Unreachable,
)
from producers.gateway.errors import RETRY_AFTER_S_MAX, ApiError, of_producer, of_record

REFUSED = "engine_refused"


def _record(kind: Kind, reason: Reason | None = None, **fields: Any) -> TerminalRecord:
    return TerminalRecord(job="j", lane="acme", kind=kind, ended_at_s=1.0, reason=reason, **fields)


def test_an_error_has_all_four_keys() -> None:
    """Also those that are null: the client reads each."""
    body = orjson.loads(ApiError(404, "not_found", "No.").body)
    assert body == {
        "error": {
            "message": "No.",
            "type": "invalid_request_error",
            "param": None,
            "code": "not_found",
        }
    }


@pytest.mark.parametrize(
    ("pause_s", "told"),
    [
        (0.0123, {"Retry-After": "1", "retry-after-ms": "13"}),
        (2.0, {"Retry-After": "2", "retry-after-ms": "2000"}),
        (9e9, {"Retry-After": "120", "retry-after-ms": "120000"}),
        (None, {"x-should-retry": "false"}),
    ],
)
def test_when_to_come_again(pause_s: float | None, told: dict[str, str]) -> None:
    """To the millisecond, never longer than a client obeys; or that it is of no use."""
    assert ApiError(429, "queue_full", "Full.", retry_after_s=pause_s).headers == told
    assert RETRY_AFTER_S_MAX == 120


@pytest.mark.parametrize(
    ("error", "status", "code", "pause_s"),
    [
        (QueueFull("full", retry_after_s=2.5), 429, "queue_full", 2.5),
        (UnknownModel("none"), 404, "model_not_found", None),
        (BodyTooLarge("large"), 413, "payload_too_large", None),
        (BadRequest("bad"), 400, "invalid_request", None),
        (Unreachable("down"), 503, "unreachable", 1.0),
        (ClientClosed("closed"), 503, "gateway_stopping", 1.0),
        (ResultTimeout("late"), 408, "answer_timeout", None),
        (ProducerError("else"), 503, "unreachable", 1.0),
    ],
)
def test_what_was_not_accepted(
    error: ProducerError, status: int, code: str, pause_s: float | None
) -> None:
    """Each of the library's errors has a status, a code, and a word on retries."""
    told = of_producer(error)
    assert (told.status, told.code, told.retry_after_s) == (status, code, pause_s)
    assert told.message


@pytest.mark.parametrize(
    ("reason", "status", "retries"),
    [
        (Reason.QUEUE_FULL, 429, True),
        (Reason.QUOTA_EXCEEDED, 429, True),
        (Reason.RESULTS_FULL, 429, True),
        (Reason.NO_WORKERS, 503, True),
        (Reason.DRAINING, 503, True),
        (Reason.LANE_PAUSED, 503, True),
        (Reason.WAIT_EXPIRED, 503, True),
        (Reason.DEADLINE_INFEASIBLE, 408, False),
        (Reason.DEADLINE_EXPIRED, 408, False),
        (Reason.RUN_TIME_EXCEEDED, 408, False),
        (Reason.CANCELLED, 409, False),
        (Reason.DUPLICATE, 409, False),
        (Reason.PAYLOAD_TOO_LARGE, 413, False),
        (Reason.UNKNOWN_MODEL, 404, False),
        (Reason.MALFORMED, 400, False),
        (Reason.ENGINE_REFUSED, 400, False),
        (Reason.WORKER_LOST, 503, False),
        (Reason.ENGINE_FAILED, 503, False),
        (Reason.ENGINE_GARBAGE, 503, False),
        (Reason.ENGINE_TIMEOUT, 503, False),
        (Reason.STALLED, 503, False),
        (Reason.HANDED_BACK, 503, False),
    ],
)
def test_every_reason_has_its_status(reason: Reason, status: int, *, retries: bool) -> None:
    """Capacity may be asked again after the time that the broker told; the rest may not."""
    told = of_record(_record(Kind.FAILED, reason, retry_after_s=3.0, message="why"))
    assert (told.status, told.message) == (status, "why")
    assert told.retry_after_s == (3.0 if retries else None)
    code = {"unknown_model": "model_not_found", "malformed": "invalid_request"}
    assert told.code == code.get(reason, reason)


def test_every_reason_is_in_the_table() -> None:
    """A reason that is added must be given its status."""
    cases = test_every_reason_has_its_status.pytestmark[0].args[1]  # type: ignore[attr-defined]
    assert {case[0] for case in cases} == set(Reason)


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        (Kind.CANCELLED, 409, "cancelled"),
        (Kind.EXPIRED, 408, "deadline_expired"),
        (Kind.DEAD_LETTERED, 503, "engine_failed"),
    ],
)
def test_a_record_without_a_reason(kind: Kind, status: int, code: str) -> None:
    """Its kind says enough."""
    told = of_record(_record(kind))
    assert (told.status, told.code) == (status, code)
    assert str(kind) in told.message


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (
            422,
            {"error": {"message": "too long", "code": "context_length_exceeded", "param": "p"}},
            (422, "too long", "context_length_exceeded", "p"),
        ),
        (400, {"error": "plain"}, (400, "plain", REFUSED, None)),
        (400, {"object": "error", "message": "flat", "code": 40001}, (400, "flat", REFUSED, None)),
        (422, {"detail": "fast"}, (422, "fast", REFUSED, None)),
        (422, {"detail": [{"loc": 1}]}, (422, "why", REFUSED, None)),
        (501, {"error": {"message": "no embeddings"}}, (400, "no embeddings", REFUSED, None)),
        (400, [1], (400, "why", REFUSED, None)),
        (0, None, (400, "why", REFUSED, None)),
    ],
)  # fmt: skip
def test_the_engines_own_words(status: int, body: object, told: tuple[object, ...]) -> None:
    """What an engine said of a request is passed on in OpenAI's form, wherever it put it."""
    packed = b"<html>" if body is None else orjson.dumps(body)
    record = _record(
        Kind.FAILED, Reason.ENGINE_REFUSED, status_code=status, body=packed, message="why"
    )
    error = of_record(record)
    assert (error.status, error.message, error.code, error.param) == told
