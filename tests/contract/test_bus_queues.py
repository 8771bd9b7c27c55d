"""What the bus promises of work queues, held on both buses: pulls, redelivery, acks, resets."""

import asyncio

import pytest

from broker.bus.base import BusError, NoResponders, NoStream, NotFound, Timeout
from tests.buses import (
    CONSUMER,
    STREAM,
    SUBJECT,
    World,
    a_consumer,
    a_stream,
    pulling,
    until,
)


async def a_queue(world: World, *, messages: int = 0, **consumer: object) -> None:
    """A stream, its consumer and some messages."""
    await world.bus.ensure_stream(a_stream())
    await world.bus.ensure_consumer(a_consumer(**consumer))
    for number in range(messages):
        await world.bus.append(SUBJECT, b"%d" % number)


class TestPull:
    """Continuous pulls."""

    async def test_delivers_in_order_with_all_a_broker_needs(self, world: World) -> None:
        """A delivery says where it stands, since when, and how many are behind it."""
        await a_queue(world)
        await world.bus.append(SUBJECT, b"job", headers={"Kind": "job"})
        await world.bus.append(SUBJECT, b"next")
        puller = await pulling(world.bus)
        first, second = (await puller.heard.count(2))[:2]
        stored = await world.bus.message_at(STREAM, 1)
        assert (first.subject, first.stream, first.consumer) == (SUBJECT, STREAM, CONSUMER)
        assert (first.sequence, second.sequence) == (1, 2)
        assert (first.data, first.headers) == (b"job", {"Kind": "job"})
        assert (first.pending, second.pending) == (1, 0)
        assert first.stored_at_s == pytest.approx(stored.at_s, abs=1e-3)

    async def test_new_message_arrives_at_once(self, world: World) -> None:
        """A pull that stands idle delivers what is appended, long before it expires."""
        await a_queue(world)
        puller = await pulling(world.bus)
        async with asyncio.timeout(1):
            for number in range(5):
                await world.bus.append(SUBJECT, b"")
                await puller.heard.count(number + 1)

    async def test_window_is_never_exceeded_and_refilled(self, world: World) -> None:
        """No more than `window` are out and not released; each release makes room for one."""
        await a_queue(world, messages=30)
        puller = await pulling(world.bus, window=8, hold=True)
        assert puller.pull is not None
        await puller.heard.count(8)
        await world.bus.rtt_s()
        assert len(puller.heard.items) == 8
        for count in range(9, 21):
            puller.pull.release()
            await puller.heard.count(count)
        puller.pull.release(8)
        await puller.heard.count(28)
        puller.pull.release(8)
        await puller.heard.count(30)
        assert puller.sequences == list(range(1, 31))

    async def test_window_of_one(self, world: World) -> None:
        """The smallest window works one message at a time."""
        await a_queue(world, messages=5)
        puller = await pulling(world.bus, window=1, hold=True)
        assert puller.pull is not None
        for count in range(1, 6):
            await puller.heard.count(count)
            assert len(puller.heard.items) == count
            puller.pull.release()

    async def test_paused_pull_gets_nothing_more(self, world: World) -> None:
        """A window of 0 pauses; a larger one goes on where it stopped."""
        await a_queue(world, messages=2)
        puller = await pulling(world.bus, window=2, hold=True)
        assert puller.pull is not None
        await puller.heard.count(2)
        puller.pull.resize(0)
        puller.pull.release(2)
        await world.bus.append(SUBJECT, b"")
        await world.bus.rtt_s()
        assert len(puller.heard.items) == 2
        puller.pull.resize(4)
        await puller.heard.count(3)

    async def test_stop_leaves_no_pull_and_loses_nothing(self, world: World) -> None:
        """Case 33: after `stop` no pull stands; all delivered was handed over or returned."""
        await a_queue(world, messages=100)
        puller = await pulling(world.bus, window=10)
        assert puller.pull is not None
        await puller.heard.count(10)
        left = await puller.pull.stop()
        assert await puller.pull.stop() == []
        state = await world.bus.consumer_state(STREAM, CONSUMER)
        assert state.waiting == 0
        seen = [*puller.sequences, *(delivery.sequence for delivery in left)]
        assert seen == list(range(1, state.delivered_sequence + 1))
        await world.bus.append(SUBJECT, b"")
        await world.bus.rtt_s()
        assert len(puller.sequences) + len(left) == len(seen)

    async def test_raising_handler_is_counted_and_the_pull_lives(self, world: World) -> None:
        """A handler that raises gets the next batch all the same."""
        await a_queue(world, messages=3)
        seen: list[int] = []

        def handler(batch: list[object]) -> None:
            seen.append(len(batch))
            raise RuntimeError

        await world.bus.pull(STREAM, CONSUMER, handler, window=1000)  # pyright: ignore[reportArgumentType]
        await until(lambda: sum(seen) == 3)
        await world.bus.append(SUBJECT, b"")
        await until(lambda: sum(seen) == 4)
        assert world.bus.counts["handler_errors"] == len(seen)

    async def test_waits_for_a_consumer_that_is_not_there_yet(self, world: World) -> None:
        """A pull from a missing stream or consumer starts when it is made."""
        puller = await pulling(world.bus)
        await world.bus.rtt_s()
        await a_queue(world, messages=3)
        await puller.heard.count(3)

    async def test_outlives_a_recreated_consumer(self, world: World) -> None:
        """A pull goes on with the new consumer of the same name, from the beginning."""
        await a_queue(world, messages=3)
        puller = await pulling(world.bus)
        await puller.heard.count(3)
        await world.bus.ensure_consumer(a_consumer(), recreate=True)
        await puller.heard.count(6)
        assert puller.sequences == [1, 2, 3, 1, 2, 3]

    async def test_goes_on_after_a_lost_link(self, world: World) -> None:
        """The window is full again after the link came back, and nothing acknowledged is lost."""
        await a_queue(world, messages=3)
        puller = await pulling(world.bus)
        for delivery in (await puller.heard.count(3))[:2]:
            await world.bus.ack(delivery.ack_subject)
        await world.cut()
        await world.mend()
        await world.bus.append(SUBJECT, b"")
        await until(lambda: 4 in puller.sequences)
        assert (await world.bus.stream_state(STREAM)).messages == 2

    async def test_two_pullers_share_without_overlap(self, world: World) -> None:
        """Each message goes to one of those who pull from the same consumer."""
        await a_queue(world, messages=200)
        first = await pulling(world.bus, window=20)
        second = await pulling(world.peer, window=20)
        await until(lambda: len(first.sequences) + len(second.sequences) == 200)
        assert sorted([*first.sequences, *second.sequences]) == list(range(1, 201))

    async def test_stuck_queue_blocks_no_other(self, world: World) -> None:
        """A queue whose consumer is full leaves the stream's other queues alone."""
        await world.bus.ensure_stream(a_stream(subjects=("jobs.a.1.m", "jobs.a.2.m")))
        for band in (1, 2):
            await world.bus.ensure_consumer(
                a_consumer(name=f"b{band}", filter_subject=f"jobs.a.{band}.m", max_ack_pending=2)
            )
            for _ in range(5):
                await world.bus.append(f"jobs.a.{band}.m", b"")
        stuck = await pulling(world.bus, consumer="b1")
        await stuck.heard.count(2)
        other = await pulling(world.bus, consumer="b2")
        for count in range(1, 6):
            delivery = (await other.heard.count(count))[count - 1]
            await world.bus.ack(delivery.ack_subject)
        assert len(stuck.heard.items) == 2


