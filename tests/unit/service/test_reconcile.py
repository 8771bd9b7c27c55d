"""Each kind of difference, planted: found, repaired, counted; and none found where all is well."""

import asyncio

import pytest

from broker.bus.base import Timeout
from broker.core.events import JobHeld
from broker.service.reconcile import LOOKUPS_MAX, Report
from broker.service.stages import Stage
from tests.builders import LANE, a_job
from tests.crashing import Failing
from tests.leaders import ADDRESS, OTHER_LANE, Desk, a_desk, a_listing
from tests.turns import until

KEY = f"{LANE}.job-1"
QUEUE = f"{LANE}.2.tiny"


async def reconcile(desk: Desk) -> Report:
    """One pass, with no time between its looks; the loop runs beside it."""
    desk.leader.reconciler.look_again_s = 0.0
    work = asyncio.create_task(desk.leader.reconciler.reconcile())
    while not work.done():
        desk.turn()
        await asyncio.sleep(0)
    desk.turn()
    return work.result()


def kinds(report: Report) -> list[tuple[str, str]]:
    """What was found."""
    return [(found.kind, found.key) for found in report.differences]


async def test_nothing_is_found_where_all_is_well() -> None:
    """Held, running, doubled, behind one being closed, and waiting in the stream."""
    async with a_desk() as desk:
        await desk.hold(a_job(id="held"))
        desk.beat()
        desk.shelf.runs(await desk.hold(a_job(id="runs")))
        await desk.hold(a_job(id="double"))
        desk.take(await desk.deliver(a_job(id="double", client="c2")))
        closing = await desk.hold(a_job(id="closing"))
        closing.stage = Stage.CLOSING
        desk.take(await desk.deliver(a_job(id="closing")))
        await desk.publish(a_job(id="pending"))
        report = await reconcile(desk)
        assert (kinds(report), report.checked_jobs) == ([], 4)
        assert not desk.seen.differences


async def test_a_held_job_whose_message_was_deleted_is_forgotten() -> None:
    """Behind the broker's back: by the rule of removal, its record stands."""
    async with a_desk() as desk:
        held = await desk.hold(a_job())
        await desk.hold(a_job(id="other"))
        await desk.bus.delete_message(held.stream, held.sequence)
        assert kinds(await reconcile(desk)) == [("held_gone", KEY)]
        assert KEY not in desk.shelf
        assert not desk.leader.scheduler.is_known(KEY)
        assert desk.window.released == 1
        assert desk.seen.differences == {"held_gone": 1}
        assert kinds(await reconcile(desk)) == []


async def test_a_running_job_whose_message_is_gone_is_stopped_and_freed() -> None:
    """Case 24: its quota is not held for ever."""
    async with a_desk() as desk:
        sequence = await desk.publish(a_job())
        desk.beat(inflight=(a_listing(sequence=sequence),))
        await desk.bus.delete_message(f"JOBS_{LANE}", sequence)
        assert kinds(await reconcile(desk)) == [("held_gone", KEY)]
        assert not desk.leader.scheduler.leases()


async def test_a_job_that_ends_while_it_is_looked_at_is_no_difference() -> None:
    """Its message is gone and its end is on its way."""
    async with a_desk() as desk:
        held = await desk.hold(a_job())
        await desk.bus.delete_message(held.stream, held.sequence)
        desk.leader.reconciler.look_again_s = 0.0
        work = asyncio.create_task(desk.leader.reconciler.reconcile())
        await until(desk.leader.reconciler._one_at_a_time.locked)
        desk.shelf.remove(KEY)
        assert kinds(await work) == []


async def test_a_delivery_that_nobody_holds_is_delivered_again() -> None:
    """Lost between server and shelf, say by a leader that is no more."""
    async with a_desk() as desk:
        await desk.deliver(a_job())
        report = await reconcile(desk)
        assert kinds(report) == [("delivered_unheld", QUEUE)]
        assert "1" in report.differences[0].detail
        state = await desk.bus.consumer_state(f"JOBS_{LANE}", "b2-tiny")
        assert (state.pending, state.ack_pending) == (1, 0)


