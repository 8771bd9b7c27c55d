"""Fields put into an object: the others keep their bytes."""

import msgspec
import orjson
import pytest

from broker.wire.splice import with_fields

ODD = b'{ "id": 123456789012345678901234567890,  "t":1.50, "s":"\\u00e9\\/", "d": [ 1e2,-0 ] }'


def test_other_fields_keep_their_bytes() -> None:
    """Numbers beyond 64 bits, digits that a float has not, escapes, blanks."""
    made = with_fields(ODD, {"stream": True, "t": None})
    for kept in (b":123456789012345678901234567890", b'"\\u00e9\\/"', b"[ 1e2,-0 ]"):
        assert kept in made
    assert orjson.loads(made) == {**orjson.loads(ODD), "stream": True, "t": None}


def test_a_name_stands_once() -> None:
    """Of a field that was said twice the last counts, as everywhere; a new one replaces both."""
    twice = b'{"stream": false, "n": 1, "stream": 0, "n": 2}'
    assert with_fields(twice, {"stream": True}) == b'{"stream":true,"n":2}'
    assert with_fields(b"{}", {"a": {"b": 1}}) == b'{"a":{"b":1}}'


@pytest.mark.parametrize("body", [b"[]", b"", b"{", b"null"])
def test_what_is_no_object(body: bytes) -> None:
    """It is an error, and no object is made of it."""
    with pytest.raises(msgspec.DecodeError):
        with_fields(body, {"a": 1})
