"""A batch from its creation to its end: whatever happens, each line stands once."""

import asyncio

import msgspec
import pytest
import structlog
from msgspec.structs import replace

from broker.bus.base import BusError, LinkDown, NotFound
from broker.wire.messages import Job, Kind, Reason, TerminalRecord, Usage
from producers.batches import runner
from producers.batches.lanes import LINES_WAITING_MIN
from producers.batches.records import Batch
from tests.batches import a_line, lines
from tests.builders import LANE
from tests.lanes import until
from tests.responder import a_record, a_rejection
from tests.stored_batches import PATIENCE_S, SMALL, a_place, codes

IDS = [f"id-{number}" for number in range(100)]


async def test_every_line_stands_once() -> None:
    """All completed: counted, in the output, run once, and no record is left behind."""
    async with a_place() as place:
        place.start_runner()
        batch = await place.create(lines(100))
        ended = await place.ended(batch.id)
        assert ended.status == "completed"
        assert (ended.counts.total, ended.counts.completed, ended.error_file_id) == (100, 100, "")
        assert ended.created_at_s < ended.in_progress_at_s < ended.finalizing_at_s
        assert ended.finalizing_at_s < ended.completed_at_s
        await place.check(ended, IDS)
        assert set(place.responder.runs.values()) == {1}
        await place.until_cleared()


async def test_usage_is_the_sum_of_the_lines() -> None:
    """Tokens as the engines counted them."""
    async with a_place() as place:
        place.responder.answer = lambda job: a_record(job, usage=Usage(7, 3, 2))
        place.start_runner()
        batch = await place.create(lines(50))
        assert (await place.ended(batch.id)).usage == Usage(350, 150, 100)


async def test_one_bad_line_stops_nothing() -> None:
    """Bad lines are error lines with their number; all others are run."""
    async with a_place() as place:
        place.start_runner()
        given = lines(20)
        given[3] = b"{no json"
        given[5] = a_line("id-0")  # A double.
        given[7] = a_line("id-7", url="/v1/embeddings")
        given[9] = a_line("id-9", body={"model": "unknown", "messages": []})
        given[11] = a_line("id-11", body={"messages": []})
        batch = await place.create(given)
        ended = await place.ended(batch.id)
        assert (ended.status, ended.counts.completed, ended.counts.failed) == ("completed", 15, 5)
        output, errors = await place.results(ended)
        assert len(output) == 15
        assert codes(errors) == {
            "invalid_json_line": 1,
            "duplicate_custom_id": 1,
            "url_mismatch": 1,
            "model_not_found": 1,
            "invalid_request": 1,
        }
        assert sorted(line["error"]["line"] for line in errors) == [4, 6, 8, 10, 12]
        await place.check(ended, (f"id-{number}" for number in range(20) if number not in (3, 5)))


async def test_an_input_of_which_nothing_can_run_fails_its_batch() -> None:
    """With each line's fault and its number, and nothing ran."""
    async with a_place() as place:
        place.start_runner()
        batch = await place.create([b"{", b"", a_line("b", url="/v1/embeddings"), b"[]"])
        ended = await place.ended(batch.id)
        assert (ended.status, ended.output_file_id, ended.error_file_id) == ("failed", "", "")
        assert [(fault.code, fault.line) for fault in ended.errors] == [
            ("invalid_json_line", 1),
            ("url_mismatch", 3),
            ("invalid_request", 4),
        ]
        assert ended.failed_at_s > 0
        assert not place.responder.runs


async def test_an_empty_input_fails_its_batch() -> None:
    """Blank lines are none."""
    async with a_place() as place:
        place.start_runner()
        batch = await place.create(b"\n  \n\n")
        ended = await place.ended(batch.id)
        assert (ended.status, ended.errors[0].code) == ("failed", "empty_file")


async def test_completed_may_mean_that_every_line_failed() -> None:
    """No output file then; an HTTP-level failure keeps its response in the error file."""

    def refused(job: Job) -> TerminalRecord:
        return a_record(
            job,
            kind=Kind.FAILED,
            reason=Reason.ENGINE_REFUSED,
            status_code=400,
            body=b'{"error": {"message": "no"}}',
        )

    async with a_place() as place:
        place.responder.answer = refused
        place.start_runner()
        batch = await place.create(lines(5))
        ended = await place.ended(batch.id)
        assert (ended.status, ended.output_file_id) == ("completed", "")
        _, errors = await place.results(ended)
        assert {line["response"]["status_code"] for line in errors} == {400}
        await place.check(ended, IDS[:5])


