"""Virtual time: requests arrive, engines compute, and a router says who runs what.

A heap of (at_s, sequence) drives everything; equal times happen in the order in which they were
asked for. Nothing else orders events, and nothing is random here.
"""

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Protocol

from msgspec import Struct

from broker.engine_model.events import Finished, FirstToken, SequenceRequest
from broker.engine_model.profile import Profile
from broker.sim.host import Host
from broker.sim.records import NOT_YET, Records
from broker.sim.request import Request
from broker.wire.messages import Usage

Call = Callable[[float], None]


class Change(StrEnum):
    """What happens to the fleet."""

    JOIN = "join"
    LOSE = "lose"
    """The machine is gone, and what it ran."""
    RESTART = "restart"
    """The worker starts anew under its name, empty."""
    DRAIN = "drain"


class FleetChange(Struct, frozen=True, kw_only=True):
    """Something that happens to the fleet at an instant."""

    at_s: float
    change: Change
    host: int = -1
    """Number of the worker; a join makes a new one."""
    profile: Profile | None = None
    """Of a worker that joins; None = as the first one."""


class Router(Protocol):
    """What decides who runs what. The world tells it everything at the instant it happens."""

    def joined(self, host: Host, *, at_s: float) -> None:
        """Meet a worker."""
        ...

    def arrived(self, request: Request, *, at_s: float) -> None:
        """Take a request."""
        ...

    def first_token(self, request: Request, host: Host, *, cached_tokens: int, at_s: float) -> None:
        """See a request's first token come out of an engine."""
        ...

    def ended(self, request: Request, host: Host, *, usage: Usage, at_s: float) -> None:
        """See a request's last token come out of an engine."""
        ...

    def changed(self, host: Host, change: Change, *, at_s: float) -> None:
        """See a worker lost, restarted or asked to drain; the engine already is as it will be."""
        ...


