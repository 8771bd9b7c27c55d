"""Two more of the kind of each case 1 to 10: load that is not counted, places that are not seen.

The cases themselves stand on the page of properties, each beside its test.
"""

from collections import Counter
from dataclasses import replace

import pytest

from broker.core.decisions import Abort, Dispatch
from broker.core.events import DispatchAllowed, JobHeld
from broker.core.heat import HEAT_KEYS_MAX, Heat
from broker.core.policy import QuotaRow
from broker.core.routing import make_router
from broker.core.stickiness import STICKY_KEYS_MAX, Stickiness
from broker.wire.messages import Answer, Kind, Load, Outcome, Usage
from tests.unit.core.cluster import (
    EPOCH,
    LANE,
    Cluster,
    a_policy,
    a_spec,
    in_flight,
    keys,
    of,
    only,
)
from tests.unit.core.invariants import check_sums
from tests.unit.core.routing_builders import CACHE_AWARE, SYSTEM, Place, a_worker, where

# ---- 1: one path forgot to count load -----------------------------------------------------------


def test_1_adopted_jobs_load_their_worker_as_dispatched_ones_do() -> None:
    """A new leader finds three jobs on one of two workers: the next three go to the other."""
    old = Cluster()
    old.join("w1", slots=4)
    running = of(Dispatch, old.hold_many(3))
    new = Cluster(started=False, epoch=EPOCH + 1)
    listed = tuple(in_flight(a_spec(f"j{n}"), one.attempt) for n, one in enumerate(running))
    new.join("w1", inflight=listed)
    new.join("w2")
    new.step(DispatchAllowed(new.at_s))
    given = [one.worker for one in of(Dispatch, new.hold_many(3, prefix="k"))]
    assert given == ["w2"] * 3
    check_sums(new.scheduler)


def test_1_a_retry_moves_its_load_to_where_it_runs() -> None:
    """Failed on one worker and run on another, it counts there and nowhere else."""
    cluster = Cluster(a_policy(QuotaRow(lane=LANE, inflight_tokens_max=10_000)))
    cluster.join("w1", "w2")
    first = only(Dispatch, cluster.hold(a_spec()))
    cluster.fail(first)
    second = only(Dispatch, cluster.wait(2.0))
    assert second.worker != first.worker
    loads = {one.worker: one.inflight_jobs for one in cluster.scheduler.views.workers()}
    assert loads == {first.worker: 0, second.worker: 1}
    check_sums(cluster.scheduler)


# ---- 2: what ends in an odd way leaks ------------------------------------------------------------


def test_2_a_job_cancelled_while_it_waits_for_its_retry_leaves_nothing() -> None:
    """It held no lease then, and its queue forgets it: the row is free for the next."""
    cluster = Cluster(a_policy(QuotaRow(lane=LANE, inflight_jobs_max=1, queued_jobs_max=1)))
    cluster.join("w1")
    cluster.fail(only(Dispatch, cluster.hold(a_spec())))
    cluster.cancel("acme.j1")
    assert not cluster.scheduler.is_known("acme.j1")
    check_sums(cluster.scheduler)
    assert keys(Dispatch, cluster.hold(a_spec("j2"))) == ["acme.j2"]


@pytest.mark.parametrize("seconds", [12.0, 60.0])
def test_2_a_cancelled_job_whose_worker_dies_leaves_nothing(seconds: float) -> None:
    """The abort is never answered; the worker's end is the job's end too."""
    cluster = Cluster(a_policy(QuotaRow(inflight_tokens_max=1000)))
    cluster.join("w1", "w2")
    dispatch = only(Dispatch, cluster.hold(a_spec()))
    cluster.answer(dispatch, Answer.ACCEPTED)
    assert keys(Abort, cluster.cancel("acme.j1")) == ["acme.j1"]
    cluster.beats.pop(dispatch.worker)
    cluster.wait(seconds)
    assert cluster.usage["all"] == (0, 0.0)
    check_sums(cluster.scheduler)


# ---- 3: load that is known late ------------------------------------------------------------------


def test_3_a_report_older_than_a_dispatch_does_not_take_its_load_away() -> None:
    """A report that was sent before the order arrived lists nothing: the order counts on."""
    cluster = Cluster()
    cluster.join("w1", "w2")
    first = only(Dispatch, cluster.hold(a_spec("j1")))
    cluster.beat(first.worker, echo=0, inflight=(), load=Load())
    second = only(Dispatch, cluster.hold(a_spec("j2")))
    assert second.worker != first.worker


@pytest.mark.parametrize("policy", CACHE_AWARE)
def test_3_jobs_of_one_hot_prefix_do_not_all_queue_at_its_holder(policy: str) -> None:
    """Forty long questions about one cached document between two reports: the holder has its θ,
    and what is more waits or goes elsewhere.
    """
    place = Place(4, policy=policy)
    place.warm("w0", SYSTEM)
    given = Counter[str]()
    for number in range(40):
        placement = place.place(place.spec(SYSTEM, (f"own{number}", 40)))
        if placement.worker is None:
            break
        given[place.give(place.spec(SYSTEM, (f"own{number}", 40))).worker] += 1
    assert max(given.values()) <= 4


