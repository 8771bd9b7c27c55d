"""Heartbeats: what they change, what they repair, and which of them say nothing."""

from typing import Any

import pytest

from broker.core.decisions import (
    Difference,
    DifferenceKind,
    Dispatch,
    Release,
    Requeue,
    Resync,
    WorkerGone,
)
from broker.core.events import (
    Unanswered,
)
from broker.core.policy import QuotaRow
from broker.wire.messages import (
    CacheSummary,
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
from tests.unit.core.listings import OLD, differences, one_job


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


def test_a_model_that_is_listed_twice_is_served_once() -> None:
    """Else its slots counted twice, and each later report of that worker failed."""
    cluster = Cluster()
    cluster.join("w1", models=("tiny", "tiny", "other"), slots=7)
    pools = {one.model: (one.workers, one.slots) for one in cluster.scheduler.views.pools()}
    assert pools == {"tiny": (1, 7), "other": (1, 7)}
    cluster.beat("w1", models=("other", "other"))
    (view,) = cluster.scheduler.views.workers()
    assert view.models == ("other",)
    check_sums(cluster.scheduler)


def test_a_worker_says_whether_its_engine_caches_by_slot() -> None:
    """From its first report on, and anew with each."""
    cluster = Cluster()
    cluster.beat("w1", cache_sequences=3)
    worker = cluster.scheduler._mind.fleet.workers["w1"]
    assert worker.cache_sequences == 3
    cluster.beat("w1", cache_sequences=0)
    assert worker.cache_sequences == 0


def test_reports_teach_how_long_a_step_takes() -> None:
    """Each rate is learned with the KV tokens that the worker was given; a report without one
    teaches nothing, and leaves what was known.
    """
    cluster = Cluster()
    cluster.join("w1", load=Load(decode_tokens_s=50.0))
    worker = cluster.scheduler._mind.fleet.workers["w1"]
    rate = worker.own_decode_rate
    assert (rate.step_s(0), rate.slope_s) == (0.02, 0.0)
    cluster.beat("w1", load=Load())
    assert rate.weight == 1.0
    (view,) = cluster.scheduler.views.workers()
    assert view.decode_tokens_s == 50.0
    cluster.hold(a_spec(prompt_tokens=9950))
    cluster.beat("w1", load=Load(decode_tokens_s=25.0))
    assert rate.slope_s == pytest.approx(0.02 / 10_000)
    assert rate.step_s(20_000) == pytest.approx(0.06)
    assert worker.decode_rate.step_s(20_000) == pytest.approx(0.06)


def test_a_worker_that_joins_is_as_quick_as_its_kin() -> None:
    """By the models, slots and KV cache that they say they have."""
    cluster = Cluster()
    cluster.join("w1", load=Load(kv_tokens_max=4000, decode_tokens_s=50.0))
    cluster.join("w2", load=Load(kv_tokens_max=4000))
    cluster.join("w3", load=Load(kv_tokens_max=9000))
    workers = cluster.scheduler._mind.fleet.workers
    steps_s = [workers[name].decode_rate.step_s(0) for name in ("w1", "w2", "w3")]
    assert steps_s == [0.02, 0.02, 0.0]


def test_a_rate_is_learned_with_the_kv_that_was_there_while_answers_grew() -> None:
    """Not with what happens to be there at the report: a short job came and went in between.

    With what was there at the report, both readings would lie at the long job's KV, and teach no
    slope.
    """
    cluster = Cluster()
    cluster.join("w1", load=Load(decode_tokens_s=50.0))
    worker = cluster.scheduler._mind.fleet.workers["w1"]
    long = only(Dispatch, cluster.hold(a_spec("long", prompt_tokens=9_950)))
    cluster.first_token(long)
    cluster.tick(1.0)
    cluster.beat("w1", load=Load(decode_tokens_s=50.0))
    alone = worker.own_decode_rate.kv_mean
    short = only(Dispatch, cluster.hold(a_spec("short", prompt_tokens=4_950)))
    cluster.first_token(short)
    cluster.tick(0.5)
    cluster.end(short)
    cluster.tick(0.5)
    assert worker.kv_over_time.answer_s == pytest.approx(1.0)
    cluster.beat("w1", load=Load(decode_tokens_s=40.0))
    # Two answers beside each other for half a second, then one for as long.
    seen = worker.own_decode_rate
    assert seen.kv_mean == pytest.approx((2 * alone + (2 * 15_000 + 10_000) / 3) / 3, rel=0.01)


def test_reports_teach_how_much_kv_cache_jobs_share() -> None:
    """What an engine uses beyond what its listed jobs added was there before them."""
    cluster = Cluster()
    cluster.join("w1", inflight=(in_flight(a_spec(), OLD, prefilled=True, output_tokens=100),))
    cluster.beat("w1", load=Load(kv_tokens_used=290))
    (view,) = cluster.scheduler.views.workers()
    assert view.kv_base_tokens == 90


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
    before = counters.counter(LANE, band=2)
    assert cluster.usage["all"] == (1, 160.0)
    for output_tokens, cost in ((30, 160.0), (40, 180.0), (50, 200.0)):
        listed = in_flight(a_spec(), dispatch.attempt, output_tokens=output_tokens, prefilled=True)
        cluster.beat("w1", inflight=(listed,))
        assert cluster.usage["all"] == (1, cost)
        assert counters.counter(LANE, band=2) == before + cost - 160.0
    assert counters.period.error_max == 80.0
    cluster.end(dispatch, usage=Usage(100, 0, 50))
    assert counters.counter(LANE, band=2) == before + 40.0
    check_sums(cluster.scheduler)


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