class TestAcks:
    """What ends a delivery, and what does not."""

    async def test_acknowledged_message_leaves(self, world: World) -> None:
        """It is gone from its stream, whoever acknowledges it, and twice is no error."""
        await a_queue(world, messages=2)
        puller = await pulling(world.bus)
        first, _ = await puller.heard.count(2)
        await world.peer.ack(first.ack_subject)
        await world.bus.ack(first.ack_subject)
        assert await world.bus.subject_counts(STREAM) == {SUBJECT: 1}
        state = await world.bus.consumer_state(STREAM, CONSUMER)
        assert (state.delivered_sequence, state.ack_pending, state.pending) == (2, 1, 0)

    async def test_unacknowledged_message_comes_again(self, world: World) -> None:
        """After the ack-wait, and to whoever pulls then."""
        await a_queue(world, messages=1, ack_wait_s=world.ack_wait_s)
        first = await pulling(world.bus)
        await first.heard.count(1)
        assert first.pull is not None
        await first.pull.stop()
        second = await pulling(world.peer)
        await world.pass_time(world.ack_wait_s + 0.1)
        (again,) = await second.heard.count(1)
        assert again.sequence == 1
        await world.bus.ack(again.ack_subject)
        assert (await world.bus.stream_state(STREAM)).messages == 0

    async def test_renewed_delivery_stays(self, world: World) -> None:
        """Renewed in time, a message is not delivered again; left alone, it is."""
        await a_queue(world, messages=1, ack_wait_s=world.ack_wait_s)
        puller = await pulling(world.bus)
        (delivery,) = await puller.heard.count(1)
        for _ in range(4):
            await world.pass_time(world.ack_wait_s * 0.5)
            await world.peer.renew(delivery.ack_subject)
        await world.bus.rtt_s()
        assert len(puller.heard.items) == 1
        await world.pass_time(world.ack_wait_s + 0.1)
        await puller.heard.count(2)

    async def test_ack_of_a_deleted_message(self, world: World) -> None:
        """Acknowledging what was deleted is no error: it is gone, as asked."""
        await a_queue(world, messages=1)
        puller = await pulling(world.bus)
        (delivery,) = await puller.heard.count(1)
        await world.bus.delete_message(STREAM, 1)
        await world.bus.ack(delivery.ack_subject)

    async def test_ack_to_a_consumer_that_is_gone(self, world: World) -> None:
        """Where no such consumer listens, the caller is told at once."""
        with pytest.raises(NoResponders):
            await world.bus.ack(f"$JS.ACK.{STREAM}.none.1.1.1.1700000000000000000.0")

    async def test_max_ack_pending_holds_back(self, world: World) -> None:
        """No more are out than the consumer allows, until one is acknowledged."""
        await a_queue(world, messages=5, max_ack_pending=2)
        puller = await pulling(world.bus)
        first, _ = await puller.heard.count(2)
        await world.bus.rtt_s()
        assert len(puller.heard.items) == 2
        await world.bus.ack(first.ack_subject)
        await puller.heard.count(3)

    async def test_deleted_message_is_not_delivered(self, world: World) -> None:
        """A cancelled job that was never pulled is not seen by anybody."""
        await a_queue(world, messages=3)
        await world.bus.delete_message(STREAM, 2)
        puller = await pulling(world.bus)
        await puller.heard.count(2)
        assert puller.sequences == [1, 3]


