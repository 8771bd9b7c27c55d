"""Who holds how much of a chain: galloping search down the chain, over sets of holders.

Holdings are closed (no block without its parent), so the sets only shrink on the way down. The edge
of each depth is found by doubling steps and then halving (Bentley & Yao 1976): log(depth) look-ups
for each distinct depth, whatever the number of workers or blocks.
"""

from collections.abc import Callable, Mapping, Sequence

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


Seen = list[tuple[int, int]]
"""Blocks looked up on the way down: position, and who holds it."""


def search(
    holders: Mapping[int, Holders], live: int, blocks: Sequence[int]
) -> tuple[list[Level], int]:
    """Return who holds how much of a chain, deepest first, and how many blocks were looked up.

    Its loops look blocks up themselves: a call for each is half of what a search costs.
    """
    if not blocks:
        return [], 0
    get = holders.get
    first = get(blocks[0])
    root = first.bits & live if first is not None else 0
    if not root:
        return [], 1
    seen, absent, probes = _gallop(get, blocks, root)
    levels: list[Level] = []
    while seen and len(levels) < LEVELS_MAX:
        present, workers = seen[-1]
        workers &= root
        while absent - present > 1:
            middle = (present + absent) // 2
            probes += 1
            found = get(blocks[middle])
            at_middle = found.bits & root if found is not None else 0
            if at_middle:
                present, workers = middle, at_middle
                seen.append((middle, at_middle))
            else:
                absent = middle
        levels.append(Level(present + 1, workers))
        root &= ~workers
        if not root:
            break
        absent = present
        while seen and not seen[-1][1] & root:
            absent = min(absent, seen.pop()[0])
    return levels, probes


def _gallop(
    get: Callable[[int], Holders | None], blocks: Sequence[int], root: int
) -> tuple[Seen, int, int]:
    """Return what was seen down to the first position where nobody of `root` was; that; look-ups.

    `root` holds the first block, which was looked up before.
    """
    seen, probes = [(0, root)], 1
    step, ahead, absent = 1, 1, len(blocks)
    while ahead < absent:
        probes += 1
        found = get(blocks[ahead])
        workers = found.bits & root if found is not None else 0
        if not workers:
            absent = ahead
            break
        seen.append((ahead, workers))
        step += step
        ahead += step
    return seen, absent, probes


def deepened(
    levels: list[Level], blocks: Sequence[int], chain: Sequence[int], worker: int
) -> list[Level]:
    """Return the levels of `blocks` once `worker` holds `chain` too: the same list if equal."""
    depth = 0
    for level in levels:
        if level.workers & worker:
            depth = level.depth_blocks
            break
    # No call for these: most that were dispatched part before, and a look-up asks for each.
    if depth >= len(blocks) or depth >= len(chain) or blocks[depth] != chain[depth]:
        return levels
    common = common_blocks(blocks, chain)
    by_depth = {level.depth_blocks: level.workers & ~worker for level in levels}
    by_depth[common] = by_depth.get(common, 0) | worker
    ordered = sorted(by_depth.items(), reverse=True)
    return [Level(at, workers) for at, workers in ordered if workers][:LEVELS_MAX]


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
