"""How often prefixes are asked for: what a further copy of one would be used, and who pays for it.

A count for each prefix that decays with HEAT_S, so that it is both its uses of the last minute and,
if they go on, those of the next.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass

from broker.core.scoring import Scored

HEAT_S = 60.0
"""Time in which a use counts 1/e: what was asked for a minute ago says little."""

HEAT_KEYS_MAX = 65_536
"""Prefixes whose uses are counted; the least recently used go first."""


class Heat:
    """By the block that a prefix ends with."""

    def __init__(self) -> None:
        self._uses: OrderedDict[int, tuple[float, float]] = OrderedDict()
        """Count, and when it was last raised."""

    def __len__(self) -> int:
        """Return how many prefixes are counted."""
        return len(self._uses)

    def note(self, key: int, *, at_s: float) -> None:
        """Count a use."""
        self._uses[key] = (self.uses(key, at_s=at_s) + 1.0, at_s)
        self._uses.move_to_end(key)
        if len(self._uses) > HEAT_KEYS_MAX:
            self._uses.popitem(last=False)

    def uses(self, key: int, *, at_s: float) -> float:
        """Return the uses that are expected in the next HEAT_S seconds, if it goes on so."""
        count, since_s = self._uses.get(key, (0.0, at_s))
        return count * math.exp((since_s - at_s) / HEAT_S)


@dataclass(frozen=True, slots=True)
class Spread:
    """A hot prefix: what a copy of it costs is shared by those who will use it.

    The job that makes the copy pays its prefill once. Each later one that goes there gains what
    that worker is better by, once it holds the prefix, than the best that holds it now. So the cost
    counts less by that gain times the expected uses, and at most for nothing.
    """

    workers: int
    """Who holds it."""
    hit_tokens: float
    uses: float
    """Of one more copy, in the next minute."""
    best: float
    """Score of the best that holds it, with what its prefills make the answer wait, less what is no
    difference."""

    def apply(self, one: Scored) -> None:
        """Correct the score of a worker that lacks the prefix."""
        if one.seat.bit & self.workers:
            return
        lacks_tokens = self.hit_tokens - one.hit_tokens
        if lacks_tokens <= 0:
            return
        cost_s = one.seat.prefill_weight * lacks_tokens / one.seat.prefill_tokens_s
        gain_s = self.best - (one.score - cost_s)
        if gain_s > 0:
            one.score -= min(cost_s, self.uses * gain_s)
