"""Hash of the first blocks with bounded load: one home per prefix, left when it is too busy.

The first two blocks of the prompt are hashed onto a ring of workers. The home serves unless it has
more than `load_factor` times the average of requests, this one counted in; then the least loaded
worker within the bound does, and the home after all where none is. A worker that joins or goes
moves only its own share of the prefixes.

Sources: SGLang model gateway, sgl-model-gateway/src/policies/prefix_hash.rs (bound 1.25, the
fallback, the test's figures); Mirrokni, Thorup, Zadimoghaddam, Consistent Hashing with Bounded
Loads (SODA 2018). The gateway hashes the first 256 tokens, or fewer where the prompt is shorter;
two blocks of 512 are what tells prompts of the Mooncake traces apart, where all share block 0.
"""

import hashlib
import random
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

from broker.sim.peers.base import MakePeer, PeerWorker
from broker.sim.peers.forgetful import Forgetful
from broker.sim.request import Request

NAME: str = "prefix-hash"
SOURCE: str = "SGLang model gateway, policies/prefix_hash.rs; bounded loads, SODA 2018"

LOAD_FACTOR = 1.25
"""The gateway's default."""

HASHED_BLOCKS = 2

RING_POINTS = 160
"""Points a worker has on the ring: shares then differ by about 8 %. libketama has as many."""


class PrefixHash(Forgetful):
    """Hashes prefixes onto a ring, which is built anew when the workers change."""

    def __init__(self, _rng: random.Random, *, load_factor: float = LOAD_FACTOR) -> None:
        self._load_factor = load_factor
        self._ids: tuple[int, ...] = ()
        self._points: list[int] = []
        self._places: list[int] = []

    def choose(self, request: Request, workers: Sequence[PeerWorker], *, at_s: float) -> int:
        """Return the home of the prefix, or the least loaded where that is too busy."""
        del at_s
        home = self._home(request, workers)
        loads = [worker.requests for worker in workers]
        if self.within_bound(loads[home], loads):
            return home
        least = min(loads)
        return loads.index(least) if self.within_bound(least, loads) else home

    def within_bound(self, load: int, loads: Sequence[int]) -> bool:
        """Say whether a worker with this load may take one more; `loads` is everybody's."""
        total = sum(loads)
        return total == 0 or load <= (total + 1) / len(loads) * self._load_factor

    def _home(self, request: Request, workers: Sequence[PeerWorker]) -> int:
        ids = tuple(worker.id for worker in workers)
        if ids != self._ids:
            self._build(ids)
        point = bisect_left(self._points, _prefix_point(request))
        return self._places[point % len(self._places)]

    def _build(self, ids: tuple[int, ...]) -> None:
        ring = sorted(
            (_point(f"worker {worker_id} {spot}"), place)
            for place, worker_id in enumerate(ids)
            for spot in range(RING_POINTS)
        )
        self._ids = ids
        self._points = [point for point, _ in ring]
        self._places = [place for _, place in ring]


def _prefix_point(request: Request) -> int:
    # Ids are chained: the last of the hashed blocks stands for all of them. A shorter prompt is
    # hashed with its tail, which is taken for its own.
    if len(request.blocks) < HASHED_BLOCKS:
        return _point(f"request {request.index}")
    return _point(f"block {request.blocks[HASHED_BLOCKS - 1]}")


def _point(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def variants() -> dict[str, MakePeer]:
    """Return the bounds on load; the last one never leaves home."""
    factors = (LOAD_FACTOR, 1.5, 2.0, float("inf"))
    return {
        f"{NAME} bound={factor:g}": partial(PrefixHash, load_factor=factor) for factor in factors
    }
