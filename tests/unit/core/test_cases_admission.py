"""Two more of the kind of each case 11 to 19, 39 and 40: who may run, who must wait, who is told.

The cases themselves stand on the page of properties, each beside its test.
"""

import random
from typing import Any

import pytest

from broker.core.decisions import Abort, DeadLetter, Dispatch, Queued, Reject, Requeue
from broker.core.events import DispatchAllowed, DrainRequested, PolicyChanged
from broker.core.policy import DEFAULT_BANDS, LanePolicy, OrderPolicy, Policy, QuotaRow
from broker.core.scaling import scaling_of
from broker.wire.messages import Answer, Reason, Usage
from tests.unit.core.cluster import (
    EPOCH,
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
from tests.unit.core.one_slot import one_slot, shares_of, work_of

_FIELDS: dict[str, Any] = {"models": (MODEL,), "order": OrderPolicy(lane_slack_tokens=0.0)}

# ---- 11: low priority starves --------------------------------------------------------------------


def test_11_batch_gets_its_share_below_standard_work_alone() -> None:
    """Not only people stand above it: a crowd of standard jobs leaves it its twentieth, too."""
    cluster, dispatch = one_slot()
    cluster.hold_many(400, band=2, prefix="crowd")
    cluster.hold_many(100, band=3, prefix="line")
    shares = shares_of(cluster, dispatch, count=300)
    assert shares[3] == pytest.approx(DEFAULT_BANDS[3].guaranteed_share, abs=0.02)


def test_11_a_lane_of_little_weight_is_served_by_its_weight() -> None:
    """One part in 21, and never none."""
    lanes = (LanePolicy(name=LANE, weight=20.0), LanePolicy(name="beta", weight=1.0))
    cluster, dispatch = one_slot(Policy(**_FIELDS, lanes=lanes))
    cluster.hold_many(400, band=2)
    cluster.hold_many(100, band=2, lane="beta")
    work = work_of(cluster, dispatch, count=210)
    assert work["beta"] / sum(work.values()) == pytest.approx(1 / 21, abs=0.01)


# ---- 12: all slots are taken by what is less urgent ----------------------------------------------


def test_12_standard_work_leaves_people_their_floor_too() -> None:
    """While people's jobs run, a crowd of standard ones takes all slots but the floor's."""
    cluster = Cluster()
    cluster.join("w1", slots=10)
    cluster.hold(a_spec("chat", band=1))
    cluster.hold_many(30, band=2, prefix="crowd")
    assert len(cluster.scheduler.leases()) == 9
    assert keys(Dispatch, cluster.hold(a_spec("urgent", band=0))) == ["acme.urgent"]


def test_12_a_lost_worker_takes_its_share_of_the_floor_and_no_more() -> None:
    """Of 40 slots batch leaves 4; with 20 left, what it has may end, and 2 stay free again."""
    cluster = Cluster()
    cluster.join("w1", "w2", "w3", "w4", slots=10)
    running = of(Dispatch, cluster.hold_many(60, band=3))
    assert len(running) == 36
    cluster.beats.pop("w3")
    cluster.beats.pop("w4")
    cluster.wait(30.0)
    on_the_rest = [one for one in cluster.scheduler.leases() if one.worker in ("w1", "w2")]
    assert len(on_the_rest) <= 20
    for lease in on_the_rest[:3]:
        cluster.end(next(one for one in running if one.key == lease.job.key))
    assert len(cluster.scheduler.leases()) <= 18
    assert keys(Dispatch, cluster.hold(a_spec("urgent", band=0))) == ["acme.urgent"]


# ---- 13: what was refused counts -----------------------------------------------------------------


def test_13_a_deadline_that_cannot_be_met_costs_nobody_anything() -> None:
    """A thousand such refusals: rows, counters and shares stand as they did."""
    cluster, dispatch = one_slot(a_policy(QuotaRow(lane=LANE, inflight_jobs_max=4)))
    cluster.hold_many(50, band=2)
    before = _books(cluster)
    for n in range(1000):
        job = a_spec(f"late{n}", band=2, deadline_at_s=cluster.at_s + 0.001)
        assert of(Reject, cluster.hold(job))
    assert _books(cluster) == before
    assert of(Dispatch, cluster.end(dispatch))


def test_13_a_full_queue_refuses_without_end_and_serves_as_if_nobody_had_come() -> None:
    """The lane that knocks most is not served less, nor more, for that."""
    rows = tuple(QuotaRow(lane=lane, queued_jobs_max=20) for lane in (LANE, "beta"))
    cluster, dispatch = one_slot(a_policy(*rows))
    for lane in (LANE, "beta"):
        cluster.hold_many(20, band=2, lane=lane, prefix=lane)
    refused = of(Reject, cluster.hold_many(500, band=2, prefix="more"))
    assert {one.reason for one in refused} == {Reason.QUEUE_FULL}
    work = work_of(cluster, dispatch, count=30)
    assert work[LANE] == pytest.approx(work["beta"], abs=200.0)


def _books(cluster: Cluster) -> object:
    views = cluster.scheduler.views
    pools = [(one.fairness_gap, one.fairness_bound, one.work_tokens) for one in views.pools()]
    return cluster.usage, pools, [one.queued_jobs for one in views.rows()]


# ---- 14: a counter runs out while its job runs ---------------------------------------------------


def test_14_tokens_in_flight_are_held_through_a_takeover() -> None:
    """A row full of long jobs is as full for the next leader, who pulls as many again."""
    row = QuotaRow(lane=LANE, inflight_tokens_max=400)
    old = Cluster(a_policy(row))
    old.join("w1")
    running = of(Dispatch, old.hold_many(2))
    new = Cluster(a_policy(row), started=False, epoch=EPOCH + 1)
    listed = tuple(in_flight(a_spec(f"j{n}"), one.attempt) for n, one in enumerate(running))
    new.join("w1", inflight=listed)
    new.step(DispatchAllowed(new.at_s))
    assert not of(Dispatch, new.hold_many(2, prefix="k"))
    assert len(of(Dispatch, new.end(running[0]))) == 1


def test_14_a_reload_in_the_middle_forgets_nothing_that_runs() -> None:
    """Rows come, go and come back while a job runs: it counts in each that matches."""
    cluster = Cluster(a_policy(QuotaRow(lane=LANE, inflight_jobs_max=1)))
    cluster.join("w1")
    only(Dispatch, cluster.hold(a_spec()))
    cluster.step(PolicyChanged(cluster.at_s, a_policy()))
    cluster.step(PolicyChanged(cluster.at_s, a_policy(QuotaRow(band=2, inflight_jobs_max=1))))
    assert not of(Dispatch, cluster.hold(a_spec("j2")))
    check_sums(cluster.scheduler)


# ---- 15: a retry keeps what it had ---------------------------------------------------------------


def test_15_a_thousand_workers_die_under_their_jobs_and_usage_is_zero() -> None:
    """Not the attempt fails but the worker goes: nothing of either is counted afterwards."""
    rng = random.Random(15)
    cluster = Cluster(a_policy(QuotaRow(inflight_jobs_max=8, inflight_tokens_max=4000)))
    for n in range(1000):
        name = f"w{n % 3}"
        cluster.beat(name, incarnation=n + 1, sequence=1, echo=0, inflight=())
        cluster.hold(a_spec(f"j{n}", enqueued_at_s=cluster.at_s, band=rng.randrange(4)))
        cluster.tick(0.01)
        if n % 100 == 0:
            check_sums(cluster.scheduler)
    for n in range(3):
        cluster.beat(f"w{n}", incarnation=2000 + n, sequence=1, echo=0, inflight=(), ready=False)
    assert cluster.usage["all"] == (0, 0.0)
    check_sums(cluster.scheduler)


def test_15_a_dead_letter_gives_everything_back() -> None:
    """The last failure of all frees what the first attempt took."""
    cluster = Cluster(a_policy(QuotaRow(lane=LANE, inflight_jobs_max=1)))
    cluster.join("w1", "w2", "w3", "w4")
    dispatch = only(Dispatch, cluster.hold(a_spec()))
    while not of(DeadLetter, cluster.fail(dispatch)):
        dispatch = only(Dispatch, cluster.wait(5.0))
    assert set(cluster.usage.values()) == {(0, 0.0)}
    assert keys(Dispatch, cluster.hold(a_spec("j2"))) == ["acme.j2"]


# ---- 16: two take from each other for ever -------------------------------------------------------


def test_16_lenders_and_borrowers_in_turn_abort_nothing() -> None:
    """Two rows that lend each other all they have, both in demand: each ends where it began."""
    rows = tuple(
        QuotaRow(lane=lane, inflight_jobs_max=2, lendable_share=1.0, ceiling_ratio=2.0)
        for lane in (LANE, "beta")
    )
    cluster = Cluster(a_policy(*rows))
    cluster.join("w1", slots=4)
    running = of(Dispatch, cluster.hold_many(30, prefix="a"))
    assert len(running) == 4
    running += of(Dispatch, cluster.hold_many(30, prefix="b", lane="beta"))
    while running:
        running += of(Dispatch, cluster.end(running.pop(0)))
    assert not of(Abort, cluster.decisions)
    assert not of(Requeue, cluster.decisions)
    assert len(of(Dispatch, cluster.decisions)) == 60


def test_16_two_models_that_want_one_row_both_get_it() -> None:
    """Large jobs of two models and one row over both: who keeps it first goes, then the other."""
    cluster = Cluster(a_policy(QuotaRow(inflight_tokens_max=1000)))
    cluster.join("w1", "w2", models=(MODEL, "other"))
    running = of(Dispatch, cluster.hold_many(40))
    for model in (MODEL, "other"):
        cluster.hold(a_spec(f"large-{model}", model=model, prompt_tokens=800))
    went: list[str] = []
    while running:
        more = of(Dispatch, cluster.end(running.pop(0)) + cluster.wait(1.0))
        went += [one.key for one in more]
        running += more
    assert {"acme.large-tiny", "acme.large-other"} <= set(went)
    assert not of(Abort, cluster.decisions)


# ---- 17: what seemed idle is swept away ----------------------------------------------------------


@pytest.mark.parametrize("gone", ["lane", "model"])
def test_17_a_job_runs_on_when_its_lane_or_model_is_taken_out(gone: str) -> None:
    """A reload without it: what runs ends in its own time, and is counted until then."""
    cluster = Cluster()
    cluster.join("w1", models=(MODEL, "other"))
    dispatch = only(Dispatch, cluster.hold(a_spec(lane="beta", model="other")))
    cluster.answer(dispatch, Answer.ACCEPTED)
    policy = a_policy(lanes=(LANE,)) if gone == "lane" else a_policy(models=(MODEL,))
    cluster.step(PolicyChanged(cluster.at_s, policy))
    cluster.wait(30.0)
    assert cluster.scheduler.is_leased("beta.j1")
    cluster.end(dispatch)
    assert not cluster.scheduler.is_known("beta.j1")
    check_sums(cluster.scheduler)


def test_17_a_job_at_rest_is_not_idle() -> None:
    """Its queue is empty of all others and it rests for its retry: it goes when that is over."""
    cluster = Cluster()
    cluster.join("w1", "w2")
    cluster.fail(only(Dispatch, cluster.hold(a_spec())))
    assert keys(Dispatch, cluster.wait(5.0)) == ["acme.j1"]


# ---- 18: jobs are counted, not work --------------------------------------------------------------


def test_18_weights_are_of_work_not_of_jobs() -> None:
    """Three to one, short jobs against long ones: three quarters of the work, not of the jobs."""
    lanes = (LanePolicy(name=LANE, weight=3.0), LanePolicy(name="beta", weight=1.0))
    cluster, dispatch = one_slot(Policy(**_FIELDS, lanes=lanes))
    cluster.hold_many(2000, band=2, prompt_tokens=100)
    cluster.hold_many(200, band=2, prompt_tokens=1900, lane="beta")
    work = work_of(cluster, dispatch, count=600)
    assert work[LANE] / sum(work.values()) == pytest.approx(0.75, abs=0.02)


def test_18_what_a_job_did_not_use_is_given_back() -> None:
    """A lane that allows 2,000 tokens and uses 50 is charged 50, once its jobs have ended."""
    cluster, dispatch = one_slot()
    cluster.hold_many(300, band=2, output_tokens_max=2000)
    cluster.hold_many(300, band=2, output_tokens_max=50, lane="beta")
    went = {LANE: 0, "beta": 0}
    for _ in range(400):
        lease = cluster.scheduler.leases()[0]
        dispatch = only(Dispatch, cluster.end(dispatch, usage=Usage(100, 0, 50)))
        went[lease.job.lane] += 1
    assert went[LANE] == pytest.approx(went["beta"], abs=30)


# ---- 19: what is old outranks what is urgent -----------------------------------------------------


def test_19_a_day_old_standard_backlog_leaves_people_three_quarters() -> None:
    """All of it has aged, and all of it may take is the cap."""
    cluster, dispatch = one_slot()
    cluster.hold_many(2000, band=2, prefix="old", enqueued_at_s=cluster.at_s - 500.0)
    cluster.hold_many(600, band=1, prefix="chat")
    shares = shares_of(cluster, dispatch, count=600)
    assert shares[1] >= 1.0 - 0.25 - 0.10


def test_19_one_chat_among_ten_thousand_old_lines_is_the_next_to_go() -> None:
    """With nothing owed to batch, nobody who is urgent waits for more than what runs."""
    cluster, dispatch = one_slot()
    cluster.hold_many(3000, band=3, enqueued_at_s=cluster.at_s - 86_400.0)
    dispatch = only(Dispatch, cluster.end(dispatch))
    cluster.hold(a_spec("chat", band=0, enqueued_at_s=cluster.at_s))
    assert keys(Dispatch, cluster.end(dispatch)) == ["acme.chat"]


# ---- 39: an estimate without sense ---------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        QuotaRow(lane=LANE, inflight_jobs_max=0),
        QuotaRow(lane=LANE, tokens_per_min=200),
        QuotaRow(lane=LANE, inflight_tokens_max=200),
    ],
)
def test_39_a_row_that_lets_little_or_nothing_through_tells_a_finite_wait(row: QuotaRow) -> None:
    """No job ever, one a minute, one at a time: finite, and the longest wait at most."""
    cluster = Cluster(a_policy(row))
    cluster.join("w1")
    told = of(Queued, cluster.hold_many(5))
    assert told
    assert all(0.0 < one.wait_s <= 600.0 for one in told)