async def test_results_can_be_read_while_it_runs() -> None:
    """The output file is known from its first line on, and counts are kept."""
    async with a_place() as place:
        place.responder.run_s = 0.01
        place.start_runner(msgspec.structs.replace(SMALL, lines_inflight_max=2))
        batch = await place.create(lines(100))
        running = await place.when(batch.id, lambda one: one.counts.completed > 0)
        assert running.status == "in_progress"
        assert running.output_file_id
        assert 0 < len(await place.lines_of(running.output_file_id)) < 100
        info = await place.files.find(running.output_file_id)
        assert info is not None
        assert info.growing
        await place.ended(batch.id)
        info = await place.files.find(running.output_file_id)
        assert info is not None
        assert (info.growing, info.lines) == (False, 100)


async def test_cancel_delivers_what_was_finished() -> None:
    """Finished lines stand in the output, all others as cancelled in the error file."""
    async with a_place() as place:
        place.responder.run_s = 0.02
        place.start_runner()
        batch = await place.create(lines(200))
        await place.when(batch.id, lambda one: one.counts.completed > 10)
        cancelling = await place.shelf.cancel(batch.id)
        assert cancelling.status == "cancelling"
        ended = await place.ended(batch.id)
        assert ended.status == "cancelled"
        assert 10 < ended.counts.completed < 200
        await place.check(ended, (f"id-{number}" for number in range(200)))
        _, errors = await place.results(ended)
        assert codes(errors) == {"batch_cancelled": ended.counts.failed}
        assert await place.shelf.cancel(batch.id) == ended
        assert sum(place.responder.runs.values()) == ended.counts.completed


async def test_cancel_before_it_began() -> None:
    """Nobody runs it yet: whoever comes closes all its lines, and nothing runs."""
    async with a_place() as place:
        batch = await place.create([*lines(30), b"{"])
        await place.shelf.cancel(batch.id)
        place.start_runner()
        ended = await place.ended(batch.id)
        assert (ended.status, ended.counts.failed) == ("cancelled", 31)
        await place.check(ended, IDS[:30])
        assert not place.responder.runs


async def test_cancel_of_jobs_that_never_end() -> None:
    """The cluster says nothing: after the grace the lines are closed all the same."""
    async with a_place() as place:
        place.responder.may_run.clear()
        place.start_runner()
        batch = await place.create(lines(20))
        await place.when(batch.id, lambda one: one.place.read_to > 0)
        await place.responder.started.wait()
        await place.shelf.cancel(batch.id)
        ended = await place.ended(batch.id)
        assert (ended.status, ended.counts.failed) == ("cancelled", 20)
        await place.check(ended, IDS[:20])


async def test_an_expired_batch_keeps_what_was_paid_for() -> None:
    """When its window is over: finished lines in the output, the others expired, none run later."""
    async with a_place() as place:
        place.responder.run_s = 0.1
        place.start_runner()
        batch = await place.create(lines(300), completion_window="2s")
        ended = await place.ended(batch.id)
        assert (ended.status, ended.expired_at_s > batch.deadline_at_s) == ("expired", True)
        assert 0 < ended.counts.completed < 300
        await place.check(ended, (f"id-{number}" for number in range(300)))
        _, errors = await place.results(ended)
        assert codes(errors) == {"batch_expired": ended.counts.failed}


async def test_a_batch_taken_up_after_its_window_is_expired() -> None:
    """No runner was there in time: its lines are told so, and none runs."""
    async with a_place() as place:
        batch = await place.create(lines(30), completion_window="0.01s")
        await asyncio.sleep(0.02)
        place.start_runner()
        ended = await place.ended(batch.id)
        assert (ended.status, ended.counts.failed) == ("expired", 30)
        await place.check(ended, IDS[:30])
        assert not place.responder.runs


async def test_another_runner_finishes_what_a_killed_one_began() -> None:
    """It takes the batch over, and no finished line runs again."""
    async with a_place() as place:
        place.responder.run_s = 0.01
        first = place.start_runner()
        batch = await place.create(lines(100))
        await place.when(batch.id, lambda one: one.counts.completed > 20)
        await first.kill()
        second = place.start_runner()
        ended = await place.ended(batch.id)
        assert ended.status == "completed"
        assert (second.runner.counts.taken, second.runner.counts.taken_over) == (1, 1)
        await place.check(ended, IDS)
        assert set(place.responder.runs.values()) == {1}
        await place.until_cleared()


