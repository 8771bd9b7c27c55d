"""What the server's errors become, and how its read-back is judged."""

import pytest

from broker.bus.base import (
    BusError,
    NoStream,
    NotFound,
    PayloadTooLarge,
    StreamFull,
    WrongSequence,
)
from broker.bus.nats_codec import ApiError, decode_answer
from broker.bus.nats_streams import check_taken, error_of, stream_config
from tests.buses import a_stream


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (10071, WrongSequence),
        (10164, WrongSequence),
        (10077, StreamFull),
        (10047, StreamFull),
        (10122, StreamFull),
        (10059, NotFound),
        (10014, NotFound),
        (10037, NotFound),
        (10054, PayloadTooLarge),
        (10039, NoStream),
        (10008, NoStream),
        (10003, BusError),
    ],
)
def test_errors_become_ours(code: int, kind: type[BusError]) -> None:
    """Each code has one meaning, and the message keeps the server's words."""
    error = error_of(ApiError(400, code, "the server's words"), what="stream S")
    assert type(error) is kind
    assert str(error) == f"stream S: the server's words (error {code})"


def test_setting_that_an_old_server_ignores_is_named() -> None:
    """A server that does not know a setting leaves it out of its answer."""
    wanted = stream_config(a_stream(allow_msg_ttl=True))
    answer = decode_answer(b'{"config":{"name":"JOBS_acme"}}')
    with pytest.raises(BusError, match="subjects"):
        check_taken(answer, wanted, what="stream JOBS_acme")
    with pytest.raises(BusError, match="allow_msg_ttl"):
        check_taken(answer, {"allow_msg_ttl": wanted["allow_msg_ttl"]}, what="stream JOBS_acme")


def test_left_out_is_false_or_zero() -> None:
    """Servers leave out what is false, zero or empty: that is as asked."""
    answer = decode_answer(b'{"config":{"name":"S"}}')
    check_taken(answer, {"name": "S", "allow_atomic": False, "max_age": 0}, what="stream S")
