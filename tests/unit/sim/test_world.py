"""Virtual time: order, bursts, turns of a session, and fleets that change under either router."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from broker.core.policy import LanePolicy
from broker.sim.arrival import ArrivalRouter
from broker.sim.contestants import contestant
from broker.sim.host import Host
from broker.sim.mind import MODEL, MindRouter
from broker.sim.request import Request
from broker.sim.world import Change, FleetChange, Router, World
from broker.wire.messages import Usage
from tests.unit.sim.worlds import (
    END_S,
    FIRST_TOKEN_S,
    Told,
    a_profile,
    a_request,
    a_world,
)

ROUTERS = ("round-robin", "least-requests", "first_token", "weighted")

LOSE = FleetChange(at_s=1.0, change=Change.LOSE, host=0)
RESTART = FleetChange(at_s=1.0, change=Change.RESTART, host=0)
DRAIN = FleetChange(at_s=1.0, change=Change.DRAIN, host=0)
JOIN = FleetChange(at_s=1.0, change=Change.JOIN)


class Watched:
    """A router that is looked at: how often each request's end was told, and by whom."""

    def __init__(self, router: Router) -> None:
        self.ends: Counter[int] = Counter()
        self._router = router

    def joined(self, host: Host, *, at_s: float) -> None:
        """Pass it on."""
        self._router.joined(host, at_s=at_s)

    def arrived(self, request: Request, *, at_s: float) -> None:
        """Pass it on."""
        self._router.arrived(request, at_s=at_s)

    def first_token(self, request: Request, host: Host, *, cached_tokens: int, at_s: float) -> None:
        """Pass it on."""
        self._router.first_token(request, host, cached_tokens=cached_tokens, at_s=at_s)

    def ended(self, request: Request, host: Host, *, usage: Usage, at_s: float) -> None:
        """Count it."""
        self.ends[request.index] += 1
        self._router.ended(request, host, usage=usage, at_s=at_s)

    def changed(self, host: Host, change: Change, *, at_s: float) -> None:
        """Pass it on."""
        self._router.changed(host, change, at_s=at_s)


def a_router(label: str, world: World) -> Watched:
    """Return a router by name."""
    one = contestant(label)
    if one.peer is not None:
        return Watched(ArrivalRouter(world, one.peer(random.Random(1))))
    assert one.policy is not None
    policy = replace(one.policy, models=(MODEL,), lanes=(LanePolicy(name="main"),))
    return Watched(MindRouter(world, policy, seed=1))


def steady(count: int, *, per_s: float = 20.0) -> list[Request]:
    """Return requests at even gaps that share a few prefixes."""
    return [
        a_request(n, n / per_s, blocks=(n % 5,), prompt_tokens=150, output_tokens=20)
        for n in range(count)
    ]


def a_run(label: str, changes: Sequence[FleetChange]) -> tuple[World, Watched]:
    """Run four seconds of load on three workers, journals kept."""
    world = a_world(*steady(80), workers=3, changes=changes, journal=True)
    router = a_router(label, world)
    world.run(router)
    return world, router


# ---- time ----------------------------------------------------------------------------------------


def test_equal_times_happen_in_the_order_asked_for() -> None:
    """What is asked for first happens first, whoever asks; an earlier instant goes before."""
    world = a_world()
    seen: list[str] = []
    world.call_at(2.0, lambda _: seen.append("a"))
    world.call_at(2.0, lambda at_s: world.call_at(at_s, lambda _: seen.append("last")))
    world.call_at(2.0, lambda _: seen.append("b"))
    world.call_at(1.0, lambda _: seen.append("first"))
    world.run_until(3.0)
    assert seen == ["first", "a", "b", "last"]
    assert world.at_s == 3.0


def test_run_until_leaves_later_calls_alone() -> None:
    """An instant is part of the time until it; the next one is not."""
    world = a_world()
    seen: list[float] = []
    for at_s in (1.0, 2.0, 2.5):
        world.call_at(at_s, seen.append)
    world.run_until(2.0)
    assert seen == [1.0, 2.0]
    world.run_until(2.5)
    assert seen == [1.0, 2.0, 2.5]


