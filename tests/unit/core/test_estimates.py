"""How long a job will wait."""

from itertools import pairwise

import pytest

from broker.core import estimates as module
from broker.core.decisions import Dispatch, Queued
from broker.core.events import DrainRequested, QueueDepth
from broker.core.policy import BandPolicy, LanePolicy, Policy, PressurePolicy, QuotaRow
from broker.wire.messages import Usage
from tests.unit.core.cluster import LANE, MODEL, Cluster, a_policy, a_spec, of, only
from tests.unit.core.estimate_builders import (
    a_pool,
    a_queue,
    forget_arrivals,
    pace_of,
    pass_a_job_s,
    wait_s,
)


def waits_of(cluster: Cluster, count: int, **fields: object) -> list[float]:
    """What so many newcomers are told."""
    return [one.wait_s for one in of(Queued, cluster.hold_many(count, **fields))]


# ---- capacity ------------------------------------------------------------------------------------


def test_a_free_slot_means_no_wait() -> None:
    """Nobody waits and a slot is free: 0; with all slots taken, the time until one frees."""
    cluster = a_pool(slots=2)
    assert wait_s(cluster) == pytest.approx(2.0, rel=0.05)
    cluster.end(of(Dispatch, cluster.decisions)[-1])
    assert wait_s(cluster) == 0.0


def test_a_slot_that_is_kept_for_people_is_not_free_for_others() -> None:
    """A standard job that comes now waits for the next one; an interactive job does not."""
    cluster = a_pool(slots=2, floor_share=0.1)
    cluster.end(of(Dispatch, cluster.decisions)[-1])
    assert wait_s(cluster) > 1.0
    queue = cluster.scheduler._mind.queues.queue(lane=LANE, band=1, model=MODEL)
    assert cluster.scheduler._estimates.wait_s(queue, position=0) == 0.0


def test_jobs_of_a_worker_that_drains_take_no_slot_of_the_others() -> None:
    """A slot is free beside a full worker that takes nothing new: no wait."""
    cluster = a_pool(slots=2)
    cluster.step(DrainRequested(cluster.at_s, "w1", draining=True))
    cluster.join("w2", slots=1)
    assert wait_s(cluster) == 0.0


def test_jobs_of_another_model_take_the_slots_that_both_share() -> None:
    """All slots run another model's jobs: a job of this one waits for one to end."""
    cluster = a_pool(slots=2)
    for dispatch in of(Dispatch, cluster.decisions)[-2:]:
        cluster.end(dispatch)
    cluster.beat("w1", models=(MODEL, "other"))
    cluster.hold_many(2, prefix="o", model="other")
    assert wait_s(cluster) > 1.0


def test_waits_grow_by_the_time_a_job_takes() -> None:
    """Two slots, 4 s a job: each place adds 2 s."""
    waits = waits_of(a_pool(slots=2), 20)
    steps = [b - a for a, b in pairwise(waits)]
    assert waits[0] == pytest.approx(2.0, rel=0.1)
    assert steps == [pytest.approx(2.0, rel=0.1)] * 19


def test_twice_the_slots_halve_the_wait() -> None:
    """Live capacity is in the estimate, and a worker lost doubles it."""
    two, four = waits_of(a_pool(slots=2), 20), waits_of(a_pool(slots=4), 20)
    assert two[-1] == pytest.approx(2 * four[-1], rel=0.05)
    cluster = a_pool(slots=4)
    cluster.hold_many(20)
    before = wait_s(cluster)
    cluster.beat("w1", slots=2)
    assert wait_s(cluster) == pytest.approx(2 * before, rel=0.05)


def test_while_jobs_wait_the_rate_is_what_is_dispatched() -> None:
    """Jobs said to run 4 s end and are followed each second: after many, a place is half a second
    for two slots, whatever a slot is said to do.
    """
    cluster = a_pool(slots=2)
    running = of(Dispatch, cluster.decisions)[-2:]
    cluster.hold_many(600)
    for _ in range(250):
        cluster.at_s += 1.0
        ended = [cluster.end_event(one, run_s=4.0) for one in running]
        running = [only(Dispatch, cluster.step(one)) for one in ended]
        cluster.beat("w1")
    waiting = cluster.scheduler._mind.queues.queue(lane=LANE, band=2, model=MODEL).waiting_jobs
    assert waiting == 100
    assert wait_s(cluster) == pytest.approx(50.5, rel=0.1)


