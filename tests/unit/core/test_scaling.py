"""Signals for who starts and stops workers: by work and waits, and never under running jobs."""

import pytest

from broker.core.decisions import Dispatch
from broker.core.events import QueueDepth
from broker.core.queues import WAIT_S_UNBOUNDED
from broker.core.scaling import WAIT_S_MAX, Scaling, scaling_of
from tests.unit.core.cluster import MODEL, Cluster, of

RATE = 1000.0
"""Weighted tokens a second: five of the jobs below."""


def signals(cluster: Cluster, *, rate: float = RATE) -> Scaling:
    """Tell the signals of the one model."""
    pool = cluster.scheduler._mind.queues.pool(MODEL)
    return scaling_of(pool, rate_tokens_s=rate, at_s=cluster.at_s)


def test_nothing_waits_and_nothing_runs() -> None:
    """No worker is called for, be there any or none."""
    cluster = Cluster()
    assert signals(cluster, rate=0.0) == Scaling(0.0, 0.0, 0)
    cluster.join("w1", "w2")
    assert signals(cluster) == Scaling(0.0, 0.0, 0)


def test_case_40_what_runs_counts() -> None:
    """Nothing waits, nine jobs run on slots for four each: three workers, until they end."""
    cluster = Cluster()
    cluster.join("w1", "w2", "w3", "w4")
    running = of(Dispatch, cluster.hold_many(9))
    assert signals(cluster).desired_workers == 3
    for one in running[:5]:
        cluster.end(one)
    assert signals(cluster).desired_workers == 1
    for one in running[5:]:
        cluster.end(one)
    assert signals(cluster).desired_workers == 0


@pytest.mark.parametrize(("jobs", "desired"), [(24, 1), (25, 1), (26, 2), (100, 4)])
def test_more_are_called_for_where_the_backlog_takes_longer_than_5_s(
    jobs: int, desired: int
) -> None:
    """One worker does five jobs a second: 25 that wait are 5 s, 100 are 20 s."""
    cluster = Cluster()
    cluster.join("w1", slots=1)
    cluster.hold_many(jobs + 1)
    seen = signals(cluster)
    assert seen.backlog_s == pytest.approx(jobs / 5)
    assert seen.desired_workers == desired
    assert WAIT_S_MAX == 5.0


def test_batch_calls_for_one_worker_and_no_more() -> None:
    """It waits for idle capacity; its backlog is told all the same, the stream's part too."""
    cluster = Cluster()
    cluster.join("w1", slots=2)
    cluster.hold_many(101, band=3)
    cluster.step(QueueDepth(cluster.at_s, "acme", 3, MODEL, 900))
    seen = signals(cluster)
    assert seen.backlog_s == pytest.approx(200.0)
    assert seen.desired_workers == 1
    cluster.step(QueueDepth(cluster.at_s, "acme", 3, MODEL, 400))
    assert signals(cluster).backlog_s == pytest.approx(100.0)


def test_without_workers_work_calls_for_one() -> None:
    """How many it takes nobody knows before one works; the backlog is finite."""
    cluster = Cluster()
    cluster.hold_many(3)
    assert signals(cluster, rate=0.0) == Scaling(WAIT_S_UNBOUNDED, 0.0, 1)


def test_the_oldest_wait_is_told() -> None:
    """Of those in line, whatever their band."""
    cluster = Cluster()
    cluster.hold_many(1, band=1, prefix="old")
    cluster.tick(7.0)
    cluster.hold_many(1, band=0, prefix="new")
    assert signals(cluster).oldest_wait_s == pytest.approx(7.0)
