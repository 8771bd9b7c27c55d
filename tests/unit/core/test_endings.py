"""What is said of single jobs: answers, first tokens, ends, cancels; and whose word counts."""

from dataclasses import replace
from typing import Any

import pytest

from broker.core.decisions import (
    Abort,
    Cancel,
    Dispatch,
    DrainOrder,
    Probe,
    Release,
    Requeue,
)
from broker.core.events import JobEnded, ProbeAnswered, Unanswered
from broker.core.policy import QuotaRow
from broker.wire.messages import Answer, Attempt, Kind, Load, Reason, Usage
from tests.unit.core.cluster import (
    LANE,
    MODEL,
    Cluster,
    a_policy,
    a_spec,
    in_flight,
    keys,
    of,
    only,
)
from tests.unit.core.invariants import check_sums


def two_workers(policy: Any = None) -> tuple[Cluster, Dispatch]:
    """One job on one of two workers."""
    cluster = Cluster(policy)
    cluster.join("w1", "w2")
    return cluster, only(Dispatch, cluster.hold(a_spec()))


def counter(cluster: Cluster, lane: str = LANE) -> float:
    """A lane's virtual token counter."""
    return cluster.scheduler._mind.queues.pool(MODEL).counters.counter(lane, band=2)


# ---- answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [Answer.ACCEPTED, Answer.DUPLICATE])
def test_an_accepted_dispatch_runs(answer: Answer) -> None:
    """A duplicate of the same attempt is an acceptance: the first answer was lost."""
    cluster, dispatch = two_workers()
    assert cluster.answer(dispatch, answer) == []
    lease = only_lease(cluster)
    assert lease.accepted
    assert not lease.unanswered


def only_lease(cluster: Cluster) -> Any:
    """The one lease."""
    (lease,) = cluster.scheduler.leases()
    return lease


@pytest.mark.parametrize(
    "answer",
    [Answer.BUSY, Answer.STALE_EPOCH, Answer.DRAINING, Answer.UNKNOWN, Unanswered.NO_RESPONDERS],
)
def test_a_refused_dispatch_goes_elsewhere_at_once_and_is_not_charged(answer: Any) -> None:
    """Same step, other worker, same place in line, nothing counted against it."""
    cluster, dispatch = two_workers()
    cluster.at_s += 1.0
    decisions = cluster.answer(dispatch, answer)
    requeue = only(Requeue, decisions)
    assert (requeue.failure, requeue.not_before_s) == (None, 0.0)
    again = only(Dispatch, decisions)
    assert again.worker != dispatch.worker
    assert again.attempt > dispatch.attempt
    assert again.enqueued_at_s == 1000.0
    assert again.failures == ()
    check_sums(cluster.scheduler)


@pytest.mark.parametrize("answer", [Answer.BUSY, Answer.STALE_EPOCH, Answer.UNKNOWN])
def test_a_worker_that_refused_gets_nothing_until_its_next_report(answer: Answer) -> None:
    """Else the same job would go round in circles a thousand times a second."""
    cluster = Cluster()
    cluster.join("w1")
    decisions = cluster.answer(only(Dispatch, cluster.hold(a_spec())), answer)
    assert not of(Dispatch, decisions)
    assert not of(Dispatch, cluster.hold(a_spec("j2")))
    assert cluster.scheduler.views.workers()[0].held_off
    assert len(of(Dispatch, cluster.beat("w1"))) == 2
    assert not cluster.scheduler.views.workers()[0].held_off


def test_a_worker_that_says_draining_gets_nothing_while_it_drains() -> None:
    """Its own reports then say how long."""
    cluster = Cluster()
    cluster.join("w1")
    dispatch = only(Dispatch, cluster.hold(a_spec()))
    assert not of(Dispatch, cluster.answer(dispatch, Answer.DRAINING))
    assert cluster.scheduler.views.workers()[0].draining
    assert not of(Dispatch, cluster.beat("w1", draining=True))
    assert not of(DrainOrder, cluster.decisions)
    assert len(of(Dispatch, cluster.beat("w1", draining=False))) == 1


