"""Jobs that come together compete: the best goes, not the first."""

import pytest

from broker.core.decisions import Cancel, Decision, Dispatch, Queued
from broker.core.events import CancelRequested, Event, JobEnded, JobHeld, JobSpec
from tests.unit.core.cluster import Cluster, a_spec, keys, of
from tests.unit.core.invariants import check_sums

LONG = a_spec("long", prompt_tokens=9000, stream_sequence=1)
SHORT = a_spec("short", stream_sequence=2)


def one_free_slot() -> Cluster:
    """A cluster with one slot, in which nobody waits."""
    cluster = Cluster()
    cluster.join("w1", slots=1)
    cluster.tick()
    assert all(pool.settled for pool in cluster.scheduler._mind.queues.pools.values())
    return cluster


def together(cluster: Cluster, *events: Event | JobSpec) -> list[Decision]:
    """Let events (jobs: their coming) happen without settling; returns what was decided so far."""
    decisions: list[Decision] = []
    for event in events:
        held = JobHeld(cluster.at_s, event) if isinstance(event, JobSpec) else event
        decisions += cluster.scheduler.step(held, settles=False)
    return decisions


@pytest.mark.parametrize("jobs", [(LONG, SHORT), (SHORT, LONG)])
def test_of_several_newcomers_the_best_goes(jobs: tuple[JobSpec, JobSpec]) -> None:
    """Whichever was pulled first, the short one is given the slot; nothing is decided before all
    have come.
    """
    cluster = one_free_slot()
    assert together(cluster, *jobs) == []
    decisions = cluster.scheduler.settle()
    assert keys(Dispatch, decisions) == ["acme.short"]
    assert keys(Queued, decisions) == ["acme.long"]
    check_sums(cluster.scheduler)


def test_newcomers_one_by_one_go_as_they_come() -> None:
    """An event that settles gives the slot to whoever is there."""
    cluster = one_free_slot()
    assert keys(Dispatch, cluster.hold(LONG, SHORT)) == ["acme.long"]


def test_the_last_of_events_settles_for_all() -> None:
    """A step that settles takes those in that came before it."""
    cluster = one_free_slot()
    together(cluster, LONG)
    assert keys(Dispatch, cluster.hold(SHORT)) == ["acme.short"]


def test_a_higher_band_wins_the_contest() -> None:
    """Bands count among newcomers as among those that wait."""
    cluster = one_free_slot()
    together(cluster, SHORT, a_spec("urgent", band=0, prompt_tokens=9000))
    assert keys(Dispatch, cluster.scheduler.settle()) == ["acme.urgent"]


def test_a_newcomer_that_is_cancelled_before_the_settling_is_no_rival() -> None:
    """It ends, and the slot is the other one's."""
    cluster = one_free_slot()
    decisions = together(cluster, LONG, SHORT, CancelRequested(cluster.at_s, SHORT.key))
    assert keys(Cancel, decisions) == ["acme.short"]
    decisions = cluster.scheduler.settle()
    assert keys(Dispatch, decisions) == ["acme.long"]
    assert not of(Queued, decisions)
    check_sums(cluster.scheduler)


def test_a_newcomer_that_ended_before_the_settling_is_forgotten() -> None:
    """Its terminal record stands: it is neither dispatched nor told that it waits."""
    cluster = one_free_slot()
    together(cluster, LONG, SHORT, JobEnded(cluster.at_s, SHORT.key))
    together(cluster, JobEnded(cluster.at_s, LONG.key))
    assert cluster.scheduler.settle() == []
    assert not cluster.scheduler.is_known(SHORT.key)
    assert keys(Dispatch, cluster.hold(a_spec("next"))) == ["acme.next"]


def test_a_message_that_comes_twice_is_no_rival_of_itself() -> None:
    """One job is dispatched, once."""
    cluster = one_free_slot()
    together(cluster, SHORT, SHORT)
    assert keys(Dispatch, cluster.scheduler.settle()) == ["acme.short"]
    assert cluster.scheduler.settle() == []


def test_a_lone_newcomer_to_a_full_pool_still_costs_no_look() -> None:
    """Only several of one settling are worth a contest."""
    cluster = one_free_slot()
    cluster.hold_many(50)
    before = cluster.router.placed
    together(cluster, SHORT)
    assert keys(Queued, cluster.scheduler.settle()) == ["acme.short"]
    assert cluster.router.placed == before


def test_newcomers_of_two_models_are_no_rivals() -> None:
    """Each pool has its own contest."""
    cluster = one_free_slot()
    cluster.join("w2", slots=1, models=("other",))
    together(cluster, LONG, a_spec("else", model="other", prompt_tokens=1))
    assert keys(Dispatch, cluster.scheduler.settle()) == ["acme.long", "acme.else"]
