"""A decision log read back: jobs joined from their lines, and what can't be used counted."""

from collections.abc import Iterable

import orjson
import pytest

from broker.service.decision_log import PREFIX_STRIDE
from broker.sim.decisions import COUNT_MAX, LOGGED_BLOCK_BYTES, LoggedJob, Tally, read_jobs
from broker.wire.messages import Attempt, Kind, Outcome, Reason, Usage
from broker.wire.prefix import BLOCK_BYTES
from tests.decision_logs import (
    START_S,
    a_closing_line,
    a_dispatch_line,
    a_refusal_line,
    an_end_line,
)


def _read(lines: Iterable[bytes]) -> tuple[list[LoggedJob], Tally]:
    tally = Tally()
    return list(read_jobs(lines, tally)), tally


def _one(*lines: bytes) -> LoggedJob:
    (job,), _ = _read(lines)
    return job


def test_job_that_completes() -> None:
    """All that its two lines say stands in one record."""
    asked = a_dispatch_line(
        blocks=range(20), prompt_tokens=650, output_tokens_max=64, session="alice", band=2
    )
    job = _one(asked, an_end_line())
    assert (job.key, job.lane, job.band, job.model) == ("acme.j1", "acme", 2, "tiny")
    assert (job.enqueued_at_s, job.dispatched_at_s) == (START_S, START_S + 1)
    assert (job.queue_s, job.held_by, job.policy, job.worker) == (1.0, "order", "first_token", "w0")
    assert (job.predicted_hit_tokens, job.predicted_ttft_s) == (640, 0.5)
    assert (job.prompt_tokens, job.output_tokens_max, job.prompt_blocks) == (650, 64, 20)
    assert list(job.blocks) == [7, 15]
    assert len(job.session) == 16
    assert (job.counted_prompt_tokens, job.cached_tokens, job.output_tokens) == (700, 600, 16)
    assert (job.kind, job.reason, job.ended_at_s) == ("completed", "", START_S + 5)
    assert (job.ttft_s, job.run_s, job.dispatches) == (2.5, 3.0, 1)


def test_logged_block_is_what_the_broker_logs() -> None:
    """The reader's block is the writer's stride."""
    assert LOGGED_BLOCK_BYTES == PREFIX_STRIDE * BLOCK_BYTES


def test_job_that_is_tried_again() -> None:
    """One job: it came and waited when it did first, and ran where it ran last."""
    job, *others = _read(
        (
            a_dispatch_line(waited_s=1.0, blocks=range(8), prompt_tokens=650),
            an_end_line(
                at_s=2.0, outcome=Outcome.RETRY, kind=None, reason=Reason.STALLED, worker="w0"
            ),
            a_dispatch_line(waited_s=3.0, worker="w1", number=2),
            an_end_line(at_s=9.0, attempt=Attempt(7, 2), worker="w1"),
        )
    )[0]
    assert not others
    assert (job.dispatches, job.worker, job.queue_s) == (2, "w1", 1.0)
    assert (job.enqueued_at_s, job.ended_at_s, job.prompt_tokens) == (START_S, START_S + 9, 650)
    assert list(job.blocks) == [7]


def test_job_whose_worker_was_lost() -> None:
    """No line tells of an attempt that nobody ended: a second dispatch is the same job's."""
    job = _one(a_dispatch_line(), a_dispatch_line(worker="w1", number=2), an_end_line(worker="w1"))
    assert (job.dispatches, job.worker) == (2, "w1")


def test_job_that_was_refused() -> None:
    """What it asked for stands in its end, for it never was dispatched."""
    refused = a_refusal_line(
        blocks=range(20), prompt_tokens=650, output_tokens_max=64, band=2, deadline_at_s=9.5
    )
    job = _one(refused)
    assert (job.key, job.lane, job.band, job.model) == ("acme.j1", "acme", 2, "tiny")
    assert (job.kind, job.reason, job.row) == ("rejected", "queue_full", "all")
    assert (job.enqueued_at_s, job.ended_at_s, job.deadline_at_s) == (START_S, START_S + 5, 9.5)
    assert (job.prompt_tokens, job.output_tokens_max, list(job.blocks)) == (650, 64, [7, 15])
    assert (job.dispatches, job.counted_prompt_tokens, job.worker) == (0, 0, "")


def test_end_that_says_again_what_a_dispatch_told() -> None:
    """A new leader does not know that an earlier one had dispatched the job: it was."""
    job = _one(a_dispatch_line(prompt_tokens=650), a_refusal_line(kind=Kind.EXPIRED))
    assert (job.dispatches, job.kind, job.prompt_tokens) == (1, "expired", 650)
    assert job.counted_prompt_tokens == 0


def test_key_that_comes_again_after_its_end() -> None:
    """It is a job of its own: a rejected one may be tried again under the same id."""
    first, second = _read(
        (a_dispatch_line(), an_end_line(), a_dispatch_line(enqueued_s=60), an_end_line(at_s=65))
    )[0]
    assert (first.enqueued_at_s, second.enqueued_at_s) == (START_S, START_S + 60)
    assert second.dispatches == 1


