"""Simulations over several processes: order, refusals, and an end in the middle."""

import multiprocessing

import pytest

from broker.sim.errors import SimError
from broker.sim.runs import Outcome, Setting
from ops.cli import sim_pool
from ops.cli.sim_point import Point
from ops.cli.sim_pool import Run, Unfit, required, run_all

POINT = Point(trace="excerpt:conversation", part="30")

SETTING = Setting(workers=2)
SMALL = Setting(workers=2, blocks_per_worker=3)


def a_run(seed: int = 1, setting: Setting = SETTING) -> Run:
    """Build a quick run."""
    return Run(label="round-robin", setting=setting, seed=seed)


@pytest.mark.parametrize("jobs", [1, 2])
def test_outcomes_come_in_the_order_asked_for(jobs: int) -> None:
    """Whichever process ends first; one that can't be run is told in its place."""
    runs = [a_run(seed=2), a_run(setting=SMALL), a_run(seed=1)]
    two, unfit, one = run_all(runs, point=POINT, workload=POINT.workload(), jobs=jobs)
    (alone,) = run_all([a_run(seed=1)], point=POINT, workload=POINT.workload(), jobs=1)
    assert one == alone
    assert isinstance(two, Outcome)
    assert two != one
    assert isinstance(unfit, Unfit)
    with pytest.raises(SimError, match="give it more blocks"):
        required([unfit])


def test_run_stops_when_told() -> None:
    """It looks at every simulated second, and what it had is dropped."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    stop.set()
    sim_pool._begin(POINT, context.SimpleQueue(), stop)
    with pytest.raises(sim_pool.Stopped):
        sim_pool._run_here(a_run(), 0)


def test_ctrl_c_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that have not begun never do, and every process ends."""

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sim_pool, "_result", interrupt)
    runs = [a_run(seed) for seed in range(1, 2000)]
    with pytest.raises(KeyboardInterrupt):
        run_all(runs, point=POINT, workload=POINT.workload(), jobs=2)
    assert multiprocessing.active_children() == []
