"""From events and decisions to counts and lines: each job is counted once, whoever ended it."""

from pathlib import Path
from typing import Any

import orjson
import pytest
from msgspec.structs import replace

from broker.core import decisions as do
from broker.core.decisions import Explanation, HeldBy
from broker.core.events import (
    AttemptEnded,
    DispatchAnswered,
    Event,
    JobHeld,
    JobSpec,
    Tick,
    Unanswered,
    WorkerReported,
)
from broker.service.decision_log import DecisionLog
from broker.service.departures import Departures
from broker.service.held import Held
from broker.service.learned import Learned
from broker.service.metrics import Metrics
from broker.service.observer import ESTIMATES_MAX, Observer
from broker.service.stages import Stage
from broker.wire.messages import (
    Attempt,
    Failure,
    Finished,
    Heartbeat,
    Kind,
    Outcome,
    Reason,
    TerminalRecord,
    Usage,
)

KEY = "acme.j1"
ATTEMPT = Attempt(7, 1)


class Bench:
    """An observer with real metrics and a real log, in a folder of the test."""

    def __init__(self, folder: Path) -> None:
        self.metrics = Metrics(lanes=["acme"], models=["tiny"])
        self.log = DecisionLog(folder, file_bytes_max=1_000_000, files_max=1)
        self.learned = Learned()
        self.departures = Departures()
        self.observer = Observer(self.metrics, self.log, self.learned, self.departures)

    def step(self, event: Event, *decisions: do.Decision, held: Held | None = None) -> None:
        """What the loop does with an event."""
        self.observer.heard(event)
        for decision in decisions:
            self.observer.decided(decision, held, at_s=event.at_s)

    def value(self, name: str, **labels: str) -> float | None:
        """Value of one series."""
        return self.metrics.registry.get_sample_value(f"inferlane_{name}", labels)

    def lines(self) -> list[dict[str, Any]]:
        """All lines of the log."""
        self.log.close()
        return [orjson.loads(one) for one in self.log.path.read_bytes().splitlines()]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A fresh one."""
    return Bench(tmp_path)


def a_held(**fields: Any) -> Held:
    """acme.j1, queued at 100 s."""
    defaults: dict[str, Any] = {
        "key": KEY,
        "lane": "acme",
        "band": 1,
        "model": "tiny",
        "job_id": "j1",
        "client": "c",
        "stream": "JOBS_acme",
        "subject": "jobs.acme.1.tiny",
        "sequence": 1,
        "ack_subject": "ack",
        "enqueued_at_s": 100.0,
    }
    return Held(**{**defaults, **fields})


def a_dispatch(**fields: Any) -> do.Dispatch:
    """acme.j1 to w1."""
    defaults: dict[str, Any] = {
        "key": KEY,
        "worker": "w1",
        "attempt": ATTEMPT,
        "number": 1,
        "stream_sequence": 1,
        "predicted_hit_tokens": 64,
        "enqueued_at_s": 100.0,
        "failures": (),
        "run_s_max": 60.0,
        "stall_s": 10.0,
        "explanation": Explanation("first_token", (), "", 64, 0.1, 2.0, HeldBy.QUOTA),
    }
    return do.Dispatch(**{**defaults, **fields})


def a_finished(**fields: Any) -> Finished:
    """acme.j1 completed: first token after 0.5 s of 3 s."""
    defaults: dict[str, Any] = {
        "key": KEY,
        "attempt": ATTEMPT,
        "outcome": Outcome.SETTLED,
        "kind": Kind.COMPLETED,
        "usage": Usage(100, 60, 20),
        "predicted_hit_tokens": 64,
        "ttft_s": 0.5,
        "run_s": 3.0,
    }
    return Finished(**{**defaults, **fields})


def a_heartbeat(*finished: Finished) -> Heartbeat:
    """Of worker w1."""
    return Heartbeat(
        worker="w1",
        incarnation=1,
        sequence=1,
        epoch=7,
        echo=1,
        at_s=110.0,
        models=("tiny",),
        slots=4,
        finished=finished,
    )


def test_dispatch_tells_what_was_asked_for(bench: Bench) -> None:
    """The job that intake read stands in the line; of one from a worker's list little is known."""
    job = JobSpec(KEY, "acme", 1, "tiny", prompt_tokens=77, enqueued_at_s=100.0)
    bench.step(Tick(102.0), a_dispatch(), held=a_held(spec=job))
    bench.step(Tick(102.0), a_dispatch(), held=a_held())
    known, listed = bench.lines()
    assert (known["prompt_tokens"], known["enqueued_at_s"]) == (77, 100.0)
    assert "prompt_tokens" not in listed
    assert listed["enqueued_at_s"] == 100.0


