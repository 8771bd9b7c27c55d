"""By how much small jobs of a queue wait less than its mean, and large ones more.

Least uncached prefill goes first, what fits beside a worker's backlog goes before what needs an
idle one, and what fits into little KV cache, or a nearly empty token bucket, goes before what does
not. No formula has all of that, so it is learned: per queue and size, waits had ÷ waits estimated
for a job of any size, over the jobs dispatched. Sizes are uncached prompt tokens, in steps of a
third of an octave with a straight line between.
"""

import math

STEPS_PER_OCTAVE = 3

MEMORY_JOBS = 24.0
"""Jobs that a step remembers: with waits that vary by a third, a factor is known within 7 %."""

DOUBT_S = 100.0
"""Seconds of waiting for which a factor of 1 counts: sizes that were hardly seen differ little from
the mean, and so do queues whose waits are short."""

WAIT_S_MIN = 1.0
"""Of jobs that were told less, and waited less, nothing is learned: their waits are single
residuals."""

FACTOR_MIN = 0.05
FACTOR_MAX = 8.0
"""On the conversation trace at twice its capacity, the largest of jobs wait five times the mean."""


class SizeFactors:
    """Of one queue."""

    def __init__(self) -> None:
        self._had: dict[int, list[float]] = {}
        """By step: moving sums of seconds waited, and of seconds estimated for any size."""

    def of(self, tokens: float) -> float:
        """Tell by how much the wait of a job of this size differs from that of any size."""
        step, beyond = _place(tokens)
        factor = (1.0 - beyond) * self._at(step) + beyond * self._at(step + 1)
        return min(FACTOR_MAX, max(FACTOR_MIN, factor))

    def learn(self, tokens: float, *, estimated_s: float, had_s: float) -> None:
        """Learn from a job that was dispatched; `estimated_s` was for a job of any size."""
        if max(estimated_s, had_s) < WAIT_S_MIN:
            return
        step, beyond = _place(tokens)
        for at, weight in ((step, 1.0 - beyond), (step + 1, beyond)):
            sums = self._had.setdefault(at, [0.0, 0.0])
            keep = 1.0 - weight / MEMORY_JOBS
            sums[0] = sums[0] * keep + weight * had_s
            sums[1] = sums[1] * keep + weight * estimated_s

    def _at(self, step: int) -> float:
        sums = self._had.get(step)
        return 1.0 if sums is None else (sums[0] + DOUBT_S) / (sums[1] + DOUBT_S)


def _place(tokens: float) -> tuple[int, float]:
    place = STEPS_PER_OCTAVE * math.log2(max(1.0, tokens))
    step = math.floor(place)
    return step, place - step
