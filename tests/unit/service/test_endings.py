"""Which record the broker writes for which decision, and what becomes of the job's place."""

import asyncio
from functools import partial
from typing import Any

import pytest

from broker.core import decisions as do
from broker.core.events import CancelRequested, JobEnded
from broker.service.closer import Ending, Farewell
from broker.service.stages import Stage
from broker.wire.messages import Attempt, Failure, Kind, Reason
from broker.wire.subjects import JobAddress
from tests.builders import LANE, MODEL, a_job
from tests.leaders import ADDRESS, Desk, a_delivery, a_desk
from tests.turns import until

KEY = f"{LANE}.job-1"
LOST = Failure(Attempt(1, 1), "w1", Reason.STALLED, 5.0)

ENDED = {
    "full": (
        do.Reject(KEY, Reason.QUEUE_FULL, "band=2", 3, 3, 7.0),
        (Kind.REJECTED, Reason.QUEUE_FULL, 7.0),
    ),
    "full, to be tried at once": (
        do.Reject(KEY, Reason.QUEUE_FULL, "", 0, 0, 0.2),
        (Kind.REJECTED, Reason.QUEUE_FULL, 1.0),
    ),
    "refused for good": (
        do.Reject(KEY, Reason.QUOTA_EXCEEDED, "", 0, 0, 0.0),
        (Kind.REJECTED, Reason.QUOTA_EXCEEDED, 0.0),
    ),
    "expired": (
        do.Expire(KEY, Reason.WAIT_EXPIRED),
        (Kind.EXPIRED, Reason.WAIT_EXPIRED, 0.0),
    ),
    "cancelled": (do.Cancel(KEY), (Kind.CANCELLED, Reason.CANCELLED, 0.0)),
    "given up": (do.DeadLetter(KEY, (LOST,)), (Kind.DEAD_LETTERED, Reason.STALLED, 0.0)),
    "given up without a failure": (
        do.DeadLetter(KEY, ()),
        (Kind.DEAD_LETTERED, Reason.WORKER_LOST, 0.0),
    ),
    "stream broken off": (do.FailStream(KEY, (LOST,)), (Kind.FAILED, Reason.STALLED, 0.0)),
}


def work(desk: Desk) -> list[Any]:
    """What the closer was given."""
    queue = desk.leader.closer._work
    return [queue.get_nowait() for _ in range(queue.qsize())]


@pytest.mark.parametrize(("decision", "wanted"), ENDED.values(), ids=ENDED)
async def test_each_decision_to_end_has_its_record(
    decision: do.Decision, wanted: tuple[Kind, Reason, float]
) -> None:
    """Kind, reason, and how long it stands: a rejection with a next try runs out, others stay."""
    async with a_desk() as desk:
        desk.take(a_delivery(a_job(request_id="r", api_key_name="alice")))
        desk.leader.endings.decided(decision, desk.held())
        (ending,) = work(desk)
        assert (ending.record.kind, ending.record.reason, ending.ttl_s) == wanted
        assert ending.dead_letter is (ending.record.kind is Kind.DEAD_LETTERED)
        assert (ending.record.job, ending.record.request_id, ending.client) == (
            "job-1",
            "r",
            "client-1",
        )
        assert ending.record.api_key_name == "alice"
        assert desk.held().stage is Stage.CLOSING
        assert desk.held().body is None
        assert desk.window.released == 0


async def test_other_decisions_end_nothing() -> None:
    """A receipt, say."""
    async with a_desk() as desk:
        desk.take(a_delivery(a_job()))
        desk.leader.endings.decided(do.Queued(KEY, 0, 0.0), desk.held())
        assert not work(desk)


async def test_a_job_ends_once() -> None:
    """Cancelled while it expires: the first decision stands, and one ending is carried out."""
    async with a_desk() as desk:
        desk.take(a_delivery(a_job()))
        desk.leader.endings.decided(do.Expire(KEY, Reason.WAIT_EXPIRED), desk.held())
        desk.leader.endings.decided(do.Cancel(KEY), desk.held())
        assert [one.record.kind for one in work(desk)] == [Kind.EXPIRED]


async def test_a_settled_job_is_let_go_and_its_duplicates_are_told() -> None:
    """Its agent acknowledges its message; the further ones are the broker's to acknowledge."""
    async with a_desk() as desk:
        desk.take(a_delivery(a_job()))
        desk.take(a_delivery(a_job(client="c2"), sequence=2))
        desk.leader.endings.released(desk.held())
        (farewell,) = work(desk)
        assert isinstance(farewell, Farewell)
        assert [one.client for one in farewell.duplicates] == ["c2"]
        assert KEY not in desk.shelf
        assert desk.window.released == 2


async def test_a_settled_job_without_duplicates_needs_no_farewell() -> None:
    """The usual case costs the closer nothing."""
    async with a_desk() as desk:
        desk.take(a_delivery(a_job()))
        desk.leader.endings.released(desk.held())
        assert not work(desk)


async def test_a_release_leaves_a_job_that_is_being_closed_to_the_closer() -> None:
    """Its place and its failures are needed until its message is gone."""
    async with a_desk() as desk:
        desk.take(a_delivery(a_job()))
        desk.leader.endings.decided(do.DeadLetter(KEY, (LOST,)), desk.held())
        desk.leader.book.failures[KEY] = (LOST,)
        desk.leader.endings.released(desk.held())
        desk.leader.loop._carry(do.Release(KEY), 0.0)
        assert KEY in desk.shelf
        assert desk.leader.book.failures == {KEY: (LOST,)}


async def test_a_message_found_gone_ends_its_job_unless_the_closer_took_it() -> None:
    """By the rule of removal the record stands; a closing job's message went the right way."""
    async with a_desk() as desk:
        desk.take(a_delivery(a_job()))
        desk.leader.endings.message_gone(desk.held())
        desk.held().stage = Stage.CLOSING
        desk.leader.endings.message_gone(desk.held())
        desk.turn()
        assert [type(event) for event in desk.seen.events].count(JobEnded) == 1


async def test_an_unpulled_job_is_cancelled_by_its_sequence() -> None:
    """Nobody was given an ack subject for it."""
    async with a_desk() as desk:
        desk.leader.endings.end_unpulled(a_job(client="c"), JobAddress(LANE, 3, MODEL), sequence=8)
        (ending,) = work(desk)
        assert isinstance(ending, Ending)
        assert (ending.stream, ending.sequence, ending.ack_subject) == (f"BATCH_{LANE}", 8, "")
        assert ending.record.kind is Kind.CANCELLED


async def test_a_redelivery_that_came_before_the_ack_does_not_bring_the_job_back() -> None:
    """It waits in the loop while its message is removed: it is known as what it is, then gone."""
    async with a_desk("closer") as desk:
        delivery = await desk.deliver(a_job())
        desk.take(delivery)
        desk.leader.loop.tell(CancelRequested(0.0, KEY))
        desk.turn()
        take = partial(desk.leader.intake.take, delivery, ADDRESS, desk.window)
        desk.leader.loop.call(take)
        while await desk.queued():
            await asyncio.sleep(0)
        await until(lambda: desk.leader.loop.backlog > 1)
        desk.turn()
        assert KEY not in desk.shelf
        assert not desk.leader.scheduler.is_known(KEY)
        assert desk.window.released == 2
