"""Round robin: the next worker, whatever its load or cache. The floor of every comparison.

Source: SGLang router, sgl-router/src/policies/round_robin.rs (a counter modulo the workers).
"""

import random
from collections.abc import Sequence

from broker.sim.peers.base import MakePeer, PeerWorker
from broker.sim.peers.forgetful import Forgetful
from broker.sim.request import Request

NAME: str = "round-robin"
SOURCE: str = "SGLang router, policies/round_robin.rs"


class RoundRobin(Forgetful):
    """Counts its choices; a worker that joins or goes changes only the modulus."""

    def __init__(self) -> None:
        self._given = 0

    def choose(self, request: Request, workers: Sequence[PeerWorker], *, at_s: float) -> int:
        """Return the next place in turn."""
        del request, at_s
        place = self._given % len(workers)
        self._given += 1
        return place


def variants() -> dict[str, MakePeer]:
    """Return the one setting."""

    def make(_rng: random.Random) -> RoundRobin:
        return RoundRobin()

    return {NAME: make}
