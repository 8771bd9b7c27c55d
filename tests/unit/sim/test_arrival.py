"""Routers that bind on arrival: what they count of each worker is what is open there."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.sim.arrival import ArrivalRouter
from broker.sim.peers.base import PeerWorker
from broker.sim.request import Request
from broker.sim.world import Change, FleetChange
from tests.unit.sim.worlds import BLOCK_TOKENS, a_profile, a_request, a_world

SMALL = a_profile(slots=3, kv_tokens_max=1500)
"""Holds a few requests at once: caches are evicted, and requests wait in the engine."""


class Bookkeeper:
    """Chooses in turn; keeps plain books of its own, and compares the seats with them each time."""

    def __init__(self) -> None:
        self.looks = 0
        self.lost_ids: list[int] = []
        self.seats: dict[int, PeerWorker] = {}
        self._given: dict[int, dict[int, Request]] = {}
        self._uncached: dict[int, int] = {}

    def choose(self, request: Request, workers: Sequence[PeerWorker], *, at_s: float) -> int:
        """Compare all, then choose."""
        del at_s
        for worker in workers:
            self.compare(worker)
        place = self.looks % len(workers)
        self.looks += 1
        worker = workers[place]
        self.seats[worker.id] = worker
        self._given.setdefault(worker.id, {})[request.index] = request
        self._uncached[request.index] = request.prompt_tokens - worker.hit_tokens(request)
        return place

    def first_token(self, request: Request, worker: PeerWorker, *, at_s: float) -> None:
        """Note it."""
        del at_s
        self._uncached[request.index] = 0
        self.compare(worker)

    def ended(self, request: Request, worker: PeerWorker, *, at_s: float) -> None:
        """Note it; the worker no longer counts it."""
        del at_s
        del self._given[worker.id][request.index]
        self.compare(worker)

    def lost(self, worker: PeerWorker, *, at_s: float) -> None:
        """Forget it."""
        del at_s
        self.lost_ids.append(worker.id)
        self._given.pop(worker.id, None)
        self.seats.pop(worker.id, None)

    def compare(self, worker: PeerWorker) -> None:
        """See that a worker's sums are those of what it was given and has not ended."""
        mine = self._given.get(worker.id, {}).values()
        blocks = {block for request in mine for block in request.blocks}
        rest = sum(r.prompt_tokens - len(r.blocks) * r.block_tokens for r in mine)
        assert worker.requests == len(mine)
        assert worker.prefill_tokens == sum(self._uncached[request.index] for request in mine)
        assert worker.active_tokens == sum(request.prompt_tokens for request in mine)
        assert worker.active_block_tokens == len(blocks) * BLOCK_TOKENS + rest


@st.composite
def some_requests(draw: st.DrawFn) -> list[Request]:
    """Draw requests that share prefixes of a few chains."""
    requests: list[Request] = []
    at_s = 0.0
    for index in range(draw(st.integers(1, 25))):
        at_s += draw(st.sampled_from([0.0, 0.01, 0.05, 0.3]))
        depth, chain = draw(st.integers(0, 5)), 10 * draw(st.integers(0, 2))
        requests.append(
            a_request(
                index,
                at_s,
                blocks=tuple(range(chain, chain + depth)),
                prompt_tokens=depth * BLOCK_TOKENS + draw(st.integers(1, 99)),
                output_tokens=draw(st.integers(1, 30)),
                output_tokens_max=30,
            )
        )
    return requests


def some_changes() -> st.SearchStrategy[list[FleetChange]]:
    """Draw what happens to a fleet of three; worker 2 stays."""
    change = st.builds(
        FleetChange,
        at_s=st.floats(0.0, 3.0),
        change=st.sampled_from(Change),
        host=st.integers(0, 1),
    )
    return st.lists(change, max_size=4)


