"""The one loop: everything in order, in slices, and no surprise ends it."""

import asyncio
import time
from functools import partial
from typing import Any

import pytest

from broker.core import decisions as do
from broker.core.events import (
    AttemptEnded,
    CancelRequested,
    DispatchAnswered,
    FirstTokenSeen,
    JobEnded,
    Tick,
    Unanswered,
)
from broker.service import loop as module
from broker.service.loop import SLICE_S
from broker.service.stages import Stage
from broker.wire import messages as wire
from broker.wire.messages import Attempt, Finished, Outcome, Reason
from tests.builders import LANE, a_job
from tests.leaders import WORKER, Desk, Worker, a_beat, a_delivery, a_desk, a_listing
from tests.turns import until

KEY = f"{LANE}.job-1"


async def test_a_surprise_is_logged_counted_and_survived() -> None:
    """What stands behind it is handled."""
    async with a_desk("loop") as desk:

        def fail() -> None:
            message = "a fault of ours"
            raise RuntimeError(message)

        done = asyncio.Event()
        desk.leader.loop.call(fail)
        desk.leader.loop.call(done.set)
        await done.wait()
        assert desk.seen.errors == {"loop": 1}


async def test_a_decision_that_cannot_be_carried_out_takes_no_other_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two jobs are dispatched in one step; the first order fails in our hands."""
    async with a_desk("outbox") as desk:
        worker = Worker(desk.bus.connection())
        await worker.listen()
        await desk.hold(a_job(id="a"))
        await desk.hold(a_job(id="b"))
        desk.allow()
        outbox = desk.leader.outbox
        dispatch, failed = outbox.dispatch, []

        def fail_once(decision: do.Dispatch) -> None:
            if not failed:
                failed.append(decision.key)
                message = "a fault of ours"
                raise RuntimeError(message)
            dispatch(decision)

        monkeypatch.setattr(outbox, "dispatch", fail_once)
        desk.beat()
        await until(lambda: bool(worker.orders))
        assert desk.seen.errors == {"loop": 1}
        told = [one for one in desk.seen.events if isinstance(one, DispatchAnswered)]
        assert [(one.key, one.answer) for one in told][:1] == [(failed[0], Unanswered.UNSENT)]


async def test_a_slice_ends_after_a_millisecond_whatever_waits() -> None:
    """SLICE_S: the loop gives way, and the rest is handled in its next turn."""
    async with a_desk() as desk:
        loop = desk.leader.loop
        for _ in range(10):
            loop.call(partial(time.sleep, SLICE_S))
        loop._slice()
        assert loop.backlog == 9


async def test_a_full_inbox_drops_what_is_repeated_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """INBOX_MAX: heartbeats and notes say the same again; events of jobs do not."""
    monkeypatch.setattr(module, "INBOX_MAX", 2)
    async with a_desk() as desk:
        loop = desk.leader.loop
        for sequence in (1, 2, 3):
            loop.heartbeat(a_beat(sequence=sequence))
        loop.note(
            wire.FirstToken(
                worker=WORKER, incarnation=1, key=KEY, attempt=Attempt(1, 1), ttft_s=0.1
            )
        )
        assert (loop.backlog, loop.dropped) == (2, 2)
        loop.tell(JobEnded(0.0, KEY))
        assert (loop.backlog, loop.dropped) == (3, 2)


async def test_notes_become_events() -> None:
    """A first token and an end are told between heartbeats."""
    async with a_desk() as desk:
        desk.leader.loop.note(
            wire.FirstToken(
                worker=WORKER, incarnation=1, key=KEY, attempt=Attempt(1, 1), ttft_s=0.1
            )
        )
        desk.leader.loop.note(
            wire.AttemptEnded(
                worker=WORKER,
                incarnation=1,
                finished=Finished(key=KEY, attempt=Attempt(1, 1), outcome=Outcome.SETTLED),
            )
        )
        desk.turn()
        assert [type(event) for event in desk.seen.events] == [FirstTokenSeen, AttemptEnded]


async def test_time_itself_is_an_event_and_its_lag_is_measured() -> None:
    """Ticks come while nothing else does, and the loop is seen to turn."""
    async with a_desk("loop") as desk:
        await asyncio.wait_for(until(lambda: len(desk.seen.lags) > 1), 5)
        assert any(isinstance(event, Tick) for event in desk.seen.events)
        assert desk.leader.loop.turned_ago_s < 1


# ---- adoption ----


async def test_what_a_worker_runs_for_an_earlier_leader_is_held_as_running() -> None:
    """Found again if its worker dies; its agent renews it until then."""
    async with a_desk() as desk:
        desk.beat(inflight=(a_listing(sequence=4),))
        held = desk.held()
        assert (held.stage, held.stream, held.sequence) == (Stage.RUNNING, f"JOBS_{LANE}", 4)
        assert (held.client, held.unread, held.sent) == ("client-1", True, Attempt(0, 7))
        assert desk.shelf.renewal_due(before_s=1e12) is None


async def test_a_job_pulled_before_its_worker_reports_is_handed_on_when_it_does() -> None:
    """Its place in the window is given back once, its body is not kept."""
    async with a_desk() as desk:
        desk.take(a_delivery(a_job()))
        desk.beat(inflight=(a_listing(),))
        held = desk.held()
        assert (held.stage, held.body, desk.window.released) == (Stage.RUNNING, None, 1)


async def test_a_job_that_is_being_closed_stays_so_when_a_worker_lists_it() -> None:
    """The closer's record decides; the worker will find it."""
    async with a_desk() as desk:
        desk.take(a_delivery(a_job()))
        desk.leader.loop.tell(CancelRequested(0.0, KEY))
        desk.turn()
        desk.beat(inflight=(a_listing(),))
        assert desk.held().stage is Stage.CLOSING


