"""Paired differences over seeds, with Student's t interval.

Both policies of a pair see the same jittered arrivals under a seed, so the difference of each seed
is free of what the arrivals alone do. The interval is mean ± t · s ÷ √n (Student, "The probable
error of a mean", Biometrika 1908), two-sided at 95 %.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

SEEDS_MIN = 3
"""With fewer the interval is too wide to say anything: t is 12.7 for two seeds."""

T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""The 97.5 % quantile of Student's t, for 1 to 30 degrees of freedom. Beyond, that of 30 is taken:
it is at most 4 % too wide."""

Verdict = Literal["better", "worse", "no difference", "no claim"]


class Difference(Struct, frozen=True, kw_only=True):
    """The mean of the differences, and its interval; None with fewer than SEEDS_MIN seeds."""

    mean: float
    interval: tuple[float, float] | None

    def verdict(self, *, higher_is_better: bool) -> Verdict:
        """Say what may be claimed: something only where the interval excludes 0."""
        if self.interval is None:
            return "no claim"
        low, high = self.interval
        if low <= 0 <= high:
            return "no difference"
        return "better" if (low > 0) == higher_is_better else "worse"


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """Return ours less theirs, seed by seed; both have a value for each seed, at least one."""
    each = [our - their for our, their in zip(ours, theirs, strict=True)]
    mean = statistics.fmean(each)
    if len(each) < SEEDS_MIN:
        return Difference(mean=mean, interval=None)
    t = T_975[min(len(each) - 1, len(T_975)) - 1]
    margin = t * statistics.stdev(each) / math.sqrt(len(each))
    return Difference(mean=mean, interval=(mean - margin, mean + margin))
