"""The base of a policy that keeps nothing of its own: all that it uses stands on the workers."""

from broker.sim.peers.base import Peer, PeerWorker
from broker.sim.request import Request


class Forgetful(Peer):
    """Sees every event and keeps none; a policy that remembers overrides what it needs."""

    def first_token(self, request: Request, worker: PeerWorker, *, at_s: float) -> None:
        """See a request's first token."""

    def ended(self, request: Request, worker: PeerWorker, *, at_s: float) -> None:
        """See a request's end."""

    def lost(self, worker: PeerWorker, *, at_s: float) -> None:
        """See a worker go."""
