"""The one configuration file, as text: TOML into typed records, a mistake into a clear sentence.

Broker, agents and producers read the same file, each its own tables; they share how a mistake is
told: the line, the key, what is allowed there, and the key that was probably meant.
"""

import difflib
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect

from broker.wire.toml_lines import KeyPath, key_lines, line_of

SETTINGS_BYTES_MAX = 1_000_000
"""Largest configuration text: 4,000 lanes with quotas of their own fit in half of it."""

NUMBER_MAX = 2**53
"""Largest number in a configuration: beyond it, a count no longer survives JSON and floats."""

_LINE = re.compile(r"\(at line (\d+), column \d+\)")
_AT = re.compile(r" - at `\$(.*)`$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`$")
_SHOWN_CHARS_MAX = 60

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a configuration."""

    line: int
    """From 1; 0 when no line is to blame."""
    key: str
    """Path of the key, `policy.lanes[0].weight`; empty when no key is to blame."""
    message: str
    """What is wrong, what is allowed, what was probably meant."""

    def told(self, source: str) -> str:
        """Say it in one line, as compilers do: file, line, key, what to do."""
        place = f"{source}:{self.line}" if self.line else source
        return f"{place}: {self.key}: {self.message}" if self.key else f"{place}: {self.message}"


class SettingsError(ValueError):
    """A configuration that can't be used; its text has one line for each problem."""

    def __init__(self, source: str, problems: tuple[Problem, ...]) -> None:
        self.source = source
        self.problems = problems
        super().__init__("\n".join(problem.told(source) for problem in problems))


@dataclass(frozen=True)
class Settings:
    """A configuration text that is well-formed TOML, its values not yet judged."""

    source: str
    """File name, for messages."""
    text: str
    data: Mapping[str, Any]

    @cached_property
    def lines(self) -> Mapping[KeyPath, int]:
        """Line of each key."""
        return key_lines(self.text)

    def problem(self, path: KeyPath, message: str) -> Problem:
        """Tell what is wrong with one key."""
        return Problem(line=line_of(self.lines, path), key=key_text(path), message=message)

    def error(self, *problems: Problem) -> SettingsError:
        """Make the error to raise."""
        return SettingsError(self.source, problems)

    def read(self, kind: type[_T], path: KeyPath = ()) -> _T:
        """Convert the table at `path` (the root, or a table of it) into a record.

        An absent table gives the record's defaults. Raises SettingsError on an unknown key, a wrong
        type, a value out of range or a missing one.
        """
        value: Any = self.data
        for step in path:
            value = cast("dict[str, Any]", value).get(str(step), {})
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            raise self.error(self._explain(error, kind, path, value)) from error

    def _explain(
        self, error: msgspec.ValidationError, kind: type[Any], root: KeyPath, value: object
    ) -> Problem:
        text = str(error)
        at = _AT.search(text)
        path = _path(at[1]) if at else ()
        text = _AT.sub("", text)
        schema = _descend(inspect.type_info(kind), path)
        if unknown := _UNKNOWN.match(text):
            return self.problem((*root, *path, unknown[1]), _unknown(unknown[1], schema))
        if missing := _MISSING.match(text):
            return self.problem((*root, *path), f"{missing[1]} is missing; it must be given here")
        allowed = _allowed(schema) or text
        shown = _shown(_look_up(value, path))
        return self.problem((*root, *path), f"{shown} is not allowed; it must be {allowed}")


def parse(data: bytes, *, source: str) -> Settings:
    """Read a configuration file's bytes as TOML.

    Raises SettingsError on what is not UTF-8, not TOML, too large, too deep, or has a number that
    is infinite or larger than any count.
    """
    if len(data) > SETTINGS_BYTES_MAX:
        raise _refused(source, 0, f"the file is larger than {SETTINGS_BYTES_MAX:,} bytes")
    try:
        # Editors on Windows put a byte-order mark first; it means nothing in UTF-8.
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = "this line is not UTF-8; save the file with that encoding"
        raise _refused(source, line, message) from error
    try:
        settings = Settings(source=source, text=text, data=tomllib.loads(text))
        settings.lines  # noqa: B018  # Computed now, so that too deep a nesting shows here.
    except tomllib.TOMLDecodeError as error:
        raise _refused(source, *_syntax(error, text)) from error
    except (RecursionError, ValueError) as error:
        # ValueError: an integer with more digits than Python reads.
        too_deep = isinstance(error, RecursionError)
        message = "tables are nested too deeply" if too_deep else "a number has too many digits"
        raise _refused(source, 0, message) from error
    problems = tuple(
        settings.problem(path, f"{_shown(number)} is not allowed; {message}")
        for path, number, message in _bad_numbers(settings.data, ())
    )
    if problems:
        raise settings.error(*problems)
    return settings


