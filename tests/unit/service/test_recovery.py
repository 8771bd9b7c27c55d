"""The start: consumers made ours, workers asked, and nothing that a silent server ends."""

import asyncio
from collections.abc import Callable

from broker.bus.base import ConsumerSpec, Delivery, LinkDown, Message, NotFound, Timeout
from broker.bus.memory import MemoryBus
from broker.service import recovery
from broker.service.queues import queue_consumers
from broker.service.recovery import collect_inventories, reset_queues
from broker.wire import subjects
from broker.wire.codec import decode, encode
from broker.wire.messages import Inventory
from broker.wire.subjects import JobAddress
from tests.builders import a_job
from tests.crashing import Failing, faulty
from tests.leaders import ADDRESS, Desk, a_beat, a_desk
from tests.turns import until


def queue(desk: Desk) -> dict[JobAddress, ConsumerSpec]:
    """The one queue of these tests."""
    return {ADDRESS: queue_consumers(desk.config)[ADDRESS]}


async def pulled(bus: MemoryBus) -> list[Delivery]:
    """Pull all there is, as a new leader would."""
    got: list[Delivery] = []
    pull = await bus.pull("JOBS_acme", "b2-tiny", got.extend, window=100)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await pull.stop()
    return got


async def test_what_a_dead_leader_held_comes_again_first() -> None:
    """Without the reset it would hide for the ack-wait, and newer jobs would go before."""
    async with a_desk() as desk:
        for number in range(3):
            await desk.publish(a_job(id=f"j{number}"))
        assert len(await pulled(desk.bus)) == 3
        await desk.publish(a_job(id="newer"))
        (mark,) = await reset_queues(desk.bus, queue(desk))
        assert (mark.delivered_sequence, mark.ack_pending, mark.recreated) == (3, 3, False)
        assert [one.sequence for one in await pulled(desk.bus)] == [1, 2, 3, 4]


async def test_a_paused_leaders_pull_gets_nothing_more() -> None:
    """Its pull stands at the server: a reset would feed it, so the consumer is made anew."""
    async with a_desk() as desk:
        await desk.publish(a_job())
        paused = desk.bus.connection()
        stolen: list[Delivery] = []
        await paused.pull("JOBS_acme", "b2-tiny", stolen.extend, window=5)
        await until(lambda: bool(stolen))
        # What a paused process does not do: take its pull to the consumer that came after.
        desk.bus.server.consumer_watchers.remove(paused._attach_pulls)
        (mark,) = await reset_queues(desk.bus, queue(desk))
        assert mark.recreated
        assert [one.sequence for one in await pulled(desk.bus)] == [1]
        assert len(stolen) == 1
        desk.bus.server.consumer_watchers.append(paused._attach_pulls)
        await paused.close()


async def test_a_queue_without_a_consumer_gets_one() -> None:
    """Somebody deleted it."""
    async with a_desk() as desk:
        del desk.bus.server.streams["JOBS_acme"].consumers["b2-tiny"]
        (mark,) = await reset_queues(desk.bus, queue(desk))
        assert (mark.recreated, mark.ack_pending) == (True, 0)
        assert (await desk.bus.consumer_state("JOBS_acme", "b2-tiny")).pending == 0


async def test_an_untouched_queue_is_left_alone() -> None:
    """Nothing was delivered: nothing has to come again."""
    async with a_desk() as desk:
        (mark,) = await reset_queues(desk.bus, queue(desk))
        assert (mark.recreated, mark.delivered_sequence) == (False, 0)


async def test_a_server_that_does_not_answer_is_asked_again() -> None:
    """It went away in the middle of the start."""
    async with a_desk() as desk:
        bus = faulty(desk.bus, Failing("reset_consumer", Timeout("slow"), times=2))
        await desk.publish(a_job())
        await pulled(desk.bus)
        (mark,) = await asyncio.wait_for(reset_queues(bus, queue(desk)), 5)
        assert mark.ack_pending == 1


