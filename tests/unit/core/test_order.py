"""Which job is next: band, then lane, then job; and what blocks nobody else."""

import random
from typing import Any

import pytest
from msgspec import structs

from broker.core.bands import CREDIT_TOKENS_MAX, Way
from broker.core.decisions import Abort, Dispatch, HeldBy, Queued, Requeue
from broker.core.events import DispatchAllowed, JobSpec, PolicyChanged
from broker.core.gate import HOLD_LOOK_S
from broker.core.order import PASSES
from broker.core.placement import Placement
from broker.core.policy import (
    DEFAULT_BANDS,
    BandPolicy,
    LanePolicy,
    OrderPolicy,
    Policy,
    QuotaRow,
)
from broker.wire.messages import Load, Usage
from tests.unit.core.cluster import LANE, MODEL, Cluster, a_policy, a_spec, keys, of, only
from tests.unit.core.invariants import check_sums
from tests.unit.core.least_loaded import LeastLoadedRouter


def one_slot(policy: Policy | None = None) -> tuple[Cluster, Dispatch]:
    """A cluster with one slot, which is taken."""
    cluster = Cluster(policy)
    cluster.join("w1", slots=1)
    return cluster, only(Dispatch, cluster.hold(a_spec("first", lane="beta", band=0)))


def run_all(cluster: Cluster, dispatch: Dispatch, *, count: int | None = None) -> list[str]:
    """End job after job in the one slot; name the jobs in the order in which they went."""
    went: list[str] = []
    while count is None or len(went) < count:
        following = of(Dispatch, cluster.end(dispatch))
        if not following:
            return went
        (dispatch,) = following
        went.append(dispatch.key)
    return went


# ---- band ---------------------------------------------------------------------------------------


def test_higher_bands_go_first() -> None:
    """Small jobs of all bands, worst first at the door: they go by band."""
    cluster, dispatch = one_slot()
    for band in (3, 2, 1, 0):
        cluster.hold(a_spec(f"b{band}", band=band, prompt_tokens=1, output_tokens_max=0))
    assert run_all(cluster, dispatch) == ["acme.b0", "acme.b1", "acme.b2", "acme.b3"]


def shares_of(cluster: Cluster, dispatch: Dispatch, *, count: int) -> dict[int, float]:
    """Share of work by band, of `count` jobs in one slot."""
    work = dict.fromkeys(range(4), 0.0)
    for _ in range(count):
        dispatch = only(Dispatch, cluster.end(dispatch))
        lease = cluster.scheduler._mind.ledger.get(dispatch.key)
        assert lease is not None
        work[lease.job.band] += lease.cost_tokens
    total = sum(work.values())
    return {band: tokens / total for band, tokens in work.items()}


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


# ---- aging --------------------------------------------------------------------------------------


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


def aging_policy() -> Policy:
    """No guaranteed share for band 2, so that only age lifts it."""
    standard = BandPolicy(guaranteed_share=0.0, aging_s=60.0, wait_s_max=600.0)
    bands = (DEFAULT_BANDS[0], DEFAULT_BANDS[1], standard, DEFAULT_BANDS[3])
    return a_policy(bands=bands, order=OrderPolicy(lane_slack_tokens=0.0))


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


def test_interactive_jobs_may_age_into_the_highest_band_uncapped() -> None:
    """Where band 1 has an `aging_s`, it rises too; the cap is for bands 2 and 3."""
    interactive = BandPolicy(guaranteed_share=0.0, aging_s=5.0, wait_s_max=600.0)
    bands = (DEFAULT_BANDS[0], interactive, *DEFAULT_BANDS[2:])
    policy = a_policy(bands=bands, order=OrderPolicy(lane_slack_tokens=0.0))
    cluster, dispatch = one_slot(policy)
    cluster.hold_many(3, band=1, prefix="old", enqueued_at_s=cluster.at_s - 6.0)
    cluster.hold_many(3, band=0, prefix="new")
    went = run_all(cluster, dispatch, count=3)
    assert went == [f"acme.old{n}" for n in range(3)]


def test_batch_does_not_age_by_the_clock() -> None:
    """Not even where the file says so: it takes shares and idle capacity."""
    batch = BandPolicy(guaranteed_share=0.0, aging_s=1.0)
    policy = a_policy(bands=(*DEFAULT_BANDS[:3], batch))
    cluster, dispatch = one_slot(policy)
    cluster.hold_many(5, band=3, prefix="old", enqueued_at_s=cluster.at_s - 1000.0)
    cluster.wait(2.0)
    cluster.hold_many(5, band=2, prefix="new")
    assert run_all(cluster, dispatch, count=5) == [f"acme.new{n}" for n in range(5)]