def test_a_request_alone_takes_what_its_engine_takes() -> None:
    """100 prompt tokens at 1 ms, then a token each 10 ms: 110 ms to the first, 150 to the last."""
    world = a_world(a_request(0, 1.0))
    router = Told(world)
    world.run(router)
    records = world.records
    assert router.seen == [("joined", 0), ("arrived", 0), ("first", 0), ("ended", 0)]
    assert (records.arrived_s[0], records.given_s[0]) == (1.0, 1.0)
    assert records.first_token_s[0] == pytest.approx(1.0 + FIRST_TOKEN_S)
    assert records.ended_s[0] == pytest.approx(1.0 + END_S)
    assert (records.host[0], records.attempts[0], records.refused[0]) == (0, 1, 0)


def test_a_burst_arrives_whole() -> None:
    """What comes at one instant is there before a call of that instant, and starts in one step."""
    world = a_world(a_request(0, 1.0), a_request(1, 1.0), a_request(2, 1.0), a_request(3, 1.001))

    class Calling(Told):
        """Asks at the first arrival to be called at once."""

        def arrived(self, request: Request, *, at_s: float) -> None:
            """Give it, and ask."""
            super().arrived(request, at_s=at_s)
            if request.index == 0:
                world.call_at(at_s, lambda _: self.seen.append(("called", 0)))

    router = Calling(world)
    world.run(router)
    assert router.seen[1:5] == [("arrived", 0), ("arrived", 1), ("arrived", 2), ("called", 0)]
    assert list(world.records.first_token_s)[:3] == [pytest.approx(1.31)] * 3
    assert world.records.first_token_s[3] > 1.31


def test_a_look_asked_for_anew_is_made_once() -> None:
    """A second request at a busy engine doesn't make the first one's end happen twice."""
    world = a_world(a_request(0, 0.0), a_request(1, 0.05), a_request(2, 0.12))
    router = Told(world)
    world.run(router)
    assert Counter(router.seen)[("ended", 0)] == 1
    assert world.ended_count == 3
    assert not world.open


def test_what_is_given_at_one_instant_is_looked_at_once() -> None:
    """A burst of eight makes one call, not eight."""
    world = a_world(*(a_request(n, 1.0) for n in range(8)))
    world.begin(Told(world))
    world.run_until(0.999)
    world.run_until(1.0)
    assert len(world._heap) == 1


# ---- sessions ------------------------------------------------------------------------------------


def test_a_turn_arrives_after_its_predecessor_ended() -> None:
    """Each turn comes its pause after the end of the turn before."""
    turns = [a_request(0, 1.0), a_request(1, 2.0, after=0), a_request(2, 0.0, after=1)]
    world = a_world(*turns)
    world.run(Told(world))
    arrived_s, ended_s = world.records.arrived_s, world.records.ended_s
    assert arrived_s[1] == pytest.approx(ended_s[0] + 2.0)
    assert arrived_s[2] == pytest.approx(ended_s[1])


def test_a_turn_whose_predecessor_is_over_keeps_its_pause_or_comes_at_once() -> None:
    """A turn listed behind a later request: its pause counts from the end, never into the past."""
    late = [a_request(0), a_request(1, 1.0), a_request(2, 5.0, after=0), a_request(3, 0.1, after=0)]
    world = a_world(*late)
    world.run(Told(world))
    assert world.records.arrived_s[2] == pytest.approx(END_S + 5.0)
    assert world.records.arrived_s[3] == 1.0


def test_a_refused_turn_lets_the_session_go_on() -> None:
    """A request that is given up ends, so its follower comes."""
    world = a_world(a_request(0, 1.0), a_request(1, 2.0, after=0))

    class Refusing(Told):
        """Refuses the first."""

        def arrived(self, request: Request, *, at_s: float) -> None:
            """Give it up, or give it."""
            if request.index == 0:
                self.world.give_up(request, at_s=at_s)
            else:
                super().arrived(request, at_s=at_s)

    world.run(Refusing(world))
    assert list(world.records.refused) == [1, 0]
    assert world.records.arrived_s[1] == 3.0


# ---- a fleet that changes ------------------------------------------------------------------------