LISTED_GARBAGE: dict[str, dict[str, Any]] = {
    "no key": {"key": ""},
    "a key with a wildcard": {"key": "acme.>"},
    "a key of three parts": {"key": "acme.a.b"},
    "a model that is no name": {"model": "x" * 200},
    "a subject of its own to publish to": {"ack_subject": "jobs.acme.0.tiny"},
    "no ack subject": {"ack_subject": ""},
    "a wildcard in the ack subject": {"ack_subject": "$JS.ACK.a.b.c.d.e.f.>"},
}


@pytest.mark.parametrize("fields", LISTED_GARBAGE.values(), ids=LISTED_GARBAGE)
async def test_what_cannot_be_a_job_is_not_adopted(fields: dict[str, Any]) -> None:
    """Counted; a good entry beside it is adopted all the same."""
    async with a_desk() as desk:
        desk.beat(inflight=(a_listing("bad", **fields), a_listing("job-1")))
        assert desk.seen.bad == {"inflight": 1}
        assert [held.job_id for held in desk.shelf.jobs()] == ["job-1"]
        assert not desk.seen.errors


async def test_a_client_that_is_no_token_is_not_told() -> None:
    """A worker's word may not choose a subject."""
    async with a_desk() as desk:
        desk.beat(inflight=(a_listing(client="a.>"),))
        assert desk.held().client == ""


# ---- decisions ----


async def running(desk: Desk) -> Worker:
    """Job `job-1` runs on worker `w1`."""
    worker = Worker(desk.bus.connection())
    await worker.listen()
    desk.beat()
    desk.allow()
    await desk.hold(a_job())
    await until(lambda: desk.held().stage is Stage.RUNNING)
    desk.turn()
    return worker


async def test_a_failed_attempt_is_written_down_and_the_job_waits_again() -> None:
    """It is renewed here again, first of all: nobody knows how old its last renewal is."""
    async with a_desk("outbox") as desk:
        await running(desk)
        failed = desk.settled(outcome=Outcome.RETRY, kind=None, reason=Reason.ENGINE_FAILED)
        desk.beat(finished=(failed,), echo=1)
        assert desk.held().stage is Stage.WAITING
        assert len(desk.leader.book.failures[KEY]) == 1
        assert desk.shelf.renewal_due(before_s=0.0) is desk.held()


async def test_a_settled_job_is_forgotten_everywhere() -> None:
    """Shelf, failures, mind."""
    async with a_desk("outbox") as desk:
        await running(desk)
        desk.beat(finished=(desk.settled(),), echo=1)
        assert KEY not in desk.shelf
        assert not desk.leader.scheduler.is_known(KEY)


async def test_the_last_failure_of_a_dead_letter_is_known_to_the_book() -> None:
    """So that the key is deleted when its message is gone, however many failures it took."""
    async with a_desk("outbox") as desk:
        await running(desk)
        failure = wire.Failure(Attempt(1, 1), WORKER, Reason.STALLED, 1.0)
        desk.leader.loop._carry(do.DeadLetter(KEY, (failure,)), 0.0)
        assert desk.leader.book.failures[KEY] == (failure,)
        assert desk.held().stage is Stage.CLOSING


async def test_orders_that_are_no_dispatch_leave_too() -> None:
    """Abort, probe, drain; and a resync goes to all ears."""
    async with a_desk("outbox") as desk:
        worker = await running(desk)
        asked: list[bytes] = []
        await desk.bus.subscribe("wrk.inventory", lambda message: asked.append(message.data))
        for decision in (
            do.Abort(KEY, WORKER, Attempt(1, 1), 7, Reason.DUPLICATE),
            do.Probe(WORKER, 8),
            do.DrainOrder(WORKER, 9, draining=True),
            do.Resync(WORKER),
            do.Drained(WORKER),
        ):
            desk.leader.loop._carry(decision, 0.0)
        await until(lambda: len(worker.orders) == 4 and bool(asked))
        assert [order.number for order in worker.orders[1:]] == [7, 8, 9]
