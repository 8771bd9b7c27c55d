"""Least requests: the worker with the fewest requests given and not ended, equals by chance.

Source: AIBrix gateway, pkg/plugins/gateway/algorithms/least_request.go.
"""

import random
from collections.abc import Sequence

from broker.sim.peers.base import MakePeer, PeerWorker
from broker.sim.peers.forgetful import Forgetful
from broker.sim.peers.picks import any_least
from broker.sim.request import Request

NAME: str = "least-requests"
SOURCE: str = "AIBrix gateway, algorithms/least_request.go"


class LeastRequests(Forgetful):
    """Looks at counts only."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: Request, workers: Sequence[PeerWorker], *, at_s: float) -> int:
        """Return the place with the fewest requests."""
        del request, at_s
        return any_least([worker.requests for worker in workers], self._rng)


def variants() -> dict[str, MakePeer]:
    """Return the one setting."""
    return {NAME: LeastRequests}
