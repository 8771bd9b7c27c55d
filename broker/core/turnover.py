"""How soon each worker's cache is filled anew: what is written there pushes out what was there.

A block is worth keeping while it may be asked for again, and a cache that is written to twice as
fast keeps it half as long. So a token that is computed where much was written of late costs more of
what will be looked for than the same token elsewhere. Evening out how fast caches turn over keeps
more of all of them: the share of prompts that is found falls off with age, so a second more for the
cache that forgets soonest gains more than a second less for the slowest loses.

Time is counted in fills: caches' worth of prompt that the workers of a model computed, each on
average. No clock is needed, and a quiet hour forgets nothing, for nothing was pushed out.
"""

from dataclasses import dataclass, field
from math import exp

FILLS_REMEMBERED = 0.1
"""What was written before counts e times less for each tenth of a cache written since: long enough
for a dozen jobs of a public trace, and short enough to even out a burst."""

JOBS_REMEMBERED = 8.0
"""Where jobs are so large, or caches so small, that a tenth of a cache is few of them: so many."""

JOBS_AVERAGED = 256
"""Jobs over which their size is averaged."""

REUSE_FILLS = 1.0
"""Of how much is found, what is older than so many fills counts e times less."""

REUSE_MIN = 0.4
"""Tokens found for each one computed, up to which caches are all the same: where so little is
found, hardly more is by keeping it longer (the conversation trace: 0.37, the synthetic: 1.1)."""

RATIO_MAX = 3.0
"""No worker counts as written to more than so many times as fast as the mean."""

REUSE_MAX = 1.0
"""Tokens found for each one computed, beyond which more count no more: what is computed beside so
much that is found is little, and where it goes is better left to the load."""


@dataclass(slots=True)
class Written:
    """What one worker computed of late."""

    fills: float = 0.0
    """In its caches' worth, older ones counted less."""
    at_fills: float = 0.0
    """When that was, on the clock of `turnover`."""
    turnover: "Turnover | None" = field(default=None, repr=False, compare=False)
    """Of the model that it served then: another model's clock stands elsewhere, and what was
    computed for it says nothing of this one's."""


@dataclass(slots=True)
class Turnover:
    """Of the workers of one model."""

    fills: float = 0.0
    """Caches' worth that each of them computed so far, on average: the clock."""
    _found: float = 1.0
    _computed: float = 1.0
    """Of late, in the clock's unit; as much as was found until more is known."""
    _jobs: int = 0
    _job_fills: float = 0.0
    """What a job computes, on average over the last few."""

    def note(self, worker: Written, *, found: float, computed: float, workers: int) -> None:
        """Take a job that was given to a worker, both in its caches' worth, of so many workers."""
        step = computed / workers
        keep = exp(-step / REUSE_FILLS)
        self._found = keep * self._found + found / workers
        self._computed = keep * self._computed + step
        self._jobs = min(JOBS_AVERAGED, self._jobs + 1)
        self._job_fills += (computed - self._job_fills) / self._jobs
        self.fills += step
        worker.fills = self._left_of(worker) + computed
        worker.at_fills = self.fills
        worker.turnover = self

    def excess(self, worker: Written) -> float:
        """Tell how much more than at the mean worker is lost by a token that is computed there.

        In tokens that would have been found, beyond REUSE_MIN: -REUSE_MAX at least, (RATIO_MAX - 1)
        x REUSE_MAX at most, 0 while nothing was written.
        """
        memory = self._memory_fills
        mean = memory * (1.0 - exp(-self.fills / memory))
        if mean <= 0.0:
            return 0.0
        ratio = min(RATIO_MAX, self._left_of(worker) / mean)
        reuse = min(REUSE_MAX, self._found / self._computed)
        return max(0.0, reuse - REUSE_MIN) * (ratio - 1.0)

    @property
    def _memory_fills(self) -> float:
        return max(FILLS_REMEMBERED, JOBS_REMEMBERED * self._job_fills)

    def _left_of(self, worker: Written) -> float:
        if worker.turnover is not self:
            return 0.0
        return worker.fills * exp((worker.at_fills - self.fills) / self._memory_fills)
