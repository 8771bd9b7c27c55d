"""A batch, run against a small responder over the in-process bus."""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from broker.wire.messages import Job, Kind, Reason, TerminalRecord
from producers.batch.errors import InputUnusable, OutputUnusable
from producers.batch.plan import Bounds, Plan
from producers.batch.results import Results
from producers.batch.runner import Tally
from producers.batch.state import Counts, State
from producers.errors import UnknownLane, Unreachable
from tests.batches import (
    SMALL,
    Cluster,
    a_cluster,
    a_line,
    a_plan,
    check_invariant,
    codes,
    lines,
    results,
)
from tests.lanes import QUICK, until
from tests.responder import a_record, a_rejection


async def test_each_line_has_one_result_of_the_documented_shape(tmp_path: Path) -> None:
    """Output lines carry id, custom_id, response and error, as Batch API clients read them."""
    plan = a_plan(tmp_path, lines(100))
    async with a_cluster() as cluster:
        report = await cluster.run(plan)
    assert report.counts == Counts(completed=100)
    check_invariant(plan, (f"id-{number}" for number in range(100)))
    first = results(plan.output)[0]
    assert first["id"].startswith("batch_req_")
    assert first["error"] is None
    assert first["response"]["status_code"] == 200
    assert first["response"]["request_id"]
    assert first["response"]["body"]["choices"]
    assert not plan.errors.exists()


async def test_a_bad_line_is_one_error_line_with_its_number(tmp_path: Path) -> None:
    """Whatever stands in a line, the others run, and the fault is told with the line's number."""
    content = [
        b"\xef\xbb\xbf" + a_line("bom"),
        b"",
        b"not json",
        b'{"custom_id": "no-body", "method": "POST", "url": "/v1/chat/completions"}',
        a_line("wrong-url", url="/v1/embeddings"),
        a_line("no-url", url="/nowhere"),
        a_line("get", method="GET"),
        b"\xff\xfe\x00",
        a_line("crlf") + b"\r",
        a_line("bom"),
        a_line("other-model", body={"model": "huge", "messages": []}),
        a_line("no-model", body={"messages": []}),
        a_line("streams", body={"model": "tiny", "stream": True, "messages": []}),
        a_line("list-body", body=[]),
        b'{"custom_id": 7, "method": "POST", "url": "/v1/chat/completions", "body": {}}',
        b"[" * 100_000,
        b"   ",
        a_line("last"),
    ]
    plan = a_plan(tmp_path, b"\n".join(content))
    async with a_cluster() as cluster:
        report = await cluster.run(plan)
    assert {line["custom_id"] for line in results(plan.output)} == {"bom", "crlf", "last"}
    errors = {line["error"]["line"]: line for line in results(plan.errors)}
    assert {number: line["error"]["code"] for number, line in errors.items()} == {
        3: "invalid_json_line",
        4: "invalid_request",
        5: "url_mismatch",
        6: "url_mismatch",
        7: "invalid_request",
        8: "invalid_json_line",
        10: "duplicate_custom_id",
        11: "model_not_found",
        12: "invalid_request",
        13: "invalid_request",
        14: "invalid_request",
        15: "invalid_request",
        16: "invalid_json_line",
    }
    assert errors[4]["custom_id"] == "no-body"
    assert errors[10]["custom_id"] is None
    assert "line 1 already" in errors[10]["error"]["message"]
    assert all(f"line {number}:" in e["error"]["message"] for number, e in errors.items())
    assert report.counts == Counts(completed=3, failed=1, bad=12)


async def test_a_line_too_large_for_a_job_gives_its_id(tmp_path: Path) -> None:
    """A 10 MB line is one error, with its custom_id, and the line after it runs."""
    huge = a_line("huge", system="x" * 10_000_000)
    plan = a_plan(tmp_path, [huge, a_line("small")])
    async with a_cluster() as cluster:
        await cluster.run(plan)
    (error,) = results(plan.errors)
    assert (error["custom_id"], error["error"]["code"]) == ("huge", "invalid_request")
    assert [line["custom_id"] for line in results(plan.output)] == ["small"]


async def test_lines_that_share_a_prefix_are_put_together(tmp_path: Path) -> None:
    """Within a window, the jobs of one system prompt are submitted one after another."""
    systems = [f"{name}" * 300 for name in "abc"]
    content = [a_line(f"id-{n}", system=systems[n % 3]) for n in range(30)]
    plan = a_plan(tmp_path, content)
    async with a_cluster() as cluster:
        await cluster.run(plan, bounds=replace(SMALL, lookahead_lines=30))
        order = [job.blocks[:8] for job in cluster.responder.seen]
    changes = sum(one != other for one, other in pairwise(order))
    assert changes == 2


