"""llm-d's affinity filter and token load: sticky until saturated.

Workers that have at least 80 % of the prompt cached are sticky. If there are any, only they are
considered, unless the best of them would start later than the best other by more than the gate:
waiting prefill tokens over 15,928 tokens/s estimate the start, and 18 s are allowed. Among those
left the least token load wins: tokens of prompts that wait there plus the request's uncached ones,
alike beyond 4,194,304; equals in turn.

Source: llm-d router, pkg/epp/framework/plugins/scheduling/filter/prefixcacheaffinity and
scorer/tokenload with their tests; in-flight tokens as dataproducer/inflightload counts them
(uncached prompt tokens until the first token). The rate is the project's for a 32B model on two
H100; only gate x rate counts, so that sweeping the gate sweeps both.
"""

import random
from collections.abc import Sequence
from functools import partial

from broker.sim.peers.base import MakePeer, PeerWorker
from broker.sim.peers.forgetful import Forgetful
from broker.sim.peers.llmd_prefix import LlmdPrefix, Turns
from broker.sim.request import Request

NAME: str = "llmd-affinity"
SOURCE: str = "llm-d router, filter/prefixcacheaffinity and scorer/tokenload"

STICKY_RATIO = 0.80
GATE_S = 18.0
PREFILL_TOKENS_S = 15_928.0
TOKEN_LOAD_MAX = 4_194_304


class LlmdAffinity(Forgetful):
    """Narrows to workers with the prompt cached, then balances prefill tokens."""

    def __init__(
        self,
        _rng: random.Random,
        *,
        precise: bool = False,
        sticky_ratio: float = STICKY_RATIO,
        gate_s: float = GATE_S,
        prefill_tokens_s: float = PREFILL_TOKENS_S,
    ) -> None:
        self._prefix = LlmdPrefix(precise=precise)
        self._turns = Turns()
        self._sticky_ratio = sticky_ratio
        self._gate_s = gate_s
        self._prefill_tokens_s = prefill_tokens_s

    def choose(self, request: Request, workers: Sequence[PeerWorker], *, at_s: float) -> int:
        """Return the place with the least token load among those that the filter leaves."""
        del at_s
        cached = [self._prefix.cached_tokens(request, worker) for worker in workers]
        places = self.left(request, workers, cached)
        scores = [
            token_load_score(workers[place].prefill_tokens + request.prompt_tokens - cached[place])
            for place in places
        ]
        place = places[self._turns.most(scores)]
        self._prefix.routed(request, workers[place].id)
        return place

    def left(
        self, request: Request, workers: Sequence[PeerWorker], cached: Sequence[int]
    ) -> list[int]:
        """Return the places that the affinity filter leaves, given what each has cached."""
        least = self._sticky_ratio * request.prompt_tokens
        sticky = [place for place, tokens in enumerate(cached) if tokens >= least]
        others = [place for place, tokens in enumerate(cached) if tokens < least]
        if not sticky:
            return others
        if self._gate_s > 0 and others:
            late_s = self._start_s(workers, sticky) - self._start_s(workers, others)
            if late_s > self._gate_s:
                return list(range(len(workers)))
        return sticky

    def lost(self, worker: PeerWorker, *, at_s: float) -> None:
        """Forget the worker's prefixes."""
        del at_s
        self._prefix.lost(worker.id)

    def _start_s(self, workers: Sequence[PeerWorker], places: Sequence[int]) -> float:
        return min(workers[place].prefill_tokens for place in places) / self._prefill_tokens_s


def token_load_score(tokens: int, *, tokens_max: int = TOKEN_LOAD_MAX) -> float:
    """Return the score of a token load: 1 for none, 0 for the most and beyond."""
    return 1.0 - min(max(tokens, 0), tokens_max) / tokens_max


def variants() -> dict[str, MakePeer]:
    """Return both producers of the cached share, and tighter gates and thresholds."""
    swept: dict[str, MakePeer] = {
        NAME: LlmdAffinity,
        f"{NAME} precise": partial(LlmdAffinity, precise=True),
    }
    for gate_s in (6.0, 2.0, 0.5):
        swept[f"{NAME} precise gate={gate_s:g}s"] = partial(
            LlmdAffinity, precise=True, gate_s=gate_s
        )
    for ratio in (0.5, 0.25):
        swept[f"{NAME} precise gate=2s sticky={ratio:g}"] = partial(
            LlmdAffinity, precise=True, gate_s=2.0, sticky_ratio=ratio
        )
    return swept
