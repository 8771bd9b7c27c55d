"""How long the means of a pool and its queues remember."""

import pytest

from broker.core.paces import PACE_JOBS, PACE_S_MIN, Flow, Runs


def flow_of(cost_tokens: float, *, jobs: int, every_s: float) -> Flow:
    """Return a queue whose jobs asked for a thousand tokens each, and came to cost so many."""
    flow = Flow(0.0, 0.0)
    for n in range(jobs):
        flow.dispatched(cost_tokens=cost_tokens, work_tokens=1000.0, at_s=n * every_s)
    return flow


def test_fast_jobs_are_remembered_for_a_while() -> None:
    """Fifty in a row that cost nothing are two seconds of thirty a second: a draw, no change."""
    flow = flow_of(500.0, jobs=3600, every_s=1 / 30)
    for n in range(50):
        flow.dispatched(cost_tokens=0.0, work_tokens=1000.0, at_s=120.0 + n / 30)
    assert flow.cost_ratio == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("every_s", [1 / 30, 5.0])
def test_a_change_is_learned(every_s: float) -> None:
    """After some minutes of fast jobs, or some fifties of slow ones, what was before is gone."""
    flow = flow_of(500.0, jobs=1000, every_s=every_s)
    begin_s = 1000 * every_s
    jobs = int(5 * max(PACE_JOBS, PACE_S_MIN / every_s))
    for n in range(jobs):
        flow.dispatched(cost_tokens=100.0, work_tokens=1000.0, at_s=begin_s + n * every_s)
    assert flow.cost_ratio == pytest.approx(0.1, rel=0.05)


def test_slow_jobs_are_remembered_by_their_number() -> None:
    """A job an hour: a minute would be the last one alone."""
    runs = Runs()
    for n in range(400):
        runs.ran(100.0 if n % 2 else 300.0, 2.0, at_s=n * 3600.0)
    assert runs.job_tokens == pytest.approx(200.0, rel=0.02)
    assert runs.jobs == pytest.approx(PACE_JOBS, rel=0.01)


def test_the_minute_holds_for_what_jobs_cost_and_how_long_they_run() -> None:
    """Both are sums of the same jobs."""
    runs = Runs()
    for n in range(6000):
        runs.ran(100.0, 2.0, at_s=n * 0.01)
    runs.ran(0.0, 60.0, at_s=60.0)
    assert runs.job_s == pytest.approx(2.0, rel=0.05)
    assert runs.slot_tokens_s == pytest.approx(50.0, rel=0.05)
