"""Heartbeats: what they change, what they repair, and which of them say nothing."""

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
    Release,
    Requeue,
    Resync,
    WorkerGone,
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
    CacheSummary,
    Kind,
    Load,
    Outcome,
    Reason,
    Usage,
)
from tests.unit.core.cluster import (
    EPOCH,
    LANE,
    MODEL,
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

OLD = Attempt(EPOCH - 1, 5)


def differences(decisions: list[Decision]) -> list[tuple[DifferenceKind, str, str]]:
    """Each difference told: kind, job, worker."""
    return [(one.kind, one.key, one.worker) for one in of(Difference, decisions)]


def one_job() -> tuple[Cluster, Dispatch]:
    """A job on w1, accepted; w2 is free."""
    cluster = Cluster()
    cluster.join("w1")
    dispatch = only(Dispatch, cluster.hold(a_spec()))
    cluster.answer(dispatch, Answer.ACCEPTED)
    cluster.join("w2")
    return cluster, dispatch


# ---- what a report says -------------------------------------------------------------------------


def test_a_report_makes_a_worker_known_and_useful() -> None:
    """Models, slots, readiness, rates and load as it says."""
    cluster = Cluster()
    load = Load(3, 2, 500, 4000, 9000.0, 60.0)
    cluster.join("w1", models=("tiny", "other"), slots=7, load=load, incarnation=4)
    (view,) = cluster.scheduler.views.workers()
    assert (view.worker, view.phase, view.incarnation) == ("w1", "live", 4)
    assert (view.models, view.slots, view.ready) == (("tiny", "other"), 7, True)
    assert (view.kv_tokens_max, view.prefill_tokens_s, view.decode_tokens_s) == (4000, 9000.0, 60.0)
    assert cluster.scheduler._mind.fleet.workers["w1"].waiting == 2
    pools = {one.model: (one.workers, one.slots) for one in cluster.scheduler.views.pools()}
    assert pools == {"tiny": (1, 7), "other": (1, 7)}


def test_workers_get_dense_indexes_which_are_used_again() -> None:
    """The prefix index's bitsets stay small however many workers come and go."""
    cluster = Cluster()
    cluster.join("w1", "w2", "w3")
    workers = cluster.scheduler._mind.fleet.workers
    assert [workers[name].index for name in ("w1", "w2", "w3")] == [0, 1, 2]
    cluster.beat("w2", incarnation=2)
    assert workers["w2"].index == 1
    cluster.join("w4")
    assert workers["w4"].index == 3


@pytest.mark.parametrize(
    ("fields", "gets"),
    [
        ({"ready": False}, False),
        ({"draining": True}, False),
        ({"models": ("other",)}, False),
        ({"slots": 0}, False),
        ({}, True),
    ],
)
def test_a_worker_that_takes_nothing_gets_nothing(fields: dict[str, Any], *, gets: bool) -> None:
    """Not ready, draining, another model, no slots; and it gets the job once that is over."""
    cluster = Cluster()
    cluster.join("w1", **fields)
    assert bool(of(Dispatch, cluster.hold(a_spec()))) is gets
    check_sums(cluster.scheduler)
    again: dict[str, Any] = {"ready": True, "draining": False, "models": (MODEL,), "slots": 4}
    assert bool(of(Dispatch, cluster.beat("w1", **again))) is not gets
    check_sums(cluster.scheduler)


def test_more_slots_let_more_jobs_go_at_once() -> None:
    """In the step of the report; and so does more KV cache."""
    cluster = Cluster()
    cluster.join("w1", slots=1, load=Load(kv_tokens_max=400))
    cluster.hold_many(4)
    assert len(of(Dispatch, cluster.decisions)) == 1
    assert len(of(Dispatch, cluster.beat("w1", slots=4))) == 1
    assert len(of(Dispatch, cluster.beat("w1", load=Load(kv_tokens_max=4000)))) == 2


@pytest.mark.parametrize(("rate", "looks"), [(1000.0, False), (1100.0, False), (1101.0, True)])
def test_a_much_faster_worker_is_looked_at_again(rate: float, *, looks: bool) -> None:
    """What θ allows rises with the prefill rate; a quiver of the average is no reason."""
    cluster = Cluster()
    cluster.join("w1", load=Load(kv_tokens_max=200, prefill_tokens_s=1000.0))
    cluster.hold(a_spec())
    cluster.hold(a_spec("j2", prompt_tokens=120))
    before = cluster.router.placed
    cluster.beat("w1", load=Load(kv_tokens_max=200, prefill_tokens_s=rate))
    assert (cluster.router.placed > before) is looks


@pytest.mark.parametrize(("sequence", "incarnation"), [(1, 3), (0, 3), (2, 2), (9, 2)], ids=str)
def test_a_late_report_says_nothing(sequence: int, incarnation: int) -> None:
    """The same or an earlier sequence, or an earlier life, whatever it claims."""
    cluster = Cluster()
    cluster.join("w1", incarnation=3)
    cluster.hold(a_spec())
    before = cluster.scheduler.views.workers()
    late = cluster.beat(
        "w1", sequence=sequence, incarnation=incarnation, slots=1, ready=False, inflight=()
    )
    assert late == []
    assert cluster.scheduler.views.workers() == before
    assert cluster.scheduler.is_leased("acme.j1")


def test_a_new_life_ends_the_old_ones_leases() -> None:
    """All that ran before is gone: requeued in the same step, and the cache credit with it."""
    cluster, dispatch = one_job()
    decisions = cluster.beat("w1", incarnation=2, sequence=1, inflight=())
    assert only(WorkerGone, decisions).cause == "restarted"
    assert keys(Requeue, decisions) == [dispatch.key]
    assert cluster.scheduler._mind.fleet.workers["w1"].incarnation == 2
    check_sums(cluster.scheduler)


def test_case_28_jobs_handed_back_before_a_restart_are_not_charged() -> None:
    """The old life gave them back; its end charges nobody."""
    cluster, dispatch = one_job()
    cluster.fail(dispatch, Reason.HANDED_BACK, charged=False)
    decisions = cluster.beat("w1", incarnation=2, inflight=())
    assert not of(Requeue, decisions)
    assert not any(
        one.failure.charged for one in of(Requeue, cluster.decisions) if one.failure is not None
    )


def test_an_engine_restart_empties_the_cache_only() -> None:
    """The agent lives, its jobs go on; the prefix index forgets what it held."""
    cluster, _ = one_job()
    cluster.beat("w1")
    assert cluster.router.cache_lost_count == 0
    decisions = cluster.beat("w1", engine_incarnation=2)
    assert not of(Requeue, decisions)
    assert cluster.router.cache_lost_count == 1


def test_a_gap_in_the_summaries_asks_for_a_full_one() -> None:
    """The router says when; one request a report."""
    cluster = Cluster()
    assert not cluster.join("w1", summary=CacheSummary(sequence=1, full=True))
    cluster.router.summaries_fit = False
    assert cluster.beat("w1") == []
    decisions = cluster.beat("w1", summary=CacheSummary(sequence=7))
    assert decisions == [Resync("w1")]


def test_an_echo_of_another_epoch_does_not_count() -> None:
    """It numbers another broker's orders."""
    cluster, dispatch = one_job()
    cluster.answer(dispatch, Unanswered.TIMEOUT)
    assert not of(Requeue, cluster.beat("w1", epoch=EPOCH - 1, echo=50, inflight=()))
    assert not of(Requeue, cluster.beat("w1", epoch=EPOCH + 1, echo=50, inflight=()))
    assert of(Requeue, cluster.beat("w1", epoch=EPOCH, echo=50, inflight=()))


# ---- progress -----------------------------------------------------------------------------------


def test_a_report_moves_a_job_on() -> None:
    """Accepted, prefilled, tokens so far: as listed; a listed first token frees prefill room."""
    cluster = Cluster()
    cluster.join("w1")
    dispatch = only(Dispatch, cluster.hold(a_spec()))
    cluster.at_s += 1.0
    listed = in_flight(a_spec(), dispatch.attempt, output_tokens=7, prefilled=True)
    cluster.beat("w1", inflight=(listed,))
    (lease,) = cluster.scheduler.leases()
    assert (lease.accepted, lease.prefilled, lease.output_tokens) == (True, True, 7)
    assert lease.progressed_at_s == cluster.at_s
    (view,) = cluster.scheduler.views.workers()
    assert (view.backlog_tokens, view.decoding_jobs) == (0, 1)
    cluster.at_s += 1.0
    cluster.beat("w1", inflight=(listed,))
    assert lease.progressed_at_s == cluster.at_s - 1.0


def test_a_job_that_writes_more_than_expected_is_charged_while_it_runs() -> None:
    """Rows and lane see it before the end; the end corrects the rest."""
    cluster = Cluster(a_policy(QuotaRow(inflight_tokens_max=1000)))
    cluster.join("w1")
    learned = only(Dispatch, cluster.hold(a_spec("j0", output_tokens_max=50)))
    cluster.end(learned, usage=Usage(100, 0, 10))
    dispatch = only(Dispatch, cluster.hold(a_spec(output_tokens_max=50)))
    counters = cluster.scheduler._mind.queues.pool(MODEL).counters
    before = counters.counter(LANE, group=0)
    assert cluster.usage["all"] == (1, 160.0)
    for output_tokens, cost in ((30, 160.0), (40, 180.0), (50, 200.0)):
        listed = in_flight(a_spec(), dispatch.attempt, output_tokens=output_tokens, prefilled=True)
        cluster.beat("w1", inflight=(listed,))
        assert cluster.usage["all"] == (1, cost)
        assert counters.counter(LANE, group=0) == before + cost - 160.0
    assert counters.error_max == 80.0
    cluster.end(dispatch, usage=Usage(100, 0, 50))
    assert counters.counter(LANE, group=0) == before + 40.0
    check_sums(cluster.scheduler)


# ---- repairs ------------------------------------------------------------------------------------


def test_a_leased_job_that_is_not_running_is_requeued_uncharged() -> None:
    """Its order was processed, and it is neither listed nor finished."""
    cluster, dispatch = one_job()
    decisions = cluster.beat("w1", inflight=())
    assert differences(decisions) == [(DifferenceKind.LEASED_NOT_RUNNING, "acme.j1", "w1")]
    assert only(Difference, decisions).detail == "attempt 7.1"
    requeue = only(Requeue, decisions)
    assert (requeue.failure, requeue.not_before_s) == (None, 0.0)
    assert only(Dispatch, decisions).failures == ()
    assert only(Dispatch, decisions).attempt > dispatch.attempt


def test_a_report_made_before_the_order_arrived_changes_nothing() -> None:
    """Its echo is behind the order: even an accepted job is not listed there yet."""
    cluster, dispatch = one_job()
    assert cluster.beat("w1", echo=dispatch.number - 1, inflight=()) == []
    assert cluster.scheduler.is_leased("acme.j1")


def test_ends_in_a_report_count_like_ends_told_at_once() -> None:
    """Settled, and to be tried again; told again they change nothing."""
    cluster = Cluster()
    cluster.join("w1")
    cluster.hold(a_spec("j1"), a_spec("j2"))
    one, two = of(Dispatch, cluster.decisions)
    ends = (
        finished(one.key, one.attempt),
        finished(two.key, two.attempt, outcome=Outcome.RETRY, kind=None, reason=None),
    )
    decisions = cluster.beat("w1", inflight=(), finished=ends)
    assert keys(Release, decisions) == ["acme.j1"]
    failure = only(Requeue, decisions).failure
    assert failure is not None
    assert failure.reason is Reason.ENGINE_FAILED
    assert not of(Difference, decisions)
    assert cluster.beat("w1", inflight=(), finished=ends) == []


def test_a_report_that_was_on_its_way_when_a_job_ended_revives_nothing() -> None:
    """It still lists the job: one or two such reports are no difference."""
    cluster, dispatch = one_job()
    listed = cluster.listed("w1")
    cluster.end(dispatch)
    assert cluster.beat("w1", inflight=listed) == []
    assert cluster.beat("w1", inflight=listed) == []
    decisions = cluster.beat("w1", inflight=listed)
    assert differences(decisions) == [(DifferenceKind.STALE_ATTEMPT, "acme.j1", "w1")]


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
    assert (view.backlog_tokens, view.decoding_jobs, view.kv_tokens) == (0, 1, 150)
    (lease,) = cluster.scheduler.leases()
    assert lease.hit_tokens == 100


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


# ---- drain --------------------------------------------------------------------------------------


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
