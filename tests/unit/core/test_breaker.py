"""A breaker's turns, case by case: what opens it, who is tried, what closes it."""

from typing import Any

import pytest
from msgspec.structs import replace

from broker.core.breaker import Breaker, BreakerState, open_s
from broker.core.breakers import TICK_WORKERS_MAX
from broker.core.decisions import Dispatch, HeldBy
from broker.core.events import PolicyChanged, Tick
from broker.core.policy import BreakerPolicy, PolicyName
from broker.wire.faults import is_fault
from broker.wire.messages import Reason
from tests.builders import an_attempt
from tests.unit.core.breaker_world import COMPLETED, FAULTS, BreakerWorld, retried
from tests.unit.core.cluster import Cluster, a_policy, of, only

FAILED = retried(Reason.ENGINE_FAILED)

ROUTINGS: list[PolicyName] = ["first_token", "weighted", "round_robin"]


def fail_all(world: BreakerWorld, *names: str, jobs: int = 3) -> None:
    """Let new jobs come until each of these workers has failed so many."""
    for name in names:
        for _ in range(jobs):
            while not world.keys_at(name):
                world.submit()
            world.end(world.keys_at(name)[0], **FAILED)


def complete(world: BreakerWorld, *names: str) -> None:
    """Let all that runs at these workers complete."""
    for name in names or world.names:
        for key in world.keys_at(name):
            world.end(key, **COMPLETED)


def an_open_worker(*, slots: int = 1) -> BreakerWorld:
    """One worker, which failed three jobs; those rest."""
    world = BreakerWorld(workers=1, slots=slots)
    fail_all(world, "w0")
    assert world.state("w0") == BreakerState.OPEN
    return world


# ---- opening -------------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", ROUTINGS)
def test_three_jobs_that_fail_in_a_row_open_it(routing: PolicyName) -> None:
    """Then nothing new goes there, however idle it is; the others take it all."""
    world = BreakerWorld(workers=3, slots=8, routing=routing)
    fail_all(world, "w0", jobs=2)
    assert world.state("w0") == BreakerState.CLOSED
    fail_all(world, "w0", jobs=1)
    assert world.state("w0") == BreakerState.OPEN
    given = world.given["w0"]
    world.submit(12)
    assert world.given["w0"] == given
    assert [world.state(name) for name in ("w1", "w2")] == [BreakerState.CLOSED] * 2


@pytest.mark.parametrize("reason", list(Reason))
def test_only_faults_of_the_engine_count(reason: Reason) -> None:
    """5xx and unreachable (`engine_failed`), garbage, time-out and stall; and only when charged."""
    assert is_fault(reason, charged=True) is (reason in FAULTS)
    assert not is_fault(reason, charged=False)


def test_one_completed_job_ends_the_run() -> None:
    """Two failures, a success and two failures more are no run of three."""
    world = BreakerWorld(workers=1, slots=1)
    fail_all(world, "w0", jobs=2)
    world.submit()
    complete(world)
    fail_all(world, "w0", jobs=2)
    assert world.state("w0") == BreakerState.CLOSED


def test_a_job_that_fails_again_at_the_only_worker_counts_once() -> None:
    """A run is of different jobs: one that makes its engine fail closes nobody else's way."""
    world = BreakerWorld(workers=1, slots=1)
    world.submit()
    for _ in range(6):
        world.end("acme.j1", **FAILED)
        world.wait(1.0)
    assert world.state("w0") == BreakerState.CLOSED


def test_what_was_given_before_it_opened_says_nothing_after() -> None:
    """Of eight jobs three fail: of the others neither a success nor a failure changes anything."""
    world = BreakerWorld(workers=1, slots=8)
    world.submit(8)
    for key in world.keys_at("w0")[:3]:
        world.end(key, **FAILED)
    until_s = world.scheduler._mind.fleet.workers["w0"].breaker.until_s
    first, second, *_ = world.keys_at("w0")
    world.end(first, **COMPLETED)
    world.end(second, **FAILED)
    assert world.state("w0") == BreakerState.OPEN
    assert world.scheduler._mind.fleet.workers["w0"].breaker.until_s == until_s


