"""Dead letters: found, listed, read, and put back into their queue exactly once."""

import dataclasses
import json
import time
from typing import Any

import msgspec
import orjson
import pytest

from broker.bus import topology
from broker.bus.memory import MemoryBus
from broker.wire import subjects
from broker.wire.codec import decode, encode
from broker.wire.ids import TOKEN_CHARS_MAX
from broker.wire.messages import (
    Attempt,
    DeadLetter,
    Failure,
    Job,
    Kind,
    LaneOffer,
    Reason,
    TerminalRecord,
)
from ops.cli.errors import CommandError, Misused
from ops.cli.letter_text import BODY_CHARS_MAX, as_builtins, as_summary, as_text
from ops.cli.letters import Letter, find, known_lanes, newest, replay
from tests.builders import LANE, MODEL, a_job
from tests.json_callers import a_body, a_json_job, packed

DLQ = subjects.dead_letters_stream(LANE)


async def a_bus(**bounds: Any) -> MemoryBus:
    """A bus with the streams of lane `acme`."""
    bus = MemoryBus()
    plan = topology.LanePlan(LANE, (MODEL,))
    await topology.apply(bus, topology.of([plan], topology.Bounds(**bounds)))
    key = subjects.lane_offer_key(LANE)
    await bus.kv_put(subjects.CONFIG_BUCKET, key, encode(LaneOffer(lane=LANE, models=(MODEL,))))
    return bus


async def a_letter(bus: MemoryBus, *, record: dict[str, Any] | None = None, **job: Any) -> Letter:
    """A job of lane `acme` that failed once, in the stream of dead letters."""
    given_up = a_job(**job)
    failure = Failure(Attempt(7, 1), "gpu-1", Reason.ENGINE_FAILED, 1000.0, detail="HTTP 500")
    fields: dict[str, Any] = {
        "job": given_up.id,
        "lane": LANE,
        "kind": Kind.DEAD_LETTERED,
        "ended_at_s": 1001.0,
        "model": MODEL,
        "client": "client-1",
        "reason": Reason.ENGINE_FAILED,
        "message": "Failed 1 times.",
        "failures": (failure,),
    }
    subject = subjects.jobs(LANE, given_up.band, MODEL)
    told = TerminalRecord(**{**fields, **(record or {})})
    letter = DeadLetter(job=encode(given_up), subject=subject, record=told)
    await bus.append(subjects.dead_letter(LANE, given_up.id), encode(letter))
    return await find(bus, f"{LANE}.{given_up.id}")


async def _queued(bus: MemoryBus) -> list[Job]:
    return [
        decode(stored.data, Job) async for stored in bus.messages(subjects.jobs_stream(LANE, 2))
    ]


async def test_letter_is_found_by_its_job() -> None:
    """LANE.JOB, as it is listed."""
    bus = await a_bus()
    letter = await a_letter(bus, id="j1")
    assert (letter.key, letter.lane, letter.record.reason) == ("acme.j1", LANE, "engine_failed")
    assert letter.job_bytes == len(encode(a_job(id="j1")))


@pytest.mark.parametrize("key", ["j1", "acme.", ".j1", "acme.j 1", "acme.>", "a.b.c"])
async def test_key_that_is_none(key: str) -> None:
    """Wrong usage, and what it should look like."""
    with pytest.raises(Misused, match=r"is not LANE.JOB"):
        await find(await a_bus(), key)


@pytest.mark.parametrize("key", ["acme.j2", "bolt.j1"])
async def test_letter_that_is_not_there(key: str) -> None:
    """No such job, or no such lane."""
    bus = await a_bus()
    await a_letter(bus, id="j1")
    with pytest.raises(CommandError, match=rf"^no dead letter {key}; see"):
        await find(bus, key)


async def test_newest_letters() -> None:
    """So many of the newest, oldest of them first; or all."""
    bus = await a_bus()
    for number in range(5):
        await a_letter(bus, id=f"j{number}")
    some = [letter.record.job async for letter in newest(bus, LANE, count_max=2)]
    every = [letter.record.job async for letter in newest(bus, LANE, count_max=None)]
    assert some == ["j3", "j4"]
    assert every == ["j0", "j1", "j2", "j3", "j4"]