async def test_a_lane_that_was_taken_out_fails_its_batches() -> None:
    """After a while, with the reason; what ended stands in whole files, and nothing is retried."""
    async with a_place() as place:
        place.responder.run_s = 0.01
        first = place.start_runner()
        batch = await place.create(lines(100))
        await place.when(batch.id, lambda one: one.counts.completed > 20)
        await first.kill()
        await place.bus.kv_delete("CONFIG", f"lane.{LANE}")
        second = place.start_runner()
        ended = await place.ended(batch.id)
        assert (ended.status, [fault.code for fault in ended.errors]) == ("failed", ["lane_gone"])
        output, _ = await place.results(ended)
        assert len(output) == ended.counts.completed > 20
        info = await place.files.find(ended.output_file_id)
        assert info is not None
        assert (info.growing, info.lines) == (False, len(output))
        assert second.runner.counts.failed > 0


async def test_a_lane_that_is_put_back_goes_on() -> None:
    """A mistake in a file that is corrected within the time costs no batch."""
    patient = msgspec.structs.replace(SMALL, lane_gone_s=60.0)
    async with a_place() as place:
        offer = await place.bus.kv_get("CONFIG", f"lane.{LANE}")
        await place.bus.kv_delete("CONFIG", f"lane.{LANE}")
        member = place.start_runner(patient)
        batch = await place.create(lines(10))
        async with asyncio.timeout(10):
            while not member.runner.counts.failed:
                await asyncio.sleep(0.01)
        await place.bus.kv_put("CONFIG", f"lane.{LANE}", offer.value)
        ended = await place.ended(batch.id)
        assert ended.status == "completed"
        await place.check(ended, IDS[:10])


async def test_what_is_cancelled_before_its_lane_was_offered_ends_at_once() -> None:
    """No line runs, so no offer is waited for, nor the time after which a lane is gone."""
    patient = msgspec.structs.replace(SMALL, lane_gone_s=600.0)
    async with a_place() as place:
        await place.bus.kv_delete("CONFIG", f"lane.{LANE}")
        batch = await place.create(lines(10))
        await place.shelf.cancel(batch.id)
        member = place.start_runner(patient)
        ended = await place.ended(batch.id)
        assert (ended.status, ended.counts.failed) == ("cancelled", 10)
        _, errors = await place.results(ended)
        assert codes(errors) == {"batch_cancelled": 10}
        assert (place.responder.seen, member.runner.counts.failed) == ([], 0)


async def test_batches_of_a_lane_share_what_may_wait() -> None:
    """Lines that have not started: so many of all batches, and a job says what is behind it."""
    few = msgspec.structs.replace(
        SMALL, lines_inflight_max=30, lines_waiting_max=2 * LINES_WAITING_MIN + 8
    )
    async with a_place() as place:
        seen = place.responder.seen
        place.responder.may_run.clear()
        place.start_runner(few)
        large = await place.create(lines(60))
        await until(lambda: len(seen) == few.lines_inflight_max)
        assert sorted(job.jobs_behind for job in seen) == list(range(30, 60))
        small = await place.create(lines(60))
        share = few.lines_waiting_max // 2
        await until(lambda: len(seen) == few.lines_inflight_max + share)
        await place.when(small.id, lambda one: one.place.jobs_inflight == share)
        assert sum(job.id.startswith(small.id) for job in seen) == share
        place.responder.may_run.set()
        for batch in (large, small):
            assert (await place.ended(batch.id)).counts.completed == 60
        assert {job.jobs_behind for job in seen} == set(range(60))


async def test_a_runner_that_ends_in_good_order_hands_over_at_once() -> None:
    """Nobody has to wait for its lease."""
    async with a_place() as place:
        place.responder.run_s = 0.01
        patient = msgspec.structs.replace(SMALL, lease_s=60.0)
        first = place.start_runner(patient)
        batch = await place.create(lines(100))
        await place.when(batch.id, lambda one: one.counts.completed > 20)
        await first.stop()
        place.start_runner(patient)
        ended = await place.ended(batch.id)
        await place.check(ended, IDS)
        assert set(place.responder.runs.values()) == {1}


