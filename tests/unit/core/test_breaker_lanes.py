"""A lane whose jobs fail everywhere: the breakers that it opens stand in nobody else's way."""

from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from broker.core.breaker import BreakerState
from broker.core.breakers import OPENED_WORKERS_MAX, TRIAL_LOOKS_MAX, Breakers, LaneRun, keep
from broker.core.events import PolicyChanged
from broker.wire.messages import Reason
from tests.unit.core.breaker_world import COMPLETED, STEP_S, BreakerWorld, retried
from tests.unit.core.cluster import MODEL

FAILED = retried(Reason.ENGINE_FAILED)
POISON, SOUND = "acme", "beta"


def world_of(*, workers: int = 4, slots: int = 2, open_s_max: float = 10.0) -> BreakerWorld:
    """Workers with breakers as they ship."""
    return BreakerWorld(workers=workers, slots=slots, tries=3, open_s=2.0, open_s_max=open_s_max)


def of_lane(world: BreakerWorld, lane: str) -> list[str]:
    """Name the lane's jobs that run."""
    return [key for key in world.running if key.startswith(f"{lane}.")]


def fail(world: BreakerWorld, lane: str = POISON) -> int:
    """Let each of a lane's jobs that is given to an engine fail at once; say how many were."""
    failed = 0
    while keys := of_lane(world, lane):
        world.end(keys[0], **FAILED)
        failed += 1
    return failed


def shut(world: BreakerWorld) -> None:
    """Let one lane's jobs open every breaker."""
    jobs_max = world.jobs + 8 * len(world.names)
    while not all(world.state(name) == BreakerState.OPEN for name in world.names):
        assert world.jobs < jobs_max, "they don't open"
        world.submit(lane=POISON, band=3)
        fail(world)


@dataclass
class Seen:
    """What became of the sound lane's jobs, and of the other's attempts."""

    waits_s: list[float] = field(default_factory=list[float])
    failed: int = 0


def side_by_side(world: BreakerWorld, *, band: int, chats: int = 6, every_s: float = 2.0) -> Seen:
    """Let a lane's requests fail in milliseconds, always more of them, beside chats of half a
    second.
    """
    seen, came_at_s = Seen(), dict[str, float]()
    world.submit(20, lane=POISON, band=3)
    seen.failed += fail(world)
    due_s = world.at_s
    while len(seen.waits_s) < chats:
        if world.at_s >= due_s and len(came_at_s) < chats:
            due_s += every_s
            world.submit(lane=SOUND, band=band)
            came_at_s[f"{SOUND}.j{world.jobs}"] = world.at_s
        seen.failed += fail(world)
        world.submit(4, lane=POISON, band=3)
        before = of_lane(world, SOUND)
        for key in before:
            if came_at_s[key] >= 0.0:
                seen.waits_s.append(world.at_s - came_at_s[key])
                came_at_s[key] = -1.0
        world.wait(2 * STEP_S)
        for key in before:
            world.end(key, **COMPLETED)
        assert world.at_s < 1000.0 + 2 * chats * every_s + 60.0, "they are locked out"
    return seen


@pytest.mark.parametrize("band", [1, 3])
def test_one_lanes_bad_requests_delay_no_other_lane(band: int) -> None:
    """Of six chats each goes at once, in a higher band or the same, and the first that completes
    closes all that was opened, for good.
    """
    world = world_of()
    seen = side_by_side(world, band=band)
    assert max(seen.waits_s) == 0.0
    assert [view.breaker_openings for view in world.views.values()] == [1] * 4
    assert [world.state(name) for name in world.names] == [BreakerState.CLOSED] * 4


