"""How wait estimates are judged, fitted to sizes, and what holds whatever happens."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.core import estimates as module
from broker.core.decisions import Dispatch, Queued
from broker.core.policy import PressurePolicy, QuotaRow
from tests.unit.core.cluster import LANE, MODEL, Cluster, a_policy, a_spec, of, only
from tests.unit.core.estimate_builders import a_pool, a_queue, pace_of


def errors_of(cluster: Cluster) -> tuple[tuple[int, float, int], ...]:
    """How good the estimates were, by band."""
    (pool,) = (one for one in cluster.scheduler.views.pools() if one.model == MODEL)
    return pool.wait_errors


def test_an_estimate_is_judged_by_the_wait_that_follows() -> None:
    """Told 10 s and dispatched after 20: off by half, by band. A short wait says nothing."""
    cluster = a_pool(slots=1, run_s=10.0)
    running = of(Dispatch, cluster.decisions)[-1]
    told = only(Queued, cluster.hold(a_spec("j", band=1)))
    assert told.wait_s == pytest.approx(10.0, rel=0.01)
    assert errors_of(cluster) == ()
    cluster.at_s += 20.0
    cluster.beat("w1")
    running = only(Dispatch, cluster.end(running))
    ((band, ratio, jobs),) = errors_of(cluster)
    assert (band, jobs) == (1, 1)
    assert ratio == pytest.approx(0.5, abs=0.1)
    cluster.hold(a_spec("k", band=1))
    cluster.at_s += 1.0
    only(Dispatch, cluster.end(running))
    assert errors_of(cluster)[0][2] == 1


def test_of_many_estimates_the_oldest_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered has a bound: the first of three is forgotten where two are kept."""
    monkeypatch.setattr(module, "TOLD_MAX", 2)
    cluster = a_pool(slots=1)
    running = of(Dispatch, cluster.decisions)[-1]
    cluster.hold_many(3)
    judged: list[int] = []
    for _ in range(3):
        cluster.at_s += 8.0
        cluster.beat("w1")
        running = only(Dispatch, cluster.end(running))
        judged.append(sum(jobs for _, _, jobs in errors_of(cluster)))
    assert judged == [0, 1, 2]


def test_a_size_that_waits_longer_is_told_so() -> None:
    """Long prompts that were overtaken again and again are told more than short ones."""
    cluster = a_pool(slots=1)
    flow = pace_of(cluster).flow((LANE, 2), at_s=cluster.at_s)
    for _ in range(100):
        flow.sizes.learn(100, estimated_s=20.0, had_s=10.0)
        flow.sizes.learn(3000, estimated_s=20.0, had_s=40.0)
    queue, estimates = a_queue(cluster), cluster.scheduler._estimates
    any_size = estimates.wait_s(queue, position=5)
    short = estimates.wait_s(queue, position=5, job=a_spec("short"))
    long = estimates.wait_s(queue, position=5, job=a_spec("long", prompt_tokens=3000))
    assert short < 0.7 * any_size
    assert long > 1.6 * any_size
    cluster.router.hits["acme.warm", "w1"] = 2900
    warm = estimates.wait_s(queue, position=5, job=a_spec("warm", prompt_tokens=3000))
    assert warm == pytest.approx(short)
    assert only(Queued, cluster.hold(a_spec("short"))).wait_s < 0.7 * 4.0


@pytest.mark.parametrize(("slots", "learned"), [(1, True), (3, False)])
def test_with_another_fleet_a_wait_says_nothing_of_sizes(slots: int, *, learned: bool) -> None:
    """A job that was told 4 s and waited 400, as many slots as before or not."""
    cluster = a_pool(slots=1)
    running = of(Dispatch, cluster.decisions)[-1]
    cluster.hold(a_spec("j"))
    cluster.at_s += 400.0
    cluster.beat("w1", slots=slots)
    cluster.end(running) if slots == 1 else None
    sizes = pace_of(cluster).flow((LANE, 2), at_s=cluster.at_s).sizes
    assert of(Dispatch, cluster.decisions)[-1].key == "acme.j"
    assert (sizes.of(100) > 1.0) is learned


# ---- properties ----------------------------------------------------------------------------------

LANES = ("acme", "beta", "crawl")

ROWS = (
    QuotaRow(lane="acme", inflight_jobs_max=2),
    QuotaRow(lane="beta", inflight_jobs_max_per_worker=1.0),
    QuotaRow(lane="crawl", tokens_per_min=3000),
    QuotaRow(band=2, inflight_tokens_max=900),
    QuotaRow(inflight_jobs_max=0),
)

FLOOR_SHARE = PressurePolicy().online_floor_share

moves = st.one_of(
    st.tuples(st.just("hold"), st.sampled_from(LANES), st.integers(0, 3), st.integers(1, 4000)),
    st.tuples(st.just("end"), st.floats(0.0, 50.0), st.just(0), st.just(0)),
    st.tuples(st.just("slots"), st.integers(0, 6), st.just(0), st.just(0)),
    st.tuples(st.just("pass"), st.floats(0.0, 90.0), st.just(0), st.just(0)),
)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.sampled_from(ROWS), unique=True, max_size=3),
    weights=st.lists(st.sampled_from((0.5, 1.0, 3.0)), min_size=3, max_size=3),
    steps=st.lists(moves, max_size=40),
)
def test_estimates_are_finite_never_fall_with_the_place_and_are_0_when_free(
    rows: list[QuotaRow],
    weights: list[float],
    steps: list[tuple[str, str | float, int, int]],
) -> None:
    """Whatever waits, runs, was learned or is limited, with workers or without."""
    cluster = Cluster(a_policy(*rows, lanes=LANES))
    for queue_weight, lane in zip(weights, LANES, strict=True):
        cluster.scheduler._mind.queues.queue(lane=lane, band=1, model=MODEL).weight = queue_weight
    cluster.join("w1", slots=2)
    for number, (what, value, band, tokens) in enumerate(steps):
        if what == "hold":
            spec = a_spec(f"j{number}", lane=str(value), band=band, prompt_tokens=tokens)
            cluster.hold(spec)
        elif what == "end" and cluster.scheduler.leases():
            key = cluster.scheduler.leases()[0].job.key
            given_ = [one for one in of(Dispatch, cluster.decisions) if one.key == key][-1]
            cluster.end(given_, run_s=float(value))
        elif what == "slots":
            cluster.beat("w1", slots=int(value))
        elif what == "pass":
            cluster.tick(float(value))
            cluster.beat("w1")
    estimates, queues = cluster.scheduler._estimates, cluster.scheduler._mind.queues
    for lane in LANES:
        for band in range(4):
            queue = queues.queue(lane=lane, band=band, model=MODEL)
            waits = [estimates.wait_s(queue, position=place) for place in range(30)]
            assert all(math.isfinite(one) and one >= 0.0 for one in waits)
            assert all(b >= a * (1 - 1e-9) for a, b in pairwise(waits))
            assert waits[-1] <= queue.wait_s_max
            pool = queue.pool
            is_kept = pool.keeps_from(band, FLOOR_SHARE)
            if not (rows or pool.waiting or is_kept) and pool.inflight_jobs < pool.slots:
                assert waits[0] == 0.0
