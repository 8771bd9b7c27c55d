"""llm-d's weighted scorers: prefix, queue and KV utilisation at 3 : 2 : 2.

Prefix: the share of the prompt that is cached. Queue: (most - own) / (most - least) of the requests
that wait in the engines, 1 for all where they are equal. KV: 1 - the share of the cache in use. The
highest weighted sum wins, equals in turn.

Source: llm-d, guides/optimized-baseline (weights); llm-d router,
pkg/epp/framework/plugins/scheduling/scorer/{prefix,queuedepth,kvcacheutilization} with their tests.
"""

import random
from collections.abc import Sequence
from functools import partial

from broker.sim.peers.base import MakePeer, PeerWorker
from broker.sim.peers.forgetful import Forgetful
from broker.sim.peers.llmd_prefix import LlmdPrefix, Turns
from broker.sim.request import Request

NAME: str = "llmd-weighted"
SOURCE: str = "llm-d, guides/optimized-baseline; llm-d router, scorer/*"

Weights = tuple[float, float, float]
"""Of the prefix, the queue and KV utilisation."""

WEIGHTS: tuple[Weights, ...] = ((3, 2, 2), (2, 1, 1), (1, 1, 1), (5, 1, 1))
"""The guide's first; 2 : 1 : 1 is an older default."""


class LlmdWeighted(Forgetful):
    """Adds up three scores."""

    def __init__(
        self, _rng: random.Random, *, precise: bool = False, weights: Weights = WEIGHTS[0]
    ) -> None:
        self._prefix = LlmdPrefix(precise=precise)
        self._turns = Turns()
        self._weights = weights

    def choose(self, request: Request, workers: Sequence[PeerWorker], *, at_s: float) -> int:
        """Return the place of the highest weighted score."""
        del at_s
        place = self._turns.most(self.scores(request, workers))
        self._prefix.routed(request, workers[place].id)
        return place

    def scores(self, request: Request, workers: Sequence[PeerWorker]) -> list[float]:
        """Return each worker's weighted sum."""
        by_prefix, by_queue, by_kv = self._weights
        queues = queue_scores([worker.waiting for worker in workers])
        return [
            by_prefix * self._prefix.cached_tokens(request, worker) / request.prompt_tokens
            + by_queue * queue
            + by_kv * (1.0 - worker.kv_ratio)
            for worker, queue in zip(workers, queues, strict=True)
        ]

    def lost(self, worker: PeerWorker, *, at_s: float) -> None:
        """Forget the worker's prefixes."""
        del at_s
        self._prefix.lost(worker.id)


def queue_scores(waiting: Sequence[int]) -> list[float]:
    """Return 0 for the longest queue to 1 for the shortest, and 1 for all where equal."""
    least, most = min(waiting), max(waiting)
    if least == most:
        return [1.0] * len(waiting)
    return [(most - own) / (most - least) for own in waiting]


def variants() -> dict[str, MakePeer]:
    """Return both producers of the cached share, and other weights on the precise one."""
    swept: dict[str, MakePeer] = {f"{NAME} 3:2:2": LlmdWeighted}
    for weights in WEIGHTS:
        label = ":".join(f"{weight:g}" for weight in weights)
        swept[f"{NAME} precise {label}"] = partial(LlmdWeighted, precise=True, weights=weights)
    return swept