async def test_a_runner_that_was_overtaken_writes_nothing_more() -> None:
    """Its link was cut past its lease; when it is back, another has the batch, and each line
    stands once.
    """
    async with a_place() as place:
        place.responder.run_s = 0.005
        first = place.start_runner()
        batch = await place.create(lines(200))
        await place.when(batch.id, lambda one: one.counts.completed > 20)
        first.link.disconnect()
        second = place.start_runner()
        await place.when(batch.id, lambda one: one.lease is not None and one.lease.number == 2)
        first.link.reconnect()
        ended = await place.ended(batch.id)
        await place.check(ended, (f"id-{number}" for number in range(200)))
        await until(lambda: not first.runner.running and not second.runner.running)
        assert second.runner.counts.ended + first.runner.counts.ended == 1


async def test_two_runners_never_run_one_batch() -> None:
    """Both are free; one takes it."""
    async with a_place() as place:
        members = [place.start_runner() for _ in range(3)]
        batch = await place.create(lines(100))
        ended = await place.ended(batch.id)
        assert ended.status == "completed"
        assert sum(member.runner.counts.taken for member in members) == 1


async def test_a_process_runs_so_many_batches() -> None:
    """A further one waits for room; with none allowed, none is run."""
    async with a_place() as place:
        place.responder.may_run.clear()
        one_at_once = msgspec.structs.replace(SMALL, batches_running_max=1)
        member = place.start_runner(one_at_once)
        place.start_runner(msgspec.structs.replace(SMALL, batches_running_max=0))
        first = await place.create(lines(5))
        await place.when(first.id, lambda one: one.status == "in_progress")
        second = await place.create(lines(5))
        await asyncio.sleep(3 * SMALL.scan_s)
        assert (member.runner.running, (await place.shelf.get(second.id)).lease) == (1, None)
        place.responder.may_run.set()
        for batch in (first, second):
            assert (await place.ended(batch.id)).status == "completed"


async def test_rejected_lines_are_tried_again() -> None:
    """A quota that refuses for a moment costs time, no line."""
    async with a_place() as place:
        turned_away: set[str] = set()

        def reject(job: Job) -> TerminalRecord | None:
            if job.id in turned_away:
                return None
            turned_away.add(job.id)
            return a_rejection(job, retry_after_s=0.02)

        place.responder.reject = reject
        place.start_runner(msgspec.structs.replace(SMALL, lines_inflight_max=20))
        batch = await place.create(lines(20))
        ended = await place.ended(batch.id)
        assert (ended.status, ended.counts.completed) == ("completed", 20)
        await place.check(ended, IDS[:20])


async def test_an_input_that_vanishes_ends_its_batch() -> None:
    """As failed, with its reason; what ended stays readable."""
    async with a_place() as place:
        batch = await place.create(lines(5))
        await place.files.delete(batch.input_file_id)
        place.start_runner()
        ended = await place.ended(batch.id)
        assert (ended.status, ended.errors[0].code) == ("failed", "input_file_gone")


async def test_a_huge_answer_becomes_an_error_line() -> None:
    """One that no message of the server can hold, beside others that are fine."""
    async with a_place() as place:
        place.bus.server.payload_bytes_max = 400_000

        def answer(job: Job) -> TerminalRecord:
            body = b'{"x":"%s"}' % (b"x" * (399_600 if job.id.endswith("-3") else 10))
            return a_record(job, body=body, usage=Usage())  # Its record just fits.

        place.responder.answer = answer
        place.start_runner()
        ids = [f"{number}-{'i' * 500}" for number in range(10)]
        batch = await place.create(map(a_line, ids))
        ended = await place.ended(batch.id)
        assert (ended.counts.completed, ended.counts.failed) == (9, 1)
        await place.check(ended, ids)


async def test_what_can_not_be_read_is_told_once_and_again_when_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a broker there are no buckets, and a look each few seconds: one line says so."""
    gone, cut = NotFound("no bucket"), LinkDown("cut")
    outcomes: list[BusError | None] = [gone, gone, gone, cut, cut, None, cut, cut]
    looked = asyncio.Event()

    async def read(*_: object) -> list[Batch]:
        outcome = outcomes.pop(0) if outcomes else None
        if not outcomes:
            looked.set()
        if outcome is not None:
            raise outcome
        return []

    monkeypatch.setattr(runner, "all_batches", read)
    async with a_place() as place:
        with structlog.testing.capture_logs() as logs:
            place.start_runner(replace(SMALL, scan_s=0.01))
            async with asyncio.timeout(PATIENCE_S):
                await looked.wait()
    told = [one["error"] for one in logs if one["event"] == "batches.not_readable"]
    assert told == ["no bucket", "cut", "cut"]