def test_what_is_not_waited_for_says_nothing_of_the_rate() -> None:
    """A job a minute that goes at once is no sign of a slow pool, nor is the time between."""
    cluster = a_pool(slots=2)
    running = of(Dispatch, cluster.decisions)[-1]
    cluster.hold(a_spec("late", lane="beta", band=0))
    cluster.at_s += 1.0
    cluster.beat("w1")
    running = only(Dispatch, cluster.end(running, run_s=4.0))
    forget_arrivals(cluster)
    before = wait_s(cluster)
    for n in range(20):
        cluster.end(running, run_s=4.0)
        cluster.at_s += 60.0
        cluster.beat("w1")
        running = only(Dispatch, cluster.hold(a_spec(f"x{n}", lane="beta", band=0)))
    forget_arrivals(cluster)
    assert wait_s(cluster) == pytest.approx(before, rel=0.01)


def test_the_pace_follows_the_jobs_that_end() -> None:
    """Jobs that take twice as long double the estimate, after about fifty of them."""
    cluster = a_pool(run_s=2.0)
    before = wait_s(cluster)
    busy = of(Dispatch, cluster.decisions)[-1]
    for n in range(200):
        pass_a_job_s(cluster)
        cluster.end(busy, run_s=4.0)
        busy = only(Dispatch, cluster.hold(a_spec(f"x{n}", band=0)))
    forget_arrivals(cluster)
    assert wait_s(cluster) == pytest.approx(2 * before, rel=0.1)


def test_one_odd_job_moves_the_pace_by_one_part_in_fifty() -> None:
    """A job that took fifty times as long doubles the estimate, no more."""
    cluster = a_pool(run_s=2.0)
    before = wait_s(cluster)
    pass_a_job_s(cluster)
    cluster.end(of(Dispatch, cluster.decisions)[-1], run_s=100.0)
    only(Dispatch, cluster.hold(a_spec("x", band=0)))
    forget_arrivals(cluster)
    assert wait_s(cluster) == pytest.approx(2 * before, rel=0.03)


def test_an_end_without_time_or_work_teaches_nothing() -> None:
    """A job found settled did not run; a run of no time has no rate."""
    cluster = a_pool()
    before = wait_s(cluster)
    busy = of(Dispatch, cluster.decisions)[-1]
    cluster.end(busy, run_s=0.0)
    busy = only(Dispatch, cluster.hold(a_spec("x", band=0)))
    cluster.end(busy, usage=Usage(), run_s=100.0)
    only(Dispatch, cluster.hold(a_spec("y", band=0)))
    forget_arrivals(cluster)
    assert wait_s(cluster) == pytest.approx(before, rel=1e-9)


@pytest.mark.parametrize(("band", "wait"), [(0, 10.0), (1, 60.0), (2, 600.0), (3, 86_400.0)])
def test_without_workers_the_estimate_is_the_longest_wait(band: int, wait: float) -> None:
    """By convention: finite, and the job ends then if nothing changes. No estimate is longer."""
    cluster = Cluster()
    assert wait_s(cluster, band=band) == wait
    cluster = a_pool(run_s=1e6)
    cluster.hold_many(3, band=band)
    assert wait_s(cluster, band=band) == wait


# ---- quotas --------------------------------------------------------------------------------------


def test_a_quota_is_less_capacity() -> None:
    """A queue that may use one of four slots waits four times as long."""
    free = waits_of(a_pool(slots=4), 20)
    held = waits_of(a_pool(slots=4, rows=(QuotaRow(lane=LANE, inflight_jobs_max=1),)), 20)
    assert held[-1] == pytest.approx(4 * free[-1], rel=0.1)


def test_a_quota_over_all_lanes_is_less_capacity_for_all() -> None:
    """Three more lanes wait under one row for two of four slots: twice the wait of none."""
    rows = (QuotaRow(band=2, inflight_jobs_max=2),)
    free, held = a_pool(slots=4), a_pool(slots=4, rows=rows)
    for cluster in (free, held):
        cluster.hold_many(30)
        cluster.hold_many(30, lane="beta")
        forget_arrivals(cluster)
    assert wait_s(held) == pytest.approx(2 * wait_s(free), rel=0.05)


def test_a_token_bucket_is_a_rate_of_its_own() -> None:
    """6,000 tokens a minute are a job of 200 each 2 s, beside four free slots."""
    cluster = Cluster(a_policy(QuotaRow(lane=LANE, tokens_per_min=6000)))
    cluster.join("w1", slots=4)
    cluster.hold_many(21)
    forget_arrivals(cluster)
    assert of(Dispatch, cluster.decisions) == []
    bucket = cluster.scheduler._mind.quotas.rows[0]
    bucket.bucket_tokens, bucket.bucket_at_s = 0.0, cluster.at_s
    assert wait_s(cluster) == pytest.approx(44.0, rel=0.01)
    bucket.bucket_tokens = 1000.0
    assert wait_s(cluster) == pytest.approx(34.0, rel=0.01)


