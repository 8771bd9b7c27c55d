"""How llm-d's router knows the share of a prompt that a worker has cached, and breaks ties.

Two producers offer the share. The approximate one, its default, keeps for each worker the prefix
blocks that it was given, the latest 31,250 blocks of 16 tokens; the precise one follows the
engine's KV events. The approximate one can tune its size to the engine's, which the precise one
outdoes anyway. Ties of the best score go in turn.

Source: llm-d router, pkg/epp/framework/plugins: requestcontrol/dataproducer/approximateprefix and
preciseprefixcache, scheduling/picker (max score, rotation).
"""

from collections.abc import Sequence

from broker.sim.peers.base import PeerWorker
from broker.sim.peers.prefix_books import PrefixBooks
from broker.sim.request import Request

INDEX_TOKENS_MAX = 31_250 * 16
"""What the approximate index keeps of each worker."""


class LlmdPrefix:
    """Tells cached tokens, by the router's own index or by the engine's events."""

    def __init__(self, *, precise: bool) -> None:
        self._precise = precise
        self._books = PrefixBooks()

    def cached_tokens(self, request: Request, worker: PeerWorker) -> int:
        """Return how many of the prompt's tokens the worker is thought to have cached."""
        if self._precise:
            return worker.hit_tokens(request)
        held = self._books.held_blocks(request.blocks, worker_id=worker.id)
        return held * request.block_tokens

    def routed(self, request: Request, worker_id: int) -> None:
        """Note where a request went."""
        if self._precise:
            return
        self._books.put(request.blocks, worker_id=worker_id)
        self._books.trim(worker_id=worker_id, blocks_max=INDEX_TOKENS_MAX // request.block_tokens)

    def lost(self, worker_id: int) -> None:
        """Forget a worker."""
        self._books.lost(worker_id)


class Turns:
    """Gives equal best scores their turns."""

    def __init__(self) -> None:
        self._turn = 0

    def most(self, scores: Sequence[float]) -> int:
        """Return the place of the highest score; `scores` is never empty."""
        highest = max(scores)
        places = [place for place, score in enumerate(scores) if score == highest]
        if len(places) == 1:
            return places[0]
        place = places[self._turn % len(places)]
        self._turn = (self._turn + 1) % len(places)
        return place