def a_job() -> JobSpec:
    """acme.j1."""
    return JobSpec(key=KEY, lane="acme", band=1, model="tiny", enqueued_at_s=100.0)


def test_job_that_completes(bench: Bench) -> None:
    """Queued at 100, dispatched at 102, ended at 105 with a run of 3 s: first token after 2.5 s."""
    held = a_held()
    bench.step(JobHeld(100.0, a_job()))
    bench.step(Tick(102.0), a_dispatch(), held=held)
    bench.step(AttemptEnded(105.0, "w1", 1, a_finished()), do.Release(KEY), held=held)
    assert bench.value("jobs_admitted_total", lane="acme", band="1", model="tiny") == 1
    assert bench.value("jobs_dispatched_total", lane="acme", band="1", model="tiny") == 1
    assert bench.value("dispatches_held_total", held_by="quota") == 1
    assert bench.value("queue_seconds_sum", lane="acme", band="1") == 2.0
    assert bench.value("ttft_seconds_sum", lane="acme", band="1") == 2.5
    assert bench.value("e2e_seconds_sum", lane="acme", band="1") == 5.0
    assert bench.value("jobs_ended_total", kind="completed", lane="acme", band="1") == 1
    assert bench.value("tokens_total", kind="cached", lane="acme") == 60
    assert bench.learned.cached_token_ratio("w1") == 0.6
    assert [(one["event"], one["attempt"]) for one in bench.lines()] == [
        ("dispatch", [7, 1]),
        ("end", [7, 1]),
    ]


def test_end_that_only_a_heartbeat_tells(bench: Bench) -> None:
    """A lost note costs nothing: the heartbeat has the same, and repeats it without counting."""
    beat = WorkerReported(110.0, a_heartbeat(a_finished()))
    bench.step(beat, do.Release(KEY), held=a_held())
    bench.step(beat)
    assert bench.value("jobs_ended_total", kind="completed", lane="acme", band="1") == 1
    assert [one["worker"] for one in bench.lines()] == ["w1"]


def test_report_of_an_earlier_event_is_forgotten(bench: Bench) -> None:
    """A release in a later step has nothing of it: its record counts as found."""
    bench.step(AttemptEnded(105.0, "w1", 1, a_finished()))
    bench.step(Tick(106.0), do.Release(KEY), held=a_held())
    assert bench.value("jobs_ended_total", kind="found", lane="acme", band="1") == 1
    assert bench.value("tokens_total", kind="prompt", lane="acme") is None


def test_job_refused_as_it_comes(bench: Bench) -> None:
    """It is rejected and not admitted; it ends when its message is gone."""
    held = a_held()
    refusal = do.Reject(KEY, Reason.QUEUE_FULL, "band=1", 400, 400, 2.0)
    bench.step(JobHeld(100.0, a_job()), refusal, held=held)
    bench.step(Tick(100.1))
    assert bench.value("jobs_admitted_total", lane="acme", band="1", model="tiny") is None
    assert bench.value("jobs_rejected_total", reason="queue_full", lane="acme", band="1") is None
    bench.observer.closed(_record(Kind.REJECTED, Reason.QUEUE_FULL), won=True)
    held.stage = Stage.CLOSING
    bench.step(Tick(100.2), do.Release(KEY), held=held)
    assert bench.value("jobs_rejected_total", reason="queue_full", lane="acme", band="1") == 1
    assert bench.value("jobs_ended_total", kind="rejected", lane="acme", band="1") == 1
    assert [(one["kind"], one["reason"]) for one in bench.lines()] == [("rejected", "queue_full")]