async def test_a_finished_batch_run_again_runs_nothing(tmp_path: Path) -> None:
    """The same command once more says the same, and submits no job."""
    plan = a_plan(tmp_path, [*lines(50), b"bad"])
    async with a_cluster() as cluster:
        first = await cluster.run(plan)
        before = plan.output.read_bytes(), plan.errors.read_bytes()
        again = await cluster.run(plan)
        assert again.counts == first.counts
        assert again.submitted == 0
        assert (plan.output.read_bytes(), plan.errors.read_bytes()) == before
        assert sum(cluster.responder.deliveries.values()) == 50


async def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """Lines that ended stay, lines under way are collected, the rest is run: each once."""
    plan = a_plan(tmp_path, lines(200), concurrency=20)
    stop, tally = asyncio.Event(), Tally()
    async with a_cluster() as cluster:
        cluster.responder.run_s = 0.005
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(cluster.run(plan, stop=stop, tally=tally))
            await until(lambda: tally.completed >= 40)
            stop.set()
        report = running.result()
        assert report.interrupted
        assert 40 <= report.counts.completed < 200
        cluster.responder.run_s = 0.0
        report = await cluster.run(plan)
        assert not report.interrupted
        assert report.counts == Counts(completed=200)
        assert set(cluster.responder.runs.values()) == {1}
    check_invariant(plan, (f"id-{number}" for number in range(200)))


async def test_more_jobs_are_never_in_flight_than_allowed(tmp_path: Path) -> None:
    """`--concurrency` holds, and so does the bound on bytes; one job always fits."""
    plan = a_plan(tmp_path, lines(100), concurrency=7)
    async with a_cluster() as cluster:
        most = 0
        tally = Tally()

        def answer(job: Job) -> TerminalRecord:
            nonlocal most
            most = max(most, tally.inflight)
            return a_record(job)

        cluster.responder.answer = answer
        await cluster.run(plan, tally=tally)
        assert most == 7
        plan = a_plan(tmp_path, lines(10), output=tmp_path / "two.jsonl")
        most, tally = 0, Tally()
        await cluster.run(plan, tally=tally, bounds=replace(SMALL, inflight_bytes=1))
        assert most == 1


async def test_results_are_written_within_their_bound(tmp_path: Path) -> None:
    """Results that wait for the disk are bounded: jobs wait instead, and none is lost."""
    plan = a_plan(tmp_path, lines(60))
    async with a_cluster() as cluster:
        await cluster.run(plan, bounds=replace(SMALL, unwritten_bytes=1))
    check_invariant(plan, (f"id-{number}" for number in range(60)))


async def test_failures_keep_their_response_in_the_error_file(tmp_path: Path) -> None:
    """An HTTP failure keeps status and body; other ends have a code and a sentence."""
    plan = a_plan(tmp_path, lines(4))

    def answer(job: Job) -> TerminalRecord:
        number = int(job.body.decode().split("id-")[1][0])
        match number:
            case 0:
                body = b'{"error": {"message": "too long",\n "code": null}}'
                return a_record(job, kind=Kind.FAILED, status_code=400, body=body)
            case 1:
                return a_record(
                    job, kind=Kind.DEAD_LETTERED, reason=Reason.WORKER_LOST, body=b"", status_code=0
                )
            case 2:
                return a_record(job, body=b"<html>")
            case _:
                return a_record(job)

    async with a_cluster() as cluster:
        cluster.responder.answer = answer
        report = await cluster.run(plan)
    assert report.counts == Counts(completed=1, failed=3)
    errors = {line["custom_id"]: line for line in results(plan.errors)}
    assert errors["id-0"]["error"] is None
    assert errors["id-0"]["response"]["status_code"] == 400
    assert errors["id-0"]["response"]["body"]["error"]["message"] == "too long"
    assert errors["id-1"]["response"] is None
    assert errors["id-1"]["error"]["code"] == "worker_lost"
    assert errors["id-2"]["error"]["code"] == "engine_garbage"


async def test_a_full_queue_and_rejections_only_slow_a_batch(tmp_path: Path) -> None:
    """Flow control: neither the stream's bound nor a transient rejection fails a line."""
    plan = a_plan(tmp_path, lines(60), concurrency=50)
    async with a_cluster(jobs_max=5) as cluster:
        turned_away: set[str] = set()

        def reject(job: Job) -> TerminalRecord | None:
            if job.id in turned_away or len(turned_away) >= 5:
                return None
            turned_away.add(job.id)
            return a_rejection(job, retry_after_s=0.01)

        cluster.responder.reject = reject
        report = await cluster.run(plan)
        assert report.counts == Counts(completed=60)
        assert len(turned_away) == 5
        assert set(cluster.responder.runs.values()) == {1}