@pytest.mark.parametrize("without", ["_blame", "arrived"])
def test_without_either_rule_the_other_lane_waits(
    without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not tried at once, the first chat waits until a breaker half-opens; with nobody to blame, the
    second finds all shut but one place.
    """
    monkeypatch.setattr(Breakers, without, lambda *_, **__: None)
    world = world_of()
    seen = side_by_side(world, band=1, chats=4)
    is_slow = max(seen.waits_s) > 0.0
    assert is_slow or sum(view.breaker_openings for view in world.views.values()) > 4


def test_the_first_to_complete_closes_what_one_lane_opened() -> None:
    """Then that lane's failures count nowhere; a third lane's do."""
    world = world_of()
    shut(world)
    world.submit(lane=SOUND)
    (probe,) = of_lane(world, SOUND)
    assert world.running[probe].explanation.is_probe
    world.end(probe, **COMPLETED)
    assert {world.state(name) for name in world.names} == {BreakerState.CLOSED}
    world.submit(20, lane=POISON)
    fail(world)
    assert {world.state(name) for name in world.names} == {BreakerState.CLOSED}
    world.submit(20, lane=SOUND)
    fail(world, SOUND)
    assert {world.state(name) for name in world.names} == {BreakerState.OPEN}


def test_a_lane_is_to_blame_for_a_time_only() -> None:
    """Without another sign for `open_s_max` its failures count: the fleet may have fallen sick."""
    world = world_of(open_s_max=3.0)
    shut(world)
    world.submit(lane=SOUND)
    world.end(*of_lane(world, SOUND), **COMPLETED)
    world.wait(2.75)
    fail(world)
    assert {world.state(name) for name in world.names} == {BreakerState.CLOSED}
    world.wait(0.5)
    shut(world)


def test_a_lane_that_completes_a_job_is_to_blame_no_more() -> None:
    """Its other jobs are sound: its next failures count at once."""
    world = world_of(workers=1)
    shut(world)
    world.submit(lane=SOUND)
    world.end(*of_lane(world, SOUND), **COMPLETED)
    world.submit(lane=POISON)
    for key in list(world.running):
        world.end(key, **COMPLETED)
    shut(world)
    assert world.state("w0") == BreakerState.OPEN


def test_a_stream_from_better_days_says_nothing_of_who_is_to_blame() -> None:
    """It was given before the failures began: the engine may have fallen sick meanwhile."""
    world = world_of(workers=1, slots=4)
    world.submit(lane=SOUND)
    world.wait(STEP_S)
    shut(world)
    world.end(*of_lane(world, SOUND), **COMPLETED)
    assert world.state("w0") == BreakerState.OPEN


def test_a_sick_fleet_costs_another_lane_one_job_for_each_worker() -> None:
    """Failed by two lanes a worker is tried in its own time, however many come."""
    world = world_of()
    shut(world)
    given = dict(world.given)
    for _ in range(20):
        world.submit(lane=SOUND)
        fail(world, SOUND)
    spent = {name: world.given[name] - given[name] for name in world.names}
    assert spent == dict.fromkeys(world.names, 1)
    assert {world.state(name) for name in world.names} == {BreakerState.OPEN}


@pytest.mark.parametrize(("others", "tried"), [(-1, 1), (0, 0)])
def test_no_more_than_so_many_workers_are_looked_at_for_a_trial(others: int, tried: int) -> None:
    """Where several lanes failed at the first eight, the rest are tried in their own time."""
    world = world_of(workers=TRIAL_LOOKS_MAX + 1, slots=1)
    shut(world)
    workers = list(world.scheduler._mind.queues.pool(MODEL).workers.values())
    for worker in workers[: TRIAL_LOOKS_MAX + others]:
        worker.breaker.lane = None
    world.submit(lane=SOUND)
    assert len(of_lane(world, SOUND)) == tried


def test_no_more_than_so_many_are_closed_at_once() -> None:
    """The earliest of more are left to their time."""
    run = LaneRun()
    for number in range(OPENED_WORKERS_MAX + 2):
        keep(run, f"w{number}")
    keep(run, "w2")
    assert len(run.opened) == OPENED_WORKERS_MAX
    assert (next(iter(run.opened)), next(reversed(run.opened))) == ("w3", "w2")


def test_lanes_that_are_no_more_are_forgotten() -> None:
    """A reload drops what was known of them."""
    world = world_of(workers=1)
    shut(world)
    breakers = world.scheduler._breakers
    assert list(breakers._lanes) == [POISON]
    lanes = tuple(lane for lane in world.policy.lanes if lane.name != POISON)
    world.step(PolicyChanged(world.at_s, replace(world.policy, lanes=lanes)))
    assert not breakers._lanes