def test_stalls_from_before_it_closed_do_not_open_it_anew() -> None:
    """Two minutes later the jobs that hung then are found stalled: the engine works again."""
    world = BreakerWorld(workers=1, slots=8)
    world.submit(6)
    stuck = world.keys_at("w0")
    for key in stuck[:3]:
        world.end(key, **FAILED)
    world.wait(5.25)
    (probe,) = [key for key in world.keys_at("w0") if key not in stuck[3:]]
    world.end(probe, **COMPLETED)
    for key in stuck[3:]:
        world.end(key, **retried(Reason.STALLED))
    assert world.state("w0") == BreakerState.CLOSED


# ---- the time it stays open ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("openings", "seconds"), [(1, 5.0), (2, 10.0), (3, 20.0), (4, 30.0), (10_000, 30.0)]
)
def test_the_time_doubles_up_to_its_cap(openings: int, seconds: float) -> None:
    """For any number of openings in a row."""
    assert open_s(openings, BreakerPolicy(open_s=5.0, open_s_max=30.0)) == seconds


def test_one_job_is_tried_and_its_success_closes() -> None:
    """After five seconds one job goes, though more wait and slots are free; then all of them."""
    world = an_open_worker(slots=4)
    world.submit(9)
    world.wait(4.75)
    assert not world.running
    world.wait(0.5)
    assert world.state("w0") == BreakerState.HALF_OPEN
    (probe,) = world.running.values()
    assert probe.explanation.is_probe
    assert probe.explanation.held_by in (HeldBy.BREAKER, HeldBy.BACK_OFF)
    world.wait(3.0)
    assert len(world.running) == 1
    world.end(probe.key, **COMPLETED)
    assert world.state("w0") == BreakerState.CLOSED
    assert len(world.running) == 4
    assert not any(one.explanation.is_probe for one in world.running.values())


def test_a_probe_that_fails_opens_it_for_twice_as_long() -> None:
    """5, 10, 20, 30, 30 s; a success later begins anew with 5."""
    world = an_open_worker()
    for seconds in (5.0, 10.0, 20.0, 30.0, 30.0):
        world.submit()
        world.wait(seconds - 0.25)
        assert not world.running, f"tried before {seconds:g} s"
        world.wait(0.5)
        (probe,) = world.running
        world.end(probe, **FAILED)
    world.wait(30.25)
    world.end(next(iter(world.running)), **COMPLETED)
    complete(world)
    fail_all(world, "w0")
    world.wait(5.25)
    assert world.state("w0") == BreakerState.HALF_OPEN


def test_a_cancelled_probe_frees_its_place_for_the_next() -> None:
    """It says nothing, and the next job is the probe."""
    world = an_open_worker()
    world.submit(2)
    world.wait(5.25)
    (first,) = world.running
    world.cancel(first)
    assert world.state("w0") == BreakerState.HALF_OPEN
    (second,) = world.running.values()
    assert second.key != first
    assert second.explanation.is_probe


@pytest.mark.parametrize("routing", ROUTINGS)
def test_with_all_open_jobs_wait_and_say_why(routing: PolicyName) -> None:
    """They are not charged, `why` says breaker, and each worker is tried in its own time."""
    world = BreakerWorld(workers=3, slots=2, routing=routing)
    fail_all(world, *world.names)
    world.submit(4)
    key = f"acme.j{world.jobs}"
    why = world.scheduler.views.why(key)
    assert why is not None
    assert (why.held_by, why.failures, why.leased) == (HeldBy.BREAKER, (), False)
    (pool,) = world.scheduler.views.pools()
    assert (pool.workers, pool.slots) == (3, 0)
    (queue,) = world.scheduler.views.queues()
    assert queue.wait_s == 600.0
    world.wait(5.5)
    assert sorted(one.worker for one in world.running.values()) == world.names
    world.heal()


def test_a_fleet_that_opened_at_once_is_tried_over_several_ticks() -> None:
    """One tick half-opens so many: a large fleet makes no step long."""
    world = BreakerWorld(workers=TICK_WORKERS_MAX + 4, slots=1, failures_max=1)
    world.submit(len(world.names))
    for key in list(world.running):
        world.end(key, **FAILED)
    world.at_s += 5.5
    for tried in (TICK_WORKERS_MAX, TICK_WORKERS_MAX + 4):
        world.step(Tick(world.at_s))
        half_open = [name for name, one in world.views.items() if one.breaker == "half_open"]
        assert len(half_open) == tried


