"""The contract in bytes: what another program, in another language, may rely on."""

from typing import Any

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.wire import subjects
from broker.wire.codec import (
    MESSAGE_BYTES_MAX,
    MalformedMessage,
    decode,
    decode_note,
    decode_order,
    decode_out,
    encode,
)
from broker.wire.ids import (
    BANDS,
    MalformedName,
    escape_model,
    is_token,
    job_key,
    new_job_id,
    require_token,
    split_job_key,
    unescape_model,
)
from broker.wire.messages import (
    Abort,
    Attempt,
    Bundle,
    Dispatch,
    End,
    Failure,
    FirstToken,
    Heartbeat,
    InFlight,
    Job,
    Kind,
    Reason,
    TerminalRecord,
    Tokens,
    Usage,
)
from tests.builders import a_job, an_attempt


def _packed(value: Any) -> bytes:
    """Pack with the independent library."""
    packed = msgpack.packb(value)
    assert packed is not None
    return packed


def test_a_job_is_a_msgpack_map_of_named_fields() -> None:
    """Any msgpack library reads a job: names as in the docs, defaults left out."""
    job = a_job(body=b"{}", blocks=b"\x01" + bytes(7))
    assert msgpack.unpackb(encode(job)) == {
        "id": "job-1",
        "lane": "acme",
        "band": 2,
        "model": "tiny",
        "client": "client-1",
        "body": b"{}",
        "output_tokens_max": 16,
        "submitted_at_s": 1000.0,
        "blocks": b"\x01" + bytes(7),
    }


def test_a_job_packed_by_another_library_is_read() -> None:
    """A foreign producer needs msgpack and the field names, nothing else; unknown fields pass."""
    packed = _packed(
        {"id": "j", "lane": "a", "band": 1, "model": "m", "client": "c", "body": b"x", "new": 1}
    )
    job = decode(packed, Job)
    assert (job.id, job.band, job.body, job.endpoint) == ("j", 1, b"x", "/v1/chat/completions")


def test_golden_bytes_of_array_like_records() -> None:
    """The order of fields in array-like records is the format: append only."""
    assert encode(Attempt(7, 3)).hex() == "920703"
    assert encode(Usage(1, 2, 3)).hex() == "93010203"
    failure = Failure(Attempt(1, 2), "w1", Reason.STALLED, 5.0, "d", charged=False)
    assert msgpack.unpackb(encode(failure)) == [[1, 2], "w1", "stalled", 5.0, "d", False]
    entry = InFlight(
        key="a.j",
        attempt=Attempt(1, 2),
        stream_sequence=9,
        band=1,
        model="m",
        prompt_tokens=10,
        cached_tokens=4,
        output_tokens_max=16,
        output_tokens=2,
        prefilled=True,
        enqueued_at_s=1.0,
        started_at_s=2.0,
        ack_subject="x",
    )
    assert msgpack.unpackb(encode(entry)) == [
        "a.j", [1, 2], 9, 1, "m", 10, 4, 16, 2, True, 1.0, 2.0, "x", "", "", False,
    ]  # fmt: skip


def test_tagged_messages_say_what_they_are() -> None:
    """Orders, notes and events to clients carry their kind in `type`."""
    abort = Abort(epoch=1, number=2, key="a.j", attempt=an_attempt(), reason=Reason.CANCELLED)
    assert msgpack.unpackb(encode(abort))["type"] == "abort"
    assert decode_order(encode(abort)) == abort
    note = FirstToken(worker="w", incarnation=1, key="a.j", attempt=an_attempt(), ttft_s=0.5)
    assert decode_note(encode(note)) == note
    end = End(job="j", record=b"r")
    assert decode_out(encode(end)) == end
    tokens = Tokens(job="j", attempt=an_attempt(), index=0, data=b"{}")
    assert decode_out(encode(tokens)) == tokens
    bundle = Bundle(tokens=(tokens, tokens))
    packed = msgpack.unpackb(encode(tokens))
    assert msgpack.unpackb(encode(bundle)) == {"type": "bundle", "tokens": [packed, packed]}
    assert decode_out(encode(bundle)) == bundle


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", "has space"),
        ("id", "trailing-newline\n"),
        ("id", ""),
        ("id", "x" * 65),
        ("lane", "a.b"),
        ("lane", "*"),
        ("client", ">"),
        ("band", 4),
        ("band", -1),
        ("band", "1"),
        ("model", ""),
        ("model", "m" * 257),
        ("submitted_at_s", float("nan")),
        ("submitted_at_s", float("inf")),
        ("deadline_at_s", -1.0),
        ("prompt_tokens", -1),
        ("prompt_tokens", 2**63),
        ("body", "text"),
        ("body", None),
    ],
)
def test_a_field_out_of_range_is_refused_at_the_edge(field: str, value: object) -> None:
    """Nothing past the decoder has to ask again whether a field is sane."""
    raw = msgpack.unpackb(encode(a_job()))
    with pytest.raises(MalformedMessage):
        decode(_packed({**raw, field: value}), Job)


def test_a_message_above_the_bound_is_refused_unread() -> None:
    """MESSAGE_BYTES_MAX is the most that is decoded."""
    with pytest.raises(MalformedMessage, match="more than a message may have"):
        decode(b"\x00" * (MESSAGE_BYTES_MAX + 1), Job)