@pytest.mark.parametrize("kind", [Kind.DEAD_LETTERED, None])
def test_job_that_the_broker_ended(kind: Kind | None) -> None:
    """Its end says nothing of tokens; a record that was found not even how it ended."""
    job = _one(a_dispatch_line(prompt_tokens=650), a_closing_line(kind=kind))
    assert (job.kind, job.worker, job.output_tokens) == (kind or "", "w0", 0)
    assert (job.ttft_s, job.run_s, job.input_tokens) == (None, None, 650)


def test_first_token_that_never_came() -> None:
    """A run without a first token has no time to it, not a time of nothing."""
    job = _one(a_dispatch_line(), an_end_line(ttft_s=0.0, kind=Kind.FAILED, usage=Usage()))
    assert (job.ttft_s, job.run_s, job.kind) == (None, 3.0, "failed")


def test_jobs_come_in_the_order_of_ends() -> None:
    """Each is given as it ends; memory holds the open ones only."""
    jobs = read_jobs(
        [a_dispatch_line("j1"), a_dispatch_line("j2"), an_end_line("j2"), an_end_line("j1")]
    )
    assert [job.key for job in jobs] == ["acme.j2", "acme.j1"]


def test_what_can_not_be_joined() -> None:
    """A dispatch without an end and an end without a dispatch are left out and counted."""
    jobs, tally = _read((an_end_line("j0"), a_dispatch_line("j1"), an_end_line("j0")))
    assert jobs == []
    assert (tally.without_dispatch, tally.without_end, tally.jobs) == (2, 1, 0)


BROKEN = [
    a_dispatch_line("j2", band=4),
    b"no json\n",
    a_dispatch_line("j9")[:-30],
    b'{"event": "dispatch"}\n',
    b'{"event": "other", "at_s": 1.0}\n',
    b"[1, 2]\n",
    b"\xff\xfe\n",
    b"[" * 100_000,
    orjson.dumps({**orjson.loads(a_dispatch_line("j9")), "blocks": "AAAA"}),
    orjson.dumps({**orjson.loads(a_dispatch_line("j9")), "prompt_tokens": -1}),
    a_dispatch_line("j9", prompt_tokens=COUNT_MAX + 1),
]


@pytest.mark.parametrize("broken", BROKEN, ids=range(len(BROKEN)))
def test_line_that_can_not_be_read(broken: bytes) -> None:
    """It is counted, and the lines around it are read."""
    jobs, tally = _read((a_dispatch_line(), broken, an_end_line()))
    assert len(jobs) == 1
    assert (tally.lines, tally.broken_lines, tally.without_end) == (3, 1, 0)


def test_blank_lines_are_no_lines() -> None:
    """A log that was torn has one where the next write began."""
    _, tally = _read((b"\n", a_dispatch_line(), b"", an_end_line()))
    assert (tally.lines, tally.broken_lines) == (2, 0)


def _as_before(line: bytes) -> bytes:
    new = ("enqueued_at_s", "prompt_tokens", "output_tokens_max", "session", "prompt_blocks")
    fields = orjson.loads(line)
    return orjson.dumps({name: fields[name] for name in fields if name not in (*new, "blocks")})


def test_log_of_an_older_broker() -> None:
    """Its dispatches don't say what was asked for: they are counted apart, and give no job."""
    jobs, tally = _read((_as_before(a_dispatch_line()), an_end_line()))
    assert jobs == []
    assert (tally.outdated_lines, tally.broken_lines, tally.without_dispatch) == (1, 0, 1)


def test_log_without_prefixes() -> None:
    """Jobs are whole but for their prefix, which is not the same as a short prompt."""
    line = a_dispatch_line(blocks=range(16), prefixes=False, prompt_tokens=300)
    job = _one(line, an_end_line())
    assert (list(job.blocks), job.has_prefix, job.prompt_tokens) == ([], False, 300)
    short = _one(a_dispatch_line(), an_end_line())
    assert (list(short.blocks), short.has_prefix) == ([], True)


def test_job_known_from_a_workers_list() -> None:
    """When it came is known; the engine's count stands in for the prompt."""
    job = _one(a_dispatch_line(listed=True), an_end_line())
    assert (job.enqueued_at_s, job.prompt_tokens, job.input_tokens) == (START_S, 0, 700)
    assert (job.output_tokens_max, job.has_prefix) == (0, False)


def test_more_open_jobs_than_can_be_kept() -> None:
    """The one dispatched longest ago is given up and counted; the others are read."""
    tally = Tally()
    lines = [a_dispatch_line(f"j{number}") for number in range(3)]
    lines += [an_end_line(f"j{number}") for number in range(3)]
    jobs = list(read_jobs(lines, tally, open_jobs_max=2))
    assert [job.key for job in jobs] == ["acme.j1", "acme.j2"]
    assert (tally.without_end, tally.without_dispatch) == (1, 1)
