"""Which job is next: band, then lane, then job; and what blocks nobody else."""

import random

import pytest
from msgspec import structs

from broker.core.bands import Way
from broker.core.decisions import Dispatch
from broker.core.events import PolicyChanged
from broker.core.policy import (
    DEFAULT_BANDS,
    BandPolicy,
    LanePolicy,
    OrderPolicy,
    QuotaRow,
)
from broker.wire.messages import Usage
from tests.unit.core.cluster import LANE, MODEL, Cluster, a_policy, a_spec, of, only
from tests.unit.core.one_slot import (
    aging_policy,
    one_slot,
    run_all,
    shares_of,
    work_of,
)


def test_higher_bands_go_first() -> None:
    """Small jobs of all bands, worst first at the door: they go by band."""
    cluster, dispatch = one_slot()
    for band in (3, 2, 1, 0):
        cluster.hold(a_spec(f"b{band}", band=band, prompt_tokens=1, output_tokens_max=0))
    assert run_all(cluster, dispatch) == ["acme.b0", "acme.b1", "acme.b2", "acme.b3"]


def test_case_11_lower_bands_get_their_guaranteed_share() -> None:
    """All bands saturated: bands 1-3 get 20, 10 and 5 % of the work at any size."""
    rng = random.Random(1)
    cluster, dispatch = one_slot()
    for n in range(500):
        for band in range(4):
            size = rng.choice((50, 400, 2000))
            cluster.hold(
                a_spec(f"j{band}-{n}", band=band, prompt_tokens=size, output_tokens_max=size // 2)
            )
    shares = shares_of(cluster, dispatch, count=500)
    assert shares[1] == pytest.approx(0.20, abs=0.02)
    assert shares[2] == pytest.approx(0.10, abs=0.02)
    assert shares[3] == pytest.approx(0.05, abs=0.02)


def test_a_band_that_cannot_use_its_share_leaves_it_to_others() -> None:
    """A band whose quota is full is passed over at once."""
    cluster, dispatch = one_slot(a_policy(QuotaRow(band=2, inflight_jobs_max=0)))
    cluster.hold_many(20, band=1, prefix="a")
    cluster.hold_many(20, band=2, prefix="b")
    went = run_all(cluster, dispatch)
    assert len(went) == 20
    assert all(key.startswith("acme.a") for key in went)


def test_work_by_exceptions_is_told() -> None:
    """How much each band took, and by what right."""
    cluster, dispatch = one_slot()
    cluster.hold_many(30, band=1, prefix="a")
    cluster.hold_many(3, band=2, prefix="b")
    run_all(cluster, dispatch)
    (pool,) = cluster.scheduler.views.pools()
    work = {(band, way): tokens for band, way, tokens in pool.work_tokens}
    assert work[0, Way.PRIORITY] == 200.0
    assert work[1, Way.PRIORITY] == 6000.0
    assert work[2, Way.SHARE] == 600.0


def test_an_aged_job_competes_one_band_up() -> None:
    """A standard job past 60 s stands among the interactive ones, with its whole wait as credit."""
    cluster, dispatch = one_slot()
    cluster.hold(a_spec("old", band=2, enqueued_at_s=cluster.at_s))
    cluster.wait(60.0)
    cluster.hold_many(5, band=1, prefix="n")
    # A quarter of the work may be aged: the fourth job of five equal ones, counting the first.
    assert run_all(cluster, dispatch, count=4) == ["acme.n0", "acme.n1", "acme.n2", "acme.old"]
    (pool,) = cluster.scheduler.views.pools()
    assert (2, Way.AGED, 200.0) in pool.work_tokens


@pytest.mark.parametrize(("waited_s", "fourth"), [(59.9, "acme.n3"), (60.0, "acme.old")])
def test_a_job_rises_by_the_clock(waited_s: float, fourth: str) -> None:
    """Not a moment before `aging_s`."""
    cluster, dispatch = one_slot(aging_policy())
    cluster.hold(a_spec("old", band=2, enqueued_at_s=cluster.at_s))
    cluster.wait(waited_s)
    cluster.hold_many(5, band=1, prefix="n")
    assert run_all(cluster, dispatch, count=4)[-1] == fourth


def test_a_job_held_late_is_aged_at_once() -> None:
    """After a takeover the wait counts from the enqueue time."""
    cluster, dispatch = one_slot(aging_policy())
    cluster.hold(a_spec("old", band=2, enqueued_at_s=cluster.at_s - 60.0))
    cluster.hold_many(5, band=1, prefix="n")
    assert run_all(cluster, dispatch, count=4)[-1] == "acme.old"


def test_of_a_lanes_two_lines_the_aged_one_is_looked_at_first() -> None:
    """Where one candidate is looked at, what came before is not behind what came since."""
    policy = a_policy(order=OrderPolicy(lane_slack_tokens=0.0, candidates_max=1))
    cluster, dispatch = one_slot(policy)
    cluster.hold(a_spec("new", band=2, prompt_tokens=10))
    cluster.hold(a_spec("old", band=2, prompt_tokens=4000, enqueued_at_s=cluster.at_s - 100.0))
    assert run_all(cluster, dispatch) == ["acme.old", "acme.new"]


def test_aged_jobs_get_their_bands_share_too() -> None:
    """Where nothing may rise, a backlog that has aged still has its guaranteed part."""
    policy = a_policy(order=OrderPolicy(lane_slack_tokens=0.0, aged_share_max=0.0))
    cluster, dispatch = one_slot(policy)
    cluster.hold_many(100, band=2, prefix="old", enqueued_at_s=cluster.at_s - 100.0)
    cluster.hold_many(300, band=1, prefix="new")
    shares = shares_of(cluster, dispatch, count=200)
    assert shares[2] == pytest.approx(0.10, abs=0.01)


def test_case_19_an_aged_backlog_takes_no_more_than_the_cap() -> None:
    """Aged standard work gets at most a quarter while people wait, and about that."""
    cluster, dispatch = one_slot(aging_policy())
    cluster.hold_many(500, band=2, prefix="old", enqueued_at_s=cluster.at_s - 100.0)
    cluster.hold_many(500, band=1, prefix="new")
    shares = shares_of(cluster, dispatch, count=400)
    assert shares[2] == pytest.approx(0.25, abs=0.01)


def test_a_job_rises_once() -> None:
    """An aged standard job never competes with critical ones."""
    cluster, dispatch = one_slot(aging_policy())
    cluster.hold_many(5, band=2, prefix="old", enqueued_at_s=cluster.at_s - 1000.0)
    cluster.hold_many(5, band=0, prefix="new")
    assert run_all(cluster, dispatch, count=5) == [f"acme.new{n}" for n in range(5)]


def test_interactive_jobs_may_age_up_to_the_cap_too() -> None:
    """Where band 1 has an `aging_s`, a quarter of what band 0 would have is its aged jobs'."""
    interactive = BandPolicy(guaranteed_share=0.0, aging_s=5.0, wait_s_max=600.0)
    bands = (DEFAULT_BANDS[0], interactive, *DEFAULT_BANDS[2:])
    policy = a_policy(bands=bands, order=OrderPolicy(lane_slack_tokens=0.0))
    cluster, dispatch = one_slot(policy)
    cluster.hold_many(300, band=1, prefix="old", enqueued_at_s=cluster.at_s - 6.0)
    cluster.hold_many(300, band=0, prefix="new")
    assert shares_of(cluster, dispatch, count=200)[1] == pytest.approx(0.25, abs=0.01)


def test_batch_does_not_age_by_the_clock() -> None:
    """Not even where the file says so: it takes shares and idle capacity."""
    batch = BandPolicy(guaranteed_share=0.0, aging_s=1.0)
    policy = a_policy(bands=(*DEFAULT_BANDS[:3], batch))
    cluster, dispatch = one_slot(policy)
    cluster.hold_many(5, band=3, prefix="old", enqueued_at_s=cluster.at_s - 1000.0)
    cluster.wait(2.0)
    cluster.hold_many(5, band=2, prefix="new")
    assert run_all(cluster, dispatch, count=5) == [f"acme.new{n}" for n in range(5)]


@pytest.mark.parametrize("band", [1, 3])
def test_case_18_lanes_are_fair_in_tokens(band: int) -> None:
    """Short jobs against long ones: half of the work each, in batch as well."""
    cluster, dispatch = one_slot()
    cluster.hold_many(400, band=band, prefix="s", prompt_tokens=10, output_tokens_max=5)
    cluster.hold_many(
        40, band=band, lane="beta", prefix="l", prompt_tokens=900, output_tokens_max=50
    )
    work = work_of(cluster, dispatch, count=205)
    assert work[LANE] == pytest.approx(work["beta"], abs=1100.0)


def test_lanes_share_by_weight() -> None:
    """A lane of weight 3 gets three times the work."""
    lanes = (LanePolicy(name=LANE, weight=3.0), LanePolicy(name="beta"))
    cluster, dispatch = one_slot(structs.replace(a_policy(), lanes=lanes))
    cluster.hold_many(200, prefix="a")
    cluster.hold_many(200, prefix="b", lane="beta")
    work = work_of(cluster, dispatch, count=200)
    assert work[LANE] == pytest.approx(3 * work["beta"], abs=800.0)


def test_a_lane_banks_nothing_while_idle() -> None:
    """After a lane had the pool for long, one that wakes gets half, not all."""
    cluster, dispatch = one_slot()
    cluster.hold_many(300, prefix="a")
    for _ in range(200):
        dispatch = only(Dispatch, cluster.end(dispatch))
    cluster.hold_many(100, prefix="b", lane="beta")
    work = work_of(cluster, dispatch, count=50)
    assert work[LANE] == pytest.approx(work["beta"], abs=400.0)


def test_a_lane_banks_nothing_while_its_quota_holds_it() -> None:
    """A lane kept at its row for long does not take the pool when the row is lifted."""
    row = QuotaRow(lane="beta", inflight_jobs_max=0)
    cluster, dispatch = one_slot(a_policy())
    cluster.step(PolicyChanged(cluster.at_s, a_policy(row)))
    cluster.hold_many(300, prefix="a")
    cluster.hold_many(100, prefix="b", lane="beta")
    for _ in range(200):
        dispatch = only(Dispatch, cluster.end(dispatch))
    cluster.step(PolicyChanged(cluster.at_s, a_policy()))
    work = work_of(cluster, dispatch, count=50)
    assert work[LANE] == pytest.approx(work["beta"], abs=400.0)


def test_within_the_slack_size_chooses_between_lanes() -> None:
    """Lanes within Q are equal, so the shorter job goes; past Q the least served lane does."""
    policy = a_policy(order=OrderPolicy(lane_slack_tokens=1000.0))
    cluster, dispatch = one_slot(policy)
    cluster.hold_many(20, prefix="s", prompt_tokens=100, output_tokens_max=0)
    cluster.hold_many(3, prefix="l", lane="beta", prompt_tokens=5000, output_tokens_max=0)
    went = run_all(cluster, dispatch, count=13)
    # Both begin level: acme gets 1,100 until it is more than 1,000 ahead.
    assert went[:11] == [f"acme.s{n}" for n in range(11)]
    assert went[11] == "beta.l0"


def test_estimates_are_corrected_when_jobs_end() -> None:
    """A lane whose jobs turn out twice as cheap as charged gets twice as many of them."""
    cluster, dispatch = one_slot()
    cluster.hold_many(300, prefix="a", band=1)
    cluster.hold_many(300, prefix="b", band=1, lane="beta")
    work = {LANE: 0, "beta": 0}
    for _ in range(200):
        lane = dispatch.key.split(".")[0]
        usage = Usage(100, 100, 25) if lane == LANE else Usage(100, 0, 50)
        work[lane] += 50 if lane == LANE else 200
        dispatch = only(Dispatch, cluster.end(dispatch, usage=usage))
    assert work[LANE] == pytest.approx(work["beta"], abs=600)


def test_the_gap_and_its_bound_are_published() -> None:
    """Two saturated lanes: the gap never exceeds U + Q + K·E, and both are told."""
    cluster = Cluster(a_policy(order=OrderPolicy(lane_slack_tokens=500.0)))
    cluster.join("w1", slots=3)
    cluster.hold_many(200, prefix="a", prompt_tokens=10, output_tokens_max=5)
    cluster.hold_many(200, prefix="b", lane="beta", prompt_tokens=900, output_tokens_max=50)
    running = of(Dispatch, cluster.decisions)
    seen = 0.0
    for _ in range(150):
        freed = cluster.end(running.pop(0))
        running += of(Dispatch, freed)
        (pool,) = cluster.scheduler.views.pools()
        assert pool.fairness_gap <= pool.fairness_bound
        seen = max(seen, pool.fairness_gap)
    assert seen > 0
    (pool,) = cluster.scheduler.views.pools()
    mind = cluster.scheduler._mind
    counters = mind.queues.pool(MODEL).counters
    assert counters.period.cost_max == 1000.0
    assert pool.fairness_bound == 1000.0 + 500.0 + pool.inflight_jobs * counters.period.error_max


def test_less_uncached_prefill_goes_first() -> None:
    """What a worker can serve from its cache goes at once, short before long."""
    cluster, dispatch = one_slot()
    cluster.hold(
        a_spec("long", prompt_tokens=4000),
        a_spec("short", prompt_tokens=800),
        a_spec("cached", prompt_tokens=4000),
    )
    cluster.router.hits["acme.cached", "w1"] = 3900
    assert run_all(cluster, dispatch) == ["acme.cached", "acme.short", "acme.long"]
