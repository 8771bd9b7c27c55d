"""What runs, what ended, what may not start again: all of it bounded."""

from typing import Any

import pytest

from broker.wire.messages import Attempt, Dispatch, Finished, Job, Kind, Outcome, Reason
from tests.builders import a_job, an_attempt
from worker_agent.ledger import Ledger, Running


def a_ledger(**fields: int) -> Ledger:
    """A ledger with small bounds."""
    defaults = {"unacknowledged_max": 3, "finished_max": 4, "seen_max": 10, "finished_beats": 2}
    return Ledger(**{**defaults, **fields})


def an_order(job: Job, attempt: Attempt) -> Dispatch:
    """The order that brought a job, without the job."""
    return Dispatch(
        epoch=1,
        number=1,
        attempt=attempt,
        lane=job.lane,
        stream="JOBS_acme",
        stream_sequence=7,
        ack_subject=f"ack.{job.id}",
        job=b"",
        run_s_max=60.0,
        stall_s=10.0,
        predicted_hit_tokens=64,
        enqueued_at_s=900.0,
    )


def accept(ledger: Ledger, job_id: str, number: int = 1, **fields: Any) -> Running:
    """Take a job in."""
    job = a_job(id=job_id, **fields)
    return ledger.accept(an_order(job, an_attempt(number)), job, at_s=1000.0, tick_s=50.0)


def an_end(running: Running, **fields: Any) -> Finished:
    """A settled end."""
    defaults: dict[str, Any] = {"outcome": Outcome.SETTLED, "kind": Kind.COMPLETED}
    return Finished(key=running.key, attempt=running.attempt, **{**defaults, **fields})


def test_an_accepted_job_is_listed_with_all_that_a_new_broker_needs() -> None:
    """The in-flight list alone lets another broker adopt it."""
    ledger = a_ledger()
    accept(ledger, "a", session="s", client="me")
    (listed,) = ledger.inflight()
    assert (listed.key, listed.attempt, listed.stream_sequence) == ("acme.a", an_attempt(1), 7)
    assert (listed.ack_subject, listed.client, listed.model) == ("ack.a", "me", "tiny")
    assert (listed.cached_tokens, listed.prefilled, listed.enqueued_at_s) == (64, False, 900.0)


def test_the_engines_count_replaces_the_prediction() -> None:
    """Predicted cached tokens stand until the engine tells, be it zero."""
    ledger = a_ledger()
    running = accept(ledger, "a")
    running.cached_tokens = 0
    running.first_token_at_s = 1001.5
    running.first_token_tick_s = running.accepted_tick_s + 1.5
    (listed,) = ledger.inflight()
    assert (listed.cached_tokens, listed.prefilled) == (0, True)
    assert running.ttft_s == 1.5


def test_a_job_can_not_run_twice_here() -> None:
    """To accept a running job again is impossible: the desk must have refused it."""
    ledger = a_ledger()
    accept(ledger, "a")
    with pytest.raises(AssertionError):
        accept(ledger, "a", number=2)


def test_dropping_frees_the_slot_once() -> None:
    """An attempt that is dropped twice frees nobody else's slot."""
    ledger = a_ledger()
    first = accept(ledger, "a")
    ledger.drop(first)
    second = accept(ledger, "a", number=2)
    ledger.drop(first)
    assert ledger.running == {"acme.a": second}


def test_a_settled_end_waits_for_its_ack_for_ever() -> None:
    """However many heartbeats carried it, it stays until the message is acknowledged."""
    ledger = a_ledger()
    running = accept(ledger, "a")
    ledger.end(running, an_end(running))
    for _ in range(10):
        ledger.finished()
        ledger.reported()
    assert [finished.acknowledged for finished in ledger.finished()] == [False]
    ledger.acknowledged("acme.a", an_attempt(1))
    assert [finished.acknowledged for finished in ledger.finished()] == [True]


def test_a_confirmed_end_is_repeated_a_few_times_only() -> None:
    """`finished_beats` heartbeats heal a lost note; then it is forgotten."""
    ledger = a_ledger(finished_beats=2)
    running = accept(ledger, "a")
    ledger.end(running, an_end(running, outcome=Outcome.RETRY, reason=Reason.STALLED))
    ledger.reported()  # Of a report that was made before.
    for _ in range(2):
        assert len(ledger.finished()) == 1
        ledger.reported()
    assert ledger.finished() == ()