@given(st.binary(max_size=200))
def test_garbage_is_malformed_and_nothing_else(data: bytes) -> None:
    """Whatever bytes come: a typed record or MalformedMessage."""
    for kind in (Job, Heartbeat, Dispatch, TerminalRecord):
        try:
            decode(data, kind)
        except MalformedMessage:
            continue


@given(st.data())
def test_a_damaged_job_is_a_job_or_malformed(data: st.DataObject) -> None:
    """One flipped byte never raises anything but MalformedMessage."""
    packed = bytearray(encode(a_job()))
    place = data.draw(st.integers(0, len(packed) - 1))
    packed[place] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(packed), Job)
    except MalformedMessage:
        return


def test_deep_nesting_is_malformed() -> None:
    """A message nested beyond any sense is refused, not a crash."""
    with pytest.raises(MalformedMessage):
        decode(b"\x81\xa1x" + b"\x91" * 200_000 + b"\xc0", Job)


@given(st.text(min_size=1, max_size=20))
def test_any_short_model_name_escapes_and_comes_back(model: str) -> None:
    """escape_model is reversible and its result is one token."""
    try:
        token = escape_model(model)
    except MalformedName:
        assert len(model.encode(errors="replace")) * 3 > 64
        return
    assert is_token(token)
    assert unescape_model(token) == model


def test_a_name_that_is_not_text_is_refused() -> None:
    """A lone surrogate can't be sent."""
    with pytest.raises(MalformedName):
        escape_model("\ud800")


def test_names_that_no_model_escapes_to_are_refused() -> None:
    """Two subjects never mean the same model."""
    for token in ("_41", "_ZZ", "a_", "_C3", "a_2f", "é", "☃", ""):
        with pytest.raises(MalformedName):
            unescape_model(token)


def test_subjects_are_parsed_back() -> None:
    """What `jobs` builds, `parse_jobs` reads."""
    subject = subjects.jobs("acme", 1, "org/model-7B.q4")
    assert subject == "jobs.acme.1.org_2Fmodel-7B_2Eq4"
    assert subjects.parse_jobs(subject) == subjects.JobAddress("acme", 1, "org/model-7B.q4")
    for wrong in ("jobs.acme.4.m", "jobs.acme.x.m", "job.acme.1.m", "jobs.acme.1", "jobs..1.m",
                  "jobs.acme.².m", "jobs.acme.1.m.n"):  # fmt: skip
        with pytest.raises(MalformedName):
            subjects.parse_jobs(wrong)


def test_every_subject_and_name_stands_as_documented() -> None:
    """Subjects are a public contract: this list changes only with the docs."""
    assert subjects.result("acme", "j") == "results.acme.j"
    assert subjects.dead_letter("acme", "j") == "dlq.acme.j"
    assert subjects.work("w1") == "work.w1"
    assert subjects.heartbeat("w1") == "wrk.w1.hb"
    assert subjects.worker_note("w1") == "wrk.w1.note"
    assert subjects.out("acme", "c", "j") == "out.acme.c.j"
    assert subjects.out_of_client("acme", "c") == "out.acme.c.*"
    assert subjects.queue_state("acme") == "q.acme"
    assert subjects.lane_control("acme", "cancel") == "ctl.lane.acme.cancel"
    assert subjects.cluster_control("workers") == "ctl.cluster.workers"
    assert [subjects.jobs_stream("acme", band) for band in BANDS] == [
        "JOBS_acme", "JOBS_acme", "JOBS_acme", "BATCH_acme",
    ]  # fmt: skip
    assert subjects.results_stream("acme") == "RESULTS_acme"
    assert subjects.dead_letters_stream("acme") == "DLQ_acme"
    assert subjects.job_consumer(3, "a/b") == "b3-a_2Fb"
    assert subjects.bad_message_id("BATCH_acme", 7) == "bad-b7"
    assert subjects.bad_message_id("JOBS_acme", 7) == "bad-j7"
    assert subjects.lane_offer_key("acme") == "lane.acme"
    assert subjects.files_stream("acme") == "FILES_acme"
    assert subjects.file_chunks("acme", "f") == "files.acme.f"
    assert subjects.file_key("acme", "f") == "acme.f"
    assert subjects.batch_key("acme", "b") == "batch.acme.b"
    assert subjects.batch_request_key("acme", "x") == "request.acme.x"


def test_job_keys_and_ids() -> None:
    """Job ids are tokens; keys name lane and job."""
    assert is_token(new_job_id())
    assert len({new_job_id() for _ in range(1000)}) == 1000
    assert split_job_key(job_key("acme", "j-1")) == ("acme", "j-1")
    with pytest.raises(MalformedName, match="lane 'a b' is not"):
        require_token("a b", what="lane")


def test_attempts_are_ordered_by_epoch_then_number() -> None:
    """A newer leader's attempt is greater than any of an older one."""
    assert Attempt(1, 9) < Attempt(2, 1) < Attempt(2, 2)


def test_kinds_are_the_documented_words() -> None:
    """Callers branch on these."""
    assert [kind.value for kind in Kind] == [
        "completed", "failed", "cancelled", "expired", "dead_lettered", "rejected",
    ]  # fmt: skip
