"""What the server's errors become, and how its read-back is judged."""

from typing import cast

import pytest

from broker.bus.base import (
    BusError,
    NoStream,
    NotFound,
    NotTaken,
    PayloadTooLarge,
    StreamFull,
    Timeout,
    WrongSequence,
)
from broker.bus.nats_codec import ApiError, decode_answer
from broker.bus.nats_link import Link
from broker.bus.nats_replies import Replies, Reply
from broker.bus.nats_streams import (
    API_TIMEOUT_S,
    ASK_AGAIN_S,
    Streams,
    check_taken,
    error_of,
    stream_config,
)
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
    with pytest.raises(NotTaken, match="subjects"):
        check_taken(answer, wanted, what="stream JOBS_acme")
    with pytest.raises(NotTaken, match="allow_msg_ttl"):
        check_taken(answer, {"allow_msg_ttl": wanted["allow_msg_ttl"]}, what="stream JOBS_acme")


def test_left_out_is_false_or_zero() -> None:
    """Servers leave out what is false, zero or empty: that is as asked."""
    answer = decode_answer(b'{"config":{"name":"S"}}')
    check_taken(answer, {"name": "S", "allow_atomic": False, "max_age": 0}, what="stream S")


class AnsweringServer:
    """Answers everything alike."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer

    async def ask(self, subject: str, data: bytes, *, timeout_s: float) -> Reply:
        """Answer."""
        del subject, data, timeout_s
        return Reply(b"", self.answer, None)


@pytest.mark.parametrize("code", [10037, 10043, 10057])
async def test_a_message_that_is_gone_already_was_not_deleted(code: int) -> None:
    """Whichever way the server says it: that is no trouble to try again after."""
    told = b'{"error":{"code":404,"err_code":%d,"description":"sequence 9 not found"}}' % code
    streams = Streams(cast("Link", None), cast("Replies", AnsweringServer(told)))
    assert not await streams.delete_message("JOBS_acme", 9, erase=False)


class SilentServer:
    """Leaves the first questions unanswered, as a group in election does."""

    def __init__(self, silent: int) -> None:
        self.silent = silent
        self.waits_s: list[float] = []

    async def ask(self, subject: str, data: bytes, *, timeout_s: float) -> Reply:
        """Answer, or let the time pass."""
        self.waits_s.append(timeout_s)
        if len(self.waits_s) <= self.silent:
            message = f"no answer on {subject} to {data!r} in time"
            raise Timeout(message)
        return Reply(b"", b'{"state":{"messages":3}}', None)

    def streams(self) -> Streams:
        """The management side of a bus to it."""
        return Streams(cast("Link", None), cast("Replies", self))


async def test_a_question_that_changes_nothing_is_put_again() -> None:
    """Its stream was in election: the answer comes with the first question after that.

    Chaos, seed 303: each silence cost a new leader 5 s, and there were three.
    """
    server = SilentServer(2)
    assert (await server.streams().stream_state("JOBS_acme")).messages == 3
    assert server.waits_s == [ASK_AGAIN_S] * 3


async def test_it_is_put_again_for_as_long_as_one_is_waited_for() -> None:
    """Then it is a time-out, as ever."""
    server = SilentServer(1000)
    with pytest.raises(Timeout):
        await server.streams().consumer_state("JOBS_acme", "b1-tiny")
    assert sum(server.waits_s) == API_TIMEOUT_S


async def test_what_changes_something_is_asked_once() -> None:
    """It may have been done."""
    server = SilentServer(1)
    with pytest.raises(Timeout):
        await server.streams().delete_message("JOBS_acme", 1, erase=False)
    assert server.waits_s == [API_TIMEOUT_S]
