"""How soon work went on after a fault, against what is promised: on histories made by hand."""

from collections.abc import Sequence
from math import inf

import pytest

from ops.chaos.bounds import PROMISED, WORDS, Promise, Timed, figures, timed, told
from ops.chaos.checker import Strike
from ops.chaos.history import Acked, Held, HistoryEvent, Submitted, ordered
from ops.chaos.plan import Kind
from ops.chaos.setting import Setting, has_room
from tests.chaos_histories import BROKER, JOB, PRODUCER, a_life, a_record, a_strike, an_order

ONE = Setting.of(1)


def the_time(history: Sequence[HistoryEvent], *strikes: Strike, promise: Promise) -> Timed:
    """Time the only case of this promise."""
    (found,) = [one for one in timed(history, strikes, setting=ONE) if one.promise is promise]
    return found


def a_hold(at_s: float, job: str = JOB, *, by: str = BROKER) -> Held:
    """A job that a broker pulled."""
    return Held(at_s=at_s, job=job, by=by)


def test_a_killed_workers_last_job_counts() -> None:
    """From the kill until a worker takes it again."""
    events = [
        an_order(1.0, job="online.a"),
        an_order(1.1, job="online.b", number=2),
        an_order(4.0, job="online.a", worker="worker-2"),
        an_order(8.5, job="online.b", worker="worker-2", number=2),
    ]
    late = the_time(events, a_strike(Kind.KILL_WORKER, 3.0), promise=Promise.KILLED_WORKER)
    assert (late.took_s, late.limit_s, late.missed) == (5.5, 5.0, True)


@pytest.mark.parametrize(("at_s", "missed"), [(12.99, False), (13.01, True)])
def test_what_a_dead_leader_held_is_due_within_two_lives_of_its_key(
    at_s: float, missed: bool
) -> None:
    """The last of the jobs that it had pulled, taken by a worker."""
    events = [
        a_hold(1.0, "online.a"),
        a_hold(1.1, "online.b"),
        an_order(6.0, job="online.a", epoch=2),
        an_order(at_s, job="online.b", epoch=2, number=2),
    ]
    struck = a_strike(Kind.KILL_LEADER, 3.0, member=BROKER)
    assert the_time(events, struck, promise=Promise.DEAD_LEADER).missed == missed


def test_a_dead_leader_held_neither_what_was_taken_from_it_nor_what_has_ended() -> None:
    """Nor what another broker pulled after it."""
    events: list[HistoryEvent] = [
        *(a_hold(1.0, f"online.{name}") for name in "abcd"),
        an_order(2.0, job="online.a"),
        a_record(2.1, job="online.b", by=BROKER),
        Acked(at_s=2.2, job="online.c", by=BROKER),
        a_hold(2.3, "online.d", by="broker-2"),
    ]
    struck = a_strike(Kind.KILL_LEADER, 3.0, member=BROKER)
    assert the_time(events, struck, promise=Promise.DEAD_LEADER).took_s == 0.0


def test_what_was_pulled_again_after_its_end_waits_for_nothing() -> None:
    """Seed 301: a new leader resets its consumers while acks are on their way."""
    ended: list[HistoryEvent] = [*a_life(), a_hold(8.1, by="broker-2")]
    struck = a_strike(Kind.KILL_LEADER, 9.0, member="broker-2")
    assert the_time(ended, struck, promise=Promise.DEAD_LEADER).took_s == 0.0
    again = [*ended, Submitted(at_s=8.2, job=JOB, by=PRODUCER), a_hold(8.3, by="broker-2")]
    assert the_time(again, struck, promise=Promise.DEAD_LEADER).took_s == inf


def test_a_held_job_whose_deadline_passed_has_gone_on_as_well() -> None:
    """The next leader wrote its record."""
    events = [a_hold(1.0), a_record(9.0, by="broker-2")]
    struck = a_strike(Kind.KILL_LEADER, 3.0, member=BROKER)
    assert the_time(events, struck, promise=Promise.DEAD_LEADER).took_s == 6.0


def test_a_leader_has_left_when_a_worker_takes_a_job_from_the_next() -> None:
    """What it had ordered itself may still arrive."""
    events = [
        an_order(1.0),
        an_order(3.1, job="online.b", number=2),
        an_order(4.5, job="online.c", epoch=2),
    ]
    struck = a_strike(Kind.TERM_LEADER, 3.0, member=BROKER)
    assert the_time(events, struck, promise=Promise.LEADER_LEFT).took_s == 1.5


@pytest.mark.parametrize("kind", [Kind.KILL_WORKER, Kind.TERM_WORKER])
def test_an_agent_is_back_with_its_first_job(kind: Kind) -> None:
    """Counted from its start, not from the end of the one before."""
    events = [
        an_order(1.0),
        an_order(6.0, job="online.b", worker="worker-2"),
        an_order(9.0, job="online.c", life=101),
    ]
    struck = a_strike(kind, 3.0, back_at_s=7.5)
    assert the_time(events, struck, promise=Promise.AGENT_BACK).took_s == 1.5


