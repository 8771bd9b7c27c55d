"""The JSON form of the messages that callers send and hear, made from their records.

A message in JSON has the fields of its record in `messages`, under the same names, and what stands
at its default may be left out. Two things differ from msgpack, because JSON has no bytes and nobody
likes to count places:

- Bytes that mostly hold JSON (`EMBEDDED`) stand as that JSON object, untouched; where they are no
  object, and in all other fields of bytes, as base64 (RFC 4648, padded).
- Records that are arrays in msgpack (attempt, usage, failure) are objects with named fields.

For each record there is a twin with these types, derived from it, so the two forms can't part.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import UnionType
from typing import Any, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, structs

from broker.wire.messages import Job

EMBEDDED = frozenset(("body", "data", "record"))
"""Fields of bytes that stand as a JSON object where they hold one."""

_FIRST_BYTES = frozenset((b"{", b" ", b"\t", b"\n", b"\r"))

_T = TypeVar("_T")


class JobRead(NamedTuple):
    """A job as its producer sent it."""

    job: Job
    missing: frozenset[str]
    """Fields that were left out; `job` has their defaults."""


def begins_json(data: bytes) -> bool:
    """Say whether bytes can only be JSON: no message of ours in msgpack begins so."""
    return data[:1] in _FIRST_BYTES and data[:64].lstrip()[:1] == b"{"


def encode(message: Struct) -> bytes:
    """Encode one message in JSON."""
    return msgspec.json.encode(message if _is_plain(type(message)) else _told(message))


def encode_job(read: JobRead) -> bytes:
    """Encode a job with all that its producer said, defaults too, and nothing that it left out."""
    names = read.job.__struct_fields__
    said = {name: getattr(read.job, name) for name in names if name not in read.missing}
    return msgspec.json.encode({**said, "body": _embedded(read.job.body)})


def decode(data: bytes, kind: type[_T]) -> _T:
    """Decode and validate one message of a kind of record.

    Raises msgspec.MsgspecError, UnicodeDecodeError or RecursionError on anything else.
    """
    return _original(_decoder(kind).decode(data), kind)


def decode_any(data: bytes, kinds: tuple[type[Struct], ...]) -> Struct:
    """Decode one message of the tagged `kinds`. Raises as `decode`."""
    twin = _union_decoder(kinds).decode(data)
    return _original(twin, _KINDS_BY_TWIN[type(twin)])


def read_job(data: bytes) -> JobRead:
    """Decode a job and tell what its producer left out. Raises as `decode`."""
    twin = _decoder(Job).decode(data)
    missing = frozenset(name for name in twin.__struct_fields__ if getattr(twin, name) is UNSET)
    return JobRead(_original(twin, Job), missing)


# ---- out ----


@lru_cache(maxsize=64)
def _is_plain(kind: type[Struct]) -> bool:
    """Say whether a kind of record has the same JSON by itself: that is 17 times cheaper to make.

    So of all that has no embedded bytes and no record that is an array. What the broker tells of
    queues each second is of this kind.
    """
    config = kind.__struct_config__
    if config.array_like or config.tag_field not in (None, "type"):
        return False
    hints = get_type_hints(kind)
    return not EMBEDDED & hints.keys() and all(map(_is_plain_type, hints.values()))


def _is_plain_type(hint: object) -> bool:
    if isinstance(hint, type) and issubclass(hint, Struct):
        return _is_plain(hint)
    return all(map(_is_plain_type, get_args(hint)))


def _told(value: object) -> object:
    """Turn a record into what its JSON holds, other values as they are."""
    if isinstance(value, tuple):
        return [_told(one) for one in cast("tuple[object, ...]", value)]
    if not isinstance(value, Struct):
        return value
    outline = _outline(type(value))
    tree: dict[str, object] = dict(outline.tag)
    for name, default in outline.defaults:
        field = getattr(value, name)
        if field != default:
            tree[name] = _embedded(field) if name in EMBEDDED else _told(field)
    return tree


def _embedded(data: bytes) -> Raw | bytes:
    """Return bytes as the JSON object that they are, or as they are."""
    if data[:1] != b"{":
        return data
    try:
        data.decode()
        return msgspec.json.decode(data, type=Raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return data


class _Outline(NamedTuple):
    tag: Mapping[str, str]
    defaults: tuple[tuple[str, object], ...]
    """Each field, and the value at which it is left out (UNSET: never)."""


@lru_cache(maxsize=64)
def _outline(kind: type[Struct]) -> _Outline:
    config = kind.__struct_config__
    defaults = tuple(
        (
            field.name,
            field.default
            if config.omit_defaults and field.default is not msgspec.NODEFAULT
            else UNSET,
        )
        for field in structs.fields(kind)
    )
    return _Outline({"type": str(config.tag)} if config.tag else {}, defaults)


# ---- in ----

_KINDS_BY_TWIN: dict[type[object], type[Struct]] = {}


@lru_cache(maxsize=64)
def _twin(kind: type[Struct]) -> type[Struct]:
    """Make the type that JSON is decoded to: what may be left out is UNSET then."""
    hints = get_type_hints(kind, include_extras=True)
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for field in structs.fields(kind):
        hint = hints[field.name]
        wanted: Any = Raw if field.name in EMBEDDED and hint is bytes else _twin_type(hint)
        if field.required:
            fields.append((field.name, wanted))
        else:
            fields.append((field.name, Union[wanted, UnsetType], UNSET))  # noqa: UP007
    tag = kind.__struct_config__.tag
    twin = msgspec.defstruct(kind.__name__, fields, frozen=True, kw_only=True, tag=tag)
    _KINDS_BY_TWIN[twin] = kind
    return twin


def _twin_type(hint: object) -> object:
    """Put twins in the place of records, at any depth."""
    if isinstance(hint, type) and issubclass(hint, Struct):
        return _twin(hint)
    parts = tuple(_twin_type(part) for part in get_args(hint))
    if get_origin(hint) is tuple:
        return tuple[parts]
    if get_origin(hint) in (Union, UnionType):
        return Union[parts]  # noqa: UP007
    return cast("object", hint)


@lru_cache(maxsize=64)
def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Struct]:
    return msgspec.json.Decoder(_twin(kind))


@lru_cache(maxsize=8)
def _union_decoder(kinds: tuple[type[Struct], ...]) -> msgspec.json.Decoder[Struct]:
    return msgspec.json.Decoder(Union[tuple(_twin(kind) for kind in kinds)])  # noqa: UP007


def _original(twin: Struct, kind: Callable[..., _T]) -> _T:
    """Make the record of a twin."""
    values: dict[str, object] = {}
    for name in twin.__struct_fields__:
        value = getattr(twin, name)
        if value is not UNSET:
            values[name] = _bytes_of(value, name) if isinstance(value, Raw) else _value(value)
    return kind(**values)


def _value(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(_value(one) for one in cast("tuple[object, ...]", value))
    kind = _KINDS_BY_TWIN.get(type(value))
    return value if kind is None else _original(cast("Struct", value), kind)


def _bytes_of(raw: Raw, name: str) -> bytes:
    """Return the bytes that JSON stands for. Raises msgspec.ValidationError."""
    text = bytes(raw).strip()
    match text[:1]:
        case b"{":
            return text
        case b'"':
            return _from_base64(text, name)
        case _:
            message = f"Expected an object or base64 - at `$.{name}`"
            raise msgspec.ValidationError(message)


def _from_base64(text: bytes, name: str) -> bytes:
    try:
        return msgspec.json.decode(text, type=bytes)
    except msgspec.ValidationError as error:
        message = f"{error} - at `$.{name}`"
        raise msgspec.ValidationError(message) from error