async def test_lost_and_doubled_ends_change_nothing(tmp_path: Path) -> None:
    """Every third end is lost, all others are said twice: one result each."""
    plan = a_plan(tmp_path, lines(60))
    async with a_cluster() as cluster:
        cluster.responder.ends = 2
        cluster.responder.loses_end = lambda job: int(job.id.rsplit("-", 1)[1]) % 3 == 0
        report = await cluster.run(plan)
        assert cluster.clients[0].watchdog_counts.healed == 20
    assert report.counts == Counts(completed=60)
    check_invariant(plan, (f"id-{number}" for number in range(60)))


async def test_unfinished_lines_expire_with_the_window(tmp_path: Path) -> None:
    """What the window leaves no time for is `batch_expired`; what ended unheard still counts."""
    plan = a_plan(tmp_path, lines(40), concurrency=10, window_s=0.3)
    async with a_cluster() as cluster:
        responder = cluster.responder
        cluster.config = msgspec.structs.replace(QUICK, watchdog_s=60.0)
        slow: list[str] = []

        def answer(job: Job) -> TerminalRecord:
            slow.append(job.id)
            if len(slow) == 5:
                responder.may_run.clear()
            return a_record(job)

        responder.answer = answer
        responder.loses_end = lambda job: job.id == slow[2]
        report = await cluster.run(plan)
        assert report.expired == report.counts.failed
        assert report.counts.completed >= 5
        assert report.counts.completed + report.counts.failed == 40
        assert set(codes(plan)) == {"batch_expired"}
        check_invariant(plan, (f"id-{number}" for number in range(40)))
        responder.may_run.set()


async def test_jobs_carry_the_windows_end_as_their_deadline(tmp_path: Path) -> None:
    """The cluster itself stops what the window leaves no time for."""
    plan = a_plan(tmp_path, lines(1), window_s=100.0)
    async with a_cluster() as cluster:
        report = await cluster.run(plan)
        job = cluster.responder.seen[0]
    assert job.deadline_at_s == report.identity.deadline_at_s
    assert job.band == 3
    assert job.deadline_at_s == pytest.approx(time.time() + 100.0, abs=20)


async def test_jobs_are_in_the_accounts_of_the_key_that_was_named(tmp_path: Path) -> None:
    """A batch from a shell may stand beside what came over HTTP."""
    plan = a_plan(tmp_path, lines(1), api_key_name="night")
    async with a_cluster() as cluster:
        await cluster.run(plan)
        assert [job.api_key_name for job in cluster.responder.seen] == ["night"]


async def test_a_changed_input_is_noticed(tmp_path: Path) -> None:
    """Another line, a missing line, one more line: nothing is run, and the way out is named."""
    plan = a_plan(tmp_path, lines(10))
    async with a_cluster() as cluster:
        await cluster.run(plan)
        for content in (lines(9), lines(11), [*lines(9), a_line("other")]):
            with pytest.raises(InputUnusable, match="another --output"):
                await cluster.run(a_plan(tmp_path, content))
        assert len(cluster.responder.seen) == 10
        await cluster.run(a_plan(tmp_path, lines(10)))


@pytest.mark.parametrize("content", [b"", b"\n\n  \r\n"])
async def test_an_empty_input_is_told_and_leaves_nothing(tmp_path: Path, content: bytes) -> None:
    """`empty_file`, and no output, no state."""
    plan = a_plan(tmp_path, content)
    async with a_cluster() as cluster:
        with pytest.raises(InputUnusable, match="empty_file"):
            await cluster.run(plan)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


async def test_two_runs_cannot_write_to_the_same_files(tmp_path: Path) -> None:
    """The second is turned away by the lock, by either file, and disturbs nothing."""
    plan = a_plan(tmp_path, lines(5))
    async with a_cluster() as cluster:
        with Results(plan.output, plan.errors), pytest.raises(OutputUnusable, match="another run"):
            await cluster.run(plan)
        other = a_plan(tmp_path, output=tmp_path / "other.jsonl")
        with Results(tmp_path / "x", plan.errors), pytest.raises(OutputUnusable, match="another"):
            await cluster.run(other)
        assert (await cluster.run(plan)).counts == Counts(completed=5)


async def test_a_full_disk_stops_the_run_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOSPC is one sentence; with room again the same command finishes, and runs nothing twice."""
    plan = a_plan(tmp_path, lines(100), concurrency=10)
    async with a_cluster() as cluster:
        full_disk = FullDisk(monkeypatch, room_bytes=5000)
        with pytest.raises(OutputUnusable, match="No space left"):
            await cluster.run(plan)
        assert len(plan.output.read_bytes()) <= 5000
        full_disk.free()
        report = await cluster.run(plan)
        assert report.counts == Counts(completed=100)
        assert set(cluster.responder.runs.values()) == {1}
    check_invariant(plan, (f"id-{number}" for number in range(100)))


class FullDisk:
    """`os.write` as on a disk with so much room left; a short write comes first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, room_bytes: int) -> None:
        self.room_bytes = room_bytes
        real = os.write

        def write(descriptor: int, data: memoryview) -> int:
            if not self.room_bytes:
                message = "No space left on device"
                raise OSError(28, message)
            count = min(len(data), self.room_bytes)
            self.room_bytes -= count
            return real(descriptor, data[:count])

        monkeypatch.setattr("producers.batch.results.os.write", write)

    def free(self) -> None:
        """Make room."""
        self.room_bytes = 1 << 40