# ---- lane ---------------------------------------------------------------------------------------


def work_of(cluster: Cluster, dispatch: Dispatch, *, count: int) -> dict[str, float]:
    """Work by lane of `count` jobs in one slot."""
    work: dict[str, float] = {}
    for _ in range(count):
        dispatch = only(Dispatch, cluster.end(dispatch))
        lease = cluster.scheduler._mind.ledger.get(dispatch.key)
        assert lease is not None
        work[lease.job.lane] = work.get(lease.job.lane, 0.0) + lease.cost_tokens
    return work


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
    assert counters.cost_max == 1000.0
    assert pool.fairness_bound == 1000.0 + 500.0 + pool.inflight_jobs * counters.error_max


# ---- job ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("waits_s", "first"), [(1.9, "acme.new"), (2.1, "acme.old")])
def test_nobody_is_overtaken_for_longer_than_its_prefill_over_alpha(
    waits_s: float, first: str
) -> None:
    """A job of 0.4 s more prefill is overtaken by jobs that came up to 2 s later (α = 0.2)."""
    cluster, dispatch = one_slot()
    cluster.hold(a_spec("old", prompt_tokens=3300, enqueued_at_s=1000.0))
    cluster.hold(a_spec("new", prompt_tokens=100, enqueued_at_s=1000.0 + waits_s))
    assert run_all(cluster, dispatch)[0] == first


def test_a_nearer_deadline_goes_before() -> None:
    """Of equal jobs the one due sooner; without deadline the longest wait counts."""
    cluster, dispatch = one_slot()
    cluster.hold(
        a_spec("none"),
        a_spec("far", deadline_at_s=1900.0),
        a_spec("near", deadline_at_s=1100.0),
        a_spec("nearest", deadline_at_s=1050.0),
    )
    went = run_all(cluster, dispatch)
    assert went == ["acme.nearest", "acme.near", "acme.far", "acme.none"]


def test_equal_jobs_go_in_the_order_of_the_stream() -> None:
    """Same size, same time: by stream sequence, whatever the order in which they were pulled."""
    cluster, dispatch = one_slot()
    cluster.hold(
        a_spec("b", stream_sequence=2),
        a_spec("c", stream_sequence=3),
        a_spec("a", stream_sequence=1),
    )
    assert run_all(cluster, dispatch) == ["acme.a", "acme.b", "acme.c"]


def test_only_the_first_candidates_of_a_lane_are_looked_at() -> None:
    """With a window of 4 the short fifth job waits until it is among the first four."""
    policy = a_policy(order=OrderPolicy(lane_slack_tokens=0.0, candidates_max=4))
    cluster, dispatch = one_slot(policy)
    sizes = (4000, 3900, 3800, 3700, 10)
    cluster.hold(
        *(a_spec(f"j{n}", prompt_tokens=size, stream_sequence=n) for n, size in enumerate(sizes))
    )
    assert run_all(cluster, dispatch) == ["acme.j3", "acme.j4", "acme.j2", "acme.j1", "acme.j0"]


def test_the_window_is_shared_by_the_lanes_of_the_fair_set() -> None:
    """However many lanes are equal, a dispatch asks for a bounded number of placements."""
    lanes = tuple(f"lane{n}" for n in range(40))
    policy = a_policy(lanes=(*lanes, "beta"), order=OrderPolicy(lane_slack_tokens=1e9))
    cluster, dispatch = one_slot(policy)
    for lane in lanes:
        cluster.hold_many(20, lane=lane, prompt_tokens=4000)
    before = cluster.router.placed
    cluster.end(dispatch)
    assert cluster.router.placed - before <= 64 + 3


def test_case_16_nothing_that_runs_is_ever_taken_back_for_another() -> None:
    """Two lanes over each other's work for long: no abort, no requeue, so no cycles."""
    cluster = Cluster(a_policy(QuotaRow(lane=LANE, inflight_jobs_max=1)))
    cluster.join("w1", slots=2)
    cluster.hold_many(100, prefix="a", band=2)
    cluster.hold_many(100, prefix="b", band=1, lane="beta")
    running = of(Dispatch, cluster.decisions)
    while running:
        running += of(Dispatch, cluster.end(running.pop(0)))
    assert not of(Abort, cluster.decisions)
    assert not of(Requeue, cluster.decisions)
    assert len(of(Dispatch, cluster.decisions)) == 200