async def test_message_that_is_no_letter(capsys: pytest.CaptureFixture[str]) -> None:
    """Told and passed over when listed; an error when asked for."""
    bus = await a_bus()
    await bus.append(subjects.dead_letter(LANE, "bad"), b"\xc1")
    await a_letter(bus, id="j1")
    assert [letter.record.job async for letter in newest(bus, LANE, count_max=None)] == ["j1"]
    assert "message 1 of DLQ_acme can't be read" in capsys.readouterr().err
    with pytest.raises(CommandError, match=r"the dead letter acme.bad can't be read"):
        await find(bus, "acme.bad")


async def test_replay() -> None:
    """The same request in the same queue under a new id; the letter is gone."""
    bus = await a_bus()
    letter = await a_letter(bus, id="j1", submission=4, session="s1")
    assert await replay(bus, letter, keep=False) == "acme.j1-r1"
    (job,) = await _queued(bus)
    before = a_job(id="j1", submission=4, session="s1")
    assert job == msgspec.structs.replace(before, id="j1-r1", submission=0)
    assert (await bus.stream_state(DLQ)).messages == 0


async def test_replay_of_a_job_in_json() -> None:
    """In JSON again, so that its caller can read what comes; nothing is made up for it."""
    bus = await a_bus()
    said = a_json_job(id="j1", submission=4, stream=False, session="s1", body=a_body("hi"))
    letter = await a_letter(bus, id="j1")
    again = dataclasses.replace(letter, job=packed(said))
    assert await replay(bus, again, keep=False) == "acme.j1-r1"
    (stored,) = [one async for one in bus.messages(subjects.jobs_stream(LANE, 2))]
    assert json.loads(stored.data) == {**said, "id": "j1-r1", "submission": 0}
    assert stored.headers["Content-Type"] == "application/json"
    assert as_builtins(again)["body"] == said["body"]


async def test_replay_that_was_interrupted() -> None:
    """Stored and not removed: once more stores nothing new, and removes."""
    bus = await a_bus()
    letter = await a_letter(bus, id="j1")
    await replay(bus, letter, keep=True)
    assert (await bus.stream_state(DLQ)).messages == 1
    await replay(bus, letter, keep=False)
    assert len(await _queued(bus)) == 1
    assert (await bus.stream_state(DLQ)).messages == 0


async def test_replay_of_what_was_replayed_and_ended() -> None:
    """A result stands under the new id: another run would be lost, so it is refused."""
    bus = await a_bus()
    letter = await a_letter(bus, id="j1")
    await bus.append(subjects.result(LANE, "j1-r1"), b"done")
    with pytest.raises(CommandError, match=r"replayed before, and ended: .* under acme.j1-r1"):
        await replay(bus, letter, keep=False)
    assert await _queued(bus) == []


async def test_replay_of_a_replay() -> None:
    """The id does not grow with each: only the last letter's number stands in it."""
    bus = await a_bus()
    await a_letter(bus, id="j1")
    again = await a_letter(bus, id="j1-r1")
    assert again.replay_id == "j1-r2"


async def test_replay_of_the_longest_id() -> None:
    """The new id is still a token."""
    bus = await a_bus()
    letter = await a_letter(bus, id="x" * TOKEN_CHARS_MAX)
    assert await replay(bus, letter, keep=False) == f"acme.{'x' * (TOKEN_CHARS_MAX - 3)}-r1"


@pytest.mark.parametrize(("left_s", "kept"), [(-5.0, False), (500.0, True), (None, False)])
async def test_deadline_of_a_replay(left_s: float | None, kept: bool) -> None:
    """One that has passed is left out, or the job would end at once."""
    bus = await a_bus()
    deadline_at_s = None if left_s is None else time.time() + left_s
    await replay(bus, await a_letter(bus, deadline_at_s=deadline_at_s), keep=False)
    (job,) = await _queued(bus)
    assert job.deadline_at_s == (deadline_at_s if kept else None)


async def test_queue_that_is_full() -> None:
    """The letter stays, and what to do is told."""
    bus = await a_bus(jobs_per_subject_max=1)
    await bus.append(subjects.jobs(LANE, 2, MODEL), encode(a_job(id="other")))
    letter = await a_letter(bus, id="j1")
    with pytest.raises(CommandError, match=r"the queue of acme.j1 is full"):
        await replay(bus, letter, keep=False)
    assert (await bus.stream_state(DLQ)).messages == 1