@settings(max_examples=150, deadline=None)
@given(some_requests(), some_changes(), st.sampled_from((0.0, 0.0005, 0.3)))
def test_seats_count_what_is_open(
    requests: list[Request], changes: list[FleetChange], hop_s: float
) -> None:
    """After any arrivals, first tokens, ends and changes each sum is that of the open requests."""
    books = Bookkeeper()
    world = a_world(*requests, workers=3, changes=changes, profile=SMALL)
    world.run(ArrivalRouter(world, books, hop_s=hop_s))
    assert books.looks >= len(requests)
    assert not any(world.records.refused)
    for seat in books.seats.values():
        books.compare(seat)
        assert (seat.requests, seat.prefill_tokens, seat.active_tokens) == (0, 0, 0)
        assert seat.active_block_tokens == 0


def test_a_seat_sees_its_engine() -> None:
    """Running, waiting, memory and cache are the engine's; uncached is as of when it was given."""
    prompt = a_request(0, blocks=(1, 2), prompt_tokens=250, output_tokens=200)
    again = a_request(1, 1.0, blocks=(1, 2, 3), prompt_tokens=320)
    third = a_request(2, 1.0, prompt_tokens=100)
    world = a_world(prompt, again, third, profile=a_profile(slots=2))
    seen: list[tuple[int, int, int, int]] = []

    class Looking(Bookkeeper):
        """Notes what it sees when a request comes."""

        def choose(self, request: Request, workers: Sequence[PeerWorker], *, at_s: float) -> int:
            """Note it."""
            (seat,) = workers
            hit = seat.hit_tokens(request)
            seen.append((seat.running, seat.waiting, hit, seat.prefill_tokens))
            assert (seat.kv_ratio > 0) is (at_s > 0)
            return super().choose(request, workers, at_s=at_s)

    world.run(ArrivalRouter(world, Looking()))
    assert seen == [(0, 0, 0, 0), (1, 0, 200, 0), (1, 1, 0, 120)]


def test_a_drained_worker_is_not_offered() -> None:
    """A policy sees only workers that take requests, in the order in which they joined."""
    changes = (
        FleetChange(at_s=1.0, change=Change.DRAIN, host=0),
        FleetChange(at_s=2.0, change=Change.JOIN),
    )
    requests = [a_request(0, 0.5), a_request(1, 1.5), a_request(2, 2.5)]
    world = a_world(*requests, workers=2, changes=changes)
    offered: list[list[int]] = []

    class Looking(Bookkeeper):
        """Notes whom it may choose."""

        def choose(self, request: Request, workers: Sequence[PeerWorker], *, at_s: float) -> int:
            """Note them."""
            offered.append([worker.id for worker in workers])
            return super().choose(request, workers, at_s=at_s)

    world.run(ArrivalRouter(world, Looking()))
    assert offered == [[0, 1], [1], [1, 2]]


@pytest.mark.parametrize(("change", "seats"), [(Change.LOSE, 1), (Change.RESTART, 2)])
def test_a_policy_is_told_of_a_lost_cache(change: Change, seats: int) -> None:
    """A loss and a restart void what is remembered; what ran there is chosen for anew at once."""
    requests = [a_request(n, 0.0, output_tokens=200) for n in range(2)]
    lost = FleetChange(at_s=1.0, change=change, host=0)
    world = a_world(*requests, workers=2, changes=(lost,))
    books = Bookkeeper()
    router = ArrivalRouter(world, books)
    world.run(router)
    assert books.lost_ids == [0]
    assert books.looks == 3
    assert list(world.records.attempts) == [2, 1]
    assert world.records.given_s[0] == 1.0
    assert len(router._seats) == seats


@pytest.mark.parametrize(("change", "host"), [(Change.LOSE, 1), (Change.RESTART, 0)])
def test_what_a_lost_worker_never_got_goes_to_another(change: Change, host: int) -> None:
    """A request is on its way for a hop; its engine is gone when it comes: it is given anew."""
    lost = FleetChange(at_s=1.1, change=change, host=0)
    world = a_world(a_request(0, 1.0), workers=2, changes=(lost,))
    world.run(ArrivalRouter(world, Bookkeeper(), hop_s=0.2))
    assert list(world.records.attempts) == [1]
    assert world.records.given_s[0] == pytest.approx(1.3)
    assert world.records.host[0] == host
