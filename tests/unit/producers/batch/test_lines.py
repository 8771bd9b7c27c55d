"""Words on lines that are no JSON: what stands there, and what would be right."""

import pytest

from producers.batch.lines import BadLine, Code, parse_line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"\xff\xfe{\x00}\x00", "the file is UTF-16; save it as UTF-8"),
        (b"[", "a JSON array begins here"),
        (b'[{"custom_id": "a"},', "a JSON array begins here"),
        (b"{", "the object does not end on its line"),
        (b'{"custom_id": "a", "method":', "the object does not end on its line"),
        (b'{"custom_id": "a", "method": 5, "body": {', "the object does not end on its line"),
        (b'"custom_id": "a",', "unexpected content after document (byte 11)"),
        (b'{"custom_id": "a"} {}', "more follows on the line after its object"),
        (b'{"custom_id": "a"}\r{}', "more follows on the line after its object; lines end with LF"),
        (b"what?", "JSON is malformed: invalid character (byte 0)"),
    ],
)
def test_what_is_no_json_is_told_by_its_form(text: bytes, said: str) -> None:
    """Files of another encoding, arrays and pretty-printed objects: each line says what is wrong.

    No word of a parser's "line 1" beside the number of the file's line.
    """
    found = parse_line(text, 1, endpoint="")
    assert isinstance(found, BadLine)
    assert found.code is Code.INVALID_JSON_LINE
    assert found.message.startswith(f"line 1: {said}")
    assert found.message.count("line 1") == 1


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (rb'"\ud83d"', "a half of a character stands alone"),
        (rb'"\ud83d and more"', "a half of a character stands alone"),
        (rb'"\ude00"', "a half of a character stands alone"),
        (rb'"\ud83d\u0041"', "a half of a character stands alone"),
        (b"NaN", "NaN and Infinity are no JSON"),
        (b"-Infinity", "NaN and Infinity are no JSON"),
        (b"[" * 5000 + b"]" * 5000, "nested more than 200 levels deep"),
    ],
)
def test_what_many_programs_write_has_its_id(value: bytes, said: str) -> None:
    """Python writes NaN, JavaScript half an emoji: the line is bad, and its id is not lost."""
    line = b'{"custom_id": "a\\"b", "method": "POST", "url": "/v1/embeddings", "body": {"x": %b}}'
    found = parse_line(line % value, 7, endpoint="")
    assert isinstance(found, BadLine)
    assert (found.code, found.custom_id) == (Code.INVALID_JSON_LINE, 'a"b')
    assert found.message.startswith(f"line 7: {said}")


def test_an_id_that_is_no_text_is_none() -> None:
    """It could not be written into the error file."""
    for text in (rb'{"custom_id": "\ud83d", "x": 1}', rb'{"custom_id": 5, "x": NaN}', b"NaN"):
        found = parse_line(text, 1, endpoint="")
        assert isinstance(found, BadLine)
        assert (found.code, found.custom_id) == (Code.INVALID_JSON_LINE, None)


def test_bytes_like_utf_16_on_a_later_line_are_garbage() -> None:
    """Only where the file begins do they say how it is written."""
    found = parse_line(b"\xff\xfe", 2, endpoint="")
    assert isinstance(found, BadLine)
    assert "UTF-16" not in found.message