def test_case_17_a_queue_that_was_idle_for_long_still_serves() -> None:
    """Nothing sweeps queues: one that sleeps costs nothing, and a job in it is never lost."""
    cluster = Cluster()
    cluster.join("w1")
    for _ in range(3):
        cluster.end(only(Dispatch, cluster.hold(a_spec(band=3))))
        cluster.wait(100.0)


def test_case_19_a_batch_backlog_costs_people_its_share_and_no_more() -> None:
    """Before 3,000 batch lines each chat goes next, but for the twentieth part that is batch's."""
    cluster, dispatch = one_slot()
    cluster.hold_many(3000, band=3, prefix="line")
    batch = 0
    for n in range(400):
        cluster.hold(a_spec(f"chat{n}", band=1, enqueued_at_s=cluster.at_s))
        dispatch = only(Dispatch, cluster.end(dispatch))
        if dispatch.key.startswith("acme.line"):
            batch += 1
            dispatch = only(Dispatch, cluster.end(dispatch))
        assert dispatch.key == f"acme.chat{n}"
    assert batch == pytest.approx(0.05 * 400, abs=2)


# ---- what blocks nobody else --------------------------------------------------------------------


def test_a_job_that_waits_for_room_blocks_no_other_model() -> None:
    """A model without workers holds its own jobs only."""
    cluster = Cluster()
    cluster.join("w1")
    cluster.hold(a_spec("j1", model="other"))
    assert keys(Dispatch, cluster.hold(a_spec("j2"))) == ["acme.j2"]
    why = cluster.scheduler.views.why("acme.j1")
    assert why is not None
    assert why.held_by is HeldBy.NO_WORKERS


def test_a_job_too_large_for_the_room_blocks_no_smaller_one() -> None:
    """Jobs behind one that does not fit the KV cache left go past it, in its lane as well."""
    cluster = Cluster()
    cluster.join("w1", load=Load(kv_tokens_max=1000))
    cluster.hold(a_spec("big", prompt_tokens=800))
    cluster.hold(a_spec("too", prompt_tokens=200))
    assert keys(Dispatch, cluster.hold(a_spec("too2", prompt_tokens=300))) == []
    assert keys(Dispatch, cluster.hold(a_spec("ok", prompt_tokens=1))) == []
    running = of(Dispatch, cluster.decisions)
    assert [one.key for one in running] == ["acme.big"]
    assert keys(Dispatch, cluster.end(running[0])) == ["acme.ok", "acme.too", "acme.too2"]


def test_a_lane_that_finds_no_room_blocks_no_lane_behind_it() -> None:
    """The least served lane has only a job that is too large: the next one's goes."""
    cluster = Cluster()
    cluster.hold(
        a_spec("large", prompt_tokens=500),
        a_spec("big", lane="beta", prompt_tokens=700, band=1),
        a_spec("fits", lane="beta", prompt_tokens=120),
        a_spec("fits2", lane="beta", prompt_tokens=120),
    )
    decisions = cluster.join("w1", load=Load(kv_tokens_max=1200))
    assert keys(Dispatch, decisions) == ["beta.big", "beta.fits"]


def test_a_lane_at_its_quota_blocks_no_other_lane() -> None:
    """Its row holds its own jobs only, and says so."""
    cluster = Cluster(a_policy(QuotaRow(lane=LANE, inflight_jobs_max=1)))
    cluster.join("w1")
    cluster.hold(a_spec("j1"), a_spec("j2"))
    assert keys(Dispatch, cluster.hold(a_spec("j1", lane="beta"))) == ["beta.j1"]
    why = cluster.scheduler.views.why("acme.j2")
    assert why is not None
    assert (why.held_by, why.row) == (HeldBy.QUOTA, "lane=acme")


def test_a_row_that_gives_way_lets_its_jobs_go_in_every_model() -> None:
    """A lane's row over all models: an end in one lets a job of another go at once."""
    cluster = Cluster(a_policy(QuotaRow(lane=LANE, inflight_jobs_max=1)))
    cluster.join("w1")
    cluster.join("w2", models=("other",))
    first = only(Dispatch, cluster.hold(a_spec("j1")))
    cluster.hold(a_spec("j2", model="other"))
    assert keys(Dispatch, cluster.end(first)) == ["acme.j2"]