def test_a_worker_that_cannot_read_a_job_is_passed_over_for_it() -> None:
    """Unknown there: the job is tried elsewhere, also after that worker's next report."""
    cluster, dispatch = two_workers()
    cluster.answer(dispatch, Answer.UNKNOWN)
    why = cluster.scheduler.views.why("acme.j1")
    assert why is not None
    assert why.excluded == (dispatch.worker,)


def test_an_order_that_was_never_sent_waits_a_moment() -> None:
    """Its body could not be had: trying at once would only spin."""
    cluster, dispatch = two_workers()
    requeue = only(Requeue, cluster.answer(dispatch, Unanswered.UNSENT))
    assert requeue.not_before_s == cluster.at_s + 0.5
    assert not of(Dispatch, cluster.tick(0.4))
    assert only(Dispatch, cluster.tick(0.1)).key == "acme.j1"


def test_an_unanswered_order_is_not_given_twice() -> None:
    """Whether it runs is not known: it stays leased, and the worker is asked."""
    cluster, dispatch = two_workers()
    decisions = cluster.answer(dispatch, Unanswered.TIMEOUT)
    assert only(Probe, decisions).worker == dispatch.worker
    assert not of(Requeue, decisions)
    assert only_lease(cluster).unanswered
    assert not of(Requeue, cluster.beat(dispatch.worker, echo=0, inflight=()))


def test_a_timeout_after_the_job_was_listed_is_nothing() -> None:
    """A report overtook it."""
    cluster, dispatch = two_workers()
    cluster.beat(dispatch.worker)
    cluster.answer(dispatch, Unanswered.TIMEOUT)
    assert not only_lease(cluster).unanswered


def test_an_unanswered_order_is_requeued_once_the_echo_has_passed_it() -> None:
    """Processed and not listed is not running: it goes again, uncharged."""
    cluster, dispatch = two_workers()
    cluster.answer(dispatch, Unanswered.TIMEOUT)
    decisions = cluster.beat(dispatch.worker, echo=dispatch.number, inflight=())
    requeue = only(Requeue, decisions)
    assert (requeue.failure, requeue.not_before_s) == (None, 0.0)
    assert only(Dispatch, decisions).attempt > dispatch.attempt


def test_an_unanswered_order_that_is_listed_runs() -> None:
    """The list is the answer."""
    cluster, dispatch = two_workers()
    cluster.answer(dispatch, Unanswered.TIMEOUT)
    assert not of(Requeue, cluster.beat(dispatch.worker))
    lease = only_lease(cluster)
    assert (lease.accepted, lease.unanswered) == (True, False)


def test_a_lost_order_that_no_later_one_follows_is_found_by_asking() -> None:
    """Reports without it ask again; the probe's own number moves the echo past it."""
    cluster, dispatch = two_workers()
    probe = only(Probe, cluster.answer(dispatch, Unanswered.TIMEOUT))
    assert not of(Probe, cluster.beat(dispatch.worker, echo=0, inflight=())), "one is out already"
    missed = ProbeAnswered(cluster.at_s, dispatch.worker, None, Unanswered.TIMEOUT)
    assert not of(Requeue, cluster.step(missed))
    again = only(Probe, cluster.beat(dispatch.worker, echo=0, inflight=()))
    assert again.number > probe.number
    assert of(Requeue, cluster.beat(dispatch.worker, echo=again.number, inflight=()))


@pytest.mark.parametrize("field", ["attempt", "worker", "key"])
def test_an_answer_for_another_attempt_changes_nothing(field: str) -> None:
    """Fencing: old attempts, other workers, unknown jobs."""
    cluster, dispatch = two_workers()
    other = {"attempt": Attempt(7, 99), "worker": "w9", "key": "acme.j9"}[field]
    changed: Any = {field: other}
    assert cluster.answer(replace(dispatch, **changed), Answer.BUSY) == []
    assert only_lease(cluster).attempt == dispatch.attempt


