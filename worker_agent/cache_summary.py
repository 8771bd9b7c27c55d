"""What a worker tells of its prefix cache: what changed since the last report, or all. Pure.

The cache model calls `stored` and `dropped` as it changes; `take` makes the next report. A report
is bounded in bytes, and what doesn't fit follows in the next one, so a full report of a large cache
takes several beats. Parents come before children, so that a reader that walks a chain never finds a
hole for long.
"""

from collections.abc import Callable, Iterable, Sequence

from broker.wire.messages import CacheSummary
from broker.wire.prefix import HASH_BYTES, pack_hashes


class SummaryFeed:
    """The reported part of a cache: whole prefixes that are long enough to matter."""

    def __init__(self, *, bytes_max: int, refresh_s: float) -> None:
        self._blocks_max = bytes_max // HASH_BYTES
        self._refresh_s = refresh_s
        self._reported_at_s: dict[int, float] = {}
        """Blocks that the reader knows of or will from what is pending; when each was last queued.
        """
        self._pending: dict[int, bool] = {}
        """What to tell next, in order: True = stored (or used again), False = gone."""
        self._full = True
        self._muted = False
        self._sequence = 0

    def stored(self, chain: Sequence[int], *, at_s: float) -> None:
        """Report a whole prefix, first block first; what was reported lately is not repeated."""
        if self._muted:
            return
        for block in chain:
            told_at_s = self._reported_at_s.get(block)
            if told_at_s is None or at_s - told_at_s >= self._refresh_s:
                self._reported_at_s[block] = at_s
                # Taken out first: what was pending as gone must not come before its parents.
                self._pending.pop(block, None)
                self._pending[block] = True

    def dropped(self, blocks: Iterable[int]) -> None:
        """Report that blocks are gone; those never reported are ignored."""
        for block in blocks:
            if self._reported_at_s.pop(block, None) is not None:
                self._pending.pop(block, None)
                self._pending[block] = False

    def kept(self, is_held: Callable[[int], bool]) -> None:
        """Report as gone what is not held by this account; children before their parents."""
        self.dropped([block for block in reversed(self._reported_at_s) if not is_held(block)])

    def ask_full(self) -> None:
        """Make the next report a full one: a reader has nothing, or missed something."""
        self._full = True
        self._pending = dict.fromkeys(self._reported_at_s, True)

    def cleared(self) -> None:
        """The cache is empty: the next report says so, in full."""
        self._reported_at_s.clear()
        self.ask_full()

    def mute(self, *, muted: bool) -> None:
        """Take all credit back, for an engine that reuses nothing; or give it again."""
        if muted and not self._muted:
            self.cleared()
        self._muted = muted

    def take(self) -> CacheSummary | None:
        """Make the next report; None when there is nothing to tell."""
        if not self._pending and not self._full:
            return None
        blocks = list(zip(self._pending.items(), range(self._blocks_max), strict=False))
        added: list[int] = []
        removed: list[int] = []
        for (block, is_stored), _ in blocks:
            (added if is_stored else removed).append(block)
            del self._pending[block]
        full, self._full = self._full, False
        self._sequence += 1
        return CacheSummary(
            sequence=self._sequence,
            full=full,
            added=pack_hashes(added),
            removed=pack_hashes(removed),
        )
