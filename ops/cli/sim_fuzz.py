"""`inferlane sim fuzz`: the mind under drawn scenarios and faults, and what must always hold."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from ops.cli.errors import ExitCode, Misused

if TYPE_CHECKING:
    from broker.sim.fuzz import Found

CHUNK_SEEDS = 8
"""Seeds that a process takes at once: under a second of work, so that the bar moves."""

FAILURES_SHOWN_MAX = 10


def fuzz(
    *,
    seeds: Annotated[int, Parameter(validator=Number(gte=1))] = 200,
    first: Annotated[int, Parameter(validator=Number(gte=0))] = 1,
    seed: Annotated[int | None, Parameter(validator=Number(gte=0))] = None,
    trace_events: Annotated[bool, Parameter(negative="")] = False,
    jobs: Annotated[int, Parameter(validator=Number(gte=1))] = 2,
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
    with _bar(len(seeds)) as advance:
        for one in _found(seeds, jobs=jobs) if jobs > 1 else map(fuzz_seed, seeds):
            found.append(one)
            advance()
    return found


def _found(seeds: Sequence[int], *, jobs: int) -> "Iterator[Found]":
    """Run seeds in several processes; what they come to is told in order."""
    from multiprocessing import get_context

    from broker.sim.fuzz import fuzz_seed
    from ops.cli.sim_child import end_with_parent

    with get_context("spawn").Pool(jobs, initializer=end_with_parent) as pool:
        yield from pool.imap(fuzz_seed, seeds, chunksize=CHUNK_SEEDS)


@contextmanager
def _bar(total: int) -> Generator[Callable[[], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    with Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
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
