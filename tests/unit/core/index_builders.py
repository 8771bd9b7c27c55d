"""An index, and the plain answer that it should give: for its tests."""

import random
from collections.abc import Sequence

from broker.core.prefix_index import (
    PrefixIndex,
)
from tests.unit.core.routing_builders import chain

WORKERS = 5
TTL_S = 600.0


def an_index(*, entries_max: int = 100_000, ttl_s: float = TTL_S) -> PrefixIndex:
    """An index with room."""
    return PrefixIndex(entries_max=entries_max, ttl_s=ttl_s)


def depths(index: PrefixIndex, blocks: Sequence[int], workers: int = WORKERS) -> dict[int, int]:
    """Ask the index: depth by worker; each worker may stand in one level only."""
    levels = index.match(blocks)
    assert [one.depth_blocks for one in levels] == sorted(
        {one.depth_blocks for one in levels}, reverse=True
    )
    found = {
        worker: level.depth_blocks
        for level in levels
        for worker in range(workers)
        if index.bit(worker) & level.workers
    }
    assert sum(level.workers.bit_count() for level in levels) == len(found)
    return found


class Naive:
    """What the index should say: a set of blocks per worker, and a walk."""

    def __init__(self) -> None:
        self.held: list[set[int]] = [set() for _ in range(WORKERS)]

    def depth(self, worker: int, blocks: Sequence[int]) -> int:
        for depth, block in enumerate(blocks):
            if block not in self.held[worker]:
                return depth
        return len(blocks)

    def depths(self, blocks: Sequence[int]) -> dict[int, int]:
        found = {worker: self.depth(worker, blocks) for worker in range(WORKERS)}
        return {worker: depth for worker, depth in found.items() if depth}


def a_tree(rng: random.Random) -> list[list[int]]:
    """Chains that branch off each other."""
    chains: list[list[int]] = []
    for number in range(6):
        stem = rng.choice(chains) if chains and rng.random() < 0.7 else []
        stem = stem[: rng.randrange(len(stem) + 1)]
        chains.append([*stem, *chain((f"{number}.{rng.random()}", rng.randrange(1, 40)))])
    return chains


def subtree(chains: list[list[int]], blocks: list[int], place: int) -> set[int]:
    """All blocks that stand on the one at `place`, itself included."""
    return {
        block
        for other in chains
        if len(other) > place and other[place] == blocks[place]
        for block in other[place:]
    }
