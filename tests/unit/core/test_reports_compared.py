"""The ledger and a worker's list, compared: each difference is repaired and told."""

from typing import Any

import pytest

from broker.core.decisions import (
    Abort,
    Decision,
    Difference,
    DifferenceKind,
    Dispatch,
    Drained,
    DrainOrder,
    Expire,
    Release,
    Requeue,
)
from broker.core.events import (
    DispatchAllowed,
    DrainRequested,
    JobHeld,
    Unanswered,
    WorkerReported,
)
from broker.core.policy import QuotaRow
from broker.core.state import ENDED_JOBS_MAX, Worker
from broker.wire.messages import (
    Answer,
    Attempt,
    Kind,
    Reason,
)
from tests.unit.core.cluster import (
    EPOCH,
    LANE,
    Cluster,
    a_policy,
    a_spec,
    finished,
    in_flight,
    keys,
    of,
    only,
)
from tests.unit.core.invariants import check_sums
from tests.unit.core.listings import OLD, differences, one_job


def test_ends_remembered_for_a_worker_are_bounded() -> None:
    """A worker that sends notes but no reports: the latest ends are known, memory is flat."""
    worker = Worker("w1", 0)
    for n in range(5 * ENDED_JOBS_MAX):
        worker.note_ended(f"acme.j{n}", Attempt(1, n))
        assert len(worker.ended) + len(worker.ended_before) <= 2 * ENDED_JOBS_MAX
    last = 5 * ENDED_JOBS_MAX - 1
    assert worker.has_ended(f"acme.j{last}", Attempt(1, last))
    assert worker.has_ended(f"acme.j{last - ENDED_JOBS_MAX}", Attempt(1, 0))
    assert not worker.has_ended("acme.j0", Attempt(1, 0))


def test_a_new_attempt_of_an_ended_job_is_not_hidden_by_the_old() -> None:
    """Only the ended attempt and earlier ones are known to be over."""
    cluster, dispatch = one_job()
    cluster.end(dispatch)
    newer = in_flight(a_spec(), Attempt(EPOCH, 99))
    decisions = cluster.beat("w1", inflight=(newer,))
    assert differences(decisions) == [(DifferenceKind.STALE_ATTEMPT, "acme.j1", "w1")]


def test_a_job_that_runs_unleased_is_adopted() -> None:
    """An earlier broker gave it: it counts in every sum from now on, and nothing is sent."""
    cluster = Cluster(a_policy(QuotaRow(inflight_jobs_max=1), QuotaRow(tokens_per_min=600)))
    listed = in_flight(
        a_spec("old", stream_sequence=12),
        OLD,
        cached_tokens=40,
        output_tokens=60,
        started_at_s=990.0,
    )
    decisions = cluster.join("w1", inflight=(listed,))
    assert decisions == [
        Difference(DifferenceKind.RUNS_UNLEASED, "acme.old", "w1", f"attempt {EPOCH - 1}.5")
    ]
    (lease,) = cluster.scheduler.leases()
    assert (lease.attempt, lease.number, lease.accepted, lease.granted_at_s) == (
        OLD,
        0,
        True,
        990.0,
    )
    assert (lease.hit_tokens, lease.uncached_tokens, lease.cost_tokens) == (40, 60, 180.0)
    assert (lease.job.lane, lease.job.band, lease.job.stream_sequence) == (LANE, 2, 12)
    assert lease.output_tokens_expected == 60
    assert cluster.usage["all"] == (1, 180.0)
    assert not of(Dispatch, cluster.hold(a_spec("j2")))
    check_sums(cluster.scheduler)
    assert keys(
        Release, cluster.beat("w1", inflight=(), finished=(finished("acme.old", OLD),))
    ) == ["acme.old"]