async def test_more_queues_than_are_reset_at_once_are_all_reset() -> None:
    """RESETS_AT_ONCE_MAX bounds the burst, not the queues."""
    async with a_desk() as desk:
        spec = queue_consumers(desk.config)[ADDRESS]
        queues = {
            JobAddress("acme", 2, f"m{number}"): spec
            for number in range(recovery.RESETS_AT_ONCE_MAX * 2 + 1)
        }
        marks = await reset_queues(desk.bus, queues)
        assert [mark.address for mark in marks] == list(queues)


# ---- inventories ----


class Asked:
    """Runs the collection, and hears the announcements."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.announced: list[Inventory] = []

    async def collect(self, on_announced: Callable[[int], None]) -> list[str]:
        """Announce epoch 9; `on_announced(n)` is called at the nth announcement."""

        def hear(message: Message) -> None:
            self.announced.append(decode(message.data, Inventory))
            on_announced(len(self.announced))

        await self.desk.bus.subscribe(subjects.INVENTORY, hear)
        return await asyncio.wait_for(
            collect_inventories(
                self.desk.link,
                self.desk.fleet,
                epoch=9,
                heartbeat_s=0.02,
                lease_s=3.0,
                now=self.desk.clock.now_s,
            ),
            5,
        )


def heard(desk: Desk, *, epoch: int, sequence: int = 1, worker: str = "w1") -> None:
    """A heartbeat reached the fleet."""
    beat = a_beat(worker=worker, sequence=sequence, epoch=epoch)
    desk.fleet._on_heartbeat(Message(subjects.heartbeat(worker), encode(beat)))


async def test_every_known_live_worker_is_waited_for() -> None:
    """One answers at the second call, the other at the third."""
    async with a_desk() as desk:
        heard(desk, epoch=8)
        heard(desk, epoch=8, worker="w2")
        desk.clock.advance(1)

        def answer(count: int) -> None:
            if count >= 2:
                heard(desk, epoch=9, sequence=2)
            if count >= 3:
                heard(desk, epoch=9, sequence=2, worker="w2")

        asked = Asked(desk)
        assert await asked.collect(answer) == []
        assert len(asked.announced) >= 3
        assert {one.epoch for one in asked.announced} == {9}


async def test_a_silent_worker_is_waited_for_no_longer_than_a_lease() -> None:
    """Then its leases can't be adopted: it is named, and fenced by the epoch."""
    async with a_desk() as desk:
        heard(desk, epoch=8)
        desk.clock.advance(1)
        asked = Asked(desk)

        def answer(_: int) -> None:
            desk.clock.advance(1.0)
            heard(desk, epoch=8, sequence=2)

        assert await asked.collect(answer) == ["w1"]
        assert len(asked.announced) == 3


async def test_a_fresh_listener_waits_until_all_that_live_can_have_spoken() -> None:
    """Nobody is known yet: that proves nothing before a heartbeat and a half has passed."""
    async with a_desk() as desk:
        asked = Asked(desk)

        def answer(count: int) -> None:
            if count == 3:
                desk.clock.advance(0.1)

        assert await asked.collect(answer) == []
        assert len(asked.announced) >= 3


async def test_an_announcement_that_cannot_be_sent_is_made_again() -> None:
    """The link was lost for a moment."""
    async with a_desk() as desk:
        bus = faulty(desk.link, Failing("publish", LinkDown("cut")))
        desk.clock.advance(1)
        silent = await asyncio.wait_for(
            collect_inventories(
                bus, desk.fleet, epoch=9, heartbeat_s=0.02, lease_s=3.0, now=desk.clock.now_s
            ),
            5,
        )
        assert silent == []


async def test_a_step_of_the_start_is_repeated_until_it_is_answered() -> None:
    """Whatever the server says meanwhile."""
    answers: list[Exception | str] = ["done", NotFound("not yet"), Timeout("slow")]

    async def step() -> str:
        answer = answers.pop()
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert await asyncio.wait_for(recovery.until_answered(step), 5) == "done"