def test_case_13_refusals_give_everything_back() -> None:
    """A hundred refused dispatches: rows, buckets and the lane's counter are as before."""
    rows = (QuotaRow(lane=LANE, tokens_per_min=60_000), QuotaRow(inflight_jobs_max=10))
    cluster = Cluster(a_policy(*rows))
    cluster.join("w1")
    cluster.hold(a_spec("keep", lane="beta"))
    cluster.tick()
    cluster.hold(a_spec())
    dispatch = only(Dispatch, cluster.wait(1.0))
    bucket = cluster.scheduler.views.rows()[0].bucket_tokens
    lane = counter(cluster)
    for _ in range(100):
        cluster.answer(dispatch, Answer.BUSY)
        dispatch = only(Dispatch, cluster.beat("w1"))
    assert cluster.scheduler.views.rows()[0].bucket_tokens == bucket
    assert cluster.usage["all"] == (2, 400.0)
    assert counter(cluster) == lane


# ---- first tokens -------------------------------------------------------------------------------


def test_a_first_token_frees_prefill_room_once() -> None:
    """The prompt leaves the backlog; a repeat changes nothing."""
    cluster, dispatch = two_workers()
    view = next(one for one in cluster.scheduler.views.workers() if one.worker == dispatch.worker)
    assert (view.backlog_tokens, view.decoding_jobs) == (100, 0)
    for _ in range(2):
        cluster.first_token(dispatch)
        view = next(
            one for one in cluster.scheduler.views.workers() if one.worker == dispatch.worker
        )
        assert (view.backlog_tokens, view.decoding_jobs) == (0, 1)
    assert only_lease(cluster).accepted


def test_a_first_token_of_another_attempt_changes_nothing() -> None:
    """Fencing."""
    cluster, dispatch = two_workers()
    cluster.first_token(replace(dispatch, attempt=Attempt(7, 99)))
    assert not only_lease(cluster).prefilled


def test_the_engines_word_on_the_hit_is_told_once() -> None:
    """At the first token where it comes then, else at the end."""
    cluster, dispatch = two_workers()
    cluster.first_token(dispatch, cached_tokens=64)
    cluster.end(dispatch, usage=Usage(100, 70, 5))
    late = only(Dispatch, cluster.hold(a_spec("j2")))
    cluster.first_token(late)
    cluster.end(late, usage=Usage(100, 70, 5))
    assert cluster.router.hits_seen == [("acme.j1", 64), ("acme.j2", 70)]


def test_an_engine_that_tells_no_hits_is_not_distrusted() -> None:
    """No word on cached tokens is no miss; a hit that was predicted and did not come is one."""
    cluster, dispatch = two_workers()
    cluster.end(dispatch, usage=Usage(100, 0, 5), predicted_hit_tokens=0)
    missed = only(Dispatch, cluster.hold(a_spec("j2")))
    cluster.end(missed, usage=Usage(100, 0, 5), predicted_hit_tokens=64)
    assert cluster.router.hits_seen == [("acme.j2", 0)]


# ---- ends ---------------------------------------------------------------------------------------


def test_an_end_frees_and_releases_once() -> None:
    """Told as often as it may be: one release, and the lane pays what was used."""
    cluster, dispatch = two_workers()
    assert counter(cluster) == 200.0
    assert cluster.end(dispatch, usage=Usage(100, 40, 10)) == [Release("acme.j1")]
    assert counter(cluster) == 80.0
    assert cluster.end(dispatch) == []
    assert not cluster.scheduler.is_known("acme.j1")
    check_sums(cluster.scheduler)


def test_an_end_does_not_refill_the_bucket() -> None:
    """What was started a minute was started, however soon it ended; so with a failure."""
    for ends in (True, False):
        cluster = Cluster(a_policy(QuotaRow(tokens_per_min=60_000)))
        cluster.join("w1")
        cluster.hold(a_spec())
        dispatch = only(Dispatch, cluster.tick(1.0))
        before = cluster.scheduler.views.rows()[0].bucket_tokens
        cluster.end(dispatch) if ends else cluster.fail(dispatch)
        assert cluster.scheduler.views.rows()[0].bucket_tokens == before