async def test_a_delivery_on_its_way_is_no_difference() -> None:
    """It is held by the next look."""
    async with a_desk() as desk:
        delivery = await desk.deliver(a_job())
        desk.leader.reconciler.look_again_s = 0.01
        work = asyncio.create_task(desk.leader.reconciler.reconcile())
        await until(desk.leader.reconciler._one_at_a_time.locked)
        desk.take(delivery)
        assert kinds(await work) == []


async def test_a_delivery_acknowledged_meanwhile_is_no_difference() -> None:
    """Settled, and its ack was on its way."""
    async with a_desk() as desk:
        delivery = await desk.deliver(a_job())
        desk.leader.reconciler.look_again_s = 0.01
        work = asyncio.create_task(desk.leader.reconciler.reconcile())
        await until(desk.leader.reconciler._one_at_a_time.locked)
        await desk.bus.ack(delivery.ack_subject)
        assert kinds(await work) == []


async def test_a_message_that_no_consumer_will_deliver_is_made_deliverable() -> None:
    """The consumer lost count (case 34): made anew, it delivers all there is."""
    async with a_desk() as desk:
        await desk.publish(a_job())
        consumer = desk.bus.server.consumer(f"JOBS_{LANE}", "b2-tiny")
        consumer._new.live.clear()
        report = await reconcile(desk)
        assert kinds(report) == [("undelivered", QUEUE)]
        assert (await desk.bus.consumer_state(f"JOBS_{LANE}", "b2-tiny")).pending == 1


async def test_jobs_that_come_while_they_are_counted_are_no_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Published between the two questions of each look."""
    async with a_desk() as desk:
        counted = desk.link.subject_counts
        published = 0

        async def counts_and_more(stream: str, *, subject: str = ">") -> dict[str, int]:
            nonlocal published
            published += 1
            before = await counted(stream, subject=subject)
            await desk.publish(a_job(id=f"j{published}"))
            return before

        monkeypatch.setattr(desk.link, "subject_counts", counts_and_more)
        assert kinds(await reconcile(desk)) == []
        assert published


async def test_jobs_that_end_while_they_are_counted_are_no_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Acknowledged between the two questions: asked the other way round, nothing is missing."""
    async with a_desk() as desk:
        deliveries = [await desk.deliver(a_job(id=f"j{number}")) for number in range(20)]
        for delivery in deliveries:
            desk.take(delivery)
        counted = desk.link.subject_counts

        async def counts_and_less(stream: str, *, subject: str = ">") -> dict[str, int]:
            before = await counted(stream, subject=subject)
            if before:
                done = deliveries.pop()
                await desk.bus.ack(done.ack_subject)
                desk.shelf.remove(f"{LANE}.j{len(deliveries)}")
                desk.leader.scheduler._mind.forgets(f"{LANE}.j{len(deliveries)}")
            return before

        monkeypatch.setattr(desk.link, "subject_counts", counts_and_less)
        assert kinds(await reconcile(desk)) == []
        assert len(deliveries) < 20


async def test_a_consumer_that_is_gone_is_made_again() -> None:
    """And said so."""
    async with a_desk() as desk:
        del desk.bus.server.streams[f"JOBS_{LANE}"].consumers["b2-tiny"]
        await desk.publish(a_job())
        assert kinds(await reconcile(desk)) == [("consumer_gone", QUEUE)]
        assert (await desk.bus.consumer_state(f"JOBS_{LANE}", "b2-tiny")).pending == 1


async def test_a_held_job_that_the_mind_does_not_know_is_let_go() -> None:
    """Case 24: renewed for ever and never run. Not renewed, it comes again."""
    async with a_desk() as desk:
        await desk.hold(a_job())
        desk.leader.scheduler._mind.forgets(KEY)
        assert kinds(await reconcile(desk))[0] == ("held_unknown", KEY)
        assert KEY not in desk.shelf
        assert desk.window.released == 1


