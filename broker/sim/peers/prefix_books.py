"""What a router remembers of its own choices: which worker was given which prefix blocks.

It stands for the approximate trees that routers keep of the prompts they sent. Block ids are
chained, so that a flat table is the tree: a block's holders hold its whole prefix. Each worker's
blocks are kept in order of use, for a bound on their number.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class PrefixBooks:
    """A table of holders by block, and an order of use by worker."""

    def __init__(self) -> None:
        self._holders: dict[int, tuple[int, ...]] = {}
        self._used: dict[int, OrderedDict[int, None]] = {}

    def put(self, blocks: Iterable[int], *, worker_id: int) -> None:
        """Note that a worker was given these blocks; the last one named is the latest used."""
        used = self._used.setdefault(worker_id, OrderedDict())
        for block in blocks:
            if block in used:
                used.move_to_end(block)
            else:
                used[block] = None
                self._holders[block] = (*self._holders.get(block, ()), worker_id)

    def held_blocks(self, blocks: Sequence[int], *, worker_id: int) -> int:
        """Return how many leading blocks the worker was given."""
        used = self._used.get(worker_id)
        if not used:
            return 0
        for place, block in enumerate(blocks):
            if block not in used:
                return place
        return len(blocks)

    def longest(self, blocks: Sequence[int]) -> tuple[int, int | None]:
        """Return the longest run of leading blocks that somebody holds, and its first holder.

        The first holder is the one that was given its last block first; None where the run is 0.
        """
        holders: tuple[int, ...] = ()
        for place, block in enumerate(blocks):
            found = self._holders.get(block)
            if found is None:
                return place, holders[0] if holders else None
            holders = found
        return len(blocks), holders[0] if holders else None

    def size_blocks(self, worker_id: int) -> int:
        """Return how many blocks a worker holds by these books."""
        return len(self._used.get(worker_id, ()))

    def trim(self, *, worker_id: int, blocks_max: int) -> None:
        """Forget a worker's least lately used blocks beyond a number."""
        used = self._used.get(worker_id)
        while used and len(used) > blocks_max:
            block, _ = used.popitem(last=False)
            self._drop(block, worker_id)

    def worker_ids(self) -> tuple[int, ...]:
        """Return the workers with books, in the order of their first entry."""
        return tuple(self._used)

    def lost(self, worker_id: int) -> None:
        """Forget a worker."""
        for block in self._used.pop(worker_id, ()):
            self._drop(block, worker_id)

    def _drop(self, block: int, worker_id: int) -> None:
        left = tuple(holder for holder in self._holders[block] if holder != worker_id)
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]
