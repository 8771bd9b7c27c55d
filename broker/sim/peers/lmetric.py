"""LMetric: new prefill tokens times the batch, the request counted into both. No knob.

score = (tokens of prompts that wait to be prefilled there + this prompt's uncached ones)
x (requests there + 1). The least score wins, then fewer requests, then fewer tokens, then the
first. Two routers' ports take the request's own tokens only: that is the other setting.

Sources: Zhang et al., Simple is Better: Multiplication May Be All You Need for LLM Request
Scheduling (OSDI 2026, arXiv 2603.15202); ports in SGLang's model gateway,
sgl-model-gateway/src/policies/lmetric.rs (ties, and the test's figures), and in llm-d's router,
scorer/lmetric.
"""

import random
from collections.abc import Sequence
from functools import partial

from broker.sim.peers.base import MakePeer, PeerWorker
from broker.sim.peers.forgetful import Forgetful
from broker.sim.request import Request

NAME: str = "lmetric"
SOURCE: str = "LMetric, OSDI 2026 (arXiv 2603.15202); SGLang model gateway, policies/lmetric.rs"


class LMetric(Forgetful):
    """Multiplies what a worker would have to compute by how many it serves."""

    def __init__(self, _rng: random.Random, *, queued: bool = True) -> None:
        self._queued = queued

    def choose(self, request: Request, workers: Sequence[PeerWorker], *, at_s: float) -> int:
        """Return the place of the least score."""
        del at_s
        ranks = [self._rank(request, worker) for worker in workers]
        return ranks.index(min(ranks))

    def _rank(self, request: Request, worker: PeerWorker) -> tuple[int, int, int]:
        new_tokens = request.prompt_tokens - worker.hit_tokens(request)
        if self._queued:
            new_tokens += worker.prefill_tokens
        return new_tokens * (worker.requests + 1), worker.requests, new_tokens


def variants() -> dict[str, MakePeer]:
    """Return the paper's rule, and that of the ports."""
    return {NAME: LMetric, f"{NAME} own tokens": partial(LMetric, queued=False)}
