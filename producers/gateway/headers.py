"""What a request's headers wish, and what an answer's headers tell.

X-Inferlane-Band       0 to 3, or critical, interactive, standard, batch
X-Inferlane-Deadline   after so long nobody wants the answer: 30, 30s, 5m
X-Inferlane-Session    requests of a session like the same worker
X-Inferlane-Job-Id     the job's id; the same again gives the same job
Idempotency-Key        the same key with the same body gives the same answer, run once
Prefer: respond-async  202 at once; the answer is fetched later
"""

import hashlib
import re
from collections.abc import Mapping

from broker.wire.ids import BANDS, is_token
from broker.wire.messages import TerminalRecord
from producers.gateway.errors import ApiError, bad_request
from producers.ticket import Ticket

BAND = "X-Inferlane-Band"
DEADLINE = "X-Inferlane-Deadline"
SESSION = "X-Inferlane-Session"
JOB_ID = "X-Inferlane-Job-Id"
IDEMPOTENCY_KEY = "Idempotency-Key"
WORKER = "X-Inferlane-Worker"
QUEUE_MS = "X-Inferlane-Queue-Ms"
CACHED_TOKENS = "X-Inferlane-Cached-Tokens"

BAND_NAMES = {"critical": 0, "interactive": 1, "standard": 2, "batch": 3}

TEXT_CHARS_MAX = 256
"""Longest session and longest Idempotency-Key: `ShortText` on the wire."""

DEADLINE_S_MAX = 7 * 86_400.0
"""Longest deadline that is taken: later than any result is kept."""

_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m|h|d)?")
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def band_of(headers: Mapping[str, str], default: int) -> int:
    """Return the priority that is wished. Raises ApiError (400)."""
    given = headers.get(BAND)
    if given is None:
        return default
    band = BAND_NAMES.get(given.strip().lower())
    if band is None and given.strip() in {str(one) for one in BANDS}:
        band = int(given)
    if band is None:
        known = ", ".join(f"{number} ({name})" for name, number in BAND_NAMES.items())
        raise _wrong(BAND, given, f"one of {known}")
    return band


def deadline_s_of(headers: Mapping[str, str]) -> float | None:
    """Return in how many seconds the answer is of no use any more; None: never.

    Raises ApiError (400).
    """
    given = headers.get(DEADLINE)
    if given is None:
        return None
    hit = _DURATION.fullmatch(given.strip().lower())
    seconds = float(hit[1]) * _UNITS_S[hit[2] or "s"] if hit else 0.0
    if not 0.0 < seconds <= DEADLINE_S_MAX:
        raise _wrong(DEADLINE, given, "a duration above 0 such as 30, 30s or 5m, at most 7d")
    return seconds


def session_of(headers: Mapping[str, str]) -> str:
    """Return the session's name; empty without one. Raises ApiError (400)."""
    given = headers.get(SESSION, "")
    if len(given) > TEXT_CHARS_MAX or not (given.isascii() and given.isprintable()):
        raise _wrong(SESSION, given, f"at most {TEXT_CHARS_MAX} printable ASCII characters")
    return given


def job_id_of(headers: Mapping[str, str], endpoint: str, body: bytes) -> str:
    """Return the id that the caller gives his job, himself or by an idempotency key; else empty.

    An id made of a key holds a digest of the body too: the same key with another body can never be
    answered with the first one's answer. Raises ApiError (400).
    """
    given, key = headers.get(JOB_ID), headers.get(IDEMPOTENCY_KEY)
    if given is not None and key is not None:
        message = f"Send either {JOB_ID} or {IDEMPOTENCY_KEY}: both name the same job."
        raise bad_request(message, code="invalid_header", param=JOB_ID)
    if given is not None:
        if not is_token(given):
            raise _wrong(JOB_ID, given, "1 to 64 of the characters A-Z a-z 0-9 _ -")
        return given
    if key is None:
        return ""
    if not 0 < len(key) <= TEXT_CHARS_MAX:
        raise _wrong(IDEMPOTENCY_KEY, key, f"1 to {TEXT_CHARS_MAX} characters")
    return f"{key_prefix(key)}-{_digest(endpoint.encode() + b' ' + body, 8)}"


def key_prefix(key: str) -> str:
    """Return how the ids of all jobs under an idempotency key begin."""
    return f"ik-{_digest(key.encode(errors='surrogateescape'), 14)}"


def wants_no_wait(headers: Mapping[str, str]) -> bool:
    """Say whether the caller prefers to fetch the answer later (RFC 7240)."""
    wishes = headers.get("Prefer", "").lower().split(",")
    return any(wish.split(";")[0].strip() == "respond-async" for wish in wishes)


def told_of(ticket: Ticket) -> dict[str, str]:
    """Return what is known of a job by now, as headers."""
    record = ticket.record
    told = {JOB_ID: ticket.job_id}
    worker = record.worker if record is not None else ticket.worker
    if worker:
        told[WORKER] = worker
    queue_s = _queue_s(ticket)
    if queue_s is not None:
        told[QUEUE_MS] = str(round(queue_s * 1000))
    if record is not None and record.status_code:
        told[CACHED_TOKENS] = str(record.usage.cached_tokens)
    return told


def of_record(record: TerminalRecord) -> dict[str, str]:
    """Return what a record tells, as headers."""
    told = {JOB_ID: record.job}
    if record.worker:
        told[WORKER] = record.worker
    if record.status_code:
        told[CACHED_TOKENS] = str(record.usage.cached_tokens)
    return told


def _queue_s(ticket: Ticket) -> float | None:
    """Return how long the job waited, by this process's clock where it heard the start."""
    if ticket.started_at_s:
        return max(0.0, ticket.started_at_s - ticket.job.submitted_at_s)
    record = ticket.record
    if record is None or not record.dispatched_at_s:
        return None
    return max(0.0, record.dispatched_at_s - record.submitted_at_s)


def _digest(data: bytes, size: int) -> str:
    return hashlib.blake2b(data, digest_size=size).hexdigest()


def _wrong(name: str, given: str, allowed: str) -> ApiError:
    shown = given[:40].encode("ascii", "replace").decode()
    message = f"{name} {shown!r} is not allowed; it must be {allowed}."
    return bad_request(message, code="invalid_header", param=name)
