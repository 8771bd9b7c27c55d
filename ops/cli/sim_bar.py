"""One progress bar over several simulations, on standard error, if that is a terminal."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

Report = Callable[[int, int], None]
"""Called with the number of a run, and of its requests that have ended."""


@contextmanager
def bar(names: Sequence[str], *, weights: Sequence[int], requests: int) -> Generator[Report]:
    """Show it: of runs of so many requests each, with what one of each run's takes."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _number, _ended: None
        return
    ended = [0] * len(names)
    with Progress(
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.description}", markup=False),
        console=console,
        transient=True,
    ) as shown:
        task = shown.add_task("", total=sum(weights) * requests)

        def report(number: int, count: int) -> None:
            ended[number] = count
            done = sum(one == requests for one in ended)
            now = " · ".join(
                name for name, one in zip(names, ended, strict=True) if 0 < one < requests
            )
            shown.update(
                task,
                completed=sum(w * n for w, n in zip(weights, ended, strict=True)),
                description=f"{done}/{len(names)} runs; {now}",
            )

        yield report
