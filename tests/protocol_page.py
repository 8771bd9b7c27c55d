"""What `ops/docs/protocol.md` has to say of each message: its fields, types and defaults."""

import inspect
import json
import re
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct, structs

from broker.wire import control, fields, messages

PAGE = Path(__file__).parents[1] / "ops" / "docs" / "protocol.md"

_NAMES: dict[object, str] = {
    fields.Token: "token",
    fields.Band: "band",
    fields.Count: "count",
    fields.Seconds: "seconds",
    fields.Model: "model",
    fields.ShortText: "text",
    fields.LongText: "long text",
    bytes: "bytes",
    bool: "bool",
    float: "number",
}
"""Types as the page calls them."""

_HEADING = re.compile(r"^### (\w+)$")
_ROW = re.compile(r"^\| `(\w+)` \| ([^|]*) \| ([^|]*) \| [^|]+ \|$")


class Row(NamedTuple):
    """One field, as a line of the page's tables tells it."""

    field: str
    type: str
    default: str


RECORDS: tuple[type[Struct], ...] = tuple(
    kind
    for module in (messages, control)
    for kind in vars(module).values()
    if inspect.isclass(kind)
    and issubclass(kind, Struct)
    and kind is not messages.Record
    and kind.__module__ == module.__name__
)
"""Every message of the system."""


def rows_of(kind: type[Struct]) -> list[Row]:
    """The lines that the page must have of a record."""
    hints = get_type_hints(kind, include_extras=True)
    return [
        Row(field.name, type_name(hints[field.name]), _default(field))
        for field in structs.fields(kind)
    ]


def type_name(hint: Any) -> str:
    """Call a type as the page does."""
    if hint in _NAMES:
        return _NAMES[hint]
    parts = [part for part in get_args(hint) if part not in (..., NoneType)]
    match get_origin(hint):
        case origin if origin in (Union, UnionType):
            return " or ".join(type_name(part) for part in parts) + " or null"
        case origin if origin is tuple:
            return f"list of {type_name(parts[0])}"
        case origin if origin is dict:
            return f"map of {type_name(parts[0]) if parts[0] is not str else 'text'} to " + (
                type_name(parts[1])
            )
        case origin if origin is Annotated:
            return type_name(parts[0])
        case _:
            return str(hint.__name__)


def _default(field: Any) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if isinstance(value, StrEnum):
        value = value.value
    if value is None or value in ((), {}, "", b"") or isinstance(value, Struct):
        return "–"
    if isinstance(value, tuple):
        value = list(cast("tuple[object, ...]", value))
    return f"`{json.dumps(value)}`"


def tables(page: str) -> dict[str, list[Row]]:
    """Read the page's tables of fields, by the record they stand under."""
    found: dict[str, list[Row]] = {}
    heading = ""
    for line in page.splitlines():
        if (match := _HEADING.match(line)) is not None:
            heading = match[1]
        elif line.startswith("#"):
            heading = ""
        elif heading and (row := _ROW.match(line)) is not None:
            found.setdefault(heading, []).append(Row(row[1], row[2].strip(), row[3].strip()))
    return found


def blocks(page: str, language: str) -> list[str]:
    """Code blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
