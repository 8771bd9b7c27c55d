"""`inferlane sim fuzz`: the mind under drawn scenarios and faults, and what must always hold."""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from multiprocessing import get_context
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from ops.cli.errors import CommandError, ExitCode, Misused
from ops.cli.sim_point import Jobs

if TYPE_CHECKING:
    from broker.sim.fuzz import Found

CHUNK_SEEDS = 8
"""Seeds that a process takes at once: under a second of work, so that the bar moves."""

SEEDS_MAX = 100_000_000
"""Weeks of work."""

CHUNKS_AHEAD = 4
"""Of each process: enough that none waits for work while an earlier chunk takes longer."""

FAILURES_SHOWN_MAX = 10


def fuzz(
    *,
    seeds: Annotated[int, Parameter(validator=Number(gte=1, lte=SEEDS_MAX))] = 200,
    first: Annotated[int, Parameter(validator=Number(gte=0))] = 1,
    seed: Annotated[int | None, Parameter(validator=Number(gte=0))] = None,
    trace_events: Annotated[bool, Parameter(negative="")] = False,
    jobs: Jobs = 2,
) -> ExitCode:
    """Run scenarios drawn from seeds, with faults, and check what must always hold.

    Messages are lost, late and overtaken; workers join, die, restart, drain and are cut off;
    engines die; leaders change; callers cancel. Every request must end exactly once, and every sum
    must be right after every step. Exit code 1: a seed failed; it is shown with the command that
    repeats it.

    Args:
        seeds: How many scenarios.
        first: The first seed; the others follow it.
        seed: Run this seed alone.
        trace_events: With --seed, print every event and decision.
        jobs: Processes that run at once.
    """
    from broker.sim.fuzz import fuzz_seed
    from ops.cli.output import say

    if trace_events and seed is None:
        message = "--trace-events shows one scenario: say which with --seed"
        raise Misused(message)
    if seed is not None:
        return _tell([fuzz_seed(seed, log=say if trace_events else None)])
    return _tell(_run_all(range(first, first + seeds), jobs=jobs))


def _run_all(seeds: Sequence[int], *, jobs: int) -> "list[Found]":
    from broker.sim.fuzz import fuzz_seed

    found: list[Found] = []
    several = _found(seeds, jobs=jobs) if jobs > 1 else (fuzz_seed(seed) for seed in seeds)
    # Closed here, so that its processes have ended before the command tells how it ended.
    with _bar(len(seeds)) as advance, closing(several):
        for one in several:
            found.append(one)
            advance()
    return found


def _found(seeds: Sequence[int], *, jobs: int) -> "Generator[Found]":
    """Run seeds in several processes; what they come to is told in order.

    Raises CommandError when a process dies.
    """
    from ops.cli.sim_child import ctrl_c_later, end_with_parent, shut_down
    from ops.cli.sim_pool import PROCESS_DIED

    begins = range(0, len(seeds), CHUNK_SEEDS)
    workers = min(jobs, len(begins))
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=end_with_parent)
    waiting: deque[Future[list[Found]]] = deque()
    try:
        for begin in begins:
            with ctrl_c_later():
                waiting.append(pool.submit(_chunk, seeds[begin : begin + CHUNK_SEEDS]))
            if len(waiting) > workers * CHUNKS_AHEAD:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    except BrokenProcessPool as error:
        raise CommandError(PROCESS_DIED) from error
    finally:
        shut_down(pool)


def _chunk(seeds: Sequence[int]) -> "list[Found]":
    from broker.sim.fuzz import fuzz_seed

    return [fuzz_seed(seed) for seed in seeds]


@contextmanager
def _bar(total: int) -> Generator[Callable[[], None]]:
    """Show a bar on standard error, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    with Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)


def _tell(found: "Sequence[Found]") -> ExitCode:
    from ops.cli.output import say

    failed = [one for one in found if one.violation]
    for one in failed[:FAILURES_SHOWN_MAX]:
        say(f"seed {one.seed} at {one.at_s:.3f} s: {one.violation}")
        say(f"    inferlane sim fuzz --seed {one.seed} --trace-events")
    if len(failed) > FAILURES_SHOWN_MAX:
        say(f"... and {len(failed) - FAILURES_SHOWN_MAX} more")
    steps, orders = sum(one.steps for one in found), sum(one.dispatches for one in found)
    if len(found) == 1:
        say(f"digest {found[0].digest}")
    say(f"{len(found)} seeds, {steps:,} steps, {orders:,} dispatches: {len(failed)} failed")
    return ExitCode.FAILED if failed else ExitCode.OK
