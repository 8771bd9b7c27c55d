"""How often prefixes are asked for: what a further copy of one would be used.

A count for each prefix that decays with HEAT_S, so that it is both its uses of the last minute and,
if they go on, those of the next.
"""

import math
from collections import OrderedDict

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