@pytest.mark.parametrize(
    ("fields", "paid"),
    [
        ({"usage": Usage(100, 0, 80)}, 260.0),
        ({"usage": Usage(100, 150, 1)}, 2.0),
        ({"ran": False, "usage": Usage()}, 0.0),
        ({"usage": Usage()}, 200.0),
        ({"usage": Usage(), "kind": Kind.CANCELLED}, 100.0),
        ({"usage": Usage(), "kind": Kind.FAILED}, 100.0),
    ],
)
def test_a_lane_pays_what_its_job_used(fields: dict[str, Any], paid: float) -> None:
    """By the engine's count; nothing for a job found settled; without a count what is known."""
    cluster, dispatch = two_workers()
    cluster.end(dispatch, **fields)
    assert counter(cluster) == paid


def test_only_completed_jobs_teach_the_expected_output() -> None:
    """A cancelled or failed job's length says nothing of the next one's."""
    cluster, dispatch = two_workers()
    cluster.end(dispatch, kind=Kind.CANCELLED, usage=Usage(100, 0, 0))
    costs = cluster.scheduler._mind.costs
    assert costs.expected_output_tokens(a_spec()) == 50
    again = only(Dispatch, cluster.hold(a_spec("j2")))
    cluster.end(again, usage=Usage(100, 0, 10))
    assert costs.expected_output_tokens(a_spec()) == 30
    assert only(Dispatch, cluster.hold(a_spec("j3"))) is not None
    assert only_lease(cluster).cost_tokens == 160.0


def test_a_failure_of_an_old_attempt_changes_nothing() -> None:
    """Fencing: only the lease's own attempt can fail it."""
    cluster, dispatch = two_workers()
    assert cluster.fail(replace(dispatch, attempt=Attempt(7, 99))) == []
    assert cluster.fail(replace(dispatch, key="acme.j9")) == []
    assert cluster.scheduler.is_leased("acme.j1")


def test_a_result_after_revocation_is_kept_and_the_other_attempt_aborted() -> None:
    """The first record stands, whoever wrote it: the second run is stopped and the job released."""
    cluster, first = two_workers()
    other = "w2" if first.worker == "w1" else "w1"
    cluster.beat(first.worker, incarnation=2, inflight=())
    second = only(Dispatch, cluster.wait(1.0))
    decisions = cluster.end(first, incarnation=1)
    abort = only(Abort, decisions)
    assert (abort.worker, abort.attempt, abort.reason) == (
        second.worker,
        second.attempt,
        Reason.DUPLICATE,
    )
    assert keys(Release, decisions) == ["acme.j1"]
    assert not cluster.scheduler.is_known("acme.j1")
    assert other in cluster.beats


def test_a_result_after_revocation_drops_the_waiting_job() -> None:
    """It waits out its back-off while its record stands already."""
    cluster = Cluster()
    cluster.join("w1")
    first = only(Dispatch, cluster.hold(a_spec()))
    cluster.beat("w1", incarnation=2, inflight=())
    assert cluster.end(first, incarnation=1) == [Release("acme.j1")]
    assert not cluster.wait(5.0)


def test_an_end_of_an_unknown_job_is_nothing() -> None:
    """Reports repeat ends until they are heard."""
    cluster, dispatch = two_workers()
    assert cluster.end(replace(dispatch, key="acme.j9")) == []


# ---- ended elsewhere ----------------------------------------------------------------------------


def test_a_record_found_elsewhere_ends_a_waiting_job() -> None:
    """Released, and nothing is left."""
    cluster = Cluster()
    cluster.hold(a_spec())
    assert cluster.step(JobEnded(cluster.at_s, "acme.j1")) == [Release("acme.j1")]
    assert cluster.step(JobEnded(cluster.at_s, "acme.j1")) == []
    check_sums(cluster.scheduler)


def test_a_record_found_elsewhere_stops_the_run() -> None:
    """Aborted and released at once; the report that still lists it is no difference."""
    cluster, dispatch = two_workers()
    listed = cluster.listed(dispatch.worker)
    decisions = cluster.step(JobEnded(cluster.at_s, "acme.j1"))
    assert only(Abort, decisions).reason is Reason.DUPLICATE
    assert keys(Release, decisions) == ["acme.j1"]
    assert counter(cluster) == 200.0
    assert cluster.beat(dispatch.worker, inflight=listed) == []


# ---- cancels ------------------------------------------------------------------------------------