class TestReset:
    """What a new leader does."""

    async def test_everything_unacknowledged_comes_again_in_order(self, world: World) -> None:
        """A new leader gets the held jobs before newer ones, without waiting for the ack-wait."""
        await a_queue(world, messages=6)
        old = await pulling(world.peer, window=4)
        deliveries = await old.heard.count(4)
        assert old.pull is not None
        await old.pull.stop()
        await world.bus.ack(deliveries[1].ack_subject)
        await world.bus.reset_consumer(STREAM, CONSUMER)
        new = await pulling(world.bus)
        await new.heard.count(5)
        assert new.sequences == [1, 3, 4, 5, 6]

    async def test_recreated_consumer_starts_anew(self, world: World) -> None:
        """The same by deletion: what an old puller still held is not hidden."""
        await a_queue(world, messages=3)
        old = await pulling(world.peer)
        await old.heard.count(3)
        assert old.pull is not None
        await old.pull.stop()
        await world.bus.ensure_consumer(a_consumer(), recreate=True)
        new = await pulling(world.bus)
        await new.heard.count(3)

    @pytest.mark.parametrize("recreate", [False, True])
    async def test_old_ack_counts_once_delivered_again(self, world: World, recreate: bool) -> None:
        """An ack given before a reset is taken when its message was delivered again, not before.

        Before, the server is silent: the caller's time-out and next try are part of the promise.
        """
        await a_queue(world, messages=2)
        old = await pulling(world.peer)
        first, _ = await old.heard.count(2)
        assert old.pull is not None
        await old.pull.stop()
        if recreate:
            await world.bus.ensure_consumer(a_consumer(), recreate=True)
        else:
            await world.bus.reset_consumer(STREAM, CONSUMER)
        acking = asyncio.ensure_future(world.peer.ack(first.ack_subject, timeout_s=0.2))
        await world.bus.rtt_s()
        await world.pass_time(0.3)
        with pytest.raises(Timeout):
            await acking
        assert (await world.bus.stream_state(STREAM)).messages == 2
        new = await pulling(world.bus)
        await new.heard.count(2)
        await world.peer.ack(first.ack_subject)
        assert await world.bus.subject_counts(STREAM) == {SUBJECT: 1}
        assert (await world.bus.consumer_state(STREAM, CONSUMER)).ack_pending == 1

    async def test_state_tells_of_a_foreign_pull(self, world: World) -> None:
        """A leader that takes over sees that another still pulls."""
        await a_queue(world)
        other = await pulling(world.peer)
        await until(lambda: _waiting(world, 1))
        assert other.pull is not None
        await other.pull.stop()
        assert await _waiting(world, 0)

    async def test_a_queue_has_one_consumer(self, world: World) -> None:
        """A second consumer on the same subject of a work queue is refused."""
        await a_queue(world)
        with pytest.raises(BusError):
            await world.bus.ensure_consumer(a_consumer(name="other"))

    async def test_consumer_is_brought_up_to_date(self, world: World) -> None:
        """A changed bound takes effect without losing what is out."""
        await a_queue(world, messages=4, max_ack_pending=2)
        puller = await pulling(world.bus)
        await puller.heard.count(2)
        await world.bus.ensure_consumer(a_consumer(max_ack_pending=10))
        await puller.heard.count(4)
        assert puller.sequences == [1, 2, 3, 4]


