"""The KV-cache events of vLLM and SGLang, from ZeroMQ frames to records. Pure.

A message is three frames: topic, sequence (8 bytes, big-endian, from 0 at each start of the engine)
and msgpack of a batch, `[time, [events], data-parallel rank]`. Batch and events come as arrays in
field order, an event's tag first, or as maps with the tag under `type`; both engines have shipped
both. Shapes were read off vLLM 0.32 and the two projects' `kv_events.py`.

Fields that later versions add are passed over, and so are kinds of events that are not known here.
A known event that can't be read spoils its batch: what it said of the cache is lost.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import msgspec

PAYLOAD_BYTES_MAX = 16_777_216
"""Largest batch that is read: three million new tokens in one step."""

HASH_BYTES_MAX = 64
"""Longest name of a block: SHA-256 has 32."""

TOKEN_MAX = 2**32 - 1
"""Largest token id: vocabularies have some 100,000, and engines keep them in 32 bits."""

END_OF_REPLAY = b"\xff" * 8
"""Sequence of the mark that ends a replay: -1."""

_SEQUENCE_BYTES = 8
_FRAMES = range(2, 5)

_STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
)
_REMOVED = ("block_hashes", "medium", "group_idx")
_ARRAY_FIELDS: Mapping[object, tuple[str, ...]] = {
    "BlockStored": _STORED,
    "BlockRemoved": _REMOVED,
    "AllBlocksCleared": (),
}

BlockName = int | bytes
"""What an engine calls a block: a hash of it and all before it."""


class MalformedEvents(ValueError):
    """Not a message, a batch or an event of this wire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """Full blocks that are in the cache from now on, each the child of the one before it."""

    names: tuple[BlockName, ...]
    parent: BlockName | None
    """Of the first; None: it begins a prompt."""
    tokens: tuple[int, ...]
    """`block_size` for each block."""
    block_size: int
    medium: str = ""
    """Where they are; empty when the engine doesn't say, which means the accelerator."""
    adapter: str = ""
    extras: tuple[str, ...] = ()
    """What else decided each block's name (images, salt), made comparable; empty: nothing."""
    group: int | None = None
    """Of layers that cache alike; models with one kind of layer have one."""
    kind: str = ""
    """Of its layers' attention, where told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """Blocks that left a medium."""

    names: tuple[BlockName, ...]
    medium: str = ""
    group: int | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The cache is empty."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step of the engine did to its cache, in order."""

    at_s: float
    """By the engine's clock."""
    events: tuple[KvEvent, ...]
    unknown: int = 0
    """Events of kinds not known here."""


def pieces(batch: Batch, *, blocks_max: int) -> Iterator[Batch]:
    """Split a batch into ones of so many blocks at most, in its order; an empty one is one piece.

    A clearing counts as one block.
    """
    events: list[KvEvent] = []
    room, is_first = blocks_max, True
    for event in batch.events:
        for part in _parts(event, blocks_max):
            blocks = 1 if isinstance(part, AllBlocksCleared) else len(part.names)
            if blocks > room:
                yield Batch(batch.at_s, tuple(events))
                events, room, is_first = [], blocks_max, False
            events.append(part)
            room -= blocks
    if events or is_first:
        yield Batch(batch.at_s, tuple(events))


def _parts(event: KvEvent, blocks_max: int) -> Iterator[KvEvent]:
    if isinstance(event, AllBlocksCleared) or len(event.names) <= blocks_max:
        yield event
        return
    for start in range(0, len(event.names), blocks_max):
        names = event.names[start : start + blocks_max]
        if isinstance(event, BlockRemoved):
            yield replace(event, names=names)
            continue
        size = event.block_size
        yield replace(
            event,
            names=names,
            parent=event.names[start - 1] if start else event.parent,
            tokens=event.tokens[start * size : (start + blocks_max) * size],
            extras=event.extras[start : start + blocks_max],
        )