def test_a_waiting_job_is_cancelled_at_once() -> None:
    """Its record is the broker's to write."""
    cluster = Cluster()
    cluster.hold(a_spec())
    assert cluster.cancel("acme.j1") == [Cancel("acme.j1")]
    assert cluster.cancel("acme.j1") == []
    assert not cluster.scheduler.is_known("acme.j1")


def test_a_running_job_is_aborted_and_forgotten_when_its_worker_says_so() -> None:
    """One order however often it is asked for; the record is the agent's to write."""
    cluster, dispatch = two_workers()
    abort = only(Abort, cluster.cancel("acme.j1"))
    assert (abort.worker, abort.attempt, abort.reason) == (
        dispatch.worker,
        dispatch.attempt,
        Reason.CANCELLED,
    )
    assert abort.number == dispatch.number + 1
    assert cluster.cancel("acme.j1") == []
    assert cluster.end(dispatch, kind=Kind.CANCELLED) == [Release("acme.j1")]


def test_a_lost_abort_is_sent_again() -> None:
    """The worker processed later orders and still runs it."""
    cluster, dispatch = two_workers()
    abort = only(Abort, cluster.cancel("acme.j1"))
    assert not of(Abort, cluster.beat(dispatch.worker, echo=dispatch.number))
    again = only(Abort, cluster.beat(dispatch.worker, echo=abort.number))
    assert (again.reason, again.number) == (Reason.CANCELLED, abort.number + 1)


def test_a_cancelled_job_that_its_worker_no_longer_lists_is_cancelled_here() -> None:
    """The abort was heard and its word lost: the record is found or written by the broker."""
    cluster, dispatch = two_workers()
    cluster.cancel("acme.j1")
    decisions = cluster.beat(dispatch.worker, inflight=())
    assert keys(Cancel, decisions) == ["acme.j1"]
    assert not of(Requeue, decisions)


def test_case_2_a_cancel_at_any_moment_leaves_the_ledger_empty() -> None:
    """Before, between and after answer, first token and end: all sums are back at zero."""
    for steps in range(4):
        cluster, dispatch = two_workers(a_policy(QuotaRow(inflight_tokens_max=1000)))
        if steps > 0:
            cluster.answer(dispatch, Answer.ACCEPTED)
        if steps > 1:
            cluster.first_token(dispatch)
        if steps > 2:
            listed = in_flight(a_spec(), dispatch.attempt, output_tokens=70, prefilled=True)
            cluster.beat(dispatch.worker, inflight=(listed,))
        cluster.cancel("acme.j1")
        cluster.end(dispatch, kind=Kind.CANCELLED, usage=Usage())
        check_sums(cluster.scheduler)
        assert cluster.usage["all"] == (0, 0.0)
        assert all(
            (one.inflight_jobs, one.backlog_tokens, one.decoding_jobs, one.kv_tokens)
            == (0, 0, 0, 0)
            for one in cluster.scheduler.views.workers()
        )


def test_case_3_simultaneous_jobs_spread_between_two_reports() -> None:
    """Eight equal jobs at once on four workers: two each, by what was given."""
    cluster = Cluster()
    cluster.join("w1", "w2", "w3", "w4", load=Load(waiting=0))
    cluster.hold_many(8)
    given = [one.worker for one in of(Dispatch, cluster.decisions)]
    assert sorted(given) == ["w1", "w1", "w2", "w2", "w3", "w3", "w4", "w4"]


def test_case_14_usage_is_the_set_of_leases_however_long_they_run() -> None:
    """A job of an hour holds its place in every row for an hour."""
    cluster = Cluster(a_policy(QuotaRow(inflight_jobs_max=1)))
    cluster.join("w1")
    dispatch = only(Dispatch, cluster.hold(a_spec()))
    cluster.answer(dispatch, Answer.ACCEPTED)
    cluster.hold(a_spec("j2", band=3))
    for minute in range(60):
        cluster.wait(59.0)
        cluster.tick(1.0)
        listed = in_flight(a_spec(), dispatch.attempt, output_tokens=minute + 1, prefilled=True)
        assert not of(Dispatch, cluster.beat("w1", inflight=(listed,)))
    assert keys(Dispatch, cluster.end(dispatch)) == ["acme.j2"]