async def test_queue_that_is_no_more() -> None:
    """A model that was taken from the lane has no queue."""
    bus = await a_bus()
    letter = await a_letter(bus, id="j1")
    gone = Letter(LANE, letter.sequence, 0.0, "jobs.acme.2.gone", letter.record, letter.job)
    with pytest.raises(CommandError, match=r"no queue takes jobs.acme.2.gone any more"):
        await replay(bus, gone, keep=False)


async def test_job_that_can_not_be_read() -> None:
    """It was malformed when it came: there is nothing to run."""
    bus = await a_bus()
    letter = await a_letter(bus, id="j1")
    broken = Letter(LANE, letter.sequence, 0.0, letter.subject, letter.record, b"\xc1")
    with pytest.raises(CommandError, match=r"the job of acme.j1 can't be read"):
        await replay(bus, broken, keep=False)


async def test_lanes_of_a_cluster() -> None:
    """Those that a broker has published."""
    assert await known_lanes(await a_bus()) == ["acme"]
    with pytest.raises(CommandError, match=r"no inferlane cluster on this NATS server"):
        await known_lanes(MemoryBus())


async def test_letter_in_words() -> None:
    """Why, each attempt, the request, and what to do next."""
    told = as_text(await a_letter(await a_bus(), id="j1"), whole=False)
    assert told.startswith("acme.j1: given up at ")
    assert ": engine_failed\n  Failed 1 times.\n  queue jobs.acme.2.tiny, client client-1" in told
    assert " on gpu-1: engine_failed: HTTP 500\n" in told
    assert "Request to /v1/chat/completions (" in told
    assert '    "model": "tiny",' in told
    assert told.endswith("To run it again: inferlane dlq replay acme.j1")


async def test_long_request_in_words() -> None:
    """Cut with the number of what is left, or whole."""
    body = orjson.dumps("x" * (BODY_CHARS_MAX + 8))
    letter = await a_letter(await a_bus(), body=b"{" + b'"a":' + body + b"}")
    assert "more characters: --all" in as_text(letter, whole=False)
    assert "more characters" not in as_text(letter, whole=True)


@pytest.mark.parametrize(
    ("body", "shown"), [(b"not json", "  not json"), (b"\xff\xfe", "  ��"), (b"\x1b[2J", "  �[2J")]
)
async def test_request_that_is_no_json(body: bytes, shown: str) -> None:
    """Shown as text; what a terminal would obey is not."""
    letter = await a_letter(await a_bus(), id="j1")
    job = msgspec.structs.replace(a_job(id="j1"), body=body)
    odd = Letter(LANE, 1, 0.0, letter.subject, letter.record, encode(job))
    assert shown in as_text(odd, whole=False).splitlines()


async def test_hostile_detail_in_words() -> None:
    """A worker's detail can't write lines of its own or move the cursor."""
    failure = Failure(
        Attempt(1, 1), "w", Reason.STALLED, 0.0, detail="x\nfake\x1b[A", charged=False
    )
    record = {"failures": (failure,)}
    told = as_text(await a_letter(await a_bus(), record=record), whole=False)
    assert "stalled (not charged to the job): x�fake�[A" in told


async def test_letter_for_scripts() -> None:
    """The request as JSON where it is JSON, as text or base64 where it is not."""
    letter = await a_letter(await a_bus(), id="j1")
    told = orjson.loads(orjson.dumps(as_builtins(letter)))
    assert told["body"]["model"] == "tiny"
    assert told["failures"][0]["attempt"] == [7, 1]
    assert "body" not in as_summary(letter)

    def shown(job: bytes) -> dict[str, Any]:
        return as_builtins(Letter(LANE, 1, 0.0, letter.subject, letter.record, job))

    plain = msgspec.structs.replace(a_job(), body=b"plain")
    binary = msgspec.structs.replace(a_job(), body=b"\xff")
    assert shown(encode(plain))["body"] == "plain"
    assert shown(encode(binary))["body_base64"] == "/w=="
    assert shown(b"\xc1")["job_base64"] == "wQ=="
