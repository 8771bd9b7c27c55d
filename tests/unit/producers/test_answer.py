"""Text out of what engines answer, and nothing out of garbage."""

import pytest

from producers.answer import answer_text, error_text, piece_text


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"choices":[{"message":{"content":"chat"}}]}', "chat"),
        (b'{"choices":[{"text":"completion"}]}', "completion"),
        (b'{"output":[{"content":[{"text":"re"},{"text":"sponse"}]}]}', "response"),
        (b'{"choices":[{"message":{"content":null}}]}', ""),
        (b'{"choices":[]}', ""),
        (b'{"choices":{"a":1},"output":[3,{"content":[null]}]}', ""),
        (b"<html>", ""),
        (b"", ""),
    ],
)
def test_the_text_of_an_answer(body: bytes, text: str) -> None:
    """Chat, completions and responses; anything else has none."""
    assert answer_text(body) == text


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b'{"choices":[{"delta":{"content":"a"}}]}', "a"),
        (b'{"choices":[{"text":"b"}]}', "b"),
        (b'{"type":"response.output_text.delta","delta":"c"}', "c"),
        (b'{"choices":[{"delta":{"role":"assistant"}}]}', ""),
        (b"[DONE]", ""),
    ],
)
def test_the_text_of_a_piece(data: bytes, text: str) -> None:
    """One event of a streamed answer."""
    assert piece_text(data) == text


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error":{"message":"too long"}}', "too long"),
        (b'{"error":"plain"}', "plain"),
        (b"{}", ""),
    ],
)
def test_the_text_of_an_error(body: bytes, text: str) -> None:
    """The message of an OpenAI error object."""
    assert error_text(body) == text
