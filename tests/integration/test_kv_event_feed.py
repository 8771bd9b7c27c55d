"""Events come in order and without holes, or it is said that some are lost. On real ZeroMQ."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.kv_publisher import CLEARED, KvPublisher, a_payload, a_publisher, removed
from tests.turns import until
from worker_agent.engine.kv_event_feed import KvEventFeed
from worker_agent.engine.kv_event_wire import Batch, BlockRemoved


class Heard:
    """What a sink was told: names of removed blocks, and what was lost."""

    def __init__(self) -> None:
        self.told: list[int | bytes | str] = []

    def heard(self, batch: Batch) -> None:
        for event in batch.events:
            self.told.extend(event.names if isinstance(event, BlockRemoved) else ["other"])

    def lost(self, *, whole: bool) -> None:
        self.told.append("whole" if whole else "part")


@asynccontextmanager
async def a_feed(publisher: KvPublisher, heard: Heard) -> AsyncGenerator[KvEventFeed]:
    """A feed that is connected."""
    feed = KvEventFeed(
        publisher.endpoint, heard, replay_endpoint=publisher.replay_endpoint, replay_s_max=5.0
    )
    async with asyncio.TaskGroup() as group:
        running = group.create_task(feed.run())
        await publisher.heard_by_one()
        yield feed
        running.cancel()


async def test_batches_come_in_order(tmp_path: Path) -> None:
    """From the first one on, nothing is missing."""
    heard = Heard()
    async with a_publisher(tmp_path) as publisher, a_feed(publisher, heard):
        for number in range(5):
            await publisher.publish(removed(number))
        await until(lambda: len(heard.told) == 6)
        assert heard.told == ["whole", 0, 1, 2, 3, 4]


async def test_what_was_published_before_is_replayed(tmp_path: Path) -> None:
    """An agent that starts beside a running engine knows all that the engine kept."""
    heard = Heard()
    async with a_publisher(tmp_path) as publisher:
        for number in range(3):
            await publisher.publish(removed(number))
        async with a_feed(publisher, heard):
            await publisher.publish(removed(3))
            await until(lambda: len(heard.told) == 5)
    assert heard.told == ["whole", 0, 1, 2, 3]


async def test_a_gap_is_replayed(tmp_path: Path) -> None:
    """From there on, in order, once."""
    heard = Heard()
    async with a_publisher(tmp_path) as publisher, a_feed(publisher, heard) as feed:
        await publisher.publish(removed(0))
        await until(lambda: 0 in heard.told)
        await publisher.publish(removed(1), loses=True)
        await publisher.publish(removed(2), loses=True)
        await publisher.publish(removed(3))
        await publisher.publish(removed(4))
        await until(lambda: 4 in heard.told)
        assert heard.told == ["whole", 0, 1, 2, 3, 4]
        assert publisher.replays[-1] == 1
        assert feed.counts["gaps"] == 1


async def test_a_gap_without_replay_is_a_loss(tmp_path: Path) -> None:
    """Hearing begins anew with what came after it."""
    heard = Heard()
    async with a_publisher(tmp_path, replays=False) as publisher, a_feed(publisher, heard):
        await publisher.publish(removed(0))
        await publisher.publish(removed(1), loses=True)
        await publisher.publish(removed(2))
        await until(lambda: 2 in heard.told)
        assert heard.told == ["whole", 0, "part", 2]


async def test_a_gap_that_the_engine_no_longer_keeps_is_a_loss(tmp_path: Path) -> None:
    """What it does keep is heard."""
    heard = Heard()
    async with a_publisher(tmp_path) as publisher, a_feed(publisher, heard):
        await publisher.publish(removed(0))
        await until(lambda: 0 in heard.told)
        for number in (1, 2):
            await publisher.publish(removed(number), loses=True)
        del publisher.kept[:2]
        await publisher.publish(removed(3))
        await until(lambda: 3 in heard.told)
        assert heard.told == ["whole", 0, "part", 2, 3]


async def test_a_replay_that_never_comes_is_a_loss(tmp_path: Path) -> None:
    """Nobody is at its endpoint: it is waited for only so long."""
    heard = Heard()
    async with a_publisher(tmp_path, replays=False) as publisher:
        feed = KvEventFeed(
            publisher.endpoint,
            heard,
            replay_endpoint=f"ipc://{tmp_path}/nobody",
            replay_s_max=0.01,
        )
        async with asyncio.TaskGroup() as group:
            running = group.create_task(feed.run())
            await publisher.heard_by_one()
            await publisher.publish(removed(0), loses=True)
            await publisher.publish(removed(1))
            await until(lambda: 1 in heard.told)
            running.cancel()
    assert heard.told == ["part", 1]
    assert feed.counts["replay_timeouts"] == 2


async def test_an_engine_that_starts_again_is_whole(tmp_path: Path) -> None:
    """Its numbers fall, and its batches are newer: not what a replay overlaps with."""
    heard = Heard()
    async with a_publisher(tmp_path) as publisher, a_feed(publisher, heard) as feed:
        for number in range(3):
            await publisher.publish(removed(number))
        await until(lambda: 2 in heard.told)
        publisher.start_again()
        await publisher.publish(removed(10))
        await publisher.publish(removed(11))
        await until(lambda: 11 in heard.told)
        assert heard.told == ["whole", 0, 1, 2, "whole", 10, 11]
        assert feed.counts["restarts"] == 1


async def test_told_to_begin_anew_it_asks_for_all(tmp_path: Path) -> None:
    """With the next batch."""
    heard = Heard()
    async with a_publisher(tmp_path) as publisher, a_feed(publisher, heard) as feed:
        await publisher.publish(removed(0))
        await until(lambda: 0 in heard.told)
        feed.resync()
        await publisher.publish(removed(1))
        await until(lambda: 1 in heard.told)
        assert heard.told == ["whole", 0, "whole", 0, 1]


async def test_garbage_is_counted_and_a_garbled_batch_is_a_loss(tmp_path: Path) -> None:
    """No frame of any kind ends the hearing."""
    heard = Heard()
    async with a_publisher(tmp_path) as publisher, a_feed(publisher, heard) as feed:
        await publisher.publish(removed(0))
        await until(lambda: 0 in heard.told)
        await publisher.frames(b"alone")
        await publisher.frames(b"topic", b"short", b"payload")
        await publisher.frames(b"topic", b"\xff" * 8, a_payload(CLEARED))
        await publisher.frames(*[b""] * 9)
        await publisher.send(b"\xc1 is no msgpack")
        await publisher.publish(removed(2))
        await until(lambda: 2 in heard.told)
        assert heard.told == ["whole", 0, "part", 2]
        assert feed.counts["malformed"] == 5


async def test_a_number_out_of_nowhere_is_recovered_from(tmp_path: Path) -> None:
    """It looks like a gap that nothing fills; the true numbers look like a new start."""
    heard = Heard()
    async with a_publisher(tmp_path) as publisher, a_feed(publisher, heard):
        await publisher.publish(removed(0))
        await until(lambda: 0 in heard.told)
        await publisher.frames(b"", (1 << 60).to_bytes(8, "big"), a_payload(removed(66)))
        await publisher.publish(removed(1))
        await until(lambda: heard.told[-1] == 1)
        assert heard.told[-3:] == ["whole", 0, 1]