def test_39_when_the_last_worker_goes_the_wait_is_the_longest_and_comes_down_again() -> None:
    """And with a new one it is what it was, not what is left of the bad time."""
    cluster = Cluster()
    cluster.join("w1", slots=4)
    for dispatch in of(Dispatch, cluster.hold_many(4)):
        cluster.end(dispatch)
    cluster.hold_many(4, prefix="k")
    before = only(Queued, cluster.hold(a_spec("a", enqueued_at_s=cluster.at_s))).wait_s
    cluster.beats.clear()
    cluster.tick(4.0)
    cluster.tick(20.0)  # Longer than `revoke_s` and `grace_s`.
    gone = only(Queued, cluster.hold(a_spec("b", enqueued_at_s=cluster.at_s))).wait_s
    cluster.join("w2", "w3", slots=4)
    cluster.hold_many(8, prefix="m")
    after = of(Queued, cluster.hold(a_spec("c", enqueued_at_s=cluster.at_s)))
    assert gone == 600.0
    assert all(one.wait_s <= 20 * max(1.0, before) for one in after)


# ---- 40: the signal does not see what runs -------------------------------------------------------


def test_40_what_runs_on_a_draining_worker_calls_for_nobody_and_is_waited_for() -> None:
    """It is counted until it ends; the worker that drains is none to put jobs on."""
    cluster = Cluster()
    cluster.join("w1", "w2")
    running = of(Dispatch, cluster.hold_many(8))
    cluster.step(DrainRequested(cluster.at_s, "w1"))
    pool = cluster.scheduler._mind.queues.pool(MODEL)
    seen = scaling_of(pool, rate_tokens_s=1000.0, at_s=cluster.at_s)
    assert seen.desired_workers == 2
    for dispatch in running:
        cluster.end(dispatch)
    assert scaling_of(pool, rate_tokens_s=1000.0, at_s=cluster.at_s).desired_workers == 0


def test_40_a_job_between_two_attempts_keeps_a_worker() -> None:
    """Nothing runs and nothing stands in line, but one rests for its retry."""
    cluster = Cluster()
    cluster.join("w1")
    cluster.fail(only(Dispatch, cluster.hold(a_spec())))
    pool = cluster.scheduler._mind.queues.pool(MODEL)
    assert scaling_of(pool, rate_tokens_s=1000.0, at_s=cluster.at_s).desired_workers == 1