# ---- who is to blame -----------------------------------------------------------------------------


def test_a_job_that_fails_everywhere_counts_nowhere() -> None:
    """A job that engines answer with 500 opens nobody's breaker: what it counted at the first
    worker is taken back once a second one failed it that completes others.
    """
    world = BreakerWorld(workers=3, slots=4, failures_max=2)
    for _ in range(6):
        world.submit()
        poison = f"acme.j{world.jobs}"
        for _ in range(3):
            world.submit(3)
            (home,) = [one.worker for one in world.running.values() if one.key == poison]
            complete(world, *[name for name in world.names if name != home])
            world.end(poison, **FAILED)
            complete_others(world, poison)
            world.wait(1.0)
        world.cancel(poison)
    assert [view.breaker_openings for view in world.views.values()] == [0, 0, 0]
    assert not any(one.breaker.failed for one in world.scheduler._mind.fleet.workers.values())


def complete_others(world: BreakerWorld, key: str) -> None:
    """Let all complete but one."""
    for other in [one for one in world.running if one != key]:
        world.end(other, **COMPLETED)


def test_forgiving_closes_a_breaker_that_opened_too_soon() -> None:
    """Jobs that came together opened it before a second worker could tell whose fault it was."""
    policy, breaker = BreakerPolicy(failures_max=2), Breaker()
    for number in (1, 2):
        breaker.fails(
            f"j{number}", an_attempt(number), lane="a", given_at_s=9.0, at_s=10.0, policy=policy
        )
    assert breaker.state is BreakerState.OPEN
    breaker.forgives("j9", at_s=11.0, policy=policy)
    assert breaker.state is BreakerState.OPEN
    breaker.forgives("j1", at_s=11.0, policy=policy)
    assert (breaker.state, list(breaker.failed)) == (BreakerState.CLOSED, ["j2"])


def test_forgiving_changes_nothing_after_a_probe_has_failed() -> None:
    """A later job has shown that the engine is sick."""
    policy, breaker = BreakerPolicy(failures_max=1, open_s=5.0), Breaker()
    breaker.fails("j1", an_attempt(1), lane="a", given_at_s=9.0, at_s=10.0, policy=policy)
    assert breaker.half_opens(15.0)
    assert breaker.given(an_attempt(2))
    breaker.fails("j2", an_attempt(2), lane="a", given_at_s=15.0, at_s=16.0, policy=policy)
    breaker.forgives("j1", at_s=17.0, policy=policy)
    assert (breaker.state, breaker.until_s) == (BreakerState.OPEN, 26.0)


def test_a_doubtful_probe_is_repeated_after_the_same_time() -> None:
    """It failed elsewhere, too: that the engine is sick is no more certain than before."""
    policy, breaker = BreakerPolicy(failures_max=1, open_s=5.0), Breaker()
    breaker.fails("j1", an_attempt(1), lane="a", given_at_s=9.0, at_s=10.0, policy=policy)
    breaker.half_opens(15.0)
    breaker.given(an_attempt(2))
    breaker.fails(
        "j2", an_attempt(2), lane="a", given_at_s=15.0, at_s=16.0, policy=policy, doubtful=True
    )
    assert (breaker.state, breaker.until_s) == (BreakerState.OPEN, 21.0)


def test_in_a_fleet_that_is_sick_as_a_whole_every_breaker_opens() -> None:
    """Nobody completes anything, so nothing is taken back, though jobs fail at both."""
    world = BreakerWorld(workers=2, slots=1, tries=3, open_s=30.0)
    attempts = 0
    while not all(world.state(name) == BreakerState.OPEN for name in world.names):
        world.submit()
        for key in list(world.running):
            world.end(key, **FAILED)
            attempts += 1
        world.wait(0.25)
    assert attempts <= 3 * 2 * 3, "three jobs for each worker, and all their retries"


