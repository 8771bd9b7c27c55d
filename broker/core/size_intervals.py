"""Short jobs apart from long ones: which stretch of a fleet the jobs of one size belong to.

A job holds up those that run beside it: while it is prefilled they stand still, and for as long as
it is there each of their steps reads its KV cache, too. Where n jobs run, what they bring in
burdens costs n times that. So the sum over workers of jobs x burden counts, and it is least when
sizes are apart: jobs of one size on a share of the workers that is as the root of (time they are
there x burden they bring), by Lagrange's multipliers. Long prompts then hold up few, for few of
them fit the same load, and short ones are held up by nothing long. (Task assignment by size
intervals: Harchol-Balter, Crovella and Murta, 1999, there for waiting in line.)

The workers of a model stand in a line, and each size has its stretch of it, shorter sizes first.
It is a pull and no rule: a job pays for being away from its stretch, in the router's seconds.
Sizes are octaves of prompt tokens: within a factor of two there is nothing to set apart.
"""

from dataclasses import dataclass, field
from math import sqrt

from msgspec import Struct

OCTAVES = 32
"""Sizes told apart; from 2^31 tokens on all are one."""

JOBS_MIN = 32.0
"""Fewer are no distribution: until so many ended every worker suits every size."""

MEMORY_JOBS = 4096.0
"""Then all that was seen counts half: loads change over the day."""

THERE_S_MAX = 3600.0
"""Of one job no more is believed, of time and of burden: figures come from agents, and one that is
garbage must not place the jobs of a day."""

ANYWHERE = (0.0, 1.0)
"""The whole line."""


def _nothing() -> list[float]:
    return [0.0] * OCTAVES


@dataclass(slots=True)
class SizeIntervals:
    """Of the jobs of one model: how long those of each size run, and what they cost the others."""

    jobs: float = 0.0
    burden_s: float = 0.0
    _there_s: list[float] = field(default_factory=_nothing)
    _burden_s: list[float] = field(default_factory=_nothing)
    _widths: list[float] = field(default_factory=_nothing)
    """Roots of time there x burden: kept, since jobs are placed far more often than they end."""

    def note(self, prompt_tokens: int, *, there_s: float, burden_s: float) -> None:
        """Take a job that ran: for how long, and for how long it held up each that ran beside."""
        if self.jobs >= MEMORY_JOBS:
            self._fade()
        there_s, burden_s = min(there_s, THERE_S_MAX), min(burden_s, THERE_S_MAX)
        octave = _octave(prompt_tokens)
        self.jobs += 1.0
        self.burden_s += burden_s
        self._there_s[octave] += there_s
        self._burden_s[octave] += burden_s
        self._widths[octave] = sqrt(self._there_s[octave] * self._burden_s[octave])

    def stretch(self, prompt_tokens: int) -> tuple[float, float]:
        """Return where jobs of this size belong, each end in 0..1.

        All of the line while little is known; for a size that never ran, the point between the
        shorter and the longer ones.
        """
        if self.jobs < JOBS_MIN:
            return ANYWHERE
        octave, widths = _octave(prompt_tokens), self._widths
        total = sum(widths)
        if total <= 0.0:
            return ANYWHERE
        low = sum(widths[:octave])
        return low / total, min(1.0, (low + widths[octave]) / total)

    @property
    def mean_burden_s(self) -> float:
        """Seconds for which a job holds up each that runs beside it, on average."""
        return self.burden_s / self.jobs if self.jobs else 0.0

    def _fade(self) -> None:
        self.jobs, self.burden_s = 0.5 * self.jobs, 0.5 * self.burden_s
        self._there_s = [0.5 * seconds for seconds in self._there_s]
        self._burden_s = [0.5 * seconds for seconds in self._burden_s]
        seen = zip(self._there_s, self._burden_s, strict=True)
        self._widths = [sqrt(there_s * burden_s) for there_s, burden_s in seen]


class Pull(Struct, frozen=True):
    """What draws a job to its stretch of the line."""

    stretch: tuple[float, float] = ANYWHERE
    seconds: float = 0.0
    """What the whole length of the line away from it costs."""

    def cost_s(self, place: float) -> float:
        """Return what a place on the line, in 0..1, costs; nothing within the stretch."""
        low, high = self.stretch
        return self.seconds * max(0.0, low - place, place - high)


NO_PULL = Pull()


def _octave(prompt_tokens: int) -> int:
    return min(OCTAVES - 1, prompt_tokens.bit_length())
