"""vLLM production-stack's prefix-aware router: any worker that has the longest prefix.

A trie keeps which workers were given each chunk of a prompt, for ever: the project assumes that
caches forget nothing. From the root on, the candidates are narrowed to the holders of the next
chunk while any candidate holds it; one of those left is drawn by chance. Where the match is shorter
than a minimum (0 by default, and then never), one of the workers within one request of the fewest
in flight is drawn instead. The choice goes into the trie either way. Without a minimum, prompts
that all begin alike all go to the first holder of that beginning, however many they are.

Source: vLLM production-stack, src/vllm_router/routers/routing_logic.py (PrefixAwareRouter),
src/vllm_router/prefix/hashtrie.py and src/tests/test_prefixaware_router.py. A chunk there is 128
characters; here it is the workload's block.
"""

import random
from collections.abc import Sequence
from functools import partial

from broker.sim.peers.base import MakePeer, PeerWorker
from broker.sim.peers.forgetful import Forgetful
from broker.sim.request import Request

NAME: str = "production-stack"
SOURCE: str = "vLLM production-stack, src/vllm_router/routers/routing_logic.py"

MATCH_TOKENS_MIN = (0, 1024, 4096)
"""The default first; 4,096 characters, as in the project's tests, are about 1,024 tokens."""

NEAR_TIE_REQUESTS = 1


class ProductionStack(Forgetful):
    """Keeps every prefix it ever routed."""

    def __init__(self, rng: random.Random, *, match_tokens_min: int = MATCH_TOKENS_MIN[0]) -> None:
        self._rng = rng
        self._match_tokens_min = match_tokens_min
        self._holders: dict[int, tuple[int, ...]] = {}

    def choose(self, request: Request, workers: Sequence[PeerWorker], *, at_s: float) -> int:
        """Return one of the places with the longest prefix."""
        del at_s
        matched_tokens, places = self._match(request, workers)
        if matched_tokens < self._match_tokens_min:
            places = _near_least(workers)
        place = self._rng.choice(places)
        self._insert(request, workers[place].id)
        return place

    def lost(self, worker: PeerWorker, *, at_s: float) -> None:
        """Take the worker out of the trie."""
        del at_s
        kept: dict[int, tuple[int, ...]] = {}
        for block, holders in self._holders.items():
            left = tuple(holder for holder in holders if holder != worker.id)
            if left:
                kept[block] = left
        self._holders = kept

    def _match(self, request: Request, workers: Sequence[PeerWorker]) -> tuple[int, list[int]]:
        places = list(range(len(workers)))
        for depth, block in enumerate(request.blocks):
            holders = self._holders.get(block, ())
            narrowed = [place for place in places if workers[place].id in holders]
            if not narrowed:
                return depth * request.block_tokens, places
            places = narrowed
        return len(request.blocks) * request.block_tokens, places

    def _insert(self, request: Request, worker_id: int) -> None:
        for block in request.blocks:
            holders = self._holders.get(block, ())
            if worker_id not in holders:
                self._holders[block] = (*holders, worker_id)


def _near_least(workers: Sequence[PeerWorker]) -> list[int]:
    most = min(worker.requests for worker in workers) + NEAR_TIE_REQUESTS
    return [place for place, worker in enumerate(workers) if worker.requests <= most]


def variants() -> dict[str, MakePeer]:
    """Return the least lengths of a match worth following, in tokens."""
    return {
        f"{NAME} min={tokens}": partial(ProductionStack, match_tokens_min=tokens)
        for tokens in MATCH_TOKENS_MIN
    }
