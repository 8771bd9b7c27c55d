"""NATS's notations: what is written can be read, what is hostile is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.bus.base import BusError
from broker.bus.nats_codec import (
    HEADER_BYTES_MAX,
    Status,
    check_subject,
    decode_delivery,
    decode_headers,
    decode_pub_ack,
    decode_status,
    decode_time,
    encode_headers,
    is_no_responders,
)

names = st.text("abcXYZ019-_", min_size=1, max_size=20)
values = st.text(
    st.characters(blacklist_characters="\r\n", blacklist_categories=["Cs"]), max_size=40
)


@given(st.dictionaries(names, values, max_size=5))
def test_headers_come_back(headers: dict[str, str]) -> None:
    """What `encode_headers` writes, `decode_headers` reads, but for blanks at the ends."""
    assert decode_headers(encode_headers(headers)) == {
        name: value.strip() for name, value in headers.items()
    }


@pytest.mark.parametrize("headers", [{"a b": "c"}, {"": "c"}, {"a": "b\nc"}, {"a": "b\rc"}])
def test_header_that_would_break_the_block(headers: dict[str, str]) -> None:
    """No name or value ends its line."""
    with pytest.raises(BusError):
        encode_headers(headers)


def test_of_a_huge_header_block_both_ends_are_read() -> None:
    """A stranger's fields can be as many as fill a message; the server's own come at the end."""
    many = b"".join(b"X-%d: y\r\n" % number for number in range(200_000))
    own = b"Nats-Sequence: 7\r\nNats-Subject: jobs.acme.2.tiny\r\n\r\n"
    headers = decode_headers(b"NATS/1.0\r\nContent-Type: application/json\r\n" + many + own)
    assert headers["Content-Type"] == "application/json"
    assert (headers["Nats-Sequence"], headers["Nats-Subject"]) == ("7", "jobs.acme.2.tiny")
    assert sum(len(name) + len(value) for name, value in headers.items()) < HEADER_BYTES_MAX
    one_line = b"NATS/1.0\r\nA: " + b"b" * 10 * HEADER_BYTES_MAX + b"\r\n" + own
    assert decode_headers(one_line)["Nats-Sequence"] == "7"


def test_status_lines() -> None:
    """A status has a code and perhaps a text; a plain block has none."""
    assert decode_status(b"NATS/1.0 404 No Messages\r\n\r\n") == Status(404, "No Messages")
    assert decode_status(b"NATS/1.0 503\r\n\r\n") == Status(503, "")
    block = b"NATS/1.0 409 Consumer Deleted\r\nNats-Pending-Messages: 7\r\n\r\n"
    assert decode_status(block) == Status(409, "Consumer Deleted")
    assert decode_headers(block) == {"Nats-Pending-Messages": "7"}
    assert decode_status(b"NATS/1.0 what\r\n\r\n") == Status(0, "")
    assert decode_status(b"NATS/1.0\r\nA: b\r\n\r\n") is None
    assert decode_status(None) is None


def test_no_responders_is_told_from_an_answer() -> None:
    """Only an empty answer with status 503 is the server's."""
    assert is_no_responders(b"", b"NATS/1.0 503\r\n\r\n")
    assert not is_no_responders(b"x", b"NATS/1.0 503\r\n\r\n")
    assert not is_no_responders(b"", None)
    assert not is_no_responders(b"", b"NATS/1.0\r\nA: 503\r\n\r\n")


@pytest.mark.parametrize(
    "reply",
    [
        b"$JS.ACK.JOBS_a.b1-m.2.10.30.1700000000123456789.5",
        b"$JS.ACK._.aBcDeF.JOBS_a.b1-m.2.10.30.1700000000123456789.5",
        b"$JS.ACK.hub.aBcDeF.JOBS_a.b1-m.2.10.30.1700000000123456789.5.rAnDoM",
    ],
)
def test_delivery_in_every_form_of_ack_subject(reply: bytes) -> None:
    """Short and long ack subjects say the same."""
    delivery = decode_delivery(b"jobs.a.1.m", reply, b"data", b"NATS/1.0\r\nK: v\r\n\r\n")
    assert (delivery.stream, delivery.consumer) == ("JOBS_a", "b1-m")
    assert (delivery.sequence, delivery.pending) == (10, 5)
    assert delivery.stored_at_s == pytest.approx(1_700_000_000.123456789)
    assert (delivery.ack_subject, delivery.data) == (reply.decode(), b"data")
    assert delivery.headers == {"K": "v"}


@pytest.mark.parametrize("reply", [b"", b"_INBOX.x", b"$JS.ACK.a.b.c", b"$JS.ACK.a.b.c.d.e.f.g.h"])
def test_delivery_without_ack_subject(reply: bytes) -> None:
    """What is no ack subject is refused, not misread."""
    with pytest.raises(BusError):
        decode_delivery(b"s", reply, b"", None)


@pytest.mark.parametrize("subject", ["a", "a.b.c", "$JS.API.INFO", "jobs.*.>", "a" * 1024])
def test_good_subjects(subject: str) -> None:
    """Subjects of all our kinds pass."""
    check_subject(subject)


def test_times_with_nanoseconds() -> None:
    """Server times are read to the microsecond, with any number of digits."""
    assert decode_time("2023-11-14T22:13:20.123456789Z") == pytest.approx(1_700_000_000.123456)
    assert decode_time("2023-11-14T22:13:20Z") == 1_700_000_000.0


def test_publish_acks() -> None:
    """The stream's word, good or bad; unknown fields are let pass."""
    good = decode_pub_ack(b'{"stream":"S","seq":7,"duplicate":true,"domain":"hub"}')
    assert (good.stream, good.seq, good.duplicate, good.error) == ("S", 7, True, None)
    bad = decode_pub_ack(b'{"error":{"code":503,"err_code":10077,"description":"full"},"seq":0}')
    assert bad.error is not None
    assert (bad.error.err_code, bad.error.description) == (10077, "full")
