"""A dead letter in words: for people as text, for scripts as builtins."""

import base64
import time
from typing import Any

import orjson

from broker.wire.codec import MalformedMessage, decode
from broker.wire.messages import Failure, Job
from ops.cli.letters import Letter
from ops.cli.output import printable, size

BODY_CHARS_MAX = 4_000
"""Characters of a request that are shown without --all: a screen or two."""


def moment(at_s: float) -> str:
    """Write a time of day with its date, in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))


def as_summary(letter: Letter) -> dict[str, Any]:
    """Tell a letter in builtins, without its request."""
    record = letter.record
    return {
        "job": letter.key,
        "given_up_at_s": letter.at_s,
        "subject": letter.subject,
        "band": record.band,
        "model": record.model,
        "client": record.client,
        "reason": record.reason,
        "message": record.message,
        "failures": [_failure(one) for one in record.failures],
        "job_bytes": letter.job_bytes,
    }


def as_builtins(letter: Letter) -> dict[str, Any]:
    """Tell a letter in builtins, its request included: as JSON, text or base64, what it is."""
    told = as_summary(letter)
    try:
        job = decode(letter.job, Job)
    except MalformedMessage as error:
        return told | {"unreadable": str(error), "job_base64": _base64(letter.job)}
    told |= {"endpoint": job.endpoint, "session": job.session, "request_id": job.request_id}
    try:
        return told | {"body": orjson.loads(job.body)}
    except orjson.JSONDecodeError:
        pass
    try:
        return told | {"body": job.body.decode()}
    except UnicodeDecodeError:
        return told | {"body_base64": _base64(job.body)}


def as_text(letter: Letter, *, whole: bool) -> str:
    """Tell a letter in text."""
    record = letter.record
    reason = record.reason.value if record.reason else "no reason given"
    lines = [
        f"{letter.key}: given up at {moment(letter.at_s)}: {reason}",
        f"  {record.message}",
        f"  queue {letter.subject}, client {record.client or '?'}",
        "",
        "Attempts",
        *(_attempt(one) for one in record.failures),
        *(["  none"] if not record.failures else []),
        "",
        *_request(letter.job, whole=whole),
        "",
        f"To run it again: inferlane dlq replay {letter.key}",
    ]
    return "\n".join(printable(line) for line in lines)


def _attempt(failure: Failure) -> str:
    charged = "" if failure.charged else " (not charged to the job)"
    detail = f": {failure.detail}" if failure.detail else ""
    return f"  {moment(failure.at_s)} on {failure.worker}: {failure.reason}{charged}{detail}"


def _request(data: bytes, *, whole: bool) -> list[str]:
    try:
        job = decode(data, Job)
    except MalformedMessage as error:
        return [f"Request: the job message ({size(len(data))}) can't be read: {error}"]
    text = _body_text(job.body)
    cut = "" if whole or len(text) <= BODY_CHARS_MAX else text[BODY_CHARS_MAX:]
    lines = [f"Request to {job.endpoint} ({size(len(job.body))})"]
    lines += [f"  {line}" for line in text[: len(text) - len(cut)].split("\n")]
    return [*lines, f"  … {len(cut):,} more characters: --all"] if cut else lines


def _body_text(body: bytes) -> str:
    """Write a request: JSON indented, other text as it is, bytes that are no text replaced."""
    try:
        return orjson.dumps(orjson.loads(body), option=orjson.OPT_INDENT_2).decode()
    except orjson.JSONDecodeError:
        return body.decode(errors="replace")


def _failure(failure: Failure) -> dict[str, Any]:
    return {
        "attempt": [failure.attempt.epoch, failure.attempt.number],
        "worker": failure.worker,
        "reason": failure.reason,
        "at_s": failure.at_s,
        "detail": failure.detail,
        "charged": failure.charged,
    }


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
