"""Power of two choices: two different workers by chance, and the one with fewer requests.

Sources: Mitzenmacher, The Power of Two Choices in Randomized Load Balancing (IEEE TPDS 12, 2001);
SGLang router, sgl-router/src/policies/power_of_two.rs (the first drawn wins a tie).
"""

import random
from collections.abc import Sequence

from broker.sim.peers.base import MakePeer, PeerWorker
from broker.sim.peers.forgetful import Forgetful
from broker.sim.request import Request

NAME: str = "power-of-two"
SOURCE: str = "Mitzenmacher, IEEE TPDS 12 (2001); SGLang router, policies/power_of_two.rs"


class PowerOfTwo(Forgetful):
    """Draws two and compares their counts."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: Request, workers: Sequence[PeerWorker], *, at_s: float) -> int:
        """Return the less loaded place of two drawn; a lone worker needs no draw."""
        del request, at_s
        if len(workers) == 1:
            return 0
        first, second = self._rng.sample(range(len(workers)), 2)
        return first if workers[first].requests <= workers[second].requests else second


def variants() -> dict[str, MakePeer]:
    """Return the one setting."""
    return {NAME: PowerOfTwo}