# ---- 4: ties by index ---------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_4_lanes_alike_take_turns_whatever_their_names(names: tuple[str, str]) -> None:
    """Their counters are equal time and again: neither is first for good."""
    cluster = Cluster(a_policy(lanes=names))
    cluster.join("w1", slots=1)
    for lane in names:
        cluster.hold_many(10, lane=lane, prefix=lane)
    dispatch = only(Dispatch, cluster.decisions)
    went = [names[0]]
    for _ in range(15):
        dispatch = only(Dispatch, cluster.end(dispatch))
        went.append(dispatch.key.partition(".")[0])
    assert abs(went.count("a") - went.count("b")) <= 1


def test_4_retries_spread_over_the_workers_that_are_left() -> None:
    """Eight jobs that fail on one worker at once: the other three share them evenly."""
    cluster = Cluster()
    cluster.join("w9", slots=8)
    running = of(Dispatch, cluster.hold_many(8))
    cluster.join("w1", "w2", "w3", slots=8)
    for dispatch in running:
        cluster.fail(dispatch, charged=True)
    homes = Counter(one.worker for one in of(Dispatch, cluster.wait(5.0)))
    assert sum(homes.values()) == 8
    assert "w9" not in homes
    assert max(homes.values()) - min(homes.values()) <= 1
    assert len(homes) == 3


# ---- 5: a worker that is stuck attracts ----------------------------------------------------------


@pytest.mark.parametrize("policy", CACHE_AWARE)
def test_5_a_stuck_holder_is_not_waited_for_without_end(policy: str) -> None:
    """It has the prefix and does not move: jobs of that prefix go where it must be computed."""
    place = Place(3, policy=policy)
    place.warm("w0", SYSTEM)
    place.give(place.spec(("stuck", 400)), "w0")
    homes = Counter(place.run(place.spec(SYSTEM, (f"ask{n}", 1))) for n in range(12))
    assert homes["w0"] == 0


def test_5_the_first_to_answer_is_not_the_best_because_it_fails_at_once() -> None:
    """A worker whose engine fails everything is always idle: it is given its breaker's three, and
    one at each look.
    """
    cluster = Cluster(router=make_router(a_policy().routing))  # type: ignore[arg-type]
    cluster.join("bad", "good", slots=2)
    given = Counter[str]()
    for number in range(40):
        decisions = cluster.hold(a_spec(f"j{number}", enqueued_at_s=cluster.at_s))
        for dispatch in of(Dispatch, decisions):
            given[dispatch.worker] += 1
            if dispatch.worker == "bad":
                cluster.fail(dispatch)
            else:
                cluster.end(dispatch)
    assert given["bad"] == cluster.scheduler._mind.policy.breaker.failures_max
    assert given["good"] == 40 - given["bad"]


# ---- 6: a prefix that says nothing --------------------------------------------------------------


@pytest.mark.parametrize("policy", CACHE_AWARE)
def test_6_a_prefix_that_all_hold_sticks_to_nobody(policy: str) -> None:
    """Asked for one after the other, its jobs still take turns."""
    place = Place(4, policy=policy)
    for n in range(4):
        place.warm(f"w{n}", SYSTEM)
    homes = [place.run(place.spec(SYSTEM, (f"own{n}", 1))) for n in range(8)]
    assert sorted(homes) == sorted(["w0", "w1", "w2", "w3"] * 2)


@pytest.mark.parametrize("policy", CACHE_AWARE)
def test_6_only_what_lies_beyond_the_common_beginning_draws(policy: str) -> None:
    """All hold the template and one the document behind it: its jobs go there, others don't."""
    place = Place(4, policy=policy)
    for n in range(3):
        place.warm(f"w{n}", SYSTEM)
    place.warm("w3", SYSTEM, ("document", 60))
    assert where(place, SYSTEM, ("document", 60), ("ask", 1)) == "w3"
    homes = Counter(place.run(place.spec(SYSTEM, (f"own{n}", 30))) for n in range(20))
    assert max(homes.values()) == 5


# ---- 7: memory that grows -----------------------------------------------------------------------


def test_7_a_million_sessions_leave_stickiness_at_its_bound() -> None:
    """Each comes once: the oldest are forgotten."""
    sticky = Stickiness(sticky_s=1e9)
    for n in range(STICKY_KEYS_MAX + 1000):
        sticky.note(("acme", "tiny", f"s{n}"), "w1", at_s=float(n))
    assert len(sticky) == STICKY_KEYS_MAX
    assert sticky.last(("acme", "tiny", "s0"), at_s=2000.0) == ""


