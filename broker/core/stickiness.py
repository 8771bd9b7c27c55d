"""Who served a prefix, or a session, last: kept for a while, and bounded.

A prefix is known by the hash of its last block that is worth a key: the deepest that under half of
the workers hold. What most hold belongs everywhere, and sticks to nobody.
"""

from collections import OrderedDict

STICKY_KEYS_MAX = 131_072
"""Prefixes and sessions remembered (about 25 MB): at the default 30 s, 2,000 dispatches a second
with two keys."""

Key = int | tuple[str, str, str]
"""A block hash, or (lane, model, session)."""


class Stickiness:
    """Last worker by key."""

    def __init__(self, *, sticky_s: float) -> None:
        self.sticky_s = sticky_s
        self._last: OrderedDict[Key, tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        """Return how many keys are remembered."""
        return len(self._last)

    def note(self, key: Key, worker_id: str, *, at_s: float) -> None:
        """Remember a dispatch."""
        self._last[key] = (worker_id, at_s)
        self._last.move_to_end(key)
        if len(self._last) > STICKY_KEYS_MAX:
            self._last.popitem(last=False)

    def last(self, key: Key, *, at_s: float) -> str:
        """Return the last worker; an empty name when none is known, or its time is over."""
        worker_id, since_s = self._last.get(key, ("", 0.0))
        return worker_id if at_s - since_s < self.sticky_s else ""

    def noted_at_s(self, key: Key) -> float | None:
        """Tell when a key was last dispatched, as far as that is remembered."""
        last = self._last.get(key)
        return None if last is None else last[1]

    def expire(self, at_s: float, *, keys_max: int) -> None:
        """Forget at most so many keys whose time is over."""
        for _ in range(keys_max):
            if not self._last:
                return
            key, (_, since_s) = next(iter(self._last.items()))
            if at_s - since_s < self.sticky_s:
                return
            del self._last[key]
