"""One input line becomes a request, or one error with its number. Pure."""

import re
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import orjson

from producers.request import ENDPOINTS

CUSTOM_ID_CHARS_MAX = 512

UTF_16 = (b"\xff\xfe", b"\xfe\xff")
"""How a file of that encoding begins: what PowerShell's `>` writes."""

_CUT_OFF = re.compile("truncated|unexpected end of data")
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
    if number == 1 and text.startswith(UTF_16):
        said = "the file is UTF-16; save it as UTF-8"
    elif text.startswith(b"["):
        said = "a JSON array begins here; a batch has one object a line (jq -c '.[]' makes it so)"
    elif text.startswith(b"{") and _CUT_OFF.search(str(error)):
        said = "the object does not end on its line; one line each (jq -c . makes it so)"
    else:
        said = _PLACE.sub(r" (byte \1)", str(error))
    return _bad(number, None, Code.INVALID_JSON_LINE, said)


def _id_of(text: bytes) -> str | None:
    """Find the custom_id of a line that is JSON and no request."""
    try:
        return _ids.decode(text).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
