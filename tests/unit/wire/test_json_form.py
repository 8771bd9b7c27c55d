"""The JSON form: the same messages, the same bounds, and nothing that msgpack would not say."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.wire import json_form
from broker.wire.codec import (
    MESSAGE_BYTES_MAX,
    MalformedMessage,
    decode,
    decode_order,
    decode_out,
    encode,
    encode_end,
    encode_for,
    read_json_job,
    speaks_json,
)
from broker.wire.control import (
    CancelRequest,
    ControlReply,
    EstimateRequest,
    JobRequest,
    LaneCancelRequest,
    ResultRequest,
    StreamSpan,
    WhyRequest,
)
from broker.wire.messages import (
    Attempt,
    End,
    Failure,
    Job,
    Kind,
    LaneState,
    Queued,
    QueueState,
    Reason,
    Started,
    StoredEnd,
    TerminalRecord,
    Tokens,
    Usage,
)
from broker.wire.usage import CountedRecord
from tests.builders import a_job, an_attempt
from tests.json_callers import a_body, a_json_job, base64_of, packed

FAILURE = Failure(Attempt(1, 2), "w1", Reason.STALLED, 5.0, "d", charged=False)
RECORD = TerminalRecord(
    job="j",
    lane="acme",
    kind=Kind.COMPLETED,
    ended_at_s=2.5,
    body=b'{"id": "x",  "choices": []}',
    usage=Usage(9, 4, 3),
    attempt=Attempt(1, 3),
    failures=(FAILURE,),
)
MESSAGES = [
    a_job(blocks=b"\x01" + bytes(7), deadline_at_s=9.5),
    RECORD,
    msgspec.structs.replace(RECORD, kind=Kind.REJECTED, reason=Reason.QUEUE_FULL, body=b""),
    Queued(job="j", position=3, wait_s=1.5),
    Started(job="j", attempt=an_attempt(), worker="w1"),
    Tokens(job="j", attempt=an_attempt(), index=4, data=b'{"choices": []}'),
    Tokens(job="j", attempt=an_attempt(), index=5, data=b"[DONE]"),
    StoredEnd(job="j"),
    LaneState(
        lane="acme",
        epoch=3,
        at_s=1.0,
        queues=(
            QueueState(
                band=1,
                model="m",
                queued_jobs=2,
                queued_jobs_max=9,
                inflight_jobs=1,
                wait_s=0.5,
            ),
        ),
    ),
    CancelRequest(job="j", stream="JOBS_acme", stream_sequence=7),
    WhyRequest(job="j"),
    JobRequest(job="j", stream="JOBS_acme", stream_sequence=7),
    LaneCancelRequest(
        bands=(1, 2), spans=(StreamSpan(stream="JOBS_acme", next_sequence=1, last_sequence=9),)
    ),
    ResultRequest(job="j"),
    EstimateRequest(band=1, model="m"),
    ControlReply(ok=True, data=b'{"a": 1}'),
]


@pytest.mark.parametrize(
    "message", MESSAGES, ids=[f"{n}-{type(one).__name__}" for n, one in enumerate(MESSAGES)]
)
def test_either_form_of_a_message_is_read_as_the_same_record(message: msgspec.Struct) -> None:
    """Through `decode`, so wherever a record or a job is read both forms are."""
    data = json_form.encode(message)
    assert isinstance(json.loads(data), dict)
    assert decode(data, type(message)) == message
    assert decode(encode(message), type(message)) == message


class _JobName(msgspec.Struct):
    """Who looks for a job by its id reads no more of it."""

    id: str


@pytest.mark.parametrize("message", MESSAGES)
def test_a_plain_message_is_encoded_as_it_is_and_looks_as_if_it_were_taken_apart(
    message: msgspec.Struct,
) -> None:
    """The same bytes. What the broker tells of queues each second is plain."""
    taken_apart = msgspec.json.encode(json_form._told(message))
    assert json_form.encode(message) == taken_apart
    assert json_form._is_plain(type(message)) == (type(message) in PLAIN)


PLAIN = {Queued, StoredEnd, LaneState, CancelRequest, EstimateRequest, JobRequest} | {
    LaneCancelRequest,
    ResultRequest,
    StreamSpan,
    WhyRequest,
}


def test_who_reads_some_fields_of_a_message_reads_either_form() -> None:
    """Accounts count records in JSON as the others, and a job is found by its name."""
    for record in (RECORD, msgspec.structs.replace(RECORD, retry_after_s=2.0)):
        counted = decode(json_form.encode(record), CountedRecord)
        assert counted == decode(encode(record), CountedRecord)
        assert counted.usage == record.usage
    assert decode(json_form.encode(a_job()), _JobName).id == a_job().id


def test_what_an_engine_said_stands_in_json_as_it_said_it() -> None:
    """Untouched, spaces and order included; small records are objects with named fields."""
    data = json_form.encode(RECORD)
    assert b'"body":{"id": "x",  "choices": []}' in data
    told = json.loads(data)
    assert told["usage"] == {"prompt_tokens": 9, "cached_tokens": 4, "output_tokens": 3}
    assert told["attempt"] == {"epoch": 1, "number": 3}
    assert told["failures"] == [
        {
            "attempt": {"epoch": 1, "number": 2},
            "worker": "w1",
            "reason": "stalled",
            "at_s": 5.0,
            "detail": "d",
            "charged": False,
        }
    ]


NO_OBJECTS = [
    b"",
    b"text",
    b"[1]",
    b'"x"',
    b"{",
    b'{"a":1}x',
    b'{"a":"\xff"}',
    b"{" * 5000,
    b"\x00",
]


@pytest.mark.parametrize("body", NO_OBJECTS)
def test_bytes_that_are_no_json_object_stand_as_base64(body: bytes) -> None:
    """So the whole is always valid JSON, in UTF-8, and the bytes come back as they were."""
    record = msgspec.structs.replace(RECORD, body=body)
    told = json.loads(json_form.encode(record).decode())
    assert told.get("body", "") == base64_of(body)
    assert decode(json_form.encode(record), TerminalRecord) == record


@given(st.binary(max_size=200))
def test_any_bytes_come_back_as_they_were(body: bytes) -> None:
    """An object is the same but for blanks around it, which no object that stands there has."""
    record = msgspec.structs.replace(RECORD, body=body)
    assert decode(json_form.encode(record), TerminalRecord).body == body


def test_an_end_holds_its_record_as_json() -> None:
    """A reader of JSON needs nothing else to read it."""
    told = json.loads(encode_end("j", json_form.encode(RECORD), speaks_json=True))
    assert (told["type"], told["job"], told["record"]["kind"]) == ("end", "j", "completed")


@pytest.mark.parametrize("speaks", [True, False])
@pytest.mark.parametrize("stored", [True, False])
def test_an_end_speaks_its_callers_form_whatever_the_record_stands_in(
    speaks: bool, stored: bool
) -> None:
    """The first writer chose the record's form; a second message's caller may want the other."""
    event = encode_end("j", encode_for(RECORD, speaks_json=stored), speaks_json=speaks)
    assert json_form.begins_json(event) == speaks
    end = decode_out(event)
    assert isinstance(end, End)
    assert json_form.begins_json(end.record) == speaks
    assert decode(end.record, TerminalRecord) == RECORD


def test_a_record_of_the_other_form_that_is_garbage_is_told_as_malformed() -> None:
    """Whoever tells the end says then that it stands in RESULTS."""
    with pytest.raises(MalformedMessage):
        encode_end("j", b"garbage", speaks_json=True)


def test_a_job_says_what_its_producer_left_out() -> None:
    """The broker computes that; what is there, even at its default, was meant."""
    job, missing = read_json_job(packed(a_json_job(stream=False, prompt_tokens=1)))
    assert job.id == "job-1"
    assert json.loads(job.body) == a_body()
    assert {"blocks", "output_tokens_max"} <= missing
    assert not missing & {"id", "body", "stream", "prompt_tokens"}


BAD_JOBS: dict[str, dict[str, Any]] = {
    "an id that is no token": {"id": "a.b"},
    "no body": {"body": None},
    "a body that is a number": {"body": 7},
    "a body that is a list": {"body": []},
    "a body that is no base64": {"body": "!"},
    "hashes that are no base64": {"blocks": "é"},
    "hashes as an object": {"blocks": {}},
    "hashes as numbers": {"blocks": [1, 2]},
    "a band that is none": {"band": 4},
    "a band that is text": {"band": "2"},
    "a negative count": {"prompt_tokens": -1},
    "a count beyond what JSON holds": {"prompt_tokens": 2**53 + 1},
    "a long session": {"session": "x" * 257},
}


@pytest.mark.parametrize("fields", BAD_JOBS.values(), ids=BAD_JOBS)
def test_a_job_in_json_has_the_bounds_of_one_in_msgpack(fields: dict[str, Any]) -> None:
    """And the error says where."""
    with pytest.raises(MalformedMessage, match=rf"\$\.{next(iter(fields))}"):
        decode(packed(a_json_job(**fields)), Job)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"{}", b"[]", b'{"id":"j"', b"\xff", b'{"body":' + b'{"a":' * 5000, b"NaN"],
)
def test_no_bytes_but_a_message_get_through(data: bytes) -> None:
    """Cut short, empty, deep, no text: one error."""
    with pytest.raises(MalformedMessage):
        read_json_job(data)


@given(st.binary(max_size=100))
def test_garbage_behind_a_brace_is_malformed_and_nothing_worse(tail: bytes) -> None:
    """Whatever follows."""
    with pytest.raises(MalformedMessage):
        read_json_job(b"{" + tail)


def test_orders_have_no_json_form() -> None:
    """Workers take msgpack alone."""
    with pytest.raises(MalformedMessage):
        decode_order(b'{"type":"probe","epoch":1,"number":1}')


def test_json_larger_than_a_message_may_be_is_malformed() -> None:
    """The same bound."""
    job = packed(a_json_job(body="A" * MESSAGE_BYTES_MAX))
    with pytest.raises(MalformedMessage, match="more than a message may have"):
        read_json_job(job)


@pytest.mark.parametrize(
    ("data", "headers", "speaks"),
    [
        (b"{}", {}, True),
        (b" \n{}", {}, True),
        (b"\x80", {"Content-Type": "application/json"}, True),
        (b"\x80", {"content-type": "Application/JSON; charset=utf-8"}, True),
        (b"\x80", {"Nats-Msg-Id": "a.0"}, False),
        (b"\x80", {"Content-Type": "application/msgpack"}, False),
        (b"", {}, False),
    ],
)
def test_a_sender_says_its_form_by_content_type_or_first_byte(
    data: bytes, headers: dict[str, str], speaks: bool
) -> None:
    """No message in msgpack begins with a brace or a blank."""
    assert speaks_json(data, headers) == speaks


@given(st.sampled_from(MESSAGES))
def test_no_message_in_msgpack_is_taken_for_json(message: msgspec.Struct) -> None:
    """The rule that tells the forms apart."""
    assert not json_form.begins_json(encode(message))
