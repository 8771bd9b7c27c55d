"""How long a job will wait."""

from itertools import pairwise

import pytest

from broker.core.decisions import Dispatch, Queued
from broker.core.events import QueueDepth
from broker.core.policy import QuotaRow
from broker.wire.messages import Usage
from tests.unit.core.cluster import LANE, MODEL, Cluster, a_policy, a_spec, of, only


def a_pool(
    *, slots: int = 2, run_s: float = 4.0, jobs: int = 300, rows: tuple[QuotaRow, ...] = ()
) -> Cluster:
    """A pool that has learned: jobs of cost 200 take `run_s` a slot; all slots are taken."""
    cluster = Cluster(a_policy(*rows))
    cluster.join("w1", slots=slots)
    for _ in range(jobs):
        cluster.end(only(Dispatch, cluster.hold(a_spec("warm", lane="beta", band=0))), run_s=run_s)
    cluster.at_s += 10_000.0
    cluster.beat("w1")
    cluster.hold_many(slots, prefix="busy", lane="beta", band=0)
    cluster.at_s += 10_000.0
    cluster.beat("w1")
    return cluster


def wait_s(cluster: Cluster, *, lane: str = LANE, band: int = 2, model: str = MODEL) -> float:
    """Estimate for a job that comes now."""
    return cluster.scheduler.views.queue(lane=lane, band=band, model=model).wait_s


def waits_of(cluster: Cluster, count: int, **fields: object) -> list[float]:
    """What so many newcomers are told."""
    return [one.wait_s for one in of(Queued, cluster.hold_many(count, **fields))]


def test_a_free_slot_means_no_wait() -> None:
    """Nobody waits and a slot is free: 0; with all slots taken, the time until one frees."""
    cluster = a_pool(slots=2)
    assert wait_s(cluster) == pytest.approx(2.0, rel=0.05)
    cluster.end(of(Dispatch, cluster.decisions)[-1])
    assert wait_s(cluster) == 0.0


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


def test_a_quota_is_less_capacity() -> None:
    """A queue that may use one of four slots waits four times as long."""
    free = waits_of(a_pool(slots=4), 20)
    held = waits_of(a_pool(slots=4, rows=(QuotaRow(lane=LANE, inflight_jobs_max=1),)), 20)
    assert held[-1] == pytest.approx(4 * free[-1], rel=0.1)


def test_a_job_held_by_its_quota_waits_though_slots_are_free() -> None:
    """A free slot is no help where a row is full."""
    cluster = Cluster(a_policy(QuotaRow(lane=LANE, inflight_jobs_max=1)))
    cluster.join("w1")
    cluster.hold(a_spec("j1"))
    assert wait_s(cluster) > 0.0
    assert wait_s(cluster, lane="beta") == 0.0


def test_higher_bands_count_and_lower_do_not() -> None:
    """Work that goes before is waited for; work that comes after is not."""
    cluster = a_pool()
    alone = wait_s(cluster, band=1)
    cluster.hold_many(10, band=2)
    assert wait_s(cluster, band=1) == pytest.approx(alone)
    before = wait_s(cluster, band=2)
    cluster.hold_many(10, band=1, prefix="high")
    cluster.at_s += 10_000.0
    cluster.beat("w1")
    assert wait_s(cluster, band=2) == pytest.approx(before + 20.0, rel=0.1)


def test_higher_arrivals_are_taken_off_the_rate() -> None:
    """While it waits, more urgent work goes on coming: down to the band's own share of the pool."""
    cluster = a_pool()
    cluster.hold_many(10, band=2)
    quiet = wait_s(cluster, band=2)
    pace = cluster.scheduler._estimates._pace(cluster.scheduler._mind.queues.pool(MODEL))
    pace.arrivals = [0.0, 50.0, 0.0, 0.0]
    pace.arrivals_at_s = cluster.at_s
    busy = wait_s(cluster, band=2)
    assert busy == pytest.approx(2 * quiet, rel=0.15)
    pace.arrivals = [0.0, 1e9, 0.0, 0.0]
    flooded = wait_s(cluster, band=2)
    assert flooded == pytest.approx(10 * quiet, rel=0.15)
    pace.arrivals = [0.0, 0.0, 1e9, 0.0]
    assert wait_s(cluster, band=2) == pytest.approx(quiet)
    pace.arrivals = [0.0, 1e9, 0.0, 0.0]
    cluster.at_s += 3000.0
    cluster.beat("w1")
    assert wait_s(cluster, band=2) == pytest.approx(quiet, rel=0.01)


