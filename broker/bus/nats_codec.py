"""NATS's own notations: header blocks, ack subjects, times and JSON answers. Pure."""

import re
from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

import msgspec

from broker.bus.base import BusError, Delivery

HEADER_VERSION = b"NATS/1.0"
NANOSECONDS = 1_000_000_000

_LINE_BREAKS = re.compile(r"[\r\n]")
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_BAD_SUBJECT = re.compile(r"[ \t\r\n]|^$|^\.|\.$|\.\.")

SUBJECT_CHARS_MAX = 1024
"""Longest subject: with a reply subject it must fit the server's control line of 4 KB."""

HEADER_BYTES_MAX = 16 * 1024
"""Of a message's headers, what is read: ours take a hundred bytes. A block may be as large as a
message, and its fields take the loop for a third of a second then, and many times their bytes."""

_ACK_TOKENS = 9
"""`$JS.ACK.<stream>.<consumer>.<count>.<stream seq>.<consumer seq>.<time>.<pending>`."""

_ACK_TOKENS_LONG = 11
"""As above with `<domain>.<account>` after `ACK`; a random token may follow."""


class Status(NamedTuple):
    """The status line of a header block: 100, 404, 408, 409, 503, ..."""

    code: int
    text: str


def check_subject(subject: str) -> None:
    """Raise BusError where a subject would break the protocol line it stands in."""
    if _BAD_SUBJECT.search(subject) or len(subject) > SUBJECT_CHARS_MAX:
        message = f"not a subject: {subject[:80]!r}"
        raise BusError(message)


def encode_headers(headers: Mapping[str, str]) -> bytes:
    """Write a header block. Raises BusError on a name or value that can't stand in one."""
    lines = [HEADER_VERSION.decode()]
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name) or _LINE_BREAKS.search(value):
            message = f"not a header: {name[:40]!r}: {value[:40]!r}"
            raise BusError(message)
        lines.append(f"{name}: {value}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def decode_headers(block: bytes | None) -> dict[str, str]:
    """Read the fields of a header block; the status line is left out.

    Of one beyond HEADER_BYTES_MAX its beginning and its end alone: there the server puts its own.
    """
    if not block:
        return {}
    if len(block) > HEADER_BYTES_MAX:
        half = HEADER_BYTES_MAX // 2
        begin, end = block[:half].rpartition(b"\r\n")[0], block[-half:].partition(b"\r\n")[2]
        block = begin + b"\r\n" + end
    headers: dict[str, str] = {}
    for line in block.decode("utf-8", "replace").split("\r\n")[1:]:
        name, separator, value = line.partition(":")
        if separator:
            headers[name.strip()] = value.strip()
    return headers


def decode_status(block: bytes | None) -> Status | None:
    """Read the status line of a header block; None where there is none."""
    if not block or block[len(HEADER_VERSION) : len(HEADER_VERSION) + 1] != b" ":
        return None
    line = block[len(HEADER_VERSION) + 1 : block.find(b"\r\n")].decode("utf-8", "replace")
    code, _, text = line.partition(" ")
    return Status(int(code) if code.isdecimal() else 0, text)


def is_no_responders(data: bytes, block: bytes | None) -> bool:
    """Say whether an answer is the server's "nobody listens"."""
    return not data and block is not None and block.startswith(b"NATS/1.0 503")


def decode_delivery(subject: bytes, reply: bytes, data: bytes, block: bytes | None) -> Delivery:
    """Read a pulled message. Raises BusError when its reply is no ack subject."""
    ack_subject = reply.decode()
    parts = ack_subject.split(".")
    if len(parts) == _ACK_TOKENS:
        base = 2
    elif len(parts) >= _ACK_TOKENS_LONG:
        base = 4
    else:
        message = f"not an ack subject: {ack_subject[:80]!r}"
        raise BusError(message)
    return Delivery(
        subject.decode(),
        parts[base],
        parts[base + 1],
        int(parts[base + 3]),
        data,
        ack_subject,
        int(parts[base + 5]) / NANOSECONDS,
        int(parts[base + 6]),
        decode_headers(block) if block else _NO_HEADERS,
    )


_NO_HEADERS: Mapping[str, str] = {}


def decode_time(text: str) -> float:
    """Read an RFC 3339 time as Unix seconds."""
    return datetime.fromisoformat(text).timestamp()


class ApiError(msgspec.Struct, frozen=True):
    """What a JetStream answer says went wrong."""

    code: int
    err_code: int = 0
    description: str = ""


class PubAck(msgspec.Struct, frozen=True):
    """A stream's answer to a message."""

    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: ApiError | None = None


class _State(msgspec.Struct, frozen=True):
    messages: int = 0
    bytes: int = 0
    first_seq: int = 0
    last_seq: int = 0
    num_subjects: int = 0
    subjects: dict[str, int] | None = None


class _Sequences(msgspec.Struct, frozen=True):
    consumer_seq: int = 0
    stream_seq: int = 0


class _Limits(msgspec.Struct, frozen=True):
    max_memory: int = -1
    max_storage: int = -1


class Answer(msgspec.Struct, frozen=True):
    """A JetStream API answer; which fields it has depends on the question."""

    type: str = ""
    error: ApiError | None = None
    success: bool = False
    purged: int = 0
    config: dict[str, object] = {}
    state: _State = _State()
    # consumers
    delivered: _Sequences = _Sequences()
    num_ack_pending: int = 0
    num_pending: int = 0
    num_waiting: int = 0
    # account
    memory: int = 0
    storage: int = 0
    streams: int = 0
    limits: _Limits = _Limits()
    # paging
    total: int = 0
    offset: int = 0


decode_pub_ack = msgspec.json.Decoder(PubAck).decode
decode_answer = msgspec.json.Decoder(Answer).decode
