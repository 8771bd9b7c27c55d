"""When the work before a job will be done: lanes and bands as fluids (Parekh and Gallager 1993).

A pool gives its rate to the highest band first, less what lower ones are owed, and within a band
to the lane with the least counter, so that by the time a lane has been served so much, each other
has been served up to the same counter, or all that it has and gets:

    rate · t - higher(t)  =  own + Σ over lanes of min(backlog + arrivals · t, up to my counter,
                                                        its quota · t)

The left side is convex in t and the right one concave, so Newton's method from the right meets the
one crossing in a few steps, each of them still an upper bound.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

ROUNDS_MAX = 16
"""Steps towards the crossing; each passes one bend at least, and two or three are usual."""


@dataclass(frozen=True, slots=True)
class Rival:
    """Another lane of the band, in tokens of cost."""

    backlog_tokens: float
    arrivals_tokens_s: float
    up_to_tokens: float
    """Of its work goes before mine, however much it has: until its counter is where mine will
    be."""
    limit_tokens_s: float = math.inf
    """What its quotas let through."""

    def served(self, after_s: float) -> tuple[float, float]:
        """Tell what it was served after so long, and how fast that grows then."""
        has = self.backlog_tokens + self.arrivals_tokens_s * after_s
        if self.limit_tokens_s < math.inf:
            passes = self.limit_tokens_s * after_s
            if passes < min(has, self.up_to_tokens):
                return passes, self.limit_tokens_s
        if self.up_to_tokens <= has:
            return self.up_to_tokens, 0.0
        return has, self.arrivals_tokens_s


@dataclass(frozen=True, slots=True)
class Supply:
    """What a band gets of its pool: what is left, at least its share, and more once it ages."""

    left_tokens_s: float
    """The pool's rate, less what is owed to lower bands and what arrives in higher ones."""
    higher_tokens: float
    """Waits in higher bands now."""
    floor_tokens_s: float
    """Above 0."""
    aging_s: float = math.inf
    aged_tokens_s: float = 0.0
    """From then on, where that is more than the floor."""

    def given(self, after_s: float) -> tuple[float, float]:
        """Tell what the band was given after so long, and how fast that grows then."""
        by_priority = self.left_tokens_s * after_s - self.higher_tokens
        by_share = self._floor(after_s)
        if by_priority >= by_share:
            return by_priority, self.left_tokens_s
        aged = after_s > self.aging_s
        return by_share, max(self.floor_tokens_s, self.aged_tokens_s if aged else 0.0)

    def surely(self, tokens: float) -> float:
        """Tell a time by which so much was given."""
        by_share_s = tokens / self.floor_tokens_s
        if self.left_tokens_s <= 0:
            return by_share_s
        return min(by_share_s, (tokens + self.higher_tokens) / self.left_tokens_s)

    def _floor(self, after_s: float) -> float:
        aged_s = max(0.0, after_s - self.aging_s)
        extra_tokens_s = max(0.0, self.aged_tokens_s - self.floor_tokens_s)
        return self.floor_tokens_s * after_s + (extra_tokens_s * aged_s if aged_s else 0.0)


def served_after_s(own_tokens: float, rivals: Sequence[Rival], supply: Supply) -> float:
    """Tell when a lane will have been served so much. Finite, and never falling as it grows."""
    after_s = supply.surely(own_tokens + sum(rival.up_to_tokens for rival in rivals))
    for _ in range(ROUNDS_MAX):
        given, grows_tokens_s = supply.given(after_s)
        over = given - own_tokens
        for rival in rivals:
            served, more_tokens_s = rival.served(after_s)
            over -= served
            grows_tokens_s -= more_tokens_s
        if over <= 0 or grows_tokens_s <= 0:
            break
        sooner_s = after_s - over / grows_tokens_s
        if sooner_s >= after_s:
            break
        after_s = max(0.0, sooner_s)
    return after_s
