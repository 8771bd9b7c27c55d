"""How good a pool's wait estimates are: the median of what the latest jobs found them off by.

Counted in steps that fade, so that the figure follows the last `MEMORY_JOBS` long waits and takes
no more room than its steps.
"""

from bisect import bisect_left
from itertools import pairwise

WAIT_S_MIN = 5.0
"""Waits from here on are judged: a share of a shorter one matters to nobody."""

MEMORY_JOBS = 200.0
"""Long waits that the median is of."""

STEPS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 4.0, 8.0)
"""Bounds of the steps, in shares of the wait: fine around the aims, 15 % and after losses 40 %."""


class WaitErrors:
    """Of one band of one pool."""

    def __init__(self) -> None:
        self._counts = [0.0] * len(STEPS)
        self.jobs = 0
        """Long waits that were judged."""

    def learn(self, *, told_s: float, had_s: float) -> None:
        """Judge an estimate by the wait that followed; a short wait says nothing."""
        if had_s < WAIT_S_MIN:
            return
        keep = 1.0 - 1.0 / MEMORY_JOBS
        self._counts = [count * keep for count in self._counts]
        ratio = min(STEPS[-1], abs(told_s - had_s) / had_s)
        self._counts[max(1, bisect_left(STEPS, ratio))] += 1.0
        self.jobs += 1

    @property
    def ratio_p50(self) -> float:
        """Median of |told - had| ÷ had, by a straight line within a step; 0 before any."""
        left = sum(self._counts) / 2.0
        for (low, high), count in zip(pairwise(STEPS), self._counts[1:], strict=True):
            if count and count >= left:
                return low + (high - low) * left / count
            left -= count
        return 0.0