def test_a_prefilled_job_is_adopted_as_decoding() -> None:
    """Its prompt is no backlog; a cached part larger than the prompt is the prompt."""
    cluster = Cluster()
    listed = in_flight(a_spec("old"), OLD, prefilled=True, cached_tokens=500)
    cluster.join("w1", inflight=(listed,))
    (view,) = cluster.scheduler.views.workers()
    assert (view.backlog_tokens, view.decoding_jobs, view.kv_tokens) == (0, 1, 50)
    (lease,) = cluster.scheduler.leases()
    assert (lease.hit_tokens, lease.uncached_tokens) == (100, 0)


def test_adopting_is_allowed_before_start_up_is_over() -> None:
    """That is what start-up is for; the job itself is then known and not given again."""
    cluster = Cluster(started=False)
    cluster.hold(a_spec("old"))
    cluster.join("w1", inflight=(in_flight(a_spec("old"), OLD),))
    assert not of(Dispatch, cluster.step(DispatchAllowed(cluster.at_s)))
    assert cluster.scheduler.is_leased("acme.old")
    check_sums(cluster.scheduler)


def test_a_waiting_job_that_runs_somewhere_is_adopted_with_its_history() -> None:
    """A returning worker still runs what was taken from it: better than running it again."""
    cluster = Cluster()
    cluster.join("w1")
    dispatch = only(Dispatch, cluster.hold(a_spec(streamed=True, prompt_tokens=77)))
    listed = cluster.listed("w1")
    cluster.tick(3.0)
    for _ in range(8):
        cluster.tick(1.0)
    assert cluster.scheduler.is_known("acme.j1")
    assert not cluster.scheduler.is_leased("acme.j1")
    decisions = cluster.beat("w1", inflight=listed)
    assert differences(decisions) == [(DifferenceKind.RUNS_UNLEASED, "acme.j1", "w1")]
    (lease,) = cluster.scheduler.leases()
    assert lease.attempt == dispatch.attempt
    assert lease.job.streamed
    assert len(lease.failures) == 1
    check_sums(cluster.scheduler)


def test_an_adopted_jobs_message_tells_the_rest_of_it() -> None:
    """Pulled later: stream flag, deadline and failures are known from then on; the sums stay."""
    cluster = Cluster()
    cluster.join("w1", inflight=(in_flight(a_spec("old"), OLD, prefilled=True),))
    full = a_spec("old", streamed=True, prompt_tokens=999, client="c1")
    assert cluster.step(JobHeld(cluster.at_s, full)) == []
    (lease,) = cluster.scheduler.leases()
    assert (lease.job.streamed, lease.job.client, lease.job.prompt_tokens) == (True, "c1", 100)
    check_sums(cluster.scheduler)


def a_lost_one(**fields: Any) -> tuple[Cluster, list[Decision]]:
    """A job found running, whose worker is lost before the job's own message comes; and what that
    message makes of it.
    """
    cluster = Cluster()
    cluster.join("w1", inflight=(in_flight(a_spec("old"), OLD),))
    for _ in range(12):
        cluster.tick(1.0)
    assert not cluster.scheduler.is_leased("acme.old")
    full = a_spec("old", prompt_tokens=777, session="s", blocks=(1, 2), **fields)
    return cluster, cluster.hold(full)


def test_a_lost_jobs_message_tells_the_rest_of_it() -> None:
    """All that only the message says is known from then on, its history is kept, and its owner is
    told nothing twice.
    """
    cluster, decisions = a_lost_one(deadline_at_s=1100.0, streamed=True)
    assert decisions == []
    waiting = cluster.scheduler._mind.queues.waiting["acme.old"]
    assert (waiting.job.session, waiting.job.blocks, waiting.job.streamed) == ("s", (1, 2), True)
    assert (waiting.held_at_s, waiting.retried, len(waiting.failures)) == (1010.0, True, 1)
    assert not waiting.job.bare
    check_sums(cluster.scheduler)
    cluster.hold(a_spec("old", client="another"))
    assert waiting.job.client == ""
    assert keys(Dispatch, cluster.join("w2")) == ["acme.old"]
    (lease,) = cluster.scheduler.leases()
    assert lease.job.prompt_tokens == 777


