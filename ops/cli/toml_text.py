"""Records as TOML, for `inferlane config show`: what is shown can be read back."""

import json
from collections.abc import Iterator
from typing import Any, cast

import msgspec

Table = dict[str, Any]
Entries = list[Any] | tuple[Any, ...]

SECRETS = frozenset({"password", "api_key", "token", "key"})
"""Keys whose values are not shown."""

MASK = "***"


def toml_text(record: msgspec.Struct) -> str:
    """Write a record as a TOML file. Keys without a value (None) are left out."""
    data: Table = msgspec.to_builtins(record)
    return "\n".join(_table(data, "")).strip() + "\n"


def masked(value: object) -> object:
    """Hide the values of secret keys in builtins of any depth."""
    match value:
        case dict():
            table = cast("Table", value)
            return {
                key: MASK if key in SECRETS and one else masked(one) for key, one in table.items()
            }
        case list() | tuple():
            return [masked(one) for one in cast("Entries", value)]
        case _:
            return value


def _table(data: Table, path: str) -> Iterator[str]:
    """Write values first, then tables: TOML's own rule."""
    for key, value in data.items():
        if value is not None and not _is_table(value) and not _is_tables(value):
            yield f"{_key(key)} = {_value(MASK if key in SECRETS and value else value)}"
    for key, value in data.items():
        below = f"{path}.{_key(key)}" if path else _key(key)
        if _is_table(value):
            yield ""
            yield f"[{below}]"
            yield from _table(value, below)
        elif _is_tables(value):
            for one in value:
                yield ""
                yield f"[[{below}]]"
                yield from _table(one, below)


def _is_table(value: object) -> bool:
    return isinstance(value, dict)


def _is_tables(value: object) -> bool:
    if not isinstance(value, list | tuple):
        return False
    entries = cast("Entries", value)
    return bool(entries) and all(map(_is_table, entries))


def _key(key: str) -> str:
    bare = key and all(char.isascii() and (char.isalnum() or char in "-_") for char in key)
    return key if bare else _value(key)


def _value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            # JSON's escapes are TOML's; TOML also wants DEL escaped.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
        case list() | tuple():
            return f"[{', '.join(map(_value, cast('Entries', value)))}]"
        case dict():
            table = cast("Table", value)
            pairs = ", ".join(f"{_key(key)} = {_value(one)}" for key, one in table.items())
            return f"{{ {pairs} }}" if pairs else "{}"
        case _:
            return str(value)
