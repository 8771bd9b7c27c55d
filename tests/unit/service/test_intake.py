"""What becomes of a delivered message: held, known, doubled, behind, or no job at all."""

from typing import Any

import msgspec
import pytest

from broker.core.events import JobHeld, QueueDepth
from broker.service.closer import Ending
from broker.service.held import BEHIND_MAX, DUPLICATES_MAX
from broker.service.intake import CLOCK_S_OFF, deadline_of
from broker.service.reading import REFERENCED_TOKENS_MAX
from broker.service.stages import Stage
from broker.wire import subjects
from broker.wire.codec import MESSAGE_BYTES_MAX, encode
from broker.wire.messages import Attempt, Failure, Job, Kind, Reason, TerminalRecord
from broker.wire.prefix import BLOCKS_MAX, HASH_BYTES
from broker.wire.prompt import OUTPUT_TOKENS_MAX
from broker.wire.subjects import JobAddress
from tests.builders import LANE, MODEL, a_job
from tests.leaders import ADDRESS, Desk, a_delivery, a_desk, a_listing


def raw(**fields: Any) -> bytes:
    """A job's fields as a foreign producer might send them."""
    job = msgspec.msgpack.decode(encode(a_job()))
    return msgspec.msgpack.encode({**job, **fields})


MALFORMED = {
    "nothing": b"",
    "no msgpack": b"\xc1",
    "a list": msgspec.msgpack.encode([1, 2]),
    "a number": msgspec.msgpack.encode(7),
    "cut short": encode(a_job())[:-3],
    "more behind it": encode(a_job()) + b"x",
    "JSON": b'{"id": "job-1"}',
    "nested too deep": b"\x91" * 100_000,
    "no id": raw(id=None),
    "an id that is no token": raw(id="a.b"),
    "an id that is too long": raw(id="x" * 65),
    "a client with a wildcard": raw(client=">"),
    "a band that is none": raw(band=4),
    "a negative count": raw(prompt_tokens=-1),
    "a body that is a number": raw(body=5),
    "another lane": encode(a_job(lane="beta")),
    "another band": encode(a_job(band=1)),
    "another model": encode(a_job(model="other")),
    "half a block hash": encode(a_job(blocks=b"x" * 7)),
    "too many block hashes": encode(a_job(blocks=b"x" * (HASH_BYTES * (BLOCKS_MAX + 1)))),
    "larger than a message may be": raw(body=b"x" * MESSAGE_BYTES_MAX),
}


def endings(desk: Desk) -> list[Ending]:
    """Endings the closer was given."""
    work = desk.leader.closer._work
    return [one for one in (work.get_nowait() for _ in range(work.qsize())) if type(one) is Ending]


def events(desk: Desk) -> list[Any]:
    """What the mind heard."""
    return [event for event in desk.seen.events if isinstance(event, JobHeld)]


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
async def test_a_message_that_is_no_job_ends_here_with_a_record_of_its_own(data: bytes) -> None:
    """Counted, answered under `bad-…`, its place given back once; the mind never hears of it."""
    async with a_desk() as desk:
        desk.take(a_delivery(data, sequence=9))
        (ending,) = endings(desk)
        assert (ending.record_id, ending.sequence) == ("bad-j9", 9)
        assert (ending.record.kind, ending.record.reason) == (Kind.REJECTED, Reason.MALFORMED)
        assert ending.ttl_s == 0
        assert desk.seen.bad == {"job": 1}
        assert desk.window.released == 1
        assert not events(desk)
        assert not len(desk.shelf)


async def test_the_caller_of_a_broken_message_is_told_where_it_names_itself() -> None:
    """Job id and client are salvaged; what can't stand in a subject is not."""
    async with a_desk() as desk:
        desk.take(a_delivery(raw(band=9)))
        desk.take(a_delivery(raw(band=9, client="a.*"), sequence=2))
        told, untold = endings(desk)
        assert (told.client, told.record.job) == ("client-1", "job-1")
        assert (untold.client, untold.record.job) == ("", "bad-j2")


async def test_a_good_job_is_held_with_all_that_its_message_says() -> None:
    """The mind hears of it, the body is kept, the place in the window is taken."""
    async with a_desk() as desk:
        job = a_job(session="s", deadline_at_s=2e9, stream=True, request_id="r", adapter="ad")
        desk.take(a_delivery(job, sequence=3))
        held = desk.held()
        assert (held.stream, held.sequence, held.client) == (f"JOBS_{LANE}", 3, "client-1")
        assert (held.request_id, held.submitted_at_s) == ("r", 1000.0)
        assert held.body == encode(job)
        (event,) = events(desk)
        assert (event.job.session, event.job.streamed, event.job.adapter) == ("s", True, "ad")
        assert event.job.deadline_at_s == 2e9
        assert held.spec is event.job
        assert desk.window.released == 0