def test_a_lost_job_is_lined_up_and_expires_by_its_own_deadline() -> None:
    """Its place is by its deadline, and at that time it ends."""
    cluster, _ = a_lost_one(deadline_at_s=1020.0)
    cluster.hold(a_spec("sooner", deadline_at_s=1015.0), a_spec("later", deadline_at_s=1030.0))
    (queue,) = cluster.scheduler._mind.queues.pool("tiny").queues.values()
    assert [entry[2] for entry in queue.fresh] == ["acme.sooner", "acme.old", "acme.later"]
    assert "acme.old" not in keys(Expire, cluster.tick(7.9))
    assert "acme.old" in keys(Expire, cluster.tick(0.2))
    check_sums(cluster.scheduler)


def test_a_lost_job_whose_deadline_has_passed_is_not_run_again() -> None:
    """It ends when its message tells so, though a worker is free by then."""
    cluster, decisions = a_lost_one(deadline_at_s=1005.0)
    assert keys(Expire, decisions) == ["acme.old"]
    assert not cluster.scheduler.is_known("acme.old")
    assert not of(Dispatch, cluster.join("w2"))
    check_sums(cluster.scheduler)


def test_before_start_up_is_over_a_lost_job_only_learns() -> None:
    """Nothing is expired then: it is when start-up ends."""
    cluster = Cluster(started=False)
    cluster.join("w1", inflight=(in_flight(a_spec("old"), OLD),))
    cluster.at_s += 3.0
    cluster.beat("w1", inflight=(), epoch=EPOCH, echo=99)
    assert not cluster.scheduler.is_leased("acme.old")
    assert cluster.hold(a_spec("old", deadline_at_s=1001.0)) == []
    assert cluster.scheduler.is_known("acme.old")
    assert keys(Expire, cluster.step(DispatchAllowed(cluster.at_s))) == ["acme.old"]


def test_a_job_given_before_its_message_came_learns_from_it() -> None:
    """Found running, lost, and given to another worker: the deadline counts from then on."""
    cluster = Cluster()
    cluster.join("w1", inflight=(in_flight(a_spec("old"), OLD),))
    cluster.join("w2", slots=0)
    for _ in range(12):
        cluster.tick(1.0)
        cluster.beat("w2")
    assert keys(Dispatch, cluster.beat("w2", slots=1)) == ["acme.old"]
    cluster.hold(a_spec("old", streamed=True, deadline_at_s=1100.0))
    (lease,) = cluster.scheduler.leases()
    assert (lease.job.streamed, lease.job.deadline_at_s, lease.job.bare) == (True, 1100.0, False)
    check_sums(cluster.scheduler)


def test_a_leased_jobs_own_message_changes_nothing() -> None:
    """Redelivered while it runs here."""
    cluster, _ = one_job()
    (lease,) = cluster.scheduler.leases()
    before = lease.job
    assert cluster.hold(a_spec(client="other")) == []
    assert lease.job is before


def test_a_revoked_attempt_is_aborted_when_its_worker_returns() -> None:
    """The job went elsewhere and ended: the old run is told to stop, and writes nothing."""
    cluster, dispatch = one_job()
    listed = cluster.listed("w1")
    for _ in range(10):
        cluster.tick(1.0)
        cluster.beat("w2")
    second = only(Dispatch, cluster.wait_for("w2", 1.0))
    cluster.end(second)
    decisions = cluster.beat("w1", inflight=listed)
    abort = only(Abort, decisions)
    assert (abort.worker, abort.attempt, abort.reason) == ("w1", dispatch.attempt, Reason.DUPLICATE)
    assert differences(decisions) == [(DifferenceKind.STALE_ATTEMPT, "acme.j1", "w1")]
    assert not cluster.scheduler.leases()


