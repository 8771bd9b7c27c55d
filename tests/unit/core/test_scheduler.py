"""The main way: hold, dispatch, end; receipts, expiry, start-up, policies, determinism."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

from broker.core.decisions import Dispatch, Expire, HeldBy, Queued, Release, Requeue
from broker.core.events import (
    DispatchAllowed,
    JobHeld,
    LinkChanged,
    PolicyChanged,
    QueueDepth,
    Tick,
    Unanswered,
)
from broker.core.order import SETTLE_DISPATCHES_MAX, STEP_DISPATCHES_MAX
from broker.core.policy import DEFAULT_BANDS, LanePolicy, LeasePolicy, QuotaRow, RoutingPolicy
from broker.core.scheduler import TICK_JOBS_MAX
from broker.wire.messages import Reason
from tests.unit.core.cluster import LANE, MODEL, Cluster, a_policy, a_spec, keys, of, only
from tests.unit.core.invariants import check_sums


def test_a_job_goes_to_a_free_worker_at_once() -> None:
    """A job that comes while a worker is free is dispatched in the same step, without a receipt."""
    cluster = Cluster()
    cluster.join("w1")
    decisions = cluster.hold(a_spec("j1", stream_sequence=9))
    dispatch = only(Dispatch, decisions)
    assert (dispatch.key, dispatch.worker, dispatch.number) == ("acme.j1", "w1", 1)
    assert (dispatch.stream_sequence, dispatch.enqueued_at_s) == (9, 1000.0)
    assert (dispatch.run_s_max, dispatch.stall_s) == (3600.0, 120.0)
    assert (dispatch.attempt.epoch, dispatch.attempt.number) == (cluster.epoch, 1)
    assert dispatch.explanation.policy == "least_loaded"
    assert dispatch.explanation.held_by is HeldBy.NOTHING
    assert len(decisions) == 1


def test_a_job_waits_and_goes_when_a_slot_frees() -> None:
    """With all slots taken a job gets one receipt, and goes in the step in which a slot frees."""
    cluster = Cluster()
    cluster.join("w1", slots=1)
    first = only(Dispatch, cluster.hold(a_spec("j1")))
    waits = cluster.hold(a_spec("j2"))
    assert [(one.key, one.position) for one in of(Queued, waits)] == [("acme.j2", 0)]
    ended = cluster.end(first)
    assert keys(Release, ended) == ["acme.j1"]
    assert keys(Dispatch, ended) == ["acme.j2"]
    assert only(Dispatch, ended).explanation.held_by is HeldBy.ROOM


def test_attempts_and_orders_are_numbered_without_gaps() -> None:
    """Attempts over all workers, orders for each."""
    cluster = Cluster()
    cluster.join("w1", "w2")
    cluster.hold_many(4)
    given = of(Dispatch, cluster.decisions)
    assert [one.attempt.number for one in given] == [1, 2, 3, 4]
    assert sorted((one.worker, one.number) for one in given) == [
        ("w1", 1),
        ("w1", 2),
        ("w2", 1),
        ("w2", 2),
    ]


# ---- receipts -----------------------------------------------------------------------------------


def test_a_receipt_tells_the_place_in_the_jobs_own_queue() -> None:
    """Jobs before it in (lane, band, model); those not pulled yet are behind it."""
    cluster = Cluster()
    cluster.step(QueueDepth(cluster.at_s, LANE, 2, MODEL, 1000))
    positions = [
        only(Queued, cluster.hold(spec)).position
        for spec in (
            a_spec("j1", stream_sequence=1),
            a_spec("j3", stream_sequence=3),
            a_spec("j2", stream_sequence=2),
            a_spec("b1", lane="beta"),
            a_spec("o1", model="other"),
            a_spec("c1", band=1),
        )
    ]
    assert positions == [0, 1, 1, 0, 0, 0]


def test_a_job_is_told_its_place_once() -> None:
    """Not again after a retry, a new policy, or the end of a pause in dispatching."""
    cluster = Cluster()
    cluster.hold(a_spec())
    cluster.step(DispatchAllowed(cluster.at_s, allowed=False))
    cluster.step(DispatchAllowed(cluster.at_s))
    cluster.step(PolicyChanged(cluster.at_s, a_policy(QuotaRow(inflight_jobs_max=5))))
    cluster.fail(only(Dispatch, cluster.join("w1")))
    cluster.wait(3.0)
    assert len(of(Queued, cluster.decisions)) == 1


def test_case_39_wait_estimates_are_finite_and_never_fall_with_the_place() -> None:
    """Whatever is known of the pool: no workers, some, many jobs done."""
    cluster = Cluster()

    def waits(prefix: str) -> list[float]:
        told = of(Queued, cluster.hold_many(30, prefix=prefix, band=2))
        return [one.wait_s for one in told]

    nobody = waits("a")
    assert nobody == [600.0] * 30
    cluster.join("w1", slots=2)
    some = waits("b")
    assert some == sorted(some)
    assert all(0 < one <= 600.0 for one in some)
    for _ in range(10):
        running = of(Dispatch, cluster.decisions)[-1]
        cluster.end(running, run_s=0.5)
    later = waits("c")
    assert later == sorted(later)
    assert later[0] < later[-1] < 600.0


# ---- expiry -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("band", "wait_s"), [(0, 10.0), (1, 60.0), (2, 600.0)])
def test_a_job_that_nobody_serves_waits_until_its_bands_longest_wait(
    band: int, wait_s: float
) -> None:
    """No servable worker is no refusal; at the longest wait it ends."""
    cluster = Cluster()
    cluster.hold(a_spec(band=band))
    assert not of(Expire, cluster.tick(wait_s - 0.1))
    assert of(Expire, cluster.tick(0.1)) == [Expire("acme.j1", Reason.WAIT_EXPIRED)]
    assert not cluster.scheduler.is_known("acme.j1")
    assert not cluster.tick(1000.0)
    check_sums(cluster.scheduler)


def test_batch_waits_as_long_as_it_must() -> None:
    """No longest wait; only its own deadline."""
    cluster = Cluster()
    cluster.hold(a_spec("j1", band=3), a_spec("j2", band=3, deadline_at_s=90_000.0))
    assert of(Expire, cluster.tick(88_999.9)) == []
    assert of(Expire, cluster.tick(0.1)) == [Expire("acme.j2", Reason.DEADLINE_EXPIRED)]
    assert not of(Expire, cluster.tick(1e6))


@pytest.mark.parametrize(
    ("deadline_at_s", "expires_at_s", "reason"),
    [
        (1030.0, 1030.0, Reason.DEADLINE_EXPIRED),
        (1060.0, 1060.0, Reason.DEADLINE_EXPIRED),
        (1061.0, 1060.0, Reason.WAIT_EXPIRED),
    ],
)
def test_the_nearer_of_deadline_and_longest_wait_ends_a_job(
    deadline_at_s: float, expires_at_s: float, reason: Reason
) -> None:
    """And the reason says which."""
    cluster = Cluster()
    cluster.hold(a_spec(band=1, deadline_at_s=deadline_at_s))
    assert not of(Expire, cluster.tick(expires_at_s - 1000.0 - 0.01))
    assert of(Expire, cluster.tick(0.02)) == [Expire("acme.j1", reason)]


def test_a_retried_job_gets_its_longest_wait_anew() -> None:
    """The time it ran is no wait; its place in line still counts from the enqueue time."""
    cluster = Cluster()
    cluster.join("w1")
    dispatch = only(Dispatch, cluster.hold(a_spec(band=1)))
    cluster.wait(100.0)
    cluster.beat("w1", ready=False)
    assert of(Requeue, cluster.fail(dispatch))
    assert not of(Expire, cluster.wait(59.0))
    assert keys(Expire, cluster.wait(2.0)) == ["acme.j1"]


def test_a_job_held_late_has_waited_already() -> None:
    """A broker that was away gives nobody a new longest wait."""
    cluster = Cluster()
    cluster.hold(a_spec(band=1, enqueued_at_s=950.0))
    assert keys(Expire, cluster.tick(10.0)) == ["acme.j1"]


def test_a_dispatched_job_does_not_expire_here() -> None:
    """Its worker keeps its deadline."""
    cluster = Cluster()
    cluster.hold(a_spec(deadline_at_s=1050.0))
    cluster.join("w1")
    cluster.wait(70.0)
    assert not of(Expire, cluster.decisions)


# ---- start-up -----------------------------------------------------------------------------------


def test_nothing_is_decided_before_start_up_is_over() -> None:
    """Until DispatchAllowed jobs only collect; then they go, or are told their place."""
    cluster = Cluster(started=False)
    cluster.join("w1", slots=1)
    assert cluster.hold(a_spec("j1", deadline_at_s=1001.0), a_spec("j2"), a_spec("j3")) == []
    assert cluster.tick(0.5) == []
    why = cluster.scheduler.views.why("acme.j1")
    assert why is not None
    assert why.held_by is HeldBy.START
    decisions = cluster.step(DispatchAllowed(cluster.at_s))
    assert keys(Dispatch, decisions) == ["acme.j1"]
    assert [(one.key, one.position) for one in of(Queued, decisions)] == [
        ("acme.j2", 0),
        ("acme.j3", 1),
    ]
    assert only(Dispatch, decisions).explanation.queue_s == 0.5


def test_jobs_that_expired_meanwhile_end_when_start_up_does() -> None:
    """Not before; by their own reason."""
    cluster = Cluster(started=False)
    cluster.hold(a_spec("j1", deadline_at_s=1001.0))
    assert cluster.tick(5.0) == []
    decisions = cluster.step(DispatchAllowed(cluster.at_s))
    assert decisions == [Expire("acme.j1", Reason.DEADLINE_EXPIRED)]
    assert cluster.tick() == []


def test_dispatching_can_be_stopped_again() -> None:
    """Stepping down: nothing goes any more, nothing is forgotten."""
    cluster = Cluster()
    cluster.step(DispatchAllowed(cluster.at_s, allowed=False))
    cluster.join("w1")
    assert cluster.hold(a_spec()) == []
    assert cluster.scheduler.is_known("acme.j1")
    assert keys(Dispatch, cluster.step(DispatchAllowed(cluster.at_s))) == ["acme.j1"]
    assert cluster.step(DispatchAllowed(cluster.at_s)) == []


def test_jobs_held_before_an_outage_go_before_newer_ones() -> None:
    """The link was down: order is by enqueue time, not by arrival here."""
    cluster = Cluster()
    cluster.join("w1", slots=1)
    cluster.step(LinkChanged(cluster.at_s, up=False))
    cluster.hold(a_spec("new", enqueued_at_s=1000.5), a_spec("old", enqueued_at_s=1000.0))
    assert keys(Dispatch, cluster.step(LinkChanged(cluster.at_s, up=True))) == ["acme.old"]


# ---- policy -------------------------------------------------------------------------------------


def test_an_equal_policy_changes_nothing() -> None:
    """Not even what was learned or looked at."""
    cluster = Cluster(a_policy(QuotaRow(inflight_jobs_max=3)))
    quotas = cluster.scheduler._mind.quotas
    assert cluster.step(PolicyChanged(cluster.at_s, a_policy(QuotaRow(inflight_jobs_max=3)))) == []
    assert cluster.scheduler._mind.quotas is quotas


def test_a_new_policy_counts_what_runs_and_waits_under_its_rows() -> None:
    """Atomic: from this step on every row is right, and who may go now goes."""
    cluster = Cluster(a_policy(QuotaRow(inflight_jobs_max=1)))
    cluster.join("w1")
    cluster.hold_many(4)
    rows = (QuotaRow(lane=LANE, inflight_jobs_max=3), QuotaRow(queued_jobs_max=9))
    decisions = cluster.step(PolicyChanged(cluster.at_s, a_policy(*rows)))
    assert len(of(Dispatch, decisions)) == 2
    one, two = cluster.scheduler.views.rows()
    assert (one.inflight_jobs, one.inflight_jobs_max) == (3, 3.0)
    assert (two.queued_jobs, two.queued_jobs_max) == (1, 9)
    check_sums(cluster.scheduler)


def test_a_new_policy_is_answered_in_order() -> None:
    """Who may go now goes by band and line, not in the order in which they were pulled."""
    cluster = Cluster(a_policy(QuotaRow(inflight_jobs_max=0)))
    cluster.join("w1")
    cluster.hold(a_spec("low", band=2), a_spec("high", band=1))
    decisions = cluster.step(PolicyChanged(cluster.at_s, a_policy(QuotaRow(inflight_jobs_max=1))))
    assert keys(Dispatch, decisions) == ["acme.high"]


def test_a_new_policy_takes_nothing_from_the_minute() -> None:
    """What runs was counted when it started."""
    row = QuotaRow(tokens_per_min=60_000)
    cluster = Cluster(a_policy(row))
    cluster.join("w1")
    cluster.hold(a_spec())
    cluster.tick(1.0)
    before = cluster.scheduler.views.rows()[0].bucket_tokens
    cluster.step(PolicyChanged(cluster.at_s, a_policy(row, QuotaRow(lane="beta"))))
    assert cluster.scheduler.views.rows()[0].bucket_tokens == before


def test_a_tighter_policy_takes_nothing_back() -> None:
    """What runs goes on, over the row; nothing new goes until it is under it."""
    cluster = Cluster()
    cluster.join("w1")
    cluster.hold_many(4)
    one, two, *_ = of(Dispatch, cluster.decisions)
    cluster.step(PolicyChanged(cluster.at_s, a_policy(QuotaRow(inflight_jobs_max=3))))
    assert cluster.usage["all"] == (4, 800.0)
    cluster.hold(a_spec("x"))
    assert not of(Dispatch, cluster.end(one))
    assert keys(Dispatch, cluster.end(two)) == ["acme.x"]


def test_a_row_per_worker_in_a_new_policy_knows_the_fleet() -> None:
    """Without waiting for the next change of it."""
    cluster = Cluster()
    cluster.join("w1", "w2")
    row = QuotaRow(inflight_jobs_max_per_worker=1.0)
    cluster.step(PolicyChanged(cluster.at_s, a_policy(row)))
    assert cluster.scheduler.views.rows()[0].inflight_jobs_max == 2.0
    cluster.join("w3")
    assert cluster.scheduler.views.rows()[0].inflight_jobs_max == 3.0


def test_new_weights_and_waits_hold_for_those_who_wait() -> None:
    """The longest wait of a job that waits already follows the new policy's order."""
    cluster = Cluster()
    cluster.hold(a_spec("a", band=2), a_spec("b", band=2, deadline_at_s=1300.0))
    bands = (
        *DEFAULT_BANDS[:2],
        structs.replace(DEFAULT_BANDS[2], wait_s_max=100.0),
        DEFAULT_BANDS[3],
    )
    lanes = (LanePolicy(name=LANE, weight=4.0), LanePolicy(name="beta"))
    policy = structs.replace(a_policy(), bands=bands, lanes=lanes)
    cluster.step(PolicyChanged(cluster.at_s, policy))
    queue = cluster.scheduler._mind.queues.queue(lane=LANE, band=2, model=MODEL)
    assert (queue.weight, queue.wait_s_max) == (4.0, 100.0)
    assert [entry[0] for entry in queue.fresh] == [1100.0, 1100.0]
    assert len(of(Expire, cluster.tick(100.0))) == 2


