"""Who holds how much of a chain: galloping search down the chain, over sets of holders.

Holdings are closed (no block without its parent), so the sets only shrink on the way down. The edge
of each depth is found by doubling steps and then halving (Bentley & Yao 1976): log(depth) look-ups
for each distinct depth, whatever the number of workers or blocks.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

LEVELS_MAX = 8
"""Distinct depths that are told apart, deepest first: shallower holders are worth less than the
work of finding them."""


class Holders:
    """A set of workers, and the generation of its blocks' last use."""

    __slots__ = ("bits", "count", "generation")

    def __init__(self, bits: int, generation: int) -> None:
        self.bits = bits
        self.generation = generation
        self.count = bits.bit_count()


class Level(Struct, frozen=True):
    """Workers (bitset) that hold a chain down to the same depth."""

    depth_blocks: int
    workers: int


class Search:
    """One search: `levels` found, deepest first, and how many blocks were looked up.

    Its loops look blocks up themselves: a call for each is half of what a search costs.
    """

    def __init__(self, holders: Mapping[int, Holders], live: int, blocks: Sequence[int]) -> None:
        self._get = holders.get
        self._blocks = blocks
        self.probes_count = 0
        self.levels: list[Level] = []
        if not blocks:
            return
        self.probes_count = 1
        first = holders.get(blocks[0])
        root = first.bits & live if first is not None else 0
        if root:
            self._find_levels(root)

    def _find_levels(self, root: int) -> None:
        """Find the levels of `root`, the holders of the first block."""
        seen, absent = self._gallop(root)
        while seen and len(self.levels) < LEVELS_MAX:
            depth, workers = self._deepest(seen, absent, root)
            self.levels.append(Level(depth, workers))
            root &= ~workers
            if not root:
                return
            absent = depth - 1
            while seen and not seen[-1][1] & root:
                absent = min(absent, seen.pop()[0])

    def _gallop(self, root: int) -> tuple[list[tuple[int, int]], int]:
        """Return what was seen (position, workers) up to the first position where nobody was."""
        get, blocks = self._get, self._blocks
        seen = [(0, root)]
        step, ahead, absent = 1, 1, len(blocks)
        while ahead < absent:
            found = get(blocks[ahead])
            workers = found.bits & root if found is not None else 0
            if not workers:
                absent = ahead
                break
            seen.append((ahead, workers))
            step += step
            ahead += step
        # The first was looked up before; where the end was met, one more was, and not seen.
        self.probes_count += len(seen) - (absent == len(blocks))
        return seen, absent

    def _deepest(self, seen: list[tuple[int, int]], absent: int, wanted: int) -> tuple[int, int]:
        """Find the deepest block that any of `wanted` holds, from the last of `seen` on."""
        get, blocks = self._get, self._blocks
        present, workers = seen[-1]
        workers, probes = workers & wanted, 0
        while absent - present > 1:
            middle = (present + absent) // 2
            probes += 1
            found = get(blocks[middle])
            at_middle = found.bits & wanted if found is not None else 0
            if at_middle:
                present, workers = middle, at_middle
                seen.append((middle, at_middle))
            else:
                absent = middle
        self.probes_count += probes
        return present + 1, workers


def deepened(
    levels: list[Level], blocks: Sequence[int], chain: Sequence[int], worker: int
) -> list[Level]:
    """Return the levels of `blocks` once `worker` holds `chain` too: the same list if equal."""
    depth = depth_of(worker, levels)
    if not is_shared(blocks, chain, depth):
        return levels
    common = common_blocks(blocks, chain)
    by_depth = {level.depth_blocks: level.workers & ~worker for level in levels}
    by_depth[common] = by_depth.get(common, 0) | worker
    ordered = sorted(by_depth.items(), reverse=True)
    return [Level(at, workers) for at, workers in ordered if workers][:LEVELS_MAX]


def is_shared(left: Sequence[int], right: Sequence[int], position: int) -> bool:
    """Say whether two chains are the same down to a position, the block there included."""
    return position < len(left) and position < len(right) and left[position] == right[position]


def common_blocks(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many blocks two chains share: equal at one place means equal before it."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high) // 2
        if left[middle] == right[middle]:
            low = middle + 1
        else:
            high = middle
    return low


def depth_of(worker: int, levels: Sequence[Level]) -> int:
    """Return how many blocks a worker holds, by its bit."""
    for level in levels:
        if level.workers & worker:
            return level.depth_blocks
    return 0
