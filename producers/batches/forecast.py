"""How long a batch takes at today's capacity, and how likely its window is too short. Pure.

The pace is that of the batch itself once it runs, before that the lane's batch queue's: what waits
there over how long it is said to wait. What is left, over the pace, is when the last line ends;
how sure that is shows in how much the pace changed so far. The time is taken as log-normal about
the estimate, so the chance to miss is the part of it beyond the window.
"""

import math
from collections import deque

from producers.batches.records import Forecast

SAMPLE_S = 5.0
"""Between two samples of the pace."""

SAMPLES_MAX = 120
"""Ten minutes: "today's" capacity, and long against one slow answer."""

AGED_S, AGED_RATIO = 60.0, 0.05
"""How old a forecast gets before it is told anew though nothing ended."""

SPREAD_UNKNOWN = 0.7
"""Of the logarithm of the time, while nothing was seen of the pace: it may well be double or
half."""

SPREAD_MIN = 0.1
"""The least doubt: fleets change, and the lines that are left are other lines."""


class Pace:
    """Lines a second of a batch, from samples of how many have ended.

    The first sample is taken when the first lines have ended: until then a run only begins (jobs
    are stored, dispatched, prefilled, results wait to be written), and lines ended over a time that
    has the beginning in it would be too few a second.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=SAMPLES_MAX + 1)
        self._begun_with: int | None = None

    def note(self, ended: int, *, at_s: float) -> None:
        """Take a sample, unless no line ended since the run began, or the last is too fresh."""
        if self._begun_with is None:
            self._begun_with = ended
        if ended == self._begun_with:
            return
        if not self._samples or at_s >= self._samples[-1][0] + SAMPLE_S:
            self._samples.append((at_s, ended))

    @property
    def lines_s(self) -> float:
        """Lines a second over the samples; 0 while not known."""
        if len(self._samples) < 2:  # noqa: PLR2004 - two make a difference.
            return 0.0
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        return (last - first) / (last_s - first_s)

    @property
    def spread(self) -> float:
        """Standard error of the pace, relative: how sure the mean of the samples is."""
        paces = [
            (later - earlier) / (later_s - earlier_s)
            for (earlier_s, earlier), (later_s, later) in zip(
                self._samples, list(self._samples)[1:], strict=False
            )
        ]
        mean = self.lines_s
        if len(paces) < 2 or not mean:  # noqa: PLR2004 - one tells nothing of the others.
            return SPREAD_UNKNOWN
        variance = sum((pace - mean) ** 2 for pace in paces) / (len(paces) - 1)
        return max(SPREAD_MIN, math.sqrt(variance / len(paces)) / mean)


def forecast(
    *, left_lines: int, lines_s: float, spread: float, left_s: float, at_s: float
) -> Forecast | None:
    """Tell what is left; None while no pace is known. `left_s`: of the window."""
    if lines_s <= 0:
        return None
    takes_s = left_lines / lines_s
    return Forecast(at_s=at_s, takes_s=takes_s, miss_ratio=miss_ratio(takes_s, left_s, spread))


def aged(found: Forecast, *, left_s: float, at_s: float) -> Forecast:
    """A forecast as time has passed since, while nothing newer is known: of a batch that waits.

    It is renewed by steps of a twentieth, a minute at the least, so that a record is not written
    for each second; and it never says that nothing is left. `left_s`: of the window.
    """
    passed_s = at_s - found.at_s
    if passed_s < max(AGED_S, found.takes_s * AGED_RATIO):
        return found
    takes_s = max(found.takes_s - passed_s, AGED_S)
    return Forecast(
        at_s=at_s, takes_s=takes_s, miss_ratio=miss_ratio(takes_s, left_s, SPREAD_UNKNOWN)
    )


def miss_ratio(takes_s: float, left_s: float, spread: float) -> float:
    """Chance (0..1) that what takes about `takes_s` takes longer than `left_s`."""
    if takes_s <= 0:
        return 0.0
    if left_s <= 0:
        return 1.0
    sigmas = (math.log(left_s) - math.log(takes_s)) / spread
    return 0.5 * math.erfc(sigmas / math.sqrt(2))


def told(found: Forecast | None) -> dict[str, str]:
    """Say it for people and scripts, as metadata; empty while nothing is known."""
    if found is None:
        return {}
    return {
        "inferlane_takes": f"at today's capacity this takes {duration(found.takes_s)}",
        "inferlane_takes_s": f"{found.takes_s:.0f}",
        "inferlane_miss_chance": f"{found.miss_ratio:.2f}",
    }


def duration(seconds: float) -> str:
    """Write a duration roughly: `40 s`, `12 min`, `2 h 10 min`, `3 d 4 h`."""
    minutes, hours, days = seconds / 60, seconds / 3600, seconds / 86_400
    if minutes < 2:  # noqa: PLR2004 - below, seconds tell more.
        return f"{seconds:.0f} s"
    if hours < 2:  # noqa: PLR2004 - as above, of minutes.
        return f"{minutes:.0f} min"
    if days < 2:  # noqa: PLR2004 - as above, of hours.
        return f"{int(hours)} h {int(minutes % 60)} min"
    return f"{int(days)} d {int(hours % 24)} h"