@pytest.mark.parametrize("label", ROUTERS)
@pytest.mark.parametrize(
    "changes",
    [(LOSE,), (RESTART,), (DRAIN,), (JOIN,), (JOIN, LOSE, DRAIN), (RESTART, LOSE)],
    ids=lambda changes: "+".join(one.change for one in changes),
)
def test_nothing_is_lost_or_answered_twice(label: str, changes: Sequence[FleetChange]) -> None:
    """Whatever happens to the fleet, each request ends once, with an answer."""
    world, router = a_run(label, changes)
    assert router.ends == Counter(range(80))
    assert not any(world.records.refused)
    assert all(
        arrived_s <= given_s < first_s <= ended_s
        for arrived_s, given_s, first_s, ended_s in zip(
            world.records.arrived_s,
            world.records.given_s,
            world.records.first_token_s,
            world.records.ended_s,
            strict=True,
        )
    )


@pytest.mark.parametrize("label", ROUTERS)
def test_what_a_lost_worker_ran_is_answered_by_others(label: str) -> None:
    """After a loss nothing is given there, and what it ran is run anew: more attempts than one."""
    world, _ = a_run(label, (LOSE,))
    records = world.records
    last = [n for n in range(80) if records.ended_s[n] > LOSE.at_s]
    assert 0 not in {records.host[n] for n in last}
    assert sum(records.attempts) > 80
    assert max(records.attempts) == 2


@pytest.mark.parametrize("label", ROUTERS)
def test_a_restarted_worker_is_empty_and_used_again(label: str) -> None:
    """What it cached is gone, and it gets work again."""
    world, _ = a_run(label, (RESTART,))
    records = world.records
    there = [n for n in range(80) if records.host[n] == 0 and records.given_s[n] >= RESTART.at_s]
    assert there
    assert records.cached_tokens[min(there, key=lambda n: records.first_token_s[n])] == 0
    assert world.hosts[0].lives == 2


@pytest.mark.parametrize("label", ROUTERS)
def test_a_drained_worker_ends_what_it_runs_and_gets_nothing_new(label: str) -> None:
    """Work given before the drain ends there; an order on its way takes half a millisecond."""
    world, _ = a_run(label, (DRAIN,))
    records = world.records
    there = [n for n in range(80) if records.host[n] == 0]
    assert max(records.ended_s[n] for n in there) > DRAIN.at_s
    assert max(records.given_s[n] for n in there) <= DRAIN.at_s + 0.001
    assert max(records.attempts) == 1


@pytest.mark.parametrize("label", ROUTERS)
def test_a_worker_that_joins_gets_work(label: str) -> None:
    """The fourth of three is used, and counts its time from when it came."""
    busy = (*(a_request(n, n / 40, output_tokens=50) for n in range(120)),)
    world = a_world(*busy, workers=3, changes=(JOIN,), journal=True)
    world.run(a_router(label, world))
    assert 3 in set(world.records.host)
    assert world.hosts[3].joined_at_s == 1.0


def test_a_worker_joins_with_its_own_profile() -> None:
    """A join may bring another machine; else it is as the first."""
    other = a_profile(slots=1)
    changes = (FleetChange(at_s=0.1, change=Change.JOIN, profile=other), JOIN)
    world = a_world(a_request(0, 2.0), changes=changes)
    world.run(Told(world))
    assert [host.profile.slots for host in world.hosts] == [4, 1, 4]


def test_nothing_happens_to_a_lost_worker() -> None:
    """A restart, drain or second loss of it is not told."""
    changes = (LOSE, RESTART, DRAIN, LOSE)
    world = a_world(a_request(0, 2.0), workers=2, changes=changes)
    router = Told(world, hosts=(1,))
    world.run(router)
    assert [what for what, _ in router.seen].count("lose") == 1
    assert ("restart", 0) not in router.seen
    assert not world.hosts[0].alive


def test_with_no_worker_left_requests_wait_for_one_that_joins() -> None:
    """Arrivals that find nobody are given when somebody comes, under both routers."""
    for label in ("round-robin", "first_token"):
        back = FleetChange(at_s=3.0, change=Change.JOIN)
        changes = (FleetChange(at_s=0.5, change=Change.LOSE, host=0), back)
        world = a_world(a_request(0, 1.0), changes=changes, journal=True)
        world.run(a_router(label, world))
        assert world.records.host[0] == 1
        assert world.records.given_s[0] >= 3.0