def test_tokens_in_flight_are_a_rate_by_how_long_they_run() -> None:
    """400 tokens at once, of jobs that run 4 s: two jobs each 4 s."""
    cluster = a_pool(slots=8, rows=(QuotaRow(lane=LANE, inflight_tokens_max=400),))
    cluster.end(of(Dispatch, cluster.decisions)[-1])
    cluster.hold_many(22)
    forget_arrivals(cluster)
    queue = cluster.scheduler._mind.queues.queue(lane=LANE, band=2, model=MODEL)
    assert wait_s(cluster) == pytest.approx(2.0 * (queue.waiting_jobs + 1), rel=0.1)


def test_a_job_held_by_its_quota_waits_though_slots_are_free() -> None:
    """A free slot is no help where a row is full."""
    cluster = Cluster(a_policy(QuotaRow(lane=LANE, inflight_jobs_max=1)))
    cluster.join("w1")
    cluster.hold(a_spec("j1"))
    assert wait_s(cluster) > 0.0
    assert wait_s(cluster, lane="beta") == 0.0


# ---- bands and lanes -----------------------------------------------------------------------------


def test_higher_bands_count_and_lower_only_by_their_share() -> None:
    """Work that goes before is waited for; of what comes after, the 10 % it is guaranteed."""
    cluster = a_pool()
    alone = wait_s(cluster, band=1)
    cluster.hold_many(10, band=2)
    forget_arrivals(cluster)
    assert wait_s(cluster, band=1) == pytest.approx(alone / 0.9)
    before = wait_s(cluster, band=2)
    cluster.hold_many(10, band=1, prefix="high")
    forget_arrivals(cluster)
    assert wait_s(cluster, band=2) == pytest.approx(before + 20.0, rel=0.1)


def test_aged_jobs_below_take_a_quarter() -> None:
    """What bands 2-3 may take by exceptions while their jobs have waited long."""
    cluster = a_pool()
    alone = wait_s(cluster, band=1)
    cluster.hold_many(10, band=2, enqueued_at_s=cluster.at_s - 61.0)
    forget_arrivals(cluster)
    assert len(a_queue(cluster).aged) == 10
    assert wait_s(cluster, band=1) == pytest.approx(alone / 0.75)


def test_work_counts_as_what_it_comes_to_cost() -> None:
    """Half of what dispatched jobs ask is cached: the jobs before take half as long."""
    cluster = a_pool()
    cluster.hold_many(20)
    forget_arrivals(cluster)
    queue, estimates = a_queue(cluster), cluster.scheduler._estimates
    first, last = (estimates.wait_s(queue, position=place) for place in (0, 20))
    flow = pace_of(cluster).flow((LANE, 2), at_s=cluster.at_s)
    for _ in range(300):
        flow.dispatched(cost_tokens=100.0, work_tokens=200.0, at_s=cluster.at_s)
    again, sooner = (estimates.wait_s(queue, position=place) for place in (0, 20))
    assert again == first
    assert sooner - first == pytest.approx((last - first) / 2, rel=0.02)


@pytest.mark.parametrize(
    ("band", "tokens_s", "times"), [(1, 50.0, 2.0), (1, 1e9, 5.6), (2, 1e9, 1.0), (3, 1e9, 1.0)]
)
def test_higher_arrivals_are_taken_off_the_rate(band: int, tokens_s: float, times: float) -> None:
    """While it waits, more urgent work goes on coming: down to the band's own tenth of the pool,
    and a quarter from 60 s on, when it ages. 22 s of work take 60 s and (22 - 6) ÷ 0.25.
    """
    cluster = a_pool()
    cluster.hold_many(10, band=2)
    forget_arrivals(cluster)
    quiet = wait_s(cluster, band=2)
    flow = pace_of(cluster).bands[band]
    flow.began_at_s = cluster.at_s - 1e5
    flow.recent_tokens_s = flow.usual_tokens_s = tokens_s
    assert wait_s(cluster, band=2) == pytest.approx(times * quiet, rel=0.05)
    forget_arrivals(cluster)
    assert wait_s(cluster, band=2) == pytest.approx(quiet, rel=0.01)


def test_other_lanes_take_their_fair_share_meanwhile() -> None:
    """With a second lane as deep the wait doubles; a shallow one adds only what it has."""
    cluster = a_pool()
    cluster.hold_many(20)
    forget_arrivals(cluster)
    alone = wait_s(cluster)
    cluster.hold_many(2, lane="beta", prefix="few")
    forget_arrivals(cluster)
    assert wait_s(cluster) == pytest.approx(alone + 4.0, rel=0.05)
    cluster.hold_many(60, lane="beta", prefix="many")
    forget_arrivals(cluster)
    assert wait_s(cluster) == pytest.approx(2 * alone, rel=0.1)