async def _waiting(world: World, pulls: int) -> bool:
    return (await world.bus.consumer_state(STREAM, CONSUMER)).waiting == pulls


class TestRemoval:
    """Queues that go: subject first, then consumer, then stream."""

    async def test_a_stream_that_lost_a_subject_still_delivers_what_it_holds(
        self, world: World
    ) -> None:
        """Nothing more comes in; what is there is delivered, reset, acknowledged as ever."""
        await a_queue(world, messages=3)
        await world.bus.ensure_stream(a_stream(subjects=("closed.x",)))
        with pytest.raises(NoStream):
            await world.bus.append(SUBJECT, b"late")
        puller = await pulling(world.bus)
        await puller.heard.count(3)
        await world.bus.reset_consumer(STREAM, CONSUMER)
        again = (await puller.heard.count(6))[3:]
        assert [one.data for one in again] == [b"0", b"1", b"2"]
        for delivery in again:
            await world.bus.ack(delivery.ack_subject)
        assert await world.bus.subject_counts(STREAM) == {}

    async def test_a_deleted_consumer_leaves_its_messages(self, world: World) -> None:
        """Made again, it delivers them; deleting twice, or what was never there, does nothing."""
        await a_queue(world, messages=1)
        for _ in range(2):
            await world.bus.delete_consumer(STREAM, CONSUMER)
        await world.bus.delete_consumer("NONE", CONSUMER)
        with pytest.raises(NotFound):
            await world.bus.consumer_state(STREAM, CONSUMER)
        await world.bus.ensure_consumer(a_consumer())
        assert (await world.bus.consumer_state(STREAM, CONSUMER)).pending == 1

    async def test_a_deleted_stream_is_gone_with_all_it_held(self, world: World) -> None:
        """Idempotent."""
        await a_queue(world, messages=1)
        for _ in range(2):
            await world.bus.delete_stream(STREAM)
        with pytest.raises(NotFound):
            await world.bus.stream_state(STREAM)
        await a_queue(world)
        assert (await world.bus.consumer_state(STREAM, CONSUMER)).pending == 0
