"""Bytes to typed records and back: msgpack, validated in the same pass that decodes.

What callers send and hear has a JSON form too (`json_form`), and is read in either.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, cast

import msgspec

from broker.wire import json_form
from broker.wire.messages import (
    End,
    Order,
    OutEvent,
    Queued,
    Started,
    StoredEnd,
    TerminalRecord,
    Tokens,
    WorkerNote,
)

MESSAGE_BYTES_MAX = 8_000_000
"""Largest message: the server's `max_payload` (8 MB, where NATS starts to warn)."""

_T = TypeVar("_T")


class MalformedMessage(ValueError):
    """Bytes that are not the message they should be; the text says where and why."""


_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {}
_orders = msgspec.msgpack.Decoder(Order)
_notes = msgspec.msgpack.Decoder(WorkerNote)
_outs = msgspec.msgpack.Decoder(OutEvent)


_OUT_KINDS = (Queued, Started, Tokens, End, StoredEnd)

JSON_HEADERS: Mapping[str, str] = {"Content-Type": "application/json"}
"""What a message in JSON carries, in a stream at least."""

_NAME = "content-type"
_NAME_CHARS = len(_NAME)


def speaks_json(data: bytes, headers: Mapping[str, str]) -> bool:
    """Say whether a message's sender reads and writes JSON.

    Its content type says so, or its first byte where it has none of ours: `{` begins no message in
    msgpack. A Content-Type may be spelled in any case and have parameters.
    """
    if json_form.begins_json(data):
        return True
    for name in headers:
        # Most have another length: they need not be lowered.
        if len(name) == _NAME_CHARS and name.lower() == _NAME:
            return headers[name].partition(";")[0].strip().lower() == "application/json"
    return False


def encode(message: msgspec.Struct) -> bytes:
    """Encode one message."""
    return _encoder.encode(message)


def encode_for(message: msgspec.Struct, *, speaks_json: bool) -> bytes:
    """Encode one message as its reader wants it."""
    return json_form.encode(message) if speaks_json else _encoder.encode(message)


def encode_end(job_id: str, record: bytes, *, speaks_json: bool) -> bytes:
    """Encode the end of a job as its caller wants it, from the record as it stands in RESULTS.

    Raises MalformedMessage when the record is in the other form and can't be read.
    """
    if json_form.begins_json(record) != speaks_json:
        record = encode_for(decode(record, TerminalRecord), speaks_json=speaks_json)
    return encode_for(End(job=job_id, record=record), speaks_json=speaks_json)


def decode(data: bytes, kind: type[_T]) -> _T:
    """Decode and validate one message of type `kind`, a record, in either form.

    A kind may have some of a message's fields only. Raises MalformedMessage on anything else:
    truncated, wrong type, out of range, too large, garbage.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders.setdefault(kind, msgspec.msgpack.Decoder(kind))
    try:
        return _checked(data, decoder.decode)
    except MalformedMessage:
        # Asked only now, so that msgpack pays nothing for it.
        if not json_form.begins_json(data):
            raise
    return _checked(data, partial(json_form.decode, kind=kind))


def decode_order(data: bytes) -> Order:
    """Decode what a broker tells a worker. Raises MalformedMessage."""
    return _checked(data, _orders.decode)


def decode_note(data: bytes) -> WorkerNote:
    """Decode what a worker says between heartbeats. Raises MalformedMessage."""
    return _checked(data, _notes.decode)


def decode_out(data: bytes) -> OutEvent:
    """Decode what a client hears of its job, in either form. Raises MalformedMessage."""
    if json_form.begins_json(data):
        found = _checked(data, partial(json_form.decode_any, kinds=_OUT_KINDS))
        return cast("OutEvent", found)
    return _checked(data, _outs.decode)


def read_json_job(data: bytes) -> json_form.JobRead:
    """Decode a job in JSON and tell what its producer left out. Raises MalformedMessage."""
    return _checked(data, json_form.read_job)


def _checked(data: bytes, read: Callable[[bytes], _T]) -> _T:
    if len(data) > MESSAGE_BYTES_MAX:
        message = f"{len(data)} bytes are more than a message may have ({MESSAGE_BYTES_MAX})"
        raise MalformedMessage(message)
    try:
        return read(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(str(error)) from error