def test_refused_job_is_logged_with_what_it_asked_for(bench: Bench) -> None:
    """And with the row that refused it: a replay under other quotas may let it in."""
    record = replace(_record(Kind.REJECTED, Reason.QUEUE_FULL), row="band=1")
    bench.observer.closed(record, won=True, job=a_job())
    (told,) = bench.lines()
    assert (told["row"], told["enqueued_at_s"], told["model"]) == ("band=1", 100.0, "tiny")


def test_refusal_of_another_job_in_the_same_step(bench: Bench) -> None:
    """A job that comes is admitted even if it makes an older one go."""
    refusal = do.Reject("acme.j0", Reason.QUEUE_FULL, "band=1", 400, 400, 2.0)
    bench.step(JobHeld(100.0, a_job()), refusal, held=a_held(key="acme.j0"))
    bench.step(Tick(100.1))
    assert bench.value("jobs_admitted_total", lane="acme", band="1", model="tiny") == 1


def _record(kind: Kind, reason: Reason | None = None) -> TerminalRecord:
    return TerminalRecord(job="j1", lane="acme", kind=kind, ended_at_s=101.0, band=1, reason=reason)


def test_ending_that_lost_the_race(bench: Bench) -> None:
    """The worker's record stands: the broker's own ending is not counted as one."""
    bench.observer.closed(_record(Kind.COMPLETED), won=False)
    assert bench.value("jobs_ended_total", kind="found", lane="acme", band="1") == 1
    assert bench.value("jobs_ended_total", kind="completed", lane="acme", band="1") is None


def test_dead_letter(bench: Bench) -> None:
    """Counted by lane, for whoever watches over them."""
    bench.observer.closed(_record(Kind.DEAD_LETTERED, Reason.ENGINE_FAILED), won=True)
    assert bench.value("jobs_dead_lettered_total", lane="acme") == 1


def test_attempt_that_failed(bench: Bench) -> None:
    """Its reason is counted, and its end is a line without a kind: the job goes on."""
    failed = a_finished(outcome=Outcome.RETRY, kind=None, reason=Reason.ENGINE_FAILED)
    failure = Failure(ATTEMPT, "w1", Reason.ENGINE_FAILED, 105.0)
    event = AttemptEnded(105.0, "w1", 1, failed)
    bench.step(event, do.Requeue(KEY, failure, 106.0), held=a_held())
    assert bench.value("attempts_failed_total", reason="engine_failed") == 1
    assert bench.value("jobs_ended_total", kind="found", lane="acme", band="1") is None
    (line,) = bench.lines()
    assert (line["kind"], line["outcome"], line["reason"]) == (None, "retry", "engine_failed")


def test_second_dispatch_is_no_second_wait(bench: Bench) -> None:
    """The queue time of a retried job is that of its first dispatch."""
    failure = Failure(ATTEMPT, "w1", Reason.STALLED, 105.0)
    bench.step(Tick(102.0), a_dispatch(), held=a_held())
    bench.step(Tick(106.0), a_dispatch(failures=(failure,)), held=a_held())
    assert bench.value("queue_seconds_count", lane="acme", band="1") == 1
    assert bench.value("jobs_dispatched_total", lane="acme", band="1", model="tiny") == 2


def test_wait_estimate_against_the_wait(bench: Bench) -> None:
    """The first receipt counts: told 5 s at 100, dispatched at 102, 3 s off."""
    bench.step(Tick(100.0), do.Queued(KEY, 3, 5.0))
    bench.step(Tick(101.0), do.Queued(KEY, 1, 0.5))
    bench.step(Tick(102.0), a_dispatch(), held=a_held())
    bench.step(Tick(103.0), a_dispatch(), held=a_held())
    assert bench.value("wait_estimate_error_seconds_sum", band="1") == 3.0
    assert bench.value("wait_estimate_error_seconds_count", band="1") == 1


