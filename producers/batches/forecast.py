"""How long a batch takes at today's capacity, and how likely its window is too short. Pure.

Batches of a lane share it evenly, so until one has ended, of each other one as much is done as of
this one, or all that it has. All that, over the pace of the lane, is when the last line ends; how
sure that is shows in how much the pace changed so far. The time is taken as log-normal about the
estimate, so the chance to miss is the part of it beyond the window. While a batch is alone, its own
pace is the lane's; before any line ended it is the lane's batch queue's: what waits there over how
long it is said to wait.
"""

import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Rate:
    """What ends in a second, and how sure that is."""

    a_second: float
    """Above 0."""
    spread: float
    """Standard error, relative."""


def rate_of(points: Sequence[tuple[float, float]]) -> Rate | None:
    """Tell the rate of what had been done at each time; None while nothing was, or not known."""
    if len(points) < 2:  # noqa: PLR2004 - two make a difference.
        return None
    (first_s, first), (last_s, last) = points[0], points[-1]
    if last <= first or last_s <= first_s:
        return None
    mean = (last - first) / (last_s - first_s)
    rates = [
        (later - earlier) / (later_s - earlier_s)
        for (earlier_s, earlier), (later_s, later) in itertools.pairwise(points)
    ]
    if len(rates) < 2:  # noqa: PLR2004 - one tells nothing of the others.
        return Rate(mean, SPREAD_UNKNOWN)
    variance = sum((rate - mean) ** 2 for rate in rates) / (len(rates) - 1)
    return Rate(mean, max(SPREAD_MIN, math.sqrt(variance / len(rates)) / mean))


class Pace:
    """Lines a second of a batch, from samples of how many have ended.

    The first sample is taken when the first lines have ended: until then a run only begins (jobs
    are stored, dispatched, prefilled, results wait to be written), and lines ended over a time that
    has the beginning in it would be too few a second.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES_MAX + 1)
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
    def rate(self) -> Rate | None:
        """Lines a second over the samples; None while not known."""
        return rate_of(self._samples)


def shared(left: float, others: Iterable[float]) -> float:
    """Tell how much a lane has done when one of its batches ends, `others` being what they have."""
    return left + sum(min(left, other) for other in others)


def forecast(work: float, rate: Rate | None, *, left_s: float, at_s: float) -> Forecast | None:
    """Tell when so much will be done; None while no rate is known. `left_s`: of the window."""
    if rate is None:
        return None
    takes_s = work / rate.a_second
    return Forecast(at_s=at_s, takes_s=takes_s, miss_ratio=miss_ratio(takes_s, left_s, rate.spread))


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
