"""Which steps a fault hit, and how soon work went on: on histories made by hand."""

import pytest

from broker.wire.messages import Attempt
from ops.chaos.history import Acked, HistoryEvent, Ordered, RunEnded, Told, ordered
from ops.chaos.moments import STEPS, recoveries_s, steps_hit
from ops.chaos.plan import Kind
from tests.chaos_histories import (
    BROKER,
    JOB,
    PRODUCER,
    WORKER,
    a_life,
    a_record,
    a_strike,
    an_order,
)

MIDST_S = {
    "submit": 1.5,
    "hold": 2.5,
    "dispatch": 3.5,
    "run": 4.5,
    "record": 5.5,
    "ack": 6.5,
    "done": 7.5,
}
"""A moment in each step of the life that the builders make."""


def hit(kind: Kind, at_s: float, *, member: str = "", step: str = "") -> set[str]:
    """Name the steps that a fault hit in one job's life."""
    counts = steps_hit(a_life(), [a_strike(kind, at_s, member=member, step=step)])
    assert set(counts) == set(STEPS)
    return {step for step, count in counts.items() if count}


@pytest.mark.parametrize("step", STEPS)
def test_a_fault_of_the_server_hits_the_step_that_a_job_is_in(step: str) -> None:
    """All steps need the server."""
    assert hit(Kind.KILL_NATS, MIDST_S[step]) == {step}


def test_a_fault_hits_nothing_before_a_job_came_and_after_it_ended() -> None:
    """There was nobody to hit."""
    assert hit(Kind.KILL_NATS, 0.5) == set()
    assert hit(Kind.KILL_NATS, 8.5) == set()


@pytest.mark.parametrize(
    ("kind", "member", "steps"),
    [
        (Kind.KILL_WORKER, WORKER, {"dispatch", "run", "record", "ack"}),
        (Kind.KILL_WORKER, "worker-2", set()),
        (Kind.KILL_LEADER, BROKER, {"hold", "dispatch", "done"}),
        (Kind.KILL_PRODUCER, PRODUCER, {"submit", "done"}),
        (Kind.KILL_PRODUCER, "chats-2", set()),
        (Kind.KILL_STANDBY, "broker-2", set()),
    ],
)
def test_a_process_is_hit_in_the_steps_that_are_its_own(
    kind: Kind, member: str, steps: set[str]
) -> None:
    """And only where it has the job."""
    found = {step for step in STEPS if step in hit(kind, MIDST_S[step], member=member)}
    assert found == steps


def test_a_process_that_died_at_a_place_was_hit_in_its_step() -> None:
    """It says so itself, and knows better than clocks."""
    assert hit(Kind.KILL_WORKER, 0.5, member=WORKER, step="ack") == {"ack"}


def test_a_step_counts_once_for_each_fault() -> None:
    """However many jobs were in it."""
    events = ordered([*a_life("online.a"), *a_life("online.b")])
    strikes = [a_strike(Kind.KILL_NATS, 4.5), a_strike(Kind.PAUSE_NATS, 4.6)]
    assert steps_hit(events, strikes)["run"] == 2


def test_a_worker_has_recovered_when_its_last_job_goes_on() -> None:
    """Dispatched again or ended, whichever: counted from the fault."""
    events: list[HistoryEvent] = [
        an_order(1.0, job="online.a"),
        an_order(1.1, job="online.b", number=2),
        an_order(1.2, job="online.c", number=3),
        a_record(2.0, job="online.c"),
        an_order(6.0, job="online.a", worker="worker-2"),
        a_record(7.5, job="online.b"),
    ]
    assert recoveries_s(events, [a_strike(Kind.KILL_WORKER, 3.0)]) == {0: 4.5}


def test_a_job_whose_record_nobody_tells_of_has_ended_with_its_ack() -> None:
    """Its writer died in the moment in which the record was stored."""
    events: list[HistoryEvent] = [an_order(1.0), Acked(at_s=4.0, job=JOB, by="worker-2")]
    assert recoveries_s(events, [a_strike(Kind.KILL_WORKER, 3.0)]) == {0: 1.0}
    assert recoveries_s(events, [a_strike(Kind.KILL_WORKER, 5.0)]) == {0: 0.0}


def test_a_worker_without_jobs_recovers_at_once() -> None:
    """Nobody waited."""
    assert recoveries_s(a_life(), [a_strike(Kind.KILL_WORKER, 7.0)]) == {0: 0.0}


def test_a_dead_leaders_work_goes_on_with_the_first_order_of_a_later_epoch() -> None:
    """Whoever leads then, and not with what the dead one had sent."""
    orders = [
        Ordered(at_s=at_s, job="online.a", by=BROKER, worker=WORKER, attempt=Attempt(epoch, 1))
        for at_s, epoch in ((4.0, 7), (5.1, 7), (11.0, 9))
    ]
    struck = a_strike(Kind.KILL_LEADER, 5.0, member=BROKER)
    assert recoveries_s(orders, [struck]) == {0: 6.0}


def test_a_job_that_a_worker_only_acknowledged_anew_does_not_wait_for_it() -> None:
    """Its record stood before."""
    events = [*a_life(), an_order(9.0, number=2)]
    assert recoveries_s(events, [a_strike(Kind.KILL_WORKER, 10.0)]) == {0: 0.0}


def test_after_other_faults_the_first_end_counts_from_when_they_were_over() -> None:
    """The time that the server was away is the fault's own."""
    struck = a_strike(Kind.KILL_NATS, 3.0, member="", for_s=2.0)
    assert recoveries_s(a_life(), [struck]) == {0: 1.0}


def test_where_records_are_anothers_what_producers_are_told_counts() -> None:
    """Nobody there writes a history but them."""
    told = [event for event in a_life() if isinstance(event, Told)]
    struck = a_strike(Kind.KILL_PRODUCER, 3.0, member=PRODUCER, for_s=2.0)
    assert recoveries_s(told, [struck]) == {0: 3.0}


def test_what_never_recovered_is_left_out() -> None:
    """There is no time to tell."""
    lives = a_life(without=(RunEnded,))[:4]
    assert recoveries_s(lives, [a_strike(Kind.KILL_NATS, 9.0)]) == {}