def test_work_is_back_when_a_worker_takes_a_job_after_the_servers_return() -> None:
    """A record that had waited for the server is none that was worked for since."""
    events = [a_record(13.1), an_order(16.0, job="online.b")]
    struck = a_strike(Kind.LOSE_NATS, 3.0, member="", for_s=10.0)
    assert the_time(events, struck, promise=Promise.NATS_BACK).took_s == 3.0


def test_what_never_came_is_late() -> None:
    """However long the run went on."""
    late = the_time([an_order(1.0)], a_strike(at_s=3.0), promise=Promise.KILLED_WORKER)
    assert late.took_s == inf
    assert late.missed
    assert told([late])[0].endswith("never")


def test_a_late_one_says_nothing_where_another_fault_came_within_its_time() -> None:
    """The next fault may be the reason; one that came later is none."""
    events = [an_order(1.0), an_order(9.0, worker="worker-2")]
    for next_at_s, disturbed in ((7.9, True), (8.1, False)):
        strikes = (a_strike(at_s=3.0), a_strike(Kind.KILL_LEADER, next_at_s, number=1))
        late = the_time(events, *strikes, promise=Promise.KILLED_WORKER)
        assert (late.judged, late.missed) == (not disturbed, not disturbed)


def test_a_late_one_says_nothing_in_the_midst_of_another_recovery() -> None:
    """There may have been no leader to dispatch anything; in time is in time."""
    events = [an_order(1.0), an_order(9.0, worker="worker-2")]
    for at_s, judged in ((3.0, False), (5.0, True)):
        struck = a_strike(at_s=at_s, in_midst=True)
        found = the_time(events, struck, promise=Promise.KILLED_WORKER)
        assert (found.judged, found.missed) == (judged, False)


@pytest.mark.parametrize(("share", "missed"), [(0.6, True), (0.61, False)])
def test_a_late_one_says_nothing_on_a_crowded_machine(share: float, missed: bool) -> None:
    """It is asked of the very time that was promised."""

    def crowd(from_s: float, to_s: float) -> float:
        assert (from_s, to_s) == (4.0, 7.0)
        return share

    strikes, events = [a_strike(Kind.TERM_WORKER, 3.0, back_at_s=4.0)], [an_order(16.0)]
    (found,) = timed(events, strikes, setting=ONE, crowd=crowd)
    assert found.missed == missed
    assert any("1 of 1 recoveries say nothing" in line for line in told([found])) != missed


@pytest.mark.parametrize("events", [[], [an_order(16.1)]])
def test_no_crowd_is_a_reason_to_be_four_times_too_late(events: list[HistoryEvent]) -> None:
    """Nor never to come."""
    strikes = [a_strike(Kind.TERM_WORKER, 3.0, back_at_s=4.0)]
    (found,) = timed(events, strikes, setting=ONE, crowd=lambda _from_s, _to_s: 1.0)
    assert found.missed


def test_without_room_for_its_jobs_nothing_is_promised_of_their_dispatch() -> None:
    """Four workers are enough, three are not; an agent is to be back all the same."""
    strikes = [a_strike(Kind.KILL_WORKER, 3.0, back_at_s=4.0), a_strike(Kind.KILL_LEADER, 30.0)]
    found = timed([an_order(1.0)], strikes, setting=ONE, has_room=has_room(3))
    assert [one.promise for one in found] == [Promise.AGENT_BACK]
    assert has_room(4)


def test_what_came_after_the_end_of_the_load_need_not_be_in_time() -> None:
    """An agent that finds no jobs takes none."""
    strikes = [a_strike(Kind.TERM_WORKER, 3.0, back_at_s=4.0)]
    for until_s, missed in ((6.9, False), (7.1, True)):
        (found,) = timed([], strikes, setting=ONE, loaded_until_s=until_s)
        assert found.missed == missed


def test_figures_are_by_promise_and_kind_of_fault() -> None:
    """Those that say nothing are counted, and have no part in the times."""
    struck = a_strike(Kind.KILL_WORKER, 3.0)
    times = [
        Timed(Promise.AGENT_BACK, struck, 3.0, took_s, disturbed)
        for took_s, disturbed in ((1.0, False), (2.0, True), (9.0, False), (7.0, True))
    ]
    assert figures(times) == {
        "agent_back": {
            "limit_s": 3.0,
            "kill_worker": {"judged": 3, "missed": 1, "disturbed": 1, "p50": 2.0, "max": 9.0},
        }
    }


def test_every_promise_is_made_of_a_fault_and_told_in_words() -> None:
    """None is only declared."""
    assert {promise for promises in PROMISED.values() for promise in promises} == set(Promise)
    assert WORDS.keys() == set(Promise)


def test_nothing_is_promised_of_other_faults() -> None:
    """Nothing is timed."""
    events = ordered([an_order(1.0)])
    assert timed(events, [a_strike(Kind.PAUSE_NATS, 3.0)], setting=ONE) == ()
