"""Bearer keys: whose request it is."""

import hashlib

import pytest

from producers.gateway.auth import Caller, Keys
from producers.gateway.config import KeyConfig
from producers.gateway.errors import ApiError

KEYS = Keys(
    {
        "alice": KeyConfig(lane="acme", key="sk-alice-1", band=0),
        "bob": KeyConfig(lane="bolt", key_sha256=hashlib.sha256(b"sk-bob-1").hexdigest().upper()),
    }
)


@pytest.mark.parametrize(
    ("header", "caller"),
    [
        ("Bearer sk-alice-1", Caller(name="alice", lane="acme", band=0)),
        ("bearer  sk-bob-1 ", Caller(name="bob", lane="bolt", band=1)),
    ],
)
def test_a_key_tells_lane_and_band(header: str, caller: Caller) -> None:
    """Given as it is or by its digest; the scheme in any case."""
    assert KEYS.caller(header) == caller
    assert KEYS.lanes == ("acme", "bolt")


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (None, "missing_api_key"),
        ("", "missing_api_key"),
        ("Bearer sk-carol-1", "invalid_api_key"),
        ("Basic sk-alice-1", "invalid_api_key"),
        ("sk-alice-1", "invalid_api_key"),
        ("Bearer \udcff", "invalid_api_key"),
    ],
)
def test_no_key_no_answer(header: str | None, code: str) -> None:
    """401, what to send, and no retry; the key that was sent is not repeated."""
    with pytest.raises(ApiError) as caught:
        KEYS.caller(header)
    error = caught.value
    assert (error.status, error.code) == (401, code)
    assert error.headers["x-should-retry"] == "false"
    assert "Authorization: Bearer KEY" in error.message
    assert "sk-" not in error.message
