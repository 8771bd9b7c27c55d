"""Shows on standard error how far a batch is: a bar on a terminal, else now and then a line."""

import asyncio
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from producers.batch.runner import Tally

REFRESH_S = 0.25
"""Of the bar."""

UNKNOWN_S = 1e7
"""Longer is told as unknown: four months are no estimate."""

LINE_S = 10.0
"""Between two lines where there is no terminal: a log of an hour has 360."""

RATE_S = 30.0
"""The rate is taken over about so long: steady, and still soon right after a change."""


class Pace:
    """Lines a second and seconds left, from the ends so far."""

    def __init__(self, *, at_s: float) -> None:
        self._samples: list[tuple[float, int]] = [(at_s, 0)]
        self.lines_s = 0.0

    def note(self, tally: Tally, *, at_s: float) -> None:
        """Take a sample; the oldest beyond RATE_S go."""
        self._samples.append((at_s, tally.ended))
        while self._samples[1:] and self._samples[1][0] < at_s - RATE_S:
            self._samples.pop(0)
        then_s, then = self._samples[0]
        self.lines_s = (tally.ended - then) / (at_s - then_s) if at_s > then_s else 0.0

    def left_s(self, tally: Tally) -> float | None:
        """Seconds until the last line at this rate; None while it can't be told."""
        left = tally.lines - tally.before - tally.ended
        if not tally.lines or not self.lines_s:
            return None
        return max(left, 0) / self.lines_s


async def show(tally: Tally, *, quiet: bool, console: Console | None = None) -> None:
    """Show `tally` until cancelled."""
    shown = console or Console(stderr=True)
    if quiet:
        return
    if shown.is_terminal:
        await _bar(tally, shown)
    else:
        await _lines(tally, shown)


def duration(seconds: float | None) -> str:
    """A duration for people: `1:02:03`, `2:03`, or `?`."""
    if seconds is None or seconds > UNKNOWN_S:
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def one_line(tally: Tally, pace: Pace) -> str:
    """The state of a run in a line."""
    total = f" of {tally.lines:,}" if tally.lines else ""
    return (
        f"{tally.before + tally.ended:,}{total} lines, {tally.failed:,} failed, "
        f"{tally.inflight:,} in the cluster, {pace.lines_s:,.1f} lines/s, "
        f"{duration(pace.left_s(tally))} left"
    )


async def _lines(tally: Tally, console: Console) -> None:
    pace = Pace(at_s=time.monotonic())
    while True:
        await asyncio.sleep(LINE_S)
        pace.note(tally, at_s=time.monotonic())
        console.print(one_line(tally, pace), highlight=False, soft_wrap=True)


class _Facts(ProgressColumn):
    """Failed, under way, rate, time left."""

    def __init__(self, tally: Tally, pace: Pace) -> None:
        super().__init__()
        self._tally = tally
        self._pace = pace

    def render(self, task: Task) -> Text:
        del task
        tally, pace = self._tally, self._pace
        return Text(
            f"{tally.failed:,} failed · {tally.inflight:,} in the cluster · "
            f"{pace.lines_s:,.1f} lines/s · {duration(pace.left_s(tally))} left"
        )


async def _bar(tally: Tally, console: Console) -> None:
    pace = Pace(at_s=time.monotonic())
    columns = (
        BarColumn(bar_width=None),
        TextColumn("{task.completed:,.0f}/{task.fields[of]}"),
        _Facts(tally, pace),
    )
    with Progress(*columns, console=console, expand=True, transient=True) as progress:
        task = progress.add_task("", total=None, of="?")
        while True:
            pace.note(tally, at_s=time.monotonic())
            total = tally.lines or None
            of = f"{tally.lines:,}" if total else "?"
            progress.update(task, total=total, completed=tally.before + tally.ended, of=of)
            await asyncio.sleep(REFRESH_S)