def read_frames(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Return sequence and payload of a published or replayed message. Raises MalformedEvents.

    Replays have an empty frame first and no topic; what ends one is no message.
    """
    if len(frames) not in _FRAMES or len(frames[-2]) != _SEQUENCE_BYTES:
        message = f"{len(frames)} frames; the last but one has a sequence of 8 bytes"
        raise MalformedEvents(message)
    sequence = int.from_bytes(frames[-2], "big", signed=True)
    if sequence < 0:
        message = f"sequence {sequence}"
        raise MalformedEvents(message)
    return sequence, frames[-1]


def read_batch(payload: bytes) -> Batch:
    """Read the payload of a message. Raises MalformedEvents."""
    if len(payload) > PAYLOAD_BYTES_MAX:
        message = f"a batch of {len(payload)} bytes; at most {PAYLOAD_BYTES_MAX} are read"
        raise MalformedEvents(message)
    try:
        decoded: object = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"not msgpack: {error}"
        raise MalformedEvents(message) from error
    at_s, listed = _batch_fields(decoded)
    if not isinstance(at_s, int | float) or not isinstance(listed, list):
        message = "a batch has a time and a list of events"
        raise MalformedEvents(message)
    read = [_event(entry) for entry in cast("list[object]", listed)]
    events = tuple(event for event in read if event is not None)
    return Batch(float(at_s), events, unknown=len(read) - len(events))


def _batch_fields(decoded: object) -> tuple[object, object]:
    if isinstance(decoded, dict):
        fields = cast("dict[object, object]", decoded)
        return fields.get("ts"), fields.get("events")
    values = cast("list[object]", decoded) if isinstance(decoded, list) else []
    return (values[0], values[1]) if len(values) > 1 else (None, None)


def _event(entry: object) -> KvEvent | None:
    """Read one event of either form; None when its kind is not known."""
    if isinstance(entry, dict):
        fields = cast("dict[object, object]", entry)
        tag = fields.get("type")
    elif isinstance(entry, list) and entry:
        tag, *values = cast("list[object]", entry)
        names = _ARRAY_FIELDS.get(tag, ()) if isinstance(tag, str) else ()
        fields = cast("dict[object, object]", dict(zip(names, values, strict=False)))
    else:
        message = "an event is a map or an array"
        raise MalformedEvents(message)
    match tag:
        case "BlockStored":
            return _stored(fields)
        case "BlockRemoved":
            return BlockRemoved(
                names=_names(fields.get("block_hashes")),
                medium=_text(fields.get("medium")),
                group=_number(fields.get("group_idx")),
            )
        case "AllBlocksCleared":
            return AllBlocksCleared()
        case str():
            return None
        case _:
            message = "an event has a tag"
            raise MalformedEvents(message)


def _stored(fields: Mapping[object, object]) -> BlockStored:
    names = _names(fields.get("block_hashes"))
    block_size = fields.get("block_size")
    tokens = _tokens(fields.get("token_ids"))
    if not isinstance(block_size, int) or block_size < 1 or len(tokens) != block_size * len(names):
        message = f"{len(names)} blocks of {block_size!r} tokens with {len(tokens)} tokens"
        raise MalformedEvents(message)
    parent = fields.get("parent_block_hash")
    adapter = _text(fields.get("lora_name"))
    if not adapter and (number := _number(fields.get("lora_id"))) is not None:
        adapter = f"#{number}"  # An adapter all the same: its blocks are not the base model's.
    return BlockStored(
        names=names,
        parent=None if parent is None else _name(parent),
        tokens=tokens,
        block_size=block_size,
        medium=_text(fields.get("medium")),
        adapter=adapter,
        extras=_extras(fields.get("extra_keys"), adapter),
        group=_number(fields.get("group_idx")),
        kind=_text(fields.get("kv_cache_spec_kind")),
    )


def _names(value: object) -> tuple[BlockName, ...]:
    if not isinstance(value, list):
        message = "an event lists its blocks' names"
        raise MalformedEvents(message)
    return tuple(_name(name) for name in cast("list[object]", value))


def _name(value: object) -> BlockName:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, bytes) and len(value) <= HASH_BYTES_MAX:
        return value
    message = f"a block's name is a number or at most {HASH_BYTES_MAX} bytes, not {value!r:.100}"
    raise MalformedEvents(message)


def _tokens(value: object) -> tuple[int, ...]:
    """Read token ids; of pairs (SGLang under EAGLE: each token with the next) the first ones."""
    listed = cast("list[object]", value) if isinstance(value, list) else [None]
    if any(isinstance(one, list) for one in listed):
        listed = [_first(one) for one in listed]
    kinds = set(map(type, listed))
    if kinds <= {int}:
        tokens = cast("list[int]", listed)
        if not tokens or (min(tokens) >= 0 and max(tokens) <= TOKEN_MAX):
            return tuple(tokens)
    message = f"token ids are numbers from 0 to {TOKEN_MAX}"
    raise MalformedEvents(message)


def _first(token: object) -> object:
    pair = cast("list[object]", token) if isinstance(token, list) else [token]
    return pair[0] if pair else None


def _extras(value: object, adapter: str) -> tuple[str, ...]:
    """Name what else decided each block; the adapter, which vLLM repeats there, is left out."""
    if not isinstance(value, list):
        return ()
    return tuple(extra_text(keys, adapter) for keys in cast("list[object]", value))


def extra_text(keys: object, adapter: str = "") -> str:
    """Make what decided a block beside its tokens comparable; empty for nothing."""
    if not isinstance(keys, list):
        return "" if keys is None else repr(keys)
    kept = [key for key in cast("list[object]", keys) if key != adapter or not adapter]
    return repr(kept) if kept else ""


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