def test_a_row_over_a_whole_band_holds_it_without_a_walk() -> None:
    """With a band's row full, no lane's jobs are looked at one by one."""
    cluster = Cluster(a_policy(QuotaRow(band=2, inflight_jobs_max=1)))
    cluster.join("w1")
    cluster.hold_many(50)
    cluster.hold_many(50, lane="beta")
    before = cluster.router.placed
    cluster.beat("w1", slots=5)
    assert cluster.router.placed == before
    assert keys(Dispatch, cluster.hold(a_spec("x", band=1))) == ["acme.x"]


def test_a_token_row_holds_large_jobs_and_lets_small_ones_pass() -> None:
    """A job over the tokens left is passed over; one that fits goes."""
    cluster = Cluster(a_policy(QuotaRow(inflight_tokens_max=300)))
    cluster.join("w1")
    cluster.hold(a_spec("j1"))
    cluster.hold(a_spec("j2"))
    small = a_spec("j3", prompt_tokens=60, output_tokens_max=20)
    assert keys(Dispatch, cluster.hold(small)) == ["acme.j3"]
    assert cluster.usage["all"] == (2, 300.0)


def test_a_bucket_lets_a_job_go_when_it_has_filled() -> None:
    """200 of 600 a minute: a job goes after 20 s, the next 20 s later, by the clock."""
    cluster = Cluster(a_policy(QuotaRow(tokens_per_min=600)))
    cluster.join("w1")
    cluster.hold(a_spec("j1"), a_spec("j2"))
    assert not of(Dispatch, cluster.decisions)
    assert not of(Dispatch, cluster.wait(19.5))
    assert keys(Dispatch, cluster.tick(0.5)) == ["acme.j1"]
    assert not of(Dispatch, cluster.wait(19.5))
    assert keys(Dispatch, cluster.tick(0.5)) == ["acme.j2"]


def test_case_12_a_row_keeps_slots_free_for_urgent_work() -> None:
    """Batch under a row of 3 of 4 slots: a critical job goes at once."""
    cluster = Cluster(a_policy(QuotaRow(band=3, inflight_jobs_max=3)))
    cluster.join("w1", slots=4)
    cluster.hold_many(10, band=3)
    assert len(of(Dispatch, cluster.decisions)) == 3
    assert keys(Dispatch, cluster.hold(a_spec("urgent", band=0))) == ["acme.urgent"]


def test_rows_per_worker_follow_the_fleet() -> None:
    """Two jobs a worker: a second worker lets two more go, in the step in which it reports."""
    cluster = Cluster(a_policy(QuotaRow(model=MODEL, inflight_jobs_max_per_worker=2.0)))
    cluster.join("w1")
    cluster.hold_many(6)
    assert len(of(Dispatch, cluster.decisions)) == 2
    assert len(of(Dispatch, cluster.join("w2"))) == 2


# ---- held for affinity --------------------------------------------------------------------------


class HoldingRouter(LeastLoadedRouter):
    """Holds jobs whose name begins with `held` for a worker that is never free, until released."""

    released = False

    def place(self, job: JobSpec, **fields: Any) -> Placement:
        if job.key.startswith("acme.held") and not self.released:
            return Placement(None, 0, 0, 0.0, held_for="w9")
        return super().place(job, **fields)


def test_a_job_held_for_its_worker_blocks_nobody_and_is_looked_at_again() -> None:
    """A hold is passed over; it ends by time, without any other event."""
    router = HoldingRouter()
    cluster = Cluster(router=router)
    cluster.join("w1")
    cluster.hold(a_spec("held"))
    assert keys(Dispatch, cluster.hold(a_spec("j2"))) == ["acme.j2"]
    why = cluster.scheduler.views.why("acme.held")
    assert why is not None
    assert why.held_by is HeldBy.AFFINITY
    cluster.tick()
    router.released = True
    assert not of(Dispatch, cluster.tick(HOLD_LOOK_S / 2))
    dispatch = only(Dispatch, cluster.tick(HOLD_LOOK_S / 2))
    assert dispatch.explanation.held_by is HeldBy.AFFINITY
    assert dispatch.explanation.queue_s == pytest.approx(HOLD_LOOK_S)


def test_held_jobs_do_not_hide_those_behind_them() -> None:
    """A line is walked PASSES times as far as there are candidates, and no further."""
    policy = a_policy(order=OrderPolicy(lane_slack_tokens=0.0, candidates_max=4))
    cluster = Cluster(policy, started=False, router=HoldingRouter())
    cluster.join("w1")
    cluster.hold_many(4 * PASSES - 1, prefix="held")
    cluster.hold(a_spec("seen", enqueued_at_s=1000.1))
    cluster.hold(a_spec("behind", enqueued_at_s=1000.2))
    assert keys(Dispatch, cluster.step(DispatchAllowed(cluster.at_s))) == [
        "acme.seen",
        "acme.behind",
    ]
    cluster = Cluster(policy, started=False, router=HoldingRouter())
    cluster.join("w1")
    cluster.hold_many(4 * PASSES, prefix="held")
    cluster.hold(a_spec("hidden", enqueued_at_s=1000.1))
    assert not of(Dispatch, cluster.step(DispatchAllowed(cluster.at_s)))