def test_an_adopted_attempt_that_was_revoked_is_not_adopted_again() -> None:
    """Attempts of earlier epochs are remembered once they are over; others are not."""
    cluster = Cluster()
    listed = in_flight(a_spec("old"), OLD)
    cluster.join("w1", inflight=(listed,))
    cluster.beat("w1", inflight=(), finished=(finished("acme.old", OLD),))
    cluster.beat("w1", inflight=())
    cluster.beat("w1", inflight=())
    decisions = cluster.beat("w1", inflight=(listed,))
    assert differences(decisions) == [(DifferenceKind.STALE_ATTEMPT, "acme.old", "w1")]
    newer = in_flight(a_spec("old"), Attempt(EPOCH - 1, 6))
    decisions = cluster.beat("w1", inflight=(newer,))
    assert differences(decisions) == [(DifferenceKind.RUNS_UNLEASED, "acme.old", "w1")]


def test_of_two_runs_the_greater_attempt_stays() -> None:
    """Two workers list one job: the older attempt is aborted, wherever it is."""
    cluster, dispatch = one_job()
    older = in_flight(a_spec(), OLD)
    decisions = cluster.beat("w2", inflight=(older,))
    abort = only(Abort, decisions)
    assert (abort.worker, abort.attempt) == ("w2", OLD)
    assert differences(decisions) == [(DifferenceKind.RUNS_TWICE, "acme.j1", "w2")]
    (lease,) = cluster.scheduler.leases()
    assert (lease.worker, lease.attempt) == ("w1", dispatch.attempt)
    greater = in_flight(a_spec(), Attempt(EPOCH, 50))
    decisions = cluster.beat("w2", inflight=(greater,))
    abort = only(Abort, decisions)
    assert (abort.worker, abort.attempt, abort.reason) == (
        "w1",
        dispatch.attempt,
        Reason.DUPLICATE,
    )
    assert differences(decisions) == [(DifferenceKind.RUNS_TWICE, "acme.j1", "w1")]
    (lease,) = cluster.scheduler.leases()
    assert (lease.worker, lease.attempt) == ("w2", Attempt(EPOCH, 50))
    assert not of(Requeue, decisions)
    check_sums(cluster.scheduler)


def test_a_worker_that_runs_a_job_under_its_older_attempt_keeps_it() -> None:
    """It said `duplicate` to the new one: once the echo has passed, the older counts."""
    cluster = Cluster()
    cluster.join("w1")
    first = only(Dispatch, cluster.hold(a_spec()))
    older = cluster.listed("w1")
    cluster.answer(first, Unanswered.NO_RESPONDERS)
    second = only(Dispatch, cluster.beat("w1", inflight=()))
    assert cluster.beat("w1", echo=second.number - 1, inflight=older) == []
    cluster.answer(second, Answer.DUPLICATE)
    decisions = cluster.beat("w1", echo=second.number, inflight=older)
    assert differences(decisions) == [(DifferenceKind.LEASED_NOT_RUNNING, "acme.j1", "w1")]
    (lease,) = cluster.scheduler.leases()
    assert lease.attempt == first.attempt
    assert not of(Requeue, decisions)
    assert keys(Release, cluster.end(first)) == ["acme.j1"]


def test_a_later_brokers_attempts_are_none_of_ours() -> None:
    """This one is no longer the leader, and will hear of it."""
    cluster, _ = one_job()
    later = in_flight(a_spec(), Attempt(EPOCH + 1, 1))
    assert cluster.beat("w2", inflight=(later,), epoch=EPOCH + 1) == []
    assert len(cluster.scheduler.leases()) == 1


@pytest.mark.parametrize("lost", ["order", "answer", "first token", "end", "abort"])
def test_case_24_any_one_lost_message_heals_with_the_next_reports(lost: str) -> None:
    """Nothing is leased or waits for ever, and the sums are right."""
    cluster = Cluster()
    cluster.join("w1")
    dispatch = only(Dispatch, cluster.hold(a_spec()))
    match lost:
        case "order":
            cluster.answer(dispatch, Unanswered.TIMEOUT)
            dispatch = only(Dispatch, cluster.beat("w1", inflight=()))
        case "answer":
            cluster.answer(dispatch, Unanswered.TIMEOUT)
            cluster.beat("w1")
        case "first token":
            listed = in_flight(a_spec(), dispatch.attempt, prefilled=True)
            cluster.beat("w1", inflight=(listed,))
            assert cluster.scheduler.views.workers()[0].backlog_tokens == 0
        case "abort":
            cluster.cancel("acme.j1")
            assert of(Abort, cluster.beat("w1"))
        case _:
            pass
    ends = (finished(dispatch.key, dispatch.attempt, kind=Kind.COMPLETED),)
    assert keys(Release, cluster.beat("w1", inflight=(), finished=ends)) == ["acme.j1"]
    assert not cluster.scheduler.is_known("acme.j1")
    check_sums(cluster.scheduler)


