"""Simulations over several processes: order, refusals, and an end in the middle."""

import multiprocessing
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import pytest

from broker.sim.errors import SimError
from broker.sim.runs import Outcome, Setting
from ops.cli import sim_pool
from ops.cli.errors import CommandError
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
    heard, said = context.Pipe(duplex=False)
    sim_pool._begin(POINT, said, context.RawValue("b", 1))
    with heard, said, pytest.raises(sim_pool.Stopped):
        sim_pool._run_here(a_run(), 0)


def test_a_process_that_dies_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the middle of its work, as for want of memory: it is told, and nothing waits."""
    begun = threading.Event()

    def kill_one(number: int, ended: int) -> None:
        del number, ended
        if not begun.is_set():
            begun.set()
            multiprocessing.active_children()[0].kill()

    @contextmanager
    def bar(runs: Sequence[Run], *, requests: int) -> Generator[sim_pool.Report]:
        del runs, requests
        yield kill_one

    monkeypatch.setattr(sim_pool, "_bar", bar)
    runs = [a_run(seed) for seed in range(1, 2000)]
    with pytest.raises(CommandError, match="a process of the simulation died"):
        run_all(runs, point=POINT, workload=POINT.workload(), jobs=2)
    assert multiprocessing.active_children() == []


def test_ctrl_c_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that have not begun never do, and every process ends."""

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sim_pool, "_result", interrupt)
    runs = [a_run(seed) for seed in range(1, 2000)]
    with pytest.raises(KeyboardInterrupt):
        run_all(runs, point=POINT, workload=POINT.workload(), jobs=2)
    assert multiprocessing.active_children() == []