async def test_results_taken_away_are_collected_again(tmp_path: Path) -> None:
    """The output was removed or cut: the cluster's records fill it again, without a second run."""
    plan = a_plan(tmp_path, lines(50))
    async with a_cluster() as cluster:
        await cluster.run(plan)
        plan.output.unlink()
        report = await cluster.run(plan)
        assert report.collected_again
        assert report.counts == Counts(completed=50)
        plan.output.write_bytes(plan.output.read_bytes()[:3000])
        await cluster.run(plan)
        assert set(cluster.responder.runs.values()) == {1}
    check_invariant(plan, (f"id-{number}" for number in range(50)))


async def test_retry_runs_what_failed_and_keeps_the_invariant(tmp_path: Path) -> None:
    """Failed lines leave the error file and end anew; bad lines stay; the rest is untouched."""
    plan = a_plan(tmp_path, [*lines(30), b"bad"])
    async with a_cluster() as cluster:
        responder = cluster.responder
        responder.answer = _fails(("id-5", "id-15", "id-25"))
        assert (await cluster.run(plan)).counts == Counts(completed=27, failed=3, bad=1)
        responder.answer = _fails(("id-15",))
        report = await cluster.run(plan, retry=True)
        assert report.counts == Counts(completed=29, failed=1, bad=1)
        check_invariant(plan, (f"id-{number}" for number in range(30)))
        assert len(responder.seen) == 33
        responder.answer = a_record
        report = await cluster.run(plan, retry=True)
        assert report.counts == Counts(completed=30, bad=1)
        assert len(responder.seen) == 34
        assert (await cluster.run(plan)).submitted == 0
    check_invariant(plan, (f"id-{number}" for number in range(30)))
    assert codes(plan) == ["invalid_json_line"]


def _fails(ids: tuple[str, ...]) -> Callable[[Job], TerminalRecord]:
    def answer(job: Job) -> TerminalRecord:
        if any(f'"{custom_id}"'.encode() in job.body for custom_id in ids):
            return a_record(job, kind=Kind.FAILED, status_code=500, body=b'{"error": {}}')
        return a_record(job)

    return answer


async def test_a_retry_that_dies_while_swapping_the_error_file_is_finished_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between putting lines back and swapping the file: the next run completes the swap."""
    plan = a_plan(tmp_path, [*lines(10), b"bad"])
    async with a_cluster() as cluster:
        cluster.responder.answer = _fails(("id-3", "id-4"))
        await cluster.run(plan)

        def die(_: Results, __: State) -> None:
            raise Dead

        with monkeypatch.context() as patch:
            patch.setattr(Results, "rewrite_errors", die)
            with pytest.raises(Dead):
                await cluster.run(plan, retry=True)
        cluster.responder.answer = a_record
        report = await cluster.run(plan)
        assert report.counts == Counts(completed=10, bad=1)
    check_invariant(plan, (f"id-{number}" for number in range(10)))


class Dead(Exception):
    """The process dies here."""


async def test_an_unknown_lane_stops_the_batch(tmp_path: Path) -> None:
    """Every line would fail: told once, before the first."""
    plan = a_plan(tmp_path, lines(3), lane="nobody")

    async with a_cluster() as cluster:
        cluster.lane = "nobody"
        with pytest.raises(UnknownLane):
            await cluster.run(plan)
    assert not results(plan.output)


async def test_an_outage_that_lasts_ends_the_run_with_all_results_kept(tmp_path: Path) -> None:
    """What ended before it is on disk, and the same command goes on later."""
    plan = a_plan(tmp_path, lines(60), concurrency=5)
    tally = Tally()
    async with a_cluster() as cluster:
        cluster.responder.run_s = 0.003
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(_told(cluster, plan, tally))
            await until(lambda: tally.completed >= 10)
            bus = cluster.clients[0]._bus
            bus.disconnect()  # pyright: ignore[reportAttributeAccessIssue]
        assert running.result()
        assert len(results(plan.output)) >= 10
        cluster.responder.run_s = 0.0
        assert (await cluster.run(plan)).counts == Counts(completed=60)
        assert set(cluster.responder.runs.values()) == {1}


async def _told(cluster: Cluster, plan: Plan, tally: Tally) -> bool:
    try:
        await cluster.run(plan, tally=tally, bounds=Bounds(write_s=0.01))
    except Unreachable:
        return True
    return False