def test_an_unsent_report_counts_for_nothing() -> None:
    """Reports that were made and never went out don't use an end's repetitions up."""
    ledger = a_ledger(finished_beats=1)
    running = accept(ledger, "a")
    ledger.end(running, an_end(running, outcome=Outcome.RETRY, reason=Reason.STALLED))
    for _ in range(5):
        assert len(ledger.finished()) == 1


def test_too_many_unconfirmed_acks_fill_the_ledger() -> None:
    """At `unacknowledged_max` it is full; one ack makes room."""
    ledger = a_ledger(unacknowledged_max=3)
    for job_id in "abc":
        assert not ledger.full
        running = accept(ledger, job_id)
        ledger.end(running, an_end(running))
    assert ledger.full
    ledger.acknowledged("acme.b", an_attempt(1))
    assert not ledger.full


def test_acknowledging_twice_or_the_unknown_counts_once() -> None:
    """The number of unconfirmed acks can't go below what is owed."""
    ledger = a_ledger()
    for job_id in "ab":
        running = accept(ledger, job_id)
        ledger.end(running, an_end(running))
    ledger.acknowledged("acme.a", an_attempt(1))
    ledger.acknowledged("acme.a", an_attempt(1))
    ledger.acknowledged("acme.never", an_attempt(1))
    assert ledger.unacknowledged == 1


def test_confirmed_ends_are_bounded_and_unconfirmed_ones_survive() -> None:
    """Beyond `finished_max` the oldest confirmed end goes; one that waits for its ack never."""
    ledger = a_ledger(finished_max=2, unacknowledged_max=100)
    waiting = accept(ledger, "waiting")
    ledger.end(waiting, an_end(waiting))
    for number in range(6):
        running = accept(ledger, f"r{number}")
        ledger.end(running, an_end(running, outcome=Outcome.RETRY, reason=Reason.STALLED))
    keys = [finished.key for finished in ledger.finished()]
    assert keys == ["acme.waiting", "acme.r4", "acme.r5"]


def test_a_retry_is_not_acknowledged_here() -> None:
    """The broker keeps a job that goes elsewhere; its message is not ours any more."""
    ledger = a_ledger()
    running = accept(ledger, "a")
    ledger.end(running, an_end(running, outcome=Outcome.RETRY, reason=Reason.STALLED))
    assert ledger.unacknowledged == 0
    assert list(ledger.renewals_due(before_tick_s=1e9)) == []


def test_seen_attempts_are_bounded() -> None:
    """Of accepted and revoked attempts the last `seen_max` are remembered."""
    ledger = a_ledger(seen_max=3)
    running = accept(ledger, "a")
    ledger.drop(running)
    for number in (2, 3):
        ledger.revoke("acme.a", an_attempt(number))
    assert ledger.seen("acme.a", an_attempt(1))
    ledger.revoke("acme.a", an_attempt(4))
    assert not ledger.seen("acme.a", an_attempt(1))
    assert ledger.seen("acme.a", an_attempt(4))


def test_only_the_very_attempt_is_found() -> None:
    """An abort of an earlier attempt does not touch the one that runs."""
    ledger = a_ledger()
    running = accept(ledger, "a", number=2)
    assert ledger.find("acme.a", an_attempt(2)) is running
    assert ledger.find("acme.a", an_attempt(1)) is None


def test_what_holds_a_message_is_renewed_from_acceptance_to_ack() -> None:
    """Running and unacknowledged are due; what was renewed lately or is acknowledged is not."""
    ledger = a_ledger()
    running = accept(ledger, "a")
    settled = accept(ledger, "b")
    ledger.end(settled, an_end(settled))
    done = accept(ledger, "c")
    ledger.end(done, an_end(done))
    ledger.acknowledged("acme.c", an_attempt(1))
    assert list(ledger.renewals_due(before_tick_s=50.0)) == []
    due = list(ledger.renewals_due(before_tick_s=51.0))
    assert [one.ack_subject for one in due] == ["ack.a", "ack.b"]
    running.renewed_tick_s = 60.0
    assert [one.ack_subject for one in ledger.renewals_due(before_tick_s=51.0)] == ["ack.b"]
