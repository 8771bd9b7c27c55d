"""Runs simulations, several at once, under one progress bar, and stops cleanly.

With one job everything runs in this process. Otherwise each process reads the trace for itself,
once: that is quicker than to send it. Ctrl-C reaches the processes through a flag that each looks
at every simulated second. Flag and progress take no lock: one that is killed while it holds it,
as for want of memory, would keep all others waiting.
"""

import multiprocessing
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from typing import Protocol

from msgspec import Struct

from broker.core.policy import Policy
from broker.sim.contestants import Contestant, contestant
from broker.sim.errors import SimError
from broker.sim.request import Workload
from broker.sim.runs import Outcome, Setting, run
from ops.cli.errors import CommandError
from ops.cli.sim_bar import Report, bar
from ops.cli.sim_child import ctrl_c_later, end_with_parent, shut_down
from ops.cli.sim_point import Point

OURS_COST = 4
"""A request under the mind takes about as long to simulate as this many under a peer. It only
steadies the time left."""

TOLD_SHARE = 0.02
"""Progress of a run worth telling the parent: more would keep it busy with the bar."""

PROCESS_DIED = "a process of the simulation died (out of memory?); try fewer --jobs"

Said = tuple[int, int]
"""What is reported. As bytes it is far below what a pipe takes in one piece (PIPE_BUF), so that of
several processes that write into one none cuts another short."""


class Telling(Protocol):
    """The end of a pipe that is written to."""

    def send(self, obj: Said, /) -> None:
        """Write one."""
        ...


class Heard(Protocol):
    """The end that is read."""

    def recv(self) -> Said:
        """Read one. Raises EOFError when no more will come."""
        ...


class Flag(Protocol):
    """A byte that all processes see."""

    value: int


class Run(Struct, frozen=True, kw_only=True):
    """One simulation to be run."""

    label: str
    """Of a contestant, or what to call `policy`."""
    setting: Setting
    seed: int
    policy: Policy | None = None
    """Ours under these knobs, instead of a contestant."""
    timed: bool = False
    """Measure the real time of each decision."""

    def contestant(self) -> Contestant:
        """Return who runs."""
        if self.policy is None:
            return contestant(self.label)
        return Contestant(label=self.label, family="ours", source="", policy=self.policy)


class Unfit(Struct, frozen=True):
    """A run that can't be: a request fits no worker."""

    problem: str


class Stopped(Exception):
    """Somebody pressed Ctrl-C."""


def run_all(
    runs: Sequence[Run], *, point: Point, workload: Workload, jobs: int
) -> list[Outcome | Unfit]:
    """Run all; the outcomes come in the order asked for.

    Raises CommandError when a process dies.
    """
    requests = len(workload.requests)
    with _bar(runs, requests=requests) as report:
        if jobs == 1:
            return [_run(one, number, workload, report) for number, one in enumerate(runs)]
        return _run_pool(runs, point=point, jobs=jobs, report=report)


def required(outcomes: Iterable[Outcome | Unfit]) -> list[Outcome]:
    """Return the outcomes. Raises SimError when one could not be run."""
    found: list[Outcome] = []
    for one in outcomes:
        if isinstance(one, Unfit):
            raise SimError(one.problem)
        found.append(one)
    return found


def _run(one: Run, number: int, workload: Workload, report: Report) -> Outcome | Unfit:
    def progress(ended: int, _: int) -> None:
        report(number, ended)

    progress(0, 0)
    try:
        outcome = run(
            workload,
            one.contestant(),
            one.setting,
            seed=one.seed,
            timer=time.perf_counter if one.timed else None,
            progress=progress,
        )
    except SimError as error:
        return Unfit(str(error))
    progress(len(workload.requests), 0)
    return outcome


# ---- several processes ---------------------------------------------------------------------------


class _Here:
    """What a process keeps between runs."""

    workload: Workload
    said: Telling
    stop: Flag


def _begin(point: Point, said: Telling, stop: Flag) -> None:
    end_with_parent()
    _Here.workload, _Here.said, _Here.stop = point.workload(), said, stop


def _run_here(one: Run, number: int) -> Outcome | Unfit:
    requests = len(_Here.workload.requests)
    told = -requests

    def report(run_number: int, ended: int) -> None:
        nonlocal told
        if _Here.stop.value:
            raise Stopped
        if ended == requests or ended - told >= requests * TOLD_SHARE:
            told = ended
            _Here.said.send((run_number, ended))

    return _run(one, number, _Here.workload, report)


def _run_pool(
    runs: Sequence[Run], *, point: Point, jobs: int, report: Report
) -> list[Outcome | Unfit]:
    # Spawned processes share no locks and threads with this one, on every platform.
    context = multiprocessing.get_context("spawn")
    heard, said = context.Pipe(duplex=False)
    stop: Flag = context.RawValue("b", 0)
    listener = threading.Thread(target=_listen, args=(heard, report), daemon=True)
    listener.start()
    pool = ProcessPoolExecutor(
        min(jobs, len(runs)), context, initializer=_begin, initargs=(point, said, stop)
    )
    try:
        with ctrl_c_later():
            futures = [pool.submit(_run_here, one, number) for number, one in enumerate(runs)]
        return [_result(future) for future in futures]
    finally:
        stop.value = 1
        shut_down(pool)
        said.close()  # The last end that is written to: what listens comes to the end.
        listener.join()
        heard.close()


def _result(future: "Future[Outcome | Unfit]") -> Outcome | Unfit:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise CommandError(PROCESS_DIED) from error


def _listen(heard: Heard, report: Report) -> None:
    while True:
        try:
            one = heard.recv()
        except EOFError:
            return
        report(*one)


# ---- progress ------------------------------------------------------------------------------------


def _bar(runs: Sequence[Run], *, requests: int) -> AbstractContextManager[Report]:
    names = [f"{one.label} #{one.seed}" for one in runs]
    weights = [OURS_COST if one.contestant().is_ours else 1 for one in runs]
    return bar(names, weights=weights, requests=requests)
