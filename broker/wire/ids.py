"""Names: what a lane, worker, client, job or model may be called, and how it becomes a token.

A token is `[A-Za-z0-9_-]{1,64}`: it can stand in a NATS subject, a stream or consumer name and a
file name
without quoting. Model names are free text (`meta-llama/Llama-3.1-8B`), so they are escaped into a
token.
"""

import re
import secrets

TOKEN_CHARS_MAX = 64
"""Longest token. NATS itself allows more; 64 keeps the longest subject under 300 bytes."""

BANDS = (0, 1, 2, 3)
"""Priority classes, most urgent first: 0 critical, 1 interactive, 2 standard, 3 batch."""

ONLINE_BANDS = (0, 1)
"""Somebody waits at the other end."""

BATCH_BAND = 3

_TOKEN = re.compile(rf"[A-Za-z0-9_-]{{1,{TOKEN_CHARS_MAX}}}")
_ESCAPED = re.compile(r"_([0-9A-F]{2})")
_PLAIN = re.compile(r"[A-Za-z0-9-]")
_LINE_JOB = re.compile(r"(batch_[A-Za-z0-9]+)-([0-9]+)")


class MalformedName(ValueError):
    """A name that can't stand in a subject; the message says which rule it breaks."""


def is_token(name: str) -> bool:
    """Say whether `name` can stand in a subject as it is."""
    return _TOKEN.fullmatch(name) is not None


def require_token(name: str, *, what: str) -> str:
    """Return `name` unchanged, or raise MalformedName that names `what` (say "lane")."""
    if is_token(name):
        return name
    message = f"{what} {name!r} is not 1 to {TOKEN_CHARS_MAX} of the characters A-Z a-z 0-9 _ -"
    raise MalformedName(message)


def escape_model(model: str) -> str:
    """Turn a model name into one token: letters, digits, `-` stay, other bytes become `_XX`.

    Raises MalformedName when the name is empty or its escaped form is longer than a token.
    """
    try:
        token = "".join(
            char if _PLAIN.fullmatch(char) else "".join(f"_{byte:02X}" for byte in char.encode())
            for char in model
        )
    except UnicodeEncodeError as error:
        message = f"model {model!r} is not text"
        raise MalformedName(message) from error
    return require_token(token, what="model (escaped)")


def unescape_model(token: str) -> str:
    """Undo `escape_model`. Raises MalformedName on a token that no model name escapes to."""
    try:
        model = _ESCAPED.sub(lambda hit: chr(int(hit[1], 16)), token).encode("latin-1").decode()
    except UnicodeError as error:
        message = f"{token!r} is not an escaped model name"
        raise MalformedName(message) from error
    if escape_model(model) != token:
        message = f"{token!r} is not an escaped model name"
        raise MalformedName(message)
    return model


def new_job_id() -> str:
    """Make a job id that no other client will make: 22 characters, 128 random bits."""
    return secrets.token_urlsafe(16)


def job_key(lane: str, job_id: str) -> str:
    """Name a job across lanes: `<lane>.<job>`. Job ids are unique within a lane only."""
    return f"{lane}.{job_id}"


def split_job_key(key: str) -> tuple[str, str]:
    """Return (lane, job id) of a job key."""
    lane, _, job_id = key.partition(".")
    return lane, job_id


def line_job_id(batch_id: str, number: int) -> str:
    """Name the job of a line of a batch that the cluster runs: the same for every runner."""
    return f"{batch_id}-{number}"


def parse_line_job_id(job_id: str) -> tuple[str, int] | None:
    """Undo `line_job_id`: (batch id, number of the line); None for any other job."""
    found = _LINE_JOB.fullmatch(job_id)
    return (found[1], int(found[2])) if found else None
