"""One input line becomes a request, or one error with its number. Pure."""

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

import msgspec
import orjson

from producers.request import ENDPOINTS, NESTING_MAX

CUSTOM_ID_CHARS_MAX = 512

UTF_16 = (b"\xff\xfe", b"\xfe\xff")
"""How a file of that encoding begins: what PowerShell's `>` writes."""

_CUT_OFF = re.compile("truncated|unexpected end of data")
_GOES_ON = re.compile("trailing characters|unexpected content after")
_ID_FIRST = re.compile(rb'\{\s*"custom_id"\s*:\s*("(?:[^"\\]|\\.){0,2048}")')
"""Where a custom_id stands that nothing goes before: nearly everywhere."""

_PLACE = re.compile(r": line 1 column \d+ \(char (\d+)\)$")
"""A parser's word on where it stopped; its line is not the file's."""


class Code(StrEnum):
    """Error codes of a batch, as its users know them."""

    INVALID_JSON_LINE = "invalid_json_line"
    DUPLICATE_CUSTOM_ID = "duplicate_custom_id"
    URL_MISMATCH = "url_mismatch"
    MODEL_NOT_FOUND = "model_not_found"
    INVALID_REQUEST = "invalid_request"
    EMPTY_FILE = "empty_file"
    BATCH_EXPIRED = "batch_expired"
    BATCH_CANCELLED = "batch_cancelled"


FINAL = frozenset(
    (
        Code.INVALID_JSON_LINE,
        Code.DUPLICATE_CUSTOM_ID,
        Code.URL_MISMATCH,
        Code.INVALID_REQUEST,
        Code.EMPTY_FILE,
    )
)
"""Faults of the line itself: no second run helps. (A model may be offered later, a window be
longer.)"""


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that can't be run: one line of the error file, and nothing else stops for it."""

    number: int
    custom_id: str | None
    """None where it isn't known, and of a double: the id stands in its first line's result."""
    code: Code
    message: str


@dataclass(frozen=True, slots=True)
class Request:
    """A line that can be run, as far as it says itself."""

    number: int
    custom_id: str
    url: str
    body: bytes


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Id(msgspec.Struct):
    custom_id: str | None = None


_lines = msgspec.json.Decoder(_Line)
_ids = msgspec.json.Decoder(_Id)


def parse_line(text: bytes, number: int, *, endpoint: str) -> Request | BadLine:
    """Read one line. `endpoint` is the batch's; empty while no line has told it."""
    try:
        line = _lines.decode(text)
    except msgspec.ValidationError as error:
        return _no_request(text, number, error)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _no_json(text, number, error)
    known_id = line.custom_id
    if not 0 < len(known_id) <= CUSTOM_ID_CHARS_MAX:
        told = f"custom_id has {len(known_id)} characters; it may have 1 to {CUSTOM_ID_CHARS_MAX}"
        return _bad(number, known_id, Code.INVALID_REQUEST, told)
    if line.method != "POST":
        told = f'method is "{line.method[:16]}"; it must be "POST"'
        return _bad(number, known_id, Code.INVALID_REQUEST, told)
    if line.url not in ENDPOINTS:
        told = f'url "{line.url[:64]}" is none of {", ".join(ENDPOINTS)}'
        return _bad(number, known_id, Code.URL_MISMATCH, told)
    if endpoint and line.url != endpoint:
        told = f"url {line.url} is not the batch's {endpoint}; one batch has one endpoint"
        return _bad(number, known_id, Code.URL_MISMATCH, told)
    return Request(number, known_id, line.url, bytes(line.body))


def bad(number: int, custom_id: str | None, code: Code, said: str) -> BadLine:
    """Make the error of a line; its number stands in the message too."""
    return _bad(number, custom_id, code, said)


def _bad(number: int, custom_id: str | None, code: Code, said: str) -> BadLine:
    return BadLine(number, custom_id, code, f"line {number}: {said}")


def _no_request(text: bytes, number: int, error: msgspec.ValidationError) -> BadLine:
    """Tell a line that is JSON of another shape from one that breaks off after a wrong field."""
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError as broken:
        return _no_json(text, number, broken)
    return _bad(number, _id_of(text), Code.INVALID_REQUEST, str(error))


def _no_json(text: bytes, number: int, error: Exception) -> BadLine:
    """Tell what is no JSON; of a file in another form, what form it must have."""
    known_id, lenient = _nearly_json(text)
    if lenient:
        said = lenient
    elif isinstance(error, RecursionError) and not text.startswith(b"["):
        said = f"nested more than {NESTING_MAX} levels deep; flatten it"
    elif number == 1 and text.startswith(UTF_16):
        said = "the file is UTF-16; save it as UTF-8"
    elif text.startswith(b"["):
        said = "a JSON array begins here; a batch has one object a line (jq -c '.[]' makes it so)"
    elif text.startswith(b"{") and _GOES_ON.search(str(error)):
        end = "; lines end with LF, not with CR alone" if b"\r" in text else ""
        said = f"more follows on the line after its object{end}"
    elif text.startswith(b"{") and _CUT_OFF.search(str(error)):
        said = "the object does not end on its line; one line each (jq -c . makes it so)"
    else:
        said = _PLACE.sub(r" (byte \1)", str(error))
    return _bad(number, known_id, Code.INVALID_JSON_LINE, said)


def _nearly_json(text: bytes) -> tuple[str | None, str]:
    """Give the custom_id of a line that many programs write as JSON, and what is wrong with it.

    Nothing of a line that is no JSON by any reading, and no words where it is nested too deeply.
    """
    try:
        parsed: object = json.loads(text.decode())
    except RecursionError:
        first = _ID_FIRST.match(text)
        return (_id_of(b'{"custom_id":%b}' % first[1]) if first else None), ""
    except ValueError:
        return None, ""
    found = cast("dict[str, object]", parsed).get("custom_id") if isinstance(parsed, dict) else None
    try:
        orjson.loads(text)
        said = ""
    except orjson.JSONDecodeError as error:
        is_half = "surrogate in string" in str(error)
        said = _HALF_A_CHARACTER if is_half else _NO_NUMBER
    return (found if isinstance(found, str) and _is_text(found) else None), said


_HALF_A_CHARACTER = (
    "a half of a character stands alone (\\ud83d and the like): its text was cut inside an emoji;"
    " cut it before or after"
)
_NO_NUMBER = "NaN and Infinity are no JSON; write null, or leave the field out"


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _id_of(text: bytes) -> str | None:
    """Find the custom_id of a line that is JSON and no request."""
    try:
        return _ids.decode(text).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