async def test_a_job_whose_event_waits_in_the_loop_is_not_unknown() -> None:
    """The mind hears of it in its turn."""
    async with a_desk() as desk:
        delivery = await desk.deliver(a_job())
        desk.leader.intake.take(delivery, ADDRESS, desk.window)
        assert kinds(await reconcile(desk)) == []
        assert [type(event) for event in desk.seen.events] == [JobHeld]


async def test_the_alarm_is_raised_at_its_threshold_and_not_before() -> None:
    """Three differences, or one in a hundred jobs, whichever is more."""
    async with a_desk() as desk:
        for number in range(5):
            held = await desk.hold(a_job(id=f"j{number}"))
            if number < 2:
                await desk.bus.delete_message(held.stream, held.sequence)
        await reconcile(desk)
        assert desk.seen.differences["alarm"] == 0
        for number in range(2, 5):
            held = desk.held(f"j{number}")
            await desk.bus.delete_message(held.stream, held.sequence)
        await reconcile(desk)
        assert desk.seen.differences["alarm"] == 1


async def test_a_large_cluster_is_alarmed_by_a_share() -> None:
    """`alarm_ratio` of what was checked."""
    async with a_desk(reconcile_alarm_ratio=1.0) as desk:
        for number in range(4):
            held = await desk.hold(a_job(id=f"j{number}"))
            if number:
                await desk.bus.delete_message(held.stream, held.sequence)
        assert len((await reconcile(desk)).differences) == 3
        assert desk.seen.differences["alarm"] == 0


async def test_one_pass_looks_up_no_more_than_its_bound() -> None:
    """LOOKUPS_MAX; the rest is found by the next."""
    async with a_desk() as desk:
        for number in range(LOOKUPS_MAX + 5):
            held = await desk.hold(a_job(id=f"j{number}"))
            await desk.bus.delete_message(held.stream, held.sequence)
        assert len((await reconcile(desk)).differences) == LOOKUPS_MAX
        assert len((await reconcile(desk)).differences) == 5


async def test_one_pass_walks_no_further_than_its_bound() -> None:
    """The same for what is delivered and not held."""
    async with a_desk() as desk:
        for number in range(LOOKUPS_MAX + 5):
            await desk.deliver(a_job(id=f"j{number}"))
        assert len((await reconcile(desk)).differences) == LOOKUPS_MAX


async def test_a_server_that_does_not_answer_ends_the_pass_and_not_the_duty() -> None:
    """Nothing is believed of half a count; the next pass comes."""
    failing = Failing("message_at", Timeout("slow"))
    async with a_desk(fault=failing) as desk:
        held = await desk.hold(a_job())
        await desk.bus.delete_message(held.stream, held.sequence)
        with pytest.raises(Timeout):
            await reconcile(desk)
        assert KEY in desk.shelf
        failing.left = 1
        desk.leader.reconciler.look_again_s = 0.0
        duty = asyncio.create_task(desk.leader.reconciler.run(every_s=0.001))
        loop = asyncio.create_task(desk.leader.loop.run())
        await asyncio.wait_for(until(lambda: KEY not in desk.shelf), 5)
        assert failing.raised == 2
        duty.cancel()
        loop.cancel()


async def test_other_lanes_are_not_touched() -> None:
    """A difference is its own queue's."""
    async with a_desk() as desk:
        await desk.deliver(a_job())
        await desk.deliver(a_job(lane=OTHER_LANE))
        names = sorted(kinds(await reconcile(desk)))
        assert names == [("delivered_unheld", QUEUE), ("delivered_unheld", f"{OTHER_LANE}.2.tiny")]


async def test_a_link_that_comes_back_is_a_reason_to_look_at_once() -> None:
    """What was on its way when it broke would else stay hidden for its ack-wait."""
    async with a_desk() as desk:
        await desk.deliver(a_job())
        desk.leader.reconciler.look_again_s = 0.0
        duty = asyncio.create_task(desk.leader.reconciler.run(every_s=3600.0))
        desk.leader.link_changed(up=False)
        desk.leader.link_changed(up=True)
        await until(lambda: desk.seen.differences["delivered_unheld"] == 1)
        duty.cancel()