# ---- a new life ----------------------------------------------------------------------------------


@pytest.mark.parametrize("restart", [BreakerWorld.restart, BreakerWorld.restart_engine])
def test_a_new_life_begins_closed(restart: Any) -> None:
    """Another start of agent or engine is another engine: what waits goes there at once."""
    world = an_open_worker(slots=4)
    world.submit(2)
    restart(world, "w0")
    assert world.state("w0") == BreakerState.CLOSED
    assert len(world.running) >= 2


def test_its_cache_is_credited_again_once_it_is_tried() -> None:
    """An open breaker says nothing of what the engine holds."""
    world = BreakerWorld(workers=2, slots=4)
    prefix = tuple(range(1, 41))
    world.submit(prompt_tokens=2600, blocks=(*prefix, 1000))
    home = world.running["acme.j1"].worker
    complete(world)
    fail_all(world, home)
    complete(world)
    for number in range(3):
        world.cancel(f"acme.j{world.jobs - number}")
    world.wait(5.25)
    complete(world)
    world.wait(5.25)
    complete(world)
    assert world.state(home) in (BreakerState.HALF_OPEN, BreakerState.CLOSED)
    world.submit(prompt_tokens=2600, blocks=(*prefix, 2000))
    last = world.running[f"acme.j{world.jobs}"]
    assert last.worker == home
    assert last.predicted_hit_tokens > 2000


# ---- policy --------------------------------------------------------------------------------------


def test_without_breakers_none_opens_and_none_stays_open() -> None:
    """A reload with `failures_max` 0 lets everybody serve at once."""
    world = an_open_worker()
    world.submit()
    breaker = replace(world.breaker, failures_max=0)
    world.step(PolicyChanged(world.at_s, replace(world.policy, breaker=breaker)))
    assert world.state("w0") == BreakerState.CLOSED
    assert len(world.running) == 1
    fail_all(world, "w0", jobs=10)
    assert world.state("w0") == BreakerState.CLOSED


def test_slots_for_new_jobs_follow_the_breaker() -> None:
    """All while closed, none while open, one while half-open, none while a job is tried."""
    world = BreakerWorld(workers=1, slots=5)
    seen = [world.views["w0"].slots_for_new]
    world.submit(3)
    for key in world.keys_at("w0"):
        world.end(key, **FAILED)
    keys = list(world.scheduler._mind.queues.waiting)
    for key in keys:
        world.cancel(key)
    seen.append(world.views["w0"].slots_for_new)
    world.wait(5.25)
    seen.append(world.views["w0"].slots_for_new)
    world.submit()
    seen.append(world.views["w0"].slots_for_new)
    assert seen == [5, 0, 1, 0]


def test_a_worker_that_failed_its_last_jobs_is_tried_with_one() -> None:
    """So its agent says to a leader that has not met it; fewer than open a breaker say nothing."""
    cluster = Cluster()
    cluster.join("sound", "doubtful", engine_faults=2)
    assert {one.breaker for one in cluster.scheduler.views.workers()} == {"closed"}
    cluster = Cluster()
    cluster.join("doubtful", engine_faults=3)
    (view,) = cluster.scheduler.views.workers()
    assert (view.breaker, view.slots_for_new) == ("half_open", 1)
    probe = only(Dispatch, cluster.hold_many(3))
    assert probe.explanation.is_probe
    assert len(of(Dispatch, cluster.end(probe))) == 2
    (view,) = cluster.scheduler.views.workers()
    assert view.breaker == "closed"


def test_a_worker_that_is_known_is_not_doubted_by_what_it_counts() -> None:
    """Its leader has seen each of those failures, and who was to blame."""
    cluster = Cluster()
    cluster.join("w1")
    cluster.beat("w1", engine_faults=9)
    (view,) = cluster.scheduler.views.workers()
    assert view.breaker == "closed"


def test_without_breakers_nobody_is_doubted() -> None:
    """Zero failures open none."""
    cluster = Cluster(a_policy(breaker=BreakerPolicy(failures_max=0)))
    cluster.join("w1", engine_faults=9)
    (view,) = cluster.scheduler.views.workers()
    assert view.breaker == "closed"
