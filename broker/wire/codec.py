"""Bytes to typed records and back: msgpack, validated in the same pass that decodes."""

from typing import Any, TypeVar

import msgspec

from broker.wire.messages import Order, OutEvent, WorkerNote

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


def encode(message: msgspec.Struct) -> bytes:
    """Encode one message."""
    return _encoder.encode(message)


def decode(data: bytes, kind: type[_T]) -> _T:
    """Decode and validate one message of type `kind`.

    Raises MalformedMessage on anything else: truncated, wrong type, out of range, too large,
    garbage.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders.setdefault(kind, msgspec.msgpack.Decoder(kind))
    return _decode(data, decoder)


def decode_order(data: bytes) -> Order:
    """Decode what a broker tells a worker. Raises MalformedMessage."""
    return _decode(data, _orders)


def decode_note(data: bytes) -> WorkerNote:
    """Decode what a worker says between heartbeats. Raises MalformedMessage."""
    return _decode(data, _notes)


def decode_out(data: bytes) -> OutEvent:
    """Decode what a client hears of its job. Raises MalformedMessage."""
    return _decode(data, _outs)


def _decode(data: bytes, decoder: msgspec.msgpack.Decoder[_T]) -> _T:
    if len(data) > MESSAGE_BYTES_MAX:
        message = f"{len(data)} bytes are more than a message may have ({MESSAGE_BYTES_MAX})"
        raise MalformedMessage(message)
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(str(error)) from error
