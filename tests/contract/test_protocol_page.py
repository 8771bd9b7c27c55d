"""`ops/docs/protocol.md` says what the code does: whoever writes a client has only that page."""

import json
import re

import pytest
from msgspec import Struct

from broker.service.closer import END_BYTES_MAX
from broker.service.control import RESULT_BYTES_MAX
from broker.wire import json_form, subjects
from broker.wire.codec import decode, decode_out, encode_for, read_json_job
from broker.wire.control import CancelRequest, ControlReply
from broker.wire.ids import TOKEN_CHARS_MAX, escape_model
from broker.wire.messages import BODY_BYTES_MAX, End, Kind, Reason, TerminalRecord
from broker.wire.prefix import BLOCK_BYTES, BLOCKS_MAX
from tests.leaders import a_desk
from tests.protocol_page import PAGE, RECORDS, blocks, rows_of, tables

TEXT = PAGE.read_text()


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_the_page_lists_a_messages_fields_as_they_are(kind: type[Struct]) -> None:
    """Names, types and defaults, in the order of the record; a new field needs a line here."""
    assert tables(TEXT).get(kind.__name__) == rows_of(kind)


def test_the_page_lists_no_message_that_is_not_there() -> None:
    """One that went takes its table along."""
    assert set(tables(TEXT)) == {kind.__name__ for kind in RECORDS}


@pytest.mark.parametrize("words", [Kind, Reason])
def test_the_page_lists_every_word_for_an_end(words: type[Kind] | type[Reason]) -> None:
    """In the order of the code."""
    section = TEXT.split("## How a job ends")[1].split(f"| {words.__name__} |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE) == list(words)


def test_the_pages_job_is_one() -> None:
    """It is read, with nothing missing that the broker does not fill in."""
    (example,) = blocks(TEXT, "json job")
    job, missing = read_json_job(example.encode())
    assert subjects.jobs(job.lane, job.band, job.model) in TEXT
    assert {"blocks", "prompt_tokens", "output_tokens_max", "stream"} <= missing


def test_the_pages_events_are_what_a_caller_gets() -> None:
    """Each line is an event, and its record one, exactly as they are written."""
    lines = [line for block in blocks(TEXT, "json out") for line in block.splitlines()]
    events = [decode_out(line.encode()) for line in lines]
    assert [json.loads(encode_for(event, speaks_json=True)) for event in events] == [
        json.loads(line) for line in lines
    ]
    end = events[-1]
    assert isinstance(end, End)
    record = decode(end.record, TerminalRecord)
    assert json.loads(json_form.encode(record)) == json.loads(lines[-1])["record"]
    assert subjects.result(record.lane, record.job) in TEXT


@pytest.mark.parametrize("kind", [CancelRequest, ControlReply])
def test_the_pages_questions_and_answers_are_such(kind: type[Struct]) -> None:
    """As they are written."""
    (example,) = blocks(TEXT, f"json {kind.__name__}")
    message = decode(example.encode(), kind)
    assert json.loads(encode_for(message, speaks_json=True)) == json.loads(example)


async def test_the_page_lists_what_the_broker_answers() -> None:
    """Every verb, and no other."""
    found = set(re.findall(r"^\| `ctl\.lane\.<lane>\.(\w+)`", TEXT, flags=re.MULTILINE))
    async with a_desk() as desk:
        assert found == set(desk.leader.control._lane)
        (row,) = re.findall(r"^\| `ctl\.cluster\.<verb>`.*$", TEXT, flags=re.MULTILINE)
        assert set(re.findall(r"`(\w+)`", row)) == set(desk.leader.control._cluster)


def test_the_page_has_the_subjects_and_bounds_of_the_code() -> None:
    """Where it gives a figure or a name."""
    model = "org/Big-Model:70b.v2"
    assert f"`{model}` is `{escape_model(model)}`" in TEXT
    assert f"1 to {TOKEN_CHARS_MAX} of `A-Z a-z 0-9 _ -`" in TEXT
    assert f"At most {BODY_BYTES_MAX:,} bytes" in TEXT
    assert f"blocks of {BLOCK_BYTES} bytes" in TEXT
    assert f"at most {BLOCKS_MAX})" in TEXT
    assert END_BYTES_MAX == RESULT_BYTES_MAX == 1_000_000
    for subject in (
        subjects.out("<lane>", "<client>", "<job>"),
        subjects.result("<lane>", "<job>"),
        subjects.dead_letter("<lane>", "<job>"),
        subjects.queue_state("<lane>"),
        subjects.queue_state_json("<lane>"),
        subjects.gateways_leaving("<lane>"),
        subjects.work("<worker>"),
        subjects.heartbeat("<worker>"),
        subjects.worker_note("<worker>"),
        subjects.INVENTORY,
        f"$KV.{subjects.CONFIG_BUCKET}.{subjects.lane_offer_key('<lane>')}",
        f"$KV.{subjects.LEADER_BUCKET}.{subjects.LEADER_KEY}",
        f"$KV.{subjects.ATTEMPTS_BUCKET}.<lane>.<job>",
    ):
        assert f"`{subject}`" in TEXT, subject