def test_7_prefixes_that_come_once_leave_their_heat_at_its_bound() -> None:
    """The least recently used go first."""
    heat = Heat()
    for n in range(HEAT_KEYS_MAX + 1000):
        heat.note(n, at_s=float(n))
    assert len(heat) == HEAT_KEYS_MAX
    assert heat.uses(0, at_s=1.0) == 0.0


# ---- 8: who is gone is still picked --------------------------------------------------------------


@pytest.mark.parametrize("policy", CACHE_AWARE)
@pytest.mark.parametrize("change", [{"draining": True}, {"ready": False}, {"models": ("other",)}])
def test_8_a_holder_that_serves_no_more_is_not_waited_for(
    policy: str, change: dict[str, object]
) -> None:
    """Draining, not ready or with its model unloaded: its cache draws nobody, nor holds any."""
    place = Place(2, policy=policy)
    place.warm("w0", SYSTEM)
    assert where(place, SYSTEM, ("ask", 1)) == "w0"
    place.change("w0", **change)
    placement = place.place(place.spec(SYSTEM, ("ask", 1)))
    assert placement.worker is place.workers["w1"]
    assert not placement.held_for


def test_8_a_suspect_gets_nothing_while_it_is_probed() -> None:
    """Silent for longer than its lease and not yet given up: everything goes to the other."""
    cluster = Cluster()
    cluster.join("w1", "w2")
    for _ in range(5):
        cluster.wait_for("w2", 1.0)
    given = [one.worker for one in of(Dispatch, cluster.hold_many(4))]
    assert given == ["w2"] * 4


# ---- 9: who comes back knows nothing -------------------------------------------------------------


@pytest.mark.parametrize("policy", CACHE_AWARE)
def test_9_a_worker_that_left_and_came_back_is_asked_for_all(policy: str) -> None:
    """Under its old name, with its cache: a delta is no ground to stand on, a full report is."""
    place = Place(2, policy=policy)
    place.warm("w1", SYSTEM)
    place.router.gone(place.workers["w1"])
    place.workers["w1"] = a_worker("w1", index=1)
    place.router.joined(place.workers["w1"])
    assert not place.report("w1", 7, added=())
    place.warm("w1", SYSTEM)
    assert where(place, SYSTEM, ("ask", 1)) == "w1"


@pytest.mark.parametrize("policy", CACHE_AWARE)
def test_9_a_report_that_was_lost_costs_one_full_one(policy: str) -> None:
    """A gap in the numbers: what is known stays no longer credited than until the full report."""
    place = Place(2, policy=policy)
    place.warm("w1", SYSTEM)
    assert not place.report("w1", 3, added=())
    assert place.report("w1", 4, added=(), full=True)
    place.run(place.spec(("x", 40)), "w1")
    assert where(place, SYSTEM, ("ask", 1)) == "w0"


# ---- 10: a cost that grows ----------------------------------------------------------------------


@pytest.mark.parametrize("waiting", [100, 3000])
def test_10_an_event_costs_the_same_however_many_wait(waiting: int) -> None:
    """In a full pool a newcomer of lower urgency looks at no worker, behind 100 or 3,000."""
    cluster = Cluster()
    cluster.join("w1", slots=1)
    cluster.hold_many(waiting)
    before = cluster.router.placed
    cluster.hold_many(50, prefix="k")
    assert cluster.router.placed - before <= 50


@pytest.mark.parametrize("lanes", [2, 400])
def test_10_a_dispatch_costs_the_same_however_many_lanes_wait(lanes: int) -> None:
    """Of lanes within the slack 64 are looked at, however many there are."""
    names = tuple(f"lane{n}" for n in range(lanes))
    cluster = Cluster(a_policy(lanes=names))
    cluster.join("w1", slots=1)
    for name in names:
        cluster.hold_many(2, lane=name)
    dispatch = of(Dispatch, cluster.decisions)[-1]
    before = cluster.router.placed
    only(Dispatch, cluster.end(dispatch))
    assert cluster.router.placed - before <= 64 + 3


# ---- all of it, once more, in the words of a takeover --------------------------------------------


def test_1_and_2_what_ended_during_a_takeover_counts_nowhere() -> None:
    """Listed by its worker, held from its queue, and ended before the new leader dispatches."""
    old = Cluster()
    old.join("w1")
    running = only(Dispatch, old.hold(a_spec()))
    new = Cluster(a_policy(QuotaRow(inflight_jobs_max=4)), started=False, epoch=EPOCH + 1)
    new.join("w1", inflight=(in_flight(a_spec(), running.attempt),))
    new.step(JobHeld(new.at_s, replace(a_spec(), stream_sequence=1)))
    new.end(running, kind=Kind.COMPLETED, usage=Usage(100, 0, 50), outcome=Outcome.SETTLED)
    new.step(DispatchAllowed(new.at_s))
    assert new.usage["all"] == (0, 0.0)
    check_sums(new.scheduler)
