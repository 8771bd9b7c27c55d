"""A peer's policy in the simulation: each request is bound to a worker when it arrives.

The request is on its way for a hop then, as ours are; what happens at engines the peer sees at
once.
"""

from collections import Counter
from functools import partial

from broker.sim.host import Host
from broker.sim.peers.base import Peer
from broker.sim.request import Request
from broker.sim.world import Change, World, sequence_request
from broker.wire.messages import Usage


class Seat:
    """A worker as a router in front of it counts it (`peers.base.PeerWorker`)."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.prefill_tokens = 0
        self.active_tokens = 0
        self.active_block_tokens = 0
        self._uncached: dict[int, int] = {}
        """Prompt tokens to prefill of each request given; 0 once its first token is out."""
        self._blocks: Counter[int] = Counter()

    @property
    def id(self) -> int:
        """The worker's number."""
        return self.host.number

    @property
    def requests(self) -> int:
        """Requests given and not ended."""
        return len(self._uncached)

    @property
    def running(self) -> int:
        """Requests that hold a slot in the engine."""
        return self.host.model.running

    @property
    def waiting(self) -> int:
        """Requests in the engine's own queue."""
        return self.host.model.waiting

    @property
    def kv_ratio(self) -> float:
        """Share of the KV cache that running requests hold, 0..1."""
        kv = self.host.model.kv
        return kv.used_tokens / kv.capacity_tokens

    def hit_tokens(self, request: Request) -> int:
        """Prompt tokens that the engine's cache would serve now."""
        return self.host.model.match_tokens(sequence_request(request))

    def has(self, request: Request) -> bool:
        """Say whether a request was given and has not ended."""
        return request.index in self._uncached

    def indices(self) -> list[int]:
        """List the requests given and not ended, in the order in which they came."""
        return list(self._uncached)

    def given(self, request: Request) -> None:
        """Count a request."""
        uncached = request.prompt_tokens - self.hit_tokens(request)
        self._uncached[request.index] = uncached
        self.prefill_tokens += uncached
        self.active_tokens += request.prompt_tokens
        before = len(self._blocks)
        self._blocks.update(request.blocks)
        blocks = len(self._blocks) - before
        rest = request.prompt_tokens - len(request.blocks) * request.block_tokens
        self.active_block_tokens += blocks * request.block_tokens + rest

    def prefilled(self, request: Request) -> None:
        """Count its prompt as prefilled."""
        self.prefill_tokens -= self._uncached[request.index]
        self._uncached[request.index] = 0

    def ended(self, request: Request) -> None:
        """Count it no more."""
        self.prefill_tokens -= self._uncached.pop(request.index)
        self.active_tokens -= request.prompt_tokens
        gone = 0
        for block in request.blocks:
            self._blocks[block] -= 1
            if not self._blocks[block]:
                del self._blocks[block]
                gone += 1
        rest = request.prompt_tokens - len(request.blocks) * request.block_tokens
        self.active_block_tokens -= gone * request.block_tokens + rest


class ArrivalRouter:
    """Binds on arrival. What a lost worker ran is given anew at once, as retrying clients do."""

    def __init__(self, world: World, peer: Peer, *, hop_s: float = 0.0) -> None:
        self._world = world
        self._peer = peer
        self._hop_s = hop_s
        self._seats: dict[int, Seat] = {}
        self._stranded: list[Request] = []

    def joined(self, host: Host, *, at_s: float) -> None:
        """Seat a worker, and give it what found none."""
        self._seats[host.number] = Seat(host)
        stranded, self._stranded = self._stranded, []
        for request in stranded:
            self.arrived(request, at_s=at_s)

    def arrived(self, request: Request, *, at_s: float) -> None:
        """Give a request to the worker that the policy chooses."""
        seats = [seat for seat in self._seats.values() if not seat.host.draining]
        if not seats:
            self._stranded.append(request)
            return
        seat = seats[self._peer.choose(request, seats, at_s=at_s)]
        seat.given(request)
        if self._hop_s:
            self._world.call_at(at_s + self._hop_s, partial(self._reached, request, seat))
        else:
            self._reached(request, seat, at_s)

    def _reached(self, request: Request, seat: Seat, at_s: float) -> None:
        """Submit what came to its engine; one that was lost meanwhile has given it to another."""
        if self._seats.get(seat.id) is seat and seat.has(request):
            self._world.submit(request, seat.host, at_s=at_s)

    def first_token(self, request: Request, host: Host, *, cached_tokens: int, at_s: float) -> None:
        """Count a prompt as prefilled."""
        del cached_tokens  # Counted as of the moment it was given.
        seat = self._seats[host.number]
        seat.prefilled(request)
        self._peer.first_token(request, seat, at_s=at_s)

    def ended(self, request: Request, host: Host, *, usage: Usage, at_s: float) -> None:
        """Count a request no more."""
        del usage
        seat = self._seats[host.number]
        seat.ended(request)
        self._peer.ended(request, seat, at_s=at_s)

    def changed(self, host: Host, change: Change, *, at_s: float) -> None:
        """Forget a worker that is lost; give its requests to others."""
        if change is Change.DRAIN:
            return
        seat = self._seats.pop(host.number)
        self._peer.lost(seat, at_s=at_s)
        if change is Change.RESTART:
            self._seats[host.number] = Seat(host)
        for index in seat.indices():
            self.arrived(self._world.open[index], at_s=at_s)
