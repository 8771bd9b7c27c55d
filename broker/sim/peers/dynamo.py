"""NVIDIA Dynamo's KV router: the least of prefill work and KV held, both in blocks.

cost = scale x (blocks of prompts not yet prefilled there + this prompt's blocks
       - credit x blocks its cache holds) + decode blocks there once this request is added
       + weight x requests there,
where a block that several requests share counts once. The least cost wins (temperature 0), equals
by chance. Prompts not yet prefilled count without what was cached when each was given.

Source: Dynamo 1.4.2, lib/kv-router/src/scheduling/selector (cost, ties) and its routing concepts
page (worked example); defaults as its router's options name them: credit 1, scale 1,
weight 0, temperature 0, no queue at the router. 16 and 32 are the best known scales on the Mooncake
traces. The agentic preset of later releases is credit 2, scale 4, weight 64 blocks of 16 tokens.
"""

import random
from collections.abc import Sequence
from functools import partial

from broker.sim.peers.active_blocks import ActiveBlocks
from broker.sim.peers.base import MakePeer, PeerWorker
from broker.sim.peers.forgetful import Forgetful
from broker.sim.peers.picks import any_least
from broker.sim.request import Request

NAME: str = "dynamo"
SOURCE: str = "NVIDIA Dynamo 1.4.2, lib/kv-router/src/scheduling/selector"

BLOCK_TOKENS = 64
"""Only a unit: both terms are in it, so that it cancels. The reference rows ran with 64."""

SCALES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""`prefill_load_scale`, the project's default first."""


class Dynamo(Forgetful):
    """Prices each worker; keeps which blocks are active where, as the router's own books do."""

    def __init__(
        self,
        rng: random.Random,
        *,
        scale: float = SCALES[0],
        credit: float = 1.0,
        request_tokens: int = 0,
    ) -> None:
        """Take the weight of a request in the tokens that it stands for."""
        self._rng = rng
        self._scale = scale
        self._credit = credit
        self._request_tokens = request_tokens
        self._active = ActiveBlocks()

    def choose(self, request: Request, workers: Sequence[PeerWorker], *, at_s: float) -> int:
        """Return the place of the least cost, and book the request there."""
        del at_s
        place = any_least([self.cost(request, worker) for worker in workers], self._rng)
        self._active.add(request, worker_id=workers[place].id)
        return place

    def cost(self, request: Request, worker: PeerWorker) -> float:
        """Return what this worker would cost, in blocks."""
        raw_tokens = worker.prefill_tokens + request.prompt_tokens
        prefill_tokens = raw_tokens - self._credit * worker.hit_tokens(request)
        added_tokens = request.prompt_tokens - self._active.shared_tokens(request, worker.id)
        decode_tokens = worker.active_block_tokens + added_tokens
        decode_tokens += self._request_tokens * worker.requests
        return (self._scale * prefill_tokens + decode_tokens) / BLOCK_TOKENS

    def ended(self, request: Request, worker: PeerWorker, *, at_s: float) -> None:
        """Free the request's blocks."""
        del at_s
        self._active.remove(request, worker_id=worker.id)

    def lost(self, worker: PeerWorker, *, at_s: float) -> None:
        """Drop the worker's books."""
        del at_s
        self._active.lost(worker.id)


def variants() -> dict[str, MakePeer]:
    """Return the prefill scales, and the agentic preset."""
    swept: dict[str, MakePeer] = {
        f"{NAME} scale={scale:g}": partial(Dynamo, scale=scale) for scale in SCALES
    }
    swept[f"{NAME} agentic"] = partial(Dynamo, scale=4.0, credit=2.0, request_tokens=64 * 16)
    return swept