def key_text(path: KeyPath) -> str:
    """Write a key path as people do: `policy.lanes[0].weight`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


def nearest(word: str, known: list[str]) -> str:
    """Say `Did you mean "x"?` with a leading space, or nothing when no known word is near."""
    hits = difflib.get_close_matches(word, known, n=1)
    return f' Did you mean "{hits[0]}"?' if hits else ""


def _refused(source: str, line: int, message: str) -> SettingsError:
    return SettingsError(source, (Problem(line=line, key="", message=message),))


def _syntax(error: tomllib.TOMLDecodeError, text: str) -> tuple[int, str]:
    """Return (line, message) of a syntax error, for people who don't know TOML's grammar."""
    raw = str(error)
    at = _LINE.search(raw)
    line = int(at[1]) if at else text.count("\n") + 1
    message = raw.split(" (at ", maxsplit=1)[0]
    if "Cannot overwrite" in message or "Cannot declare" in message or "Cannot mutate" in message:
        return line, "this key or table was given before; keep one of the two"
    return line, f"not valid TOML: {message[:1].lower()}{message[1:]}"


def _bad_numbers(value: object, path: KeyPath) -> Iterator[tuple[KeyPath, int | float, str]]:
    match value:
        case dict():
            for key, item in cast("dict[str, object]", value).items():
                yield from _bad_numbers(item, (*path, key))
        case list():
            for index, item in enumerate(cast("list[object]", value)):
                yield from _bad_numbers(item, (*path, index))
        case float() if not math.isfinite(value):
            yield path, value, "it must be a finite number"
        case int() | float() if abs(value) > NUMBER_MAX:
            yield path, value, f"it must be at most {NUMBER_MAX:,}"
        case _:
            pass


def _path(text: str) -> KeyPath:
    """Parse msgspec's `.lanes[0].weight`; a key of a free table, `[...]`, ends the path."""
    steps: list[str | int] = []
    for name, index in _STEP.findall(text):
        if index == "...":
            break
        steps.append(int(index) if index else name)
    return tuple(steps)


def _descend(schema: inspect.Type, path: KeyPath) -> inspect.Type:
    for step in path:
        schema = _inside(_one(schema), step)
    return _one(schema)


def _one(schema: inspect.Type) -> inspect.Type:
    """Take what a union with null allows besides null: TOML has no null."""
    if isinstance(schema, inspect.UnionType):
        return next(one for one in schema.types if not isinstance(one, inspect.NoneType))
    return schema


def _inside(schema: inspect.Type, step: str | int) -> inspect.Type:
    match schema:
        case inspect.StructType(fields=fields):
            return next((one.type for one in fields if one.encode_name == step), inspect.AnyType())
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            return item
        case inspect.TupleType(item_types=items) if isinstance(step, int) and step < len(items):
            return items[step]
        case _:
            return inspect.AnyType()


def _look_up(value: object, path: KeyPath) -> object:
    for step in path:
        value = cast("Any", value)[step]
    return value


def _shown(value: object) -> str:
    """Write a value as it stood in the file, cut short."""
    match value:
        case bool():
            text = "true" if value else "false"
        case str():
            text = f'"{value}"'
        case dict():
            text = "a table"
        case list():
            text = f"a list of {len(cast('list[object]', value))}"
        case int() if abs(value) > NUMBER_MAX:
            text = "a number this large"
        case _:
            text = str(value)
    return text if len(text) <= _SHOWN_CHARS_MAX else f"{text[:_SHOWN_CHARS_MAX]}…"


def _unknown(name: str, schema: inspect.Type) -> str:
    known: list[str] = []
    if isinstance(schema, inspect.StructType):
        known = [field.encode_name for field in schema.fields]
    return f"no such key.{nearest(name, known)} Known here: {', '.join(known)}"


def _allowed(schema: inspect.Type) -> str:
    """Say what a type allows, for people; empty when there is nothing to say."""
    match schema:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return f"a whole number{_range(schema)}"
        case inspect.FloatType():
            return f"a number{_range(schema)}"
        case inspect.StrType():
            return f"a text{_text_rule(schema)}"
        case inspect.LiteralType(values=values):
            return f"one of {', '.join(_shown(value) for value in values)}"
        case inspect.StructType() | inspect.DictType():
            return "a table"
        case inspect.TupleType(item_types=items):
            return f"a list of exactly {len(items)}, each {_allowed(_one(items[0]))}"
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            return f"a list, each entry {_allowed(_one(item))}"
        case _:
            return ""


def _range(schema: inspect.IntType | inspect.FloatType) -> str:
    bounds = (
        ("above", schema.gt),
        ("at least", schema.ge),
        ("below", schema.lt),
        ("at most", schema.le),
    )
    given = [f"{word} {bound}" for word, bound in bounds if bound is not None]
    return f", {' and '.join(given)}" if given else ""


def _text_rule(schema: inspect.StrType) -> str:
    if schema.pattern is not None:
        return " of 1 to 64 of the characters A-Z a-z 0-9 _ -"
    if schema.min_length is not None and schema.max_length is not None:
        return f" of {schema.min_length} to {schema.max_length} characters"
    return ""