async def test_a_job_is_no_larger_than_it_can_be() -> None:
    """What it says of itself would keep a worker, or its lane's rows, from everybody for years; its
    message goes on as it is.
    """
    async with a_desk() as desk:
        job = a_job(prompt_tokens=2**53, output_tokens_max=2**53, blocks=b"")
        desk.take(a_delivery(job))
        (event,) = events(desk)
        assert event.job.prompt_tokens == len(job.body) + REFERENCED_TOKENS_MAX
        assert event.job.output_tokens_max == OUTPUT_TOKENS_MAX
        assert desk.held().body == encode(job)


async def test_a_redelivery_brings_the_new_ack_subject_and_changes_nothing_else() -> None:
    """Slow here, or a consumer that was reset: the same message is the same job."""
    async with a_desk() as desk:
        desk.take(a_delivery(a_job()))
        desk.clock.advance(30)
        desk.take(a_delivery(a_job(), ack_subject="$JS.ACK.again"))
        assert desk.held().ack_subject == "$JS.ACK.again"
        assert desk.held().renewed_at_s == desk.clock.now_s()
        assert (desk.window.released, len(desk.shelf), len(events(desk))) == (1, 1, 1)


async def test_the_same_sequence_of_the_lanes_other_stream_is_another_message() -> None:
    """JOBS and BATCH number their messages each for itself: this is a duplicate, no redelivery."""
    async with a_desk() as desk:
        desk.take(a_delivery(a_job()))
        twin = a_delivery(
            a_job(band=3),
            stream=f"BATCH_{LANE}",
            subject=subjects.jobs(LANE, 3, MODEL),
            ack_subject="$JS.ACK.batch",
        )
        desk.take(twin, JobAddress(LANE, 3, MODEL))
        held = desk.held()
        assert held.ack_subject != "$JS.ACK.batch"
        assert list(held.duplicates) == [(f"BATCH_{LANE}", 1)]
        assert desk.window.released == 1


async def test_duplicates_are_remembered_up_to_their_bound() -> None:
    """DUPLICATES_MAX; one that comes again replaces itself, a further one waits in the stream."""
    async with a_desk() as desk:
        desk.take(a_delivery(a_job()))
        for sequence in range(2, DUPLICATES_MAX + 4):
            desk.take(a_delivery(a_job(client=f"c{sequence}"), sequence=sequence))
        desk.take(a_delivery(a_job(), sequence=2, ack_subject="$JS.ACK.again"))
        duplicates = desk.held().duplicates
        assert len(duplicates) == DUPLICATES_MAX
        assert duplicates[f"JOBS_{LANE}", 2].ack_subject == "$JS.ACK.again"
        assert desk.window.released == DUPLICATES_MAX + 3
        assert len(events(desk)) == 1


async def test_a_message_behind_a_job_being_closed_keeps_its_place_and_waits() -> None:
    """The next try after a rejection may come before the rejected message is gone."""
    async with a_desk() as desk:
        desk.take(a_delivery(a_job()))
        held = desk.held()
        held.stage = Stage.CLOSING
        for sequence in range(2, 2 + BEHIND_MAX):
            desk.take(a_delivery(a_job(), sequence=sequence))
        assert desk.window.released == 0
        desk.take(a_delivery(a_job(), sequence=99))
        assert desk.window.released == 1
        desk.take(a_delivery(a_job(), sequence=2, ack_subject="$JS.ACK.again"))
        assert desk.window.released == 2
        assert held.behind[f"JOBS_{LANE}", 2].delivery.ack_subject == "$JS.ACK.again"
        desk.shelf.remove(held.key)
        assert desk.window.released == 2 + BEHIND_MAX + 1


async def test_a_duplicate_that_comes_again_while_its_job_is_closed_is_no_new_job() -> None:
    """It leaves with the record that is being written."""
    async with a_desk() as desk:
        desk.take(a_delivery(a_job()))
        desk.take(a_delivery(a_job(), sequence=2))
        desk.held().stage = Stage.CLOSING
        desk.take(a_delivery(a_job(), sequence=2))
        assert not desk.held().behind
        assert desk.window.released == 2


async def test_a_redelivery_of_a_job_being_closed_changes_nothing() -> None:
    """The closer removes the message by its sequence where the old ack is not answered."""
    async with a_desk() as desk:
        desk.take(a_delivery(a_job()))
        desk.held().stage = Stage.CLOSING
        desk.take(a_delivery(a_job()))
        assert desk.held().stage is Stage.CLOSING
        assert desk.window.released == 1


async def test_a_job_that_runs_and_is_pulled_now_takes_no_place_and_no_memory() -> None:
    """Leased, and not on the shelf: its agent renews and acknowledges the message."""
    async with a_desk() as desk:
        desk.beat(inflight=(a_listing(),))
        desk.shelf.remove(f"{LANE}.job-1")
        desk.take(a_delivery(a_job()))
        held = desk.held()
        assert (held.stage, held.body, desk.window.released) == (Stage.RUNNING, None, 1)
        assert desk.shelf.renewal_due(before_s=1e12) is None