def test_a_longer_wait_in_a_new_policy_is_given_to_those_who_wait() -> None:
    """The old policy's alarm rings for nothing."""
    cluster = Cluster()
    cluster.hold(a_spec("a", band=1), a_spec("b", band=2))
    bands = (
        DEFAULT_BANDS[0],
        structs.replace(DEFAULT_BANDS[1], wait_s_max=100.0),
        structs.replace(DEFAULT_BANDS[2], wait_s_max=None),
        DEFAULT_BANDS[3],
    )
    cluster.step(PolicyChanged(cluster.at_s, structs.replace(a_policy(), bands=bands)))
    assert not of(Expire, cluster.tick(99.9))
    assert keys(Expire, cluster.tick(0.1)) == ["acme.a"]
    assert not of(Expire, cluster.tick(1e6))


def test_a_crowd_is_dealt_with_over_several_ticks() -> None:
    """So that no step holds up the loop: expiries, retries and dispatches, each by its bound."""
    cluster = Cluster()
    cluster.hold_many(TICK_JOBS_MAX + 10, band=0)
    assert len(of(Expire, cluster.tick(20.0))) == TICK_JOBS_MAX
    assert len(of(Expire, cluster.tick())) == 10
    assert not of(Expire, cluster.tick())
    cluster.hold_many(STEP_DISPATCHES_MAX + 10, prefix="x", band=2)
    assert len(of(Dispatch, cluster.join("w1", slots=1000))) == STEP_DISPATCHES_MAX
    assert len(of(Dispatch, cluster.tick())) == 10
    for dispatch in of(Dispatch, cluster.decisions)[: TICK_JOBS_MAX + 10]:
        cluster.answer(dispatch, Unanswered.UNSENT)
    assert len(of(Dispatch, cluster.tick(0.5))) == TICK_JOBS_MAX
    assert len(of(Dispatch, cluster.tick())) == 10