def test_estimates_past_their_bound(bench: Bench) -> None:
    """Further receipts are not remembered; an end makes room."""
    for number in range(ESTIMATES_MAX + 1):
        bench.step(Tick(100.0), do.Queued(f"acme.{number}", 0, 1.0))
    last = f"acme.{ESTIMATES_MAX}"
    bench.step(Tick(101.0), a_dispatch(key=last), held=a_held(key=last))
    assert bench.value("wait_estimate_error_seconds_count", band="1") is None
    bench.step(Tick(101.0), do.Release("acme.0"), held=a_held(key="acme.0"))
    bench.step(Tick(102.0), do.Queued(last, 0, 1.0))
    bench.step(Tick(103.0), a_dispatch(key=last), held=a_held(key=last))
    assert bench.value("wait_estimate_error_seconds_count", band="1") == 1


def test_first_token_of_an_engine_that_never_ran(bench: Bench) -> None:
    """A job whose older record was found has no tokens and no first token of its own."""
    event = AttemptEnded(105.0, "w1", 1, a_finished(ran=False))
    bench.step(event, do.Release(KEY), held=a_held())
    assert bench.value("ttft_seconds_count", lane="acme", band="1") is None
    assert bench.value("tokens_total", kind="prompt", lane="acme") is None
    assert bench.value("jobs_ended_total", kind="completed", lane="acme", band="1") == 1


def test_everything_else_that_is_counted(bench: Bench) -> None:
    """Differences, lost workers, unanswered orders, unreadable messages, lag."""
    kind = do.DifferenceKind.RUNS_TWICE
    unanswered = DispatchAnswered(1.0, "w1", KEY, ATTEMPT, Unanswered.TIMEOUT)
    bench.step(unanswered, do.Difference(kind, KEY, "w1", ""), do.WorkerGone("w1", "probe"))
    bench.observer.difference("unacknowledged")
    bench.observer.malformed("jobs")
    bench.observer.lag(0.5, held_s=0.2)
    assert bench.value("reconcile_differences_total", kind="runs_twice") == 1
    assert bench.value("reconcile_differences_total", kind="unacknowledged") == 1
    assert bench.value("workers_gone_total", cause="probe") == 1
    assert [one.worker for one in bench.departures.latest(at_s=1.0)] == ["w1"]
    assert bench.value("orders_unanswered_total", cause="timeout") == 1
    assert bench.value("messages_malformed_total", where="jobs") == 1
    assert bench.value("loop_lag_seconds_sum") == 0.5
    assert bench.value("loop_held_seconds_sum") == 0.2
    bench.log.close()


@pytest.mark.parametrize("ending", [do.DeadLetter, do.FailStream])
def test_the_failure_that_ends_a_job_is_counted_too(
    bench: Bench, ending: type[do.DeadLetter | do.FailStream]
) -> None:
    """No requeue follows it; without any failure (a takeover) there is nothing to count."""
    failure = Failure(ATTEMPT, "w1", Reason.STALLED, 101.0)
    bench.step(Tick(102.0), ending(KEY, (failure, failure)))
    assert bench.value("attempts_failed_total", reason="stalled") == 1.0
    bench.step(Tick(103.0), ending(KEY, ()))
    assert bench.value("attempts_failed_total", reason="stalled") == 1.0


def test_a_duplicate_is_counted_as_refused(bench: Bench) -> None:
    """It never becomes a job of its own: by lane and band, and nothing is said of an end."""
    bench.observer.duplicate("acme", 1)
    labels = {"reason": "duplicate", "lane": "acme", "band": "1"}
    assert bench.value("jobs_rejected_total", **labels) == 1.0
    assert bench.value("jobs_ended_total", kind="rejected", lane="acme", band="1") is None