async def test_an_adopted_jobs_message_tells_what_its_workers_list_did_not() -> None:
    """A new leader learns that the job is streamed: it may not run again behind its caller."""
    async with a_desk() as desk:
        desk.beat(inflight=(a_listing(),))
        assert desk.held().unread
        desk.take(a_delivery(a_job(stream=True, request_id="r")))
        desk.take(a_delivery(a_job(stream=True, request_id="r")))
        held = desk.held()
        assert (held.unread, held.request_id, held.stage) == (False, "r", Stage.RUNNING)
        assert len(events(desk)) == 1
        (lease,) = desk.leader.scheduler.leases()
        assert lease.job.streamed
        assert held.spec is not None
        assert desk.window.released == 2


async def test_a_body_beyond_the_budget_is_not_kept_but_its_job_is() -> None:
    """held_bytes_max bounds memory whatever is queued."""
    async with a_desk() as desk:
        desk.shelf._bytes_max = 0
        desk.take(a_delivery(a_job()))
        assert desk.held().body is None
        assert len(events(desk)) == 1


async def test_failures_of_earlier_leaders_come_with_the_job() -> None:
    """ATTEMPTS is read at the start; the cap counts across brokers."""
    failure = Failure(Attempt(0, 1), "w9", Reason.WORKER_LOST, 1.0)
    async with a_desk() as desk:
        desk.leader.book.failures[f"{LANE}.job-1"] = (failure,)
        desk.take(a_delivery(a_job()))
        assert events(desk)[0].job.failures == (failure,)


async def test_a_dead_letter_found_unwritten_is_finished_not_run() -> None:
    """The last leader died between record and letter: the job goes to the closer, not the mind."""
    record = TerminalRecord(job="job-1", lane=LANE, kind=Kind.DEAD_LETTERED, ended_at_s=1.0)
    async with a_desk() as desk:
        desk.leader.book.dead_letters[f"{LANE}.job-1"] = record
        desk.take(a_delivery(a_job()))
        (ending,) = endings(desk)
        assert (ending.record, ending.dead_letter) == (record, True)
        assert desk.held().stage is Stage.CLOSING
        assert not events(desk)


async def test_depth_is_told_by_queue() -> None:
    """What waits in the stream beyond the window."""
    async with a_desk() as desk:
        desk.leader.intake.depth(ADDRESS, 12)
        desk.turn()
        assert desk.seen.events == [QueueDepth(desk.clock.now_s(), LANE, 2, MODEL, 12)]


async def test_what_a_models_prompts_really_made_is_believed_over_the_producer() -> None:
    """A foreign producer's estimate counts only until something was measured."""
    async with a_desk() as desk:
        job = Job(
            id="j", lane=LANE, band=2, model=MODEL, client="c", body=b"", blocks=bytes(8 * 10)
        )
        desk.learned.measured(MODEL, prompt_blocks=10, prompt_tokens=1000)
        desk.take(a_delivery(msgspec.structs.replace(job, prompt_tokens=5)))
        assert events(desk)[0].job.prompt_tokens == 1000


@pytest.mark.parametrize("off_s", [-600.0, 0.0, 600.0])
def test_a_producers_clock_says_nothing_of_its_deadline(off_s: float) -> None:
    """A minute is a minute, from when the server stored the job, whatever its clock shows."""
    job = a_job(submitted_at_s=1_000_000.0 + off_s, deadline_at_s=1_000_060.0 + off_s)
    assert deadline_of(job, stored_at_s=1_000_000.0) == 1_000_060.0


def test_a_submission_that_was_on_its_way_puts_no_deadline_off() -> None:
    """CLOCK_S_OFF: so long it may take; what is later is the clock."""
    job = a_job(submitted_at_s=1000.0, deadline_at_s=1060.0)
    assert deadline_of(job, stored_at_s=1000.0 + CLOCK_S_OFF) == 1060.0
    assert deadline_of(job, stored_at_s=1000.5 + CLOCK_S_OFF) == 1060.5 + CLOCK_S_OFF


def test_deadlines_that_are_taken_at_their_word() -> None:
    """A job put in anew keeps its first one, as one that does not say when it was submitted."""
    again = a_job(submission=1, submitted_at_s=1000.0, deadline_at_s=1060.0)
    assert deadline_of(again, stored_at_s=5000.0) == 1060.0
    assert deadline_of(a_job(submitted_at_s=0.0, deadline_at_s=7.0), stored_at_s=5000.0) == 7.0
    assert deadline_of(a_job(submitted_at_s=1000.0), stored_at_s=5000.0) is None