def test_arrivals_are_counted_as_they_come() -> None:
    """Work a second, over about half a minute, by band."""
    cluster = Cluster()
    pace = cluster.scheduler._estimates._pace(cluster.scheduler._mind.queues.pool(MODEL))
    for n in range(200):
        cluster.at_s += 0.5
        cluster.hold(a_spec(f"j{n}", band=1, enqueued_at_s=cluster.at_s))
    assert pace.arrivals[1] == pytest.approx(400.0, rel=0.1)
    assert pace.arrivals[2] == 0.0


def test_other_lanes_take_their_fair_share_meanwhile() -> None:
    """With a second lane as deep the wait doubles; a shallow one adds only what it has."""
    cluster = a_pool()
    cluster.hold_many(20)
    alone = wait_s(cluster)
    cluster.hold_many(2, lane="beta", prefix="few")
    assert wait_s(cluster) == pytest.approx(alone + 4.0, rel=0.05)
    cluster.hold_many(60, lane="beta", prefix="many")
    assert wait_s(cluster) == pytest.approx(2 * alone, rel=0.1)


def test_messages_not_pulled_yet_are_before_who_comes_now() -> None:
    """The estimate of a newcomer counts all of its queue."""
    cluster = a_pool()
    cluster.hold_many(10)
    before = wait_s(cluster)
    cluster.step(QueueDepth(cluster.at_s, LANE, 2, MODEL, 10))
    assert wait_s(cluster) == pytest.approx(before + 20.0, rel=0.05)


@pytest.mark.parametrize(("band", "wait"), [(0, 10.0), (1, 60.0), (2, 600.0), (3, 86_400.0)])
def test_without_workers_the_estimate_is_the_longest_wait(band: int, wait: float) -> None:
    """By convention: finite, and the job ends then if nothing changes. No estimate is longer."""
    cluster = Cluster()
    assert wait_s(cluster, band=band) == wait
    cluster = a_pool(run_s=1e6)
    cluster.hold_many(3, band=band)
    assert wait_s(cluster, band=band) == wait


def test_the_pace_follows_the_jobs_that_end() -> None:
    """Jobs that take twice as long double the estimate, after about fifty of them."""
    cluster = a_pool(run_s=2.0)
    before = wait_s(cluster)
    busy = of(Dispatch, cluster.decisions)[-1]
    for n in range(200):
        cluster.end(busy, run_s=4.0)
        busy = only(Dispatch, cluster.hold(a_spec(f"x{n}", band=0)))
    assert wait_s(cluster) == pytest.approx(2 * before, rel=0.1)


def test_one_odd_job_moves_the_pace_by_one_part_in_fifty() -> None:
    """A job that took fifty times as long doubles the estimate, no more."""
    cluster = a_pool(run_s=2.0)
    before = wait_s(cluster)
    cluster.end(of(Dispatch, cluster.decisions)[-1], run_s=100.0)
    only(Dispatch, cluster.hold(a_spec("x", band=0)))
    assert wait_s(cluster) == pytest.approx(2 * before, rel=0.03)


def test_a_lane_alone_in_its_band_waits_for_no_other() -> None:
    """Nothing is added for lanes that are not there."""
    cluster = a_pool()
    cluster.hold_many(1)
    pool = cluster.scheduler._mind.queues.pool(MODEL)
    pace = cluster.scheduler._estimates._pace(pool)
    rate = pool.slots * pace.work_tokens / pace.seconds
    residual_s = pace.seconds / pace.jobs / pool.slots
    pace.arrivals = [0.0] * 4
    assert wait_s(cluster) == pytest.approx(residual_s + 200.0 / rate, rel=1e-9)


def test_an_end_without_time_or_work_teaches_nothing() -> None:
    """A job found settled did not run; a run of no time has no rate."""
    cluster = a_pool()
    before = wait_s(cluster)
    busy = of(Dispatch, cluster.decisions)[-1]
    cluster.end(busy, run_s=0.0)
    busy = only(Dispatch, cluster.hold(a_spec("x", band=0)))
    cluster.end(busy, usage=Usage(), run_s=100.0)
    only(Dispatch, cluster.hold(a_spec("y", band=0)))
    assert wait_s(cluster) == before
