"""SGLang's cache-aware router: the longest remembered prefix while loads are even.

Loads (requests given and not ended) are uneven when max - min > `gap` and max > `ratio` x min:
then the least loaded worker is taken. Otherwise the router's own tree of prompts tells the longest
match over all workers: above 30 % of the prompt its holder is taken, else the least loaded worker.
Releases before 0.3 took the worker with the smallest tree there, which is kept as a setting. Every
choice goes into the tree; every minute each worker's part is cut to a size, least lately used
leaves first.

Source: SGLang router 0.3.2, sgl-model-gateway/src/policies/{cache_aware,tree}.rs, its options'
defaults, and its forerunner sgl-router (smallest tree; test figures). There a tree counts
characters, 2**26 a worker by default; here it counts tokens, four characters each. The first worker
wins a tie of loads (the packaged router gives one idle worker of two all of a dozen unknown
prompts), and of several holders of a match the first that was given it.
"""

import random
from collections.abc import Sequence
from functools import partial

from broker.sim.peers.base import MakePeer, PeerWorker
from broker.sim.peers.forgetful import Forgetful
from broker.sim.peers.picks import first_least
from broker.sim.peers.prefix_books import PrefixBooks
from broker.sim.request import Request

NAME: str = "sglang"
SOURCE: str = "SGLang router 0.3.2, sgl-model-gateway/src/policies/cache_aware.rs"

MATCH_RATIO_MIN = 0.3
TREE_TOKENS_MAX = 2**24
EVICTION_EVERY_S = 60.0

KNOBS = ((64, 1.5), (32, 1.5), (16, 1.2), (8, 1.1), (4, 1.1))
"""Gap and ratio: the router's own defaults first, then ever tighter ones."""


class SGLang(Forgetful):
    """Remembers every prompt it routed."""

    def __init__(
        self,
        _rng: random.Random,
        *,
        gap: int = KNOBS[0][0],
        ratio: float = KNOBS[0][1],
        smallest_tree: bool = False,
        match_ratio_min: float = MATCH_RATIO_MIN,
    ) -> None:
        self._gap = gap
        self._ratio = ratio
        self._smallest_tree = smallest_tree
        self._match_ratio_min = match_ratio_min
        self._books = PrefixBooks()
        self._evicted_at_s = 0.0

    def choose(self, request: Request, workers: Sequence[PeerWorker], *, at_s: float) -> int:
        """Return the holder of the longest match, or the least loaded place."""
        self._evict(request, at_s)
        loads = [worker.requests for worker in workers]
        if self.uneven(loads):
            place = first_least(loads)
        else:
            place = self._by_cache(request, workers, loads)
        # Named from the last to the first, so that leaves are the least lately used.
        self._books.put(reversed(request.blocks), worker_id=workers[place].id)
        return place

    def uneven(self, loads: Sequence[int]) -> bool:
        """Say whether loads are too uneven to follow the cache."""
        least, most = min(loads), max(loads)
        return most - least > self._gap and most > least * self._ratio

    def lost(self, worker: PeerWorker, *, at_s: float) -> None:
        """Take the worker out of the tree."""
        del at_s
        self._books.lost(worker.id)

    def _by_cache(
        self, request: Request, workers: Sequence[PeerWorker], loads: Sequence[int]
    ) -> int:
        blocks, holder_id = self._books.longest(request.blocks)
        if blocks * request.block_tokens > self._match_ratio_min * request.prompt_tokens:
            for place, worker in enumerate(workers):
                if worker.id == holder_id:
                    return place
            return 0
        if self._smallest_tree:
            return first_least([self._books.size_blocks(worker.id) for worker in workers])
        return first_least(loads)

    def _evict(self, request: Request, at_s: float) -> None:
        if at_s - self._evicted_at_s < EVICTION_EVERY_S:
            return
        self._evicted_at_s = at_s
        blocks_max = TREE_TOKENS_MAX // request.block_tokens
        for worker_id in self._books.worker_ids():
            self._books.trim(worker_id=worker_id, blocks_max=blocks_max)


def variants() -> dict[str, MakePeer]:
    """Return gaps and ratios, and the older rule for a prompt that nobody holds."""
    swept: dict[str, MakePeer] = {
        f"{NAME} {gap}/{ratio:g}": partial(SGLang, gap=gap, ratio=ratio) for gap, ratio in KNOBS
    }
    for gap, ratio in (KNOBS[0], KNOBS[-1]):
        label = f"{NAME} {gap}/{ratio:g} smallest tree"
        swept[label] = partial(SGLang, gap=gap, ratio=ratio, smallest_tree=True)
    return swept