class World:
    """One run."""

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        profiles: Sequence[Profile],
        changes: Sequence[FleetChange] = (),
        journal: bool = False,
    ) -> None:
        self.at_s = 0.0
        self.requests = requests
        self.records = Records(len(requests))
        self.hosts = [
            Host(number, profile, journal=journal) for number, profile in enumerate(profiles)
        ]
        self.open: dict[int, Request] = {}
        """Requests that arrived and have not ended, by index."""
        self.ended_count = 0
        self.changes = changes
        self._journal = journal
        self._profile = profiles[0]
        self._heap: list[tuple[float, int, Call]] = []
        self._order = count()
        self._left = len(requests)
        """Requests that have not ended."""
        self._children: dict[int, list[Request]] = {}
        self._arrivals: Iterator[Request] = iter(requests)
        self._next: Request | None = None

    def run(self, router: Router) -> None:
        """Run until every request has ended."""
        self.begin(router)
        heap = self._heap
        while self._left and heap:
            self.at_s, _, call = heappop(heap)
            call(self.at_s)
        assert not self._left, f"{self._left} requests never ended"

    def run_until(self, until_s: float) -> None:
        """Run on to an instant, whatever has ended; `begin` goes before."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.at_s, _, call = heappop(heap)
            call(self.at_s)
        self.at_s = until_s

    def begin(self, router: Router) -> None:
        """Let the workers join and the first requests arrive."""
        self._router = router
        for change in self.changes:
            self.call_at(change.at_s, partial(self.change, change))
        for host in self.hosts:
            router.joined(host, at_s=0.0)
        self._await_next()
        self._arrive_all(0.0)

    # ---- what a router may ask for -------------------------------------------------------------

    def call_at(self, at_s: float, call: Call) -> None:
        """Call later, with the time; at one instant in the order asked for."""
        heappush(self._heap, (at_s, next(self._order), call))

    def submit(self, request: Request, host: Host, *, at_s: float) -> None:
        """Give a request to a living engine in which it fits and is not yet."""
        records, index = self.records, request.index
        records.given_s[index] = at_s
        records.first_token_s[index] = -1.0
        records.host[index] = host.number
        records.attempts[index] += 1
        host.model.submit(sequence_request(request), at_s)
        # What is given at one instant starts in one step: the look comes after all of it.
        self._look_at(host, at_s)

    def cancel(self, request: Request, host: Host, *, at_s: float) -> None:
        """Take a request out of an engine, if it is there."""
        if host.model.cancel(str(request.index), at_s):
            self._look_at(host, at_s)

    def give_up(self, request: Request, *, at_s: float) -> None:
        """End a request without an answer."""
        self.records.refused[request.index] = 1
        self._end(request, at_s)

    def change(self, change: FleetChange, at_s: float) -> None:
        """Let something happen to the fleet now; nothing happens to a lost worker."""
        if change.change is Change.JOIN:
            profile = change.profile or self._profile
            number = len(self.hosts)
            host = Host(number, profile, journal=self._journal, joined_at_s=at_s)
            self.hosts.append(host)
            self._router.joined(host, at_s=at_s)
            return
        host = self.hosts[change.host]
        if not host.alive:
            return
        match change.change:
            case Change.LOSE:
                host.restart()
                host.alive = False
            case Change.RESTART:
                host.restart()
                host.draining = False
            case Change.DRAIN:
                host.draining = True
        self._router.changed(host, change.change, at_s=at_s)

    # ---- events --------------------------------------------------------------------------------

    def _await_next(self) -> None:
        """Wait for the next request that waits for no other."""
        for request in self._arrivals:
            if request.after is None:
                self._next = request
                return
            self._follow(request, request.after)
        self._next = None

    def _follow(self, request: Request, parent: int) -> None:
        """Let a request arrive after another's end, which may be over."""
        ended_s = self.records.ended_s[parent]
        if ended_s == NOT_YET:
            self._children.setdefault(parent, []).append(request)
        else:
            arrives_s = max(self.at_s, ended_s + request.at_s)
            self.call_at(arrives_s, partial(self._arrive, request))

    def _arrive_all(self, at_s: float) -> None:
        """Let all arrive that are due: a burst is there at once, before anything else happens."""
        while self._next is not None and self._next.at_s <= at_s:
            request = self._next
            self._await_next()
            self._arrive(request, at_s)
        if self._next is not None:
            self.call_at(self._next.at_s, self._arrive_all)

    def _arrive(self, request: Request, at_s: float) -> None:
        self.records.arrived_s[request.index] = at_s
        self.open[request.index] = request
        self._router.arrived(request, at_s=at_s)

    def _look_at(self, host: Host, at_s: float | None) -> None:
        if at_s == host.wake_at_s:
            return
        host.wake += 1
        host.wake_at_s = at_s
        if at_s is not None:
            self.call_at(at_s, partial(self._woken, host, host.wake))

    def _woken(self, host: Host, wake: int, at_s: float) -> None:
        if wake != host.wake:
            return
        host.wake_at_s = None
        for event in host.model.advance(at_s):
            index = int(event.request_id)
            request = self.open.get(index)
            is_open = request is not None
            if request is None:
                request = self.requests[index]  # Another worker, or the broker, was first.
            match event:
                case FirstToken(cached_tokens=cached_tokens):
                    if is_open:
                        self.records.first_token_s[index] = event.at_s
                        self.records.cached_tokens[index] = cached_tokens
                    self._router.first_token(request, host, cached_tokens=cached_tokens, at_s=at_s)
                case Finished(usage=usage):
                    if is_open:
                        self._end(request, event.at_s)
                    self._router.ended(request, host, usage=usage, at_s=at_s)
                case _:
                    pass
        if host.wake_at_s is None:
            self._look_at(host, host.model.next_event_at_s())

    def _end(self, request: Request, at_s: float) -> None:
        self.records.ended_s[request.index] = at_s
        del self.open[request.index]
        self._left -= 1
        self.ended_count += 1
        for child in self._children.pop(request.index, ()):
            self.call_at(at_s + child.at_s, partial(self._arrive, child))


def sequence_request(request: Request) -> SequenceRequest:
    """Say what an engine is asked."""
    return SequenceRequest(
        request_id=str(request.index),
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        blocks=request.blocks,
        block_tokens=request.block_tokens,
    )
