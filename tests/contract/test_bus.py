"""What the bus promises (`broker.bus.base`), held on both: core messages and the link."""

import asyncio

import pytest

from broker.bus.base import (
    LinkDown,
    Message,
    NoResponders,
    PayloadTooLarge,
    Timeout,
)
from tests.buses import STREAM, SUBJECT, Heard, World, a_stream, listening, until


class TestCore:
    """Core messages and requests."""

    async def test_subscriber_hears_in_order(self, world: World) -> None:
        """Messages of one publisher arrive in the order they were sent."""
        heard = await listening(world.peer, "out.acme.*.>")
        for number in range(50):
            await world.bus.publish("out.acme.c1.j1", b"%d" % number, headers={"N": str(number)})
        items = await heard.count(50)
        assert [(int(item.data), item.headers["N"]) for item in items] == [
            (number, str(number)) for number in range(50)
        ]

    @pytest.mark.parametrize(
        ("pattern", "subject", "matches"),
        [
            ("a.b", "a.b", True),
            ("a.*", "a.b", True),
            ("a.*", "a.b.c", False),
            ("a.*", "a", False),
            ("a.>", "a.b.c", True),
            ("a.>", "a", False),
            ("*.b.>", "a.b.c", True),
            (">", "a", True),
            ("a.b", "a.c", False),
        ],
    )
    async def test_wildcards(self, world: World, pattern: str, subject: str, matches: bool) -> None:
        """`*` stands for one token, `>` for one or more at the end."""
        heard = await listening(world.peer, pattern)
        fence = await listening(world.peer, "fence.fence")
        await world.bus.publish(subject, b"x")
        await world.bus.publish("fence.fence", b"")
        await fence.count(1)
        hits = [item.subject for item in heard.items if item.subject == subject]
        assert hits == ([subject] if matches else [])

    async def test_unsubscribed_hears_no_more(self, world: World) -> None:
        """After `unsubscribe`, which may be called twice, nothing comes."""
        heard: Heard[Message] = Heard()
        subscription = await world.peer.subscribe("news", heard)
        await subscription.unsubscribe()
        await subscription.unsubscribe()
        await world.peer.rtt_s()
        fence = await listening(world.peer, "fence")
        await world.bus.publish("news", b"x")
        await world.bus.publish("fence", b"")
        await fence.count(1)
        assert heard.items == []

    async def test_queue_group_hears_each_message_once(self, world: World) -> None:
        """Of the members of a queue group, one hears a message; others hear it besides."""
        first = await listening(world.bus, "ctl.cluster.workers", queue="brokers")
        second = await listening(world.peer, "ctl.cluster.workers", queue="brokers")
        outside = await listening(world.peer, "ctl.cluster.*")
        for _ in range(40):
            await world.bus.publish("ctl.cluster.workers", b"")
        await outside.count(40)
        await until(lambda: len(first.items) + len(second.items) == 40)
        assert first.items
        assert second.items

    async def test_raising_handler_is_counted_and_the_subscription_lives(
        self, world: World
    ) -> None:
        """A handler that raises, at once or when awaited, hears the next message all the same."""
        heard: Heard[bytes] = Heard()

        async def later(data: bytes) -> None:
            await asyncio.sleep(0)
            heard(data)
            raise RuntimeError(data)

        def handler(message: Message) -> object:
            if message.data == b"now":
                heard(message.data)
                raise RuntimeError(message.data)
            return later(message.data)

        await world.peer.subscribe("noise", handler)  # pyright: ignore[reportArgumentType]
        await world.peer.rtt_s()
        for data in (b"now", b"later", b"now", b"later"):
            await world.bus.publish("noise", data)
        assert await heard.count(4) == [b"now", b"later", b"now", b"later"]
        await until(lambda: world.peer.counts["handler_errors"] == 4)

    async def test_slow_handler_gets_its_messages_one_by_one(self, world: World) -> None:
        """The next message waits until the handler is done with the one before."""
        events: Heard[str] = Heard()

        async def handler(message: Message) -> None:
            events(f"begin {message.data.decode()}")
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            events(f"end {message.data.decode()}")

        await world.peer.subscribe("slow", handler)
        await world.peer.rtt_s()
        for number in range(3):
            await world.bus.publish("slow", b"%d" % number)
        assert await events.count(6) == [
            f"{what} {number}" for number in range(3) for what in ("begin", "end")
        ]

    async def test_handler_may_use_the_bus(self, world: World) -> None:
        """A handler that awaits an answer on its own connection gets it."""
        await world.bus.subscribe("inner", lambda got: world.bus.publish(got.reply, b"inner"))
        answers: Heard[bytes] = Heard()

        async def outer(_: Message) -> None:
            answers((await world.peer.request("inner", b"", timeout_s=5)).data)

        await world.peer.subscribe("outer", outer)
        await world.peer.rtt_s()
        await world.bus.publish("outer", b"")
        assert await answers.count(1) == [b"inner"]

    async def test_request_gets_its_own_answer(self, world: World) -> None:
        """Answers that come back in another order reach who asked."""
        parked: list[Message] = []

        async def answer(message: Message) -> None:
            parked.append(message)
            if len(parked) == 20:
                for one in reversed(parked):
                    await world.peer.publish(one.reply, one.data, headers=one.headers)

        await world.peer.subscribe("work.w1", answer)
        await world.peer.rtt_s()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    world.bus.request("work.w1", b"%d" % number, timeout_s=5, headers={"A": "b"})
                )
                for number in range(20)
            ]
        assert [int(task.result().data) for task in tasks] == list(range(20))
        assert tasks[0].result().headers["A"] == "b"

    async def test_request_to_nobody_fails_at_once(self, world: World) -> None:
        """Where nobody listens, the asker knows at once, long before its time-out."""
        async with asyncio.timeout(1):
            with pytest.raises(NoResponders):
                await world.bus.request("work.nobody", b"", timeout_s=60)

    async def test_request_without_answer_times_out(self, world: World) -> None:
        """A silent listener costs the asker its time-out, and a late answer harms nobody."""
        heard = await listening(world.peer, "work.w1")
        asking = asyncio.ensure_future(world.bus.request("work.w1", b"", timeout_s=0.2))
        (question,) = await heard.count(1)
        await world.pass_time(0.3)
        with pytest.raises(Timeout):
            await asking
        await world.peer.publish(question.reply, b"late")
        await world.bus.rtt_s()
        assert world.bus.connected

    async def test_oversize_is_refused_and_the_link_stands(self, world: World) -> None:
        """More than the server takes, in data or headers, is refused before it is sent."""
        with pytest.raises(PayloadTooLarge):
            await world.bus.publish("big", bytes(8 * 1024 * 1024 + 1))
        with pytest.raises(PayloadTooLarge):
            await world.bus.request(
                "big", bytes(8 * 1024 * 1024 - 10), timeout_s=1, headers={"A": "b" * 100}
            )
        with pytest.raises(PayloadTooLarge):
            await world.bus.append("big", b"", headers={"A": "b" * 8 * 1024 * 1024})
        await world.bus.rtt_s()
        assert world.bus.connected

    async def test_close_sends_what_was_published(self, world: World) -> None:
        """A message published just before `close`, which may be called twice, still arrives."""
        heard = await listening(world.peer, "last.words")
        await world.bus.publish("last.words", b"bye")
        await world.bus.close()
        await world.bus.close()
        assert (await heard.count(1))[0].data == b"bye"
        assert not world.bus.connected
        with pytest.raises(LinkDown):
            await world.bus.publish("last.words", b"again")