def test_lanes_are_weighed() -> None:
    """A lane of weight 3 beside one of weight 1, both deep: 4/3 of the wait alone; and three jobs
    of the other go before each of its own.
    """
    lanes = (LanePolicy(name="gold", weight=3.0), LanePolicy(name="tin"))
    cluster = Cluster(Policy(models=(MODEL,), lanes=lanes))
    cluster.join("w1", slots=2)
    cluster.hold_many(2, lane="tin", prefix="busy")
    cluster.hold_many(30, lane="gold")
    forget_arrivals(cluster)
    alone = wait_s(cluster, lane="gold")
    cluster.hold_many(300, lane="tin", prefix="deep")
    forget_arrivals(cluster)
    assert wait_s(cluster, lane="gold") == pytest.approx(alone * 4 / 3, rel=0.1)
    estimates, queues = cluster.scheduler._estimates, cluster.scheduler._mind.queues
    tin = queues.queue(lane="tin", band=2, model=MODEL)
    first, fifth = (estimates.wait_s(tin, position=place) for place in (0, 5))
    assert fifth - first == pytest.approx(4 * 5 * alone / 31, rel=0.15)


def test_messages_not_pulled_yet_are_before_who_comes_now() -> None:
    """The estimate of a newcomer counts all of its queue."""
    cluster = a_pool()
    cluster.hold_many(10)
    before = wait_s(cluster)
    cluster.step(QueueDepth(cluster.at_s, LANE, 2, MODEL, 10))
    assert wait_s(cluster) == pytest.approx(before + 20.0, rel=0.05)


def test_a_band_without_a_share_waits_finitely() -> None:
    """Flooded from above and guaranteed nothing: as if it had a twentieth."""
    bands = tuple(BandPolicy(guaranteed_share=0.0) for _ in range(4))
    cluster = Cluster(a_policy(bands=bands))
    cluster.join("w1", slots=1)
    cluster.hold_many(11, band=2)
    forget_arrivals(cluster)
    quiet = wait_s(cluster)
    pace_of(cluster).bands[1].recent_tokens_s = 1e9
    assert wait_s(cluster) == pytest.approx(quiet / module.RATE_RATIO_MIN)


def test_batch_has_the_slots_that_are_not_kept_for_people() -> None:
    """Half of eight slots are kept: batch waits twice as long as standard work would."""
    pressure = PressurePolicy(online_floor_share=0.5, hold_batch_wait_s=1e6)
    waits: list[float] = []
    for band in (2, 3):
        cluster = Cluster(a_policy(pressure=pressure))
        cluster.join("w1", slots=8)
        cluster.hold_many(8, lane="beta", band=0)
        cluster.hold_many(40, band=band)
        forget_arrivals(cluster)
        waits.append(wait_s(cluster, band=band))
    assert waits[1] == pytest.approx(2 * waits[0], rel=0.05)


def test_of_many_lanes_those_not_looked_at_count_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eleven lanes of ten jobs each: two looked at tell what all of them do."""
    lanes = (LANE, *(f"lane-{n}" for n in range(10)))
    cluster = Cluster(a_policy(lanes=lanes))
    cluster.join("w1", slots=2)
    cluster.hold_many(2, lane=LANE, band=0, prefix="busy")
    for lane in lanes:
        cluster.hold_many(10, lane=lane)
    forget_arrivals(cluster)
    whole = wait_s(cluster)
    assert whole == pytest.approx(11 * wait_s_alone(), rel=0.1)
    monkeypatch.setattr(module, "LANES_MAX", 2)
    rivals = cluster.scheduler._estimates._rivals(a_queue(cluster), 2200.0)
    assert len(rivals) <= 3
    assert wait_s(cluster) == pytest.approx(whole, rel=0.05)


def wait_s_alone() -> float:
    """What a newcomer behind ten jobs of one lane is told, two slots being taken."""
    cluster = Cluster()
    cluster.join("w1", slots=2)
    cluster.hold_many(2, lane="beta", band=0)
    cluster.hold_many(10)
    forget_arrivals(cluster)
    return wait_s(cluster)


@pytest.mark.parametrize(("looked_max", "saturated"), [(1, False), (2, True)])
def test_lanes_held_by_their_quota_are_no_sign_of_a_full_pool(
    looked_max: int, saturated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only who would go in an idle pool tells that it is not; so many are looked at."""
    monkeypatch.setattr(module, "LANES_LOOKED_MAX", looked_max)
    cluster = Cluster(a_policy(QuotaRow(lane=LANE, inflight_jobs_max=0)))
    cluster.join("w1", slots=1)
    cluster.hold_many(3, lane=LANE)
    assert not pace_of(cluster).saturated
    cluster.hold_many(3, lane="beta")
    cluster.tick(0.1)
    ranking = cluster.scheduler._mind.queues.pool(MODEL).fresh[2]
    assert ranking.first == LANE
    assert pace_of(cluster).saturated is saturated