def test_a_settlement_is_cut_into_turns_of_the_loop() -> None:
    """A burst is dispatched a few jobs at a time, and nobody is told to wait who goes next."""
    cluster = Cluster()
    cluster.join("w1", slots=100)
    scheduler, jobs = cluster.scheduler, 2 * SETTLE_DISPATCHES_MAX + 3
    for number in range(jobs):
        job = a_spec(f"b{number}", stream_sequence=number + 1, enqueued_at_s=cluster.at_s)
        assert scheduler.step(JobHeld(cluster.at_s, job), settles=False) == []
    turns = [len(of(Dispatch, scheduler.settle()))]
    while scheduler.is_unsettled:
        decisions = scheduler.settle()
        assert all(isinstance(one, Dispatch) for one in decisions)
        turns.append(len(decisions))
    assert turns == [SETTLE_DISPATCHES_MAX, SETTLE_DISPATCHES_MAX, 3]
    assert scheduler.settle() == []


def test_the_router_and_the_leases_follow_the_policy() -> None:
    """New knobs hold from the next step on."""
    cluster = Cluster()
    policy = a_policy(
        routing=RoutingPolicy(prefill_tokens_s=123.0), leases=LeasePolicy(lease_s=20.0)
    )
    cluster.step(PolicyChanged(cluster.at_s, policy))
    assert cluster.router.prefill_tokens_s == 123.0
    cluster.join("w1")
    assert not cluster.tick(18.0)
    assert cluster.tick(2.0)


# ---- determinism --------------------------------------------------------------------------------


def test_the_same_life_gives_the_same_decisions_under_any_hash_seed() -> None:
    """Nothing iterates a set where order reaches a decision."""
    digests = {
        subprocess.run(
            [sys.executable, "-m", "tests.unit.core.a_life"],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[3],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("0", "77")
    }
    assert len(digests) == 1
    assert len(digests.pop()) == 2 * hashlib.sha256().digest_size


def test_time_never_goes_back() -> None:
    """An event with an earlier time is taken at the latest."""
    cluster = Cluster()
    cluster.step(Tick(2000.0))
    cluster.step(Tick(1500.0))
    assert cluster.scheduler._mind.at_s == 2000.0