class TestLink:
    """Loss and return of the link."""

    async def test_down_link_refuses_everything(self, world: World) -> None:
        """While the link is down nothing is sent, buffered or believed."""
        await world.bus.ensure_stream(a_stream())
        await world.cut()
        bus = world.bus
        attempts = [
            bus.publish("a", b""),
            bus.request("a", b"", timeout_s=1),
            bus.append(SUBJECT, b""),
            bus.last_message(STREAM, SUBJECT),
            bus.message_at(STREAM, 1),
            bus.ack("$JS.ACK.S.c.1.1.1.1700000000000000000.0"),
            bus.renew("$JS.ACK.S.c.1.1.1.1700000000000000000.0"),
            bus.stream_state(STREAM),
            bus.rtt_s(),
        ]
        for attempt in attempts:
            with pytest.raises(LinkDown):
                await attempt
        assert not bus.connected

    async def test_nothing_stale_goes_out_when_the_link_is_back(self, world: World) -> None:
        """What could not be sent is not sent later; what is sent after the return arrives."""
        heard = await listening(world.peer, "work.w1")
        await world.cut()
        with pytest.raises(LinkDown):
            await world.bus.publish("work.w1", b"stale")
        await world.mend()
        await world.bus.publish("work.w1", b"fresh")
        assert [item.data for item in await heard.count(1)] == [b"fresh"]

    async def test_watchers_hear_of_loss_and_return(self, world: World) -> None:
        """`on_link` tells False, then True; a watcher that raises disturbs no other."""
        told: list[bool] = []

        def bad(_: bool) -> None:
            raise RuntimeError

        world.bus.on_link(bad)
        world.bus.on_link(told.append)
        await world.cut()
        await world.mend()
        assert told == [False, True]

    async def test_waiters_settle_when_the_link_is_lost(self, world: World) -> None:
        """A request under way ends as LinkDown at once, not at its time-out."""
        heard = await listening(world.peer, "work.w1")
        asking = asyncio.ensure_future(world.bus.request("work.w1", b"", timeout_s=600))
        await heard.count(1)
        await world.cut()
        async with asyncio.timeout(2):
            with pytest.raises(LinkDown):
                await asking

    async def test_subscriptions_survive(self, world: World) -> None:
        """A subscription hears again after the link came back, without doing anything."""
        heard = await listening(world.peer, "wrk.*.hb")
        await world.cut()
        await world.mend()
        await world.peer.rtt_s()
        await world.bus.publish("wrk.w1.hb", b"alive")
        assert (await heard.count(1))[0].data == b"alive"