class AdapterRouter(LeastLoadedRouter):
    """No worker has any adapter."""

    def place(self, job: JobSpec, **fields: Any) -> Placement:
        if job.adapter:
            return Placement(None, 0, 0, 0.0, servable=False)
        return super().place(job, **fields)


# ---- costs of a look ----------------------------------------------------------------------------


def test_a_newcomer_to_a_full_pool_costs_one_look_at_most() -> None:
    """With nobody free, a job that comes asks for no placement, however many wait."""
    cluster = Cluster()
    cluster.join("w1", slots=1)
    cluster.hold_many(200)
    before = cluster.router.placed
    (queued,) = cluster.hold(a_spec("x", enqueued_at_s=1001.0))
    assert isinstance(queued, Queued)
    assert cluster.router.placed == before


def test_a_closed_pool_costs_no_look_for_a_smaller_job_either() -> None:
    """Nobody has room even for the smallest job: size does not matter."""
    cluster = Cluster()
    cluster.join("w1", slots=1)
    cluster.hold_many(3)
    before = cluster.router.placed
    cluster.hold(a_spec("tiny", prompt_tokens=1, output_tokens_max=1))
    assert cluster.router.placed == before


def test_one_slot_freed_costs_a_window_not_a_queue() -> None:
    """A freed slot looks at `candidates_max` jobs, gives one, and finds no more room."""
    cluster, dispatch = one_slot()
    cluster.hold_many(500)
    before = cluster.router.placed
    assert len(of(Dispatch, cluster.end(dispatch))) == 1
    assert cluster.router.placed - before <= 64 + 2


def test_a_full_workers_news_cost_no_look() -> None:
    """A first token frees prefill room, but where no slot is free nobody can go there."""
    cluster, dispatch = one_slot()
    cluster.hold_many(20)
    before = cluster.router.placed
    cluster.first_token(dispatch)
    cluster.beat("w1", engine_incarnation=2)
    assert cluster.router.placed == before


def test_a_pool_without_workers_costs_no_walk() -> None:
    """One look finds that nobody serves the model; the others are told without one."""
    cluster = Cluster(started=False)
    cluster.hold_many(50)
    cluster.step(DispatchAllowed(cluster.at_s))
    assert cluster.router.placed == 1
    (queued,) = cluster.hold(a_spec("x"))
    assert isinstance(queued, Queued)
    why = cluster.scheduler.views.why("acme.x")
    assert why is not None
    assert why.held_by is HeldBy.NO_WORKERS


def test_an_adapter_that_nobody_has_does_not_close_the_model() -> None:
    """Its own jobs wait; those without it go."""
    cluster = Cluster(router=AdapterRouter())
    cluster.join("w1")
    cluster.hold(a_spec("tuned", adapter="lora"))
    assert keys(Dispatch, cluster.hold(a_spec("plain"))) == ["acme.plain"]


def test_a_dispatch_is_counted_for_ties() -> None:
    """How many, and when the last: ties go to the worker that waited longest."""
    cluster = Cluster()
    cluster.join("w1")
    cluster.at_s += 5.0
    cluster.hold_many(3)
    worker = cluster.scheduler._mind.fleet.workers["w1"]
    assert (worker.dispatched_count, worker.dispatched_at_s) == (3, 1005.0)


def test_owed_credit_stays_bounded_by_name() -> None:
    """The bound that keeps a burst after a block short is about four chat jobs."""
    assert CREDIT_TOKENS_MAX == 16_384.0


def test_an_explanation_says_what_held_the_job() -> None:
    """Never looked at until it went: others were before it. Else the last look's word."""
    cluster, dispatch = one_slot()
    cluster.hold(a_spec("j1"))
    cluster.hold(a_spec("j2", prompt_tokens=8000))
    second = only(Dispatch, cluster.end(dispatch))
    assert second.explanation.held_by is HeldBy.ROOM
    cluster.at_s += 3.0
    third = only(Dispatch, cluster.end(second))
    assert third.explanation.held_by is HeldBy.ROOM
    assert third.explanation.queue_s == 3.0
    check_sums(cluster.scheduler)