def test_case_28_a_drained_worker_gets_nothing_finishes_all_and_says_so_once() -> None:
    """By an operator's word: told to the worker, nothing new, `drained` when the last job ended."""
    cluster = Cluster()
    cluster.join("w1")
    cluster.hold(a_spec("j1"), a_spec("j2"))
    one, two = of(Dispatch, cluster.decisions)
    decisions = cluster.step(DrainRequested(cluster.at_s, "w1"))
    order = only(DrainOrder, decisions)
    assert (order.worker, order.number, order.draining) == ("w1", 3, True)
    assert not of(Dispatch, cluster.hold(a_spec("j3")))
    assert not of(Drained, cluster.end(one))
    assert of(Drained, cluster.end(two)) == [Drained("w1")]
    assert not of(Drained, cluster.beat("w1", draining=True))


def test_an_idle_worker_is_drained_at_once() -> None:
    """Nothing to finish."""
    cluster = Cluster()
    cluster.join("w1")
    decisions = cluster.step(DrainRequested(cluster.at_s, "w1"))
    assert of(Drained, decisions) == [Drained("w1")]


def test_an_operators_word_stands_until_the_worker_has_heard_it() -> None:
    """A report that says otherwise is older, or the order was lost: it is said again."""
    cluster = Cluster()
    cluster.join("w1")
    cluster.step(DrainRequested(cluster.at_s, "w1"))
    decisions = cluster.beat("w1", draining=False)
    assert only(DrainOrder, decisions).draining
    assert not of(Dispatch, cluster.hold(a_spec()))
    assert not of(DrainOrder, cluster.beat("w1", draining=True))


def test_a_drain_taken_back_lets_it_work_again() -> None:
    """At once, in the same step; a second drain is told again."""
    cluster = Cluster()
    cluster.join("w1")
    cluster.step(DrainRequested(cluster.at_s, "w1"))
    cluster.hold(a_spec())
    decisions = cluster.step(DrainRequested(cluster.at_s, "w1", draining=False))
    assert not only(DrainOrder, decisions).draining
    assert keys(Dispatch, decisions) == ["acme.j1"]
    cluster.end(only(Dispatch, decisions))
    assert of(Drained, cluster.step(DrainRequested(cluster.at_s, "w1")))


def test_a_worker_that_drains_itself_is_said_drained_too() -> None:
    """SIGTERM: its own flag counts as an operator's word does."""
    cluster, dispatch = one_job()
    assert not of(Drained, cluster.beat("w1", draining=True))
    assert not of(DrainOrder, cluster.decisions)
    decisions = cluster.fail(dispatch, Reason.HANDED_BACK, charged=False)
    assert of(Drained, decisions) == [Drained("w1")]
    assert only(Dispatch, decisions).worker == "w2"


def test_an_unknown_worker_can_not_be_drained() -> None:
    """The service says so; here it is nothing."""
    cluster = Cluster()
    assert cluster.step(DrainRequested(cluster.at_s, "w9")) == []


def test_a_report_of_an_unknown_shape_of_time_is_taken_at_the_brokers_own() -> None:
    """An event that comes with an earlier time than the last does not turn the clock back."""
    cluster = Cluster()
    cluster.tick(10.0)
    beat = cluster.join("w1")
    assert beat == []
    cluster.step(WorkerReported(5.0, cluster.beats["w1"]))
    assert cluster.scheduler._mind.at_s == cluster.at_s
