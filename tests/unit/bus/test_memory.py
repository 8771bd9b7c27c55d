"""What the in-process bus can do beyond the common promises: cut one connection of several."""

import asyncio

import pytest

from broker.bus.base import BucketSpec, LinkDown, Message
from broker.bus.key_value import TOMBSTONE_TTL_S
from broker.bus.memory import MemoryBus
from broker.bus.memory_clock import ManualClock
from tests.buses import CONSUMER, STREAM, SUBJECT, Heard, a_consumer, a_stream, pulling


async def test_one_cut_connection_leaves_the_others() -> None:
    """A connection that is cut misses what is sent meanwhile; the others don't notice."""
    bus = MemoryBus()
    agent = bus.connection()
    here: Heard[Message] = Heard()
    there: Heard[Message] = Heard()
    await bus.subscribe("news", here)
    await agent.subscribe("news", there)
    agent.disconnect()
    agent.disconnect()
    await bus.publish("news", b"missed")
    agent.reconnect()
    agent.reconnect()
    await bus.publish("news", b"heard")
    assert [item.data for item in await here.count(2)] == [b"missed", b"heard"]
    assert [item.data for item in await there.count(1)] == [b"heard"]


async def test_lost_on_the_way_comes_again_after_the_ack_wait() -> None:
    """Deliveries that were under way when the link was cut are not handed over, and not lost."""
    clock = ManualClock()
    bus = MemoryBus(clock=clock)
    broker = bus.connection()
    await bus.ensure_stream(a_stream())
    await bus.ensure_consumer(a_consumer())
    puller = await pulling(broker)
    await bus.append(SUBJECT, b"seen")
    await puller.heard.count(1)
    bus.server.stream(STREAM).append(SUBJECT, b"on its way", headers={})
    broker.disconnect()
    await asyncio.sleep(0)
    assert len(puller.heard.items) == 1
    broker.reconnect()
    assert (await bus.consumer_state(STREAM, CONSUMER)).ack_pending == 2
    clock.advance(61.0)
    items = await puller.heard.count(3)
    assert sorted(item.data for item in items[1:]) == [b"on its way", b"seen"]


async def test_link_cut_while_storing_leaves_the_caller_in_doubt() -> None:
    """The message is stored, the caller hears LinkDown: the same id settles it."""
    bus = MemoryBus()
    await bus.ensure_stream(a_stream())
    appending = asyncio.ensure_future(bus.append(SUBJECT, b"", message_id="j1.0"))
    await asyncio.sleep(0)
    bus.disconnect()
    with pytest.raises(LinkDown):
        await appending
    bus.reconnect()
    assert (await bus.append(SUBJECT, b"", message_id="j1.0")).duplicate


async def test_handler_that_cuts_its_own_link_hears_no_more() -> None:
    """What stood behind in the same read is lost with the link."""
    bus = MemoryBus()
    heard: list[bytes] = []

    def handler(message: Message) -> None:
        heard.append(message.data)
        bus.disconnect()

    await bus.subscribe("news", handler)
    peer = bus.connection()
    for data in (b"1", b"2"):
        await peer.publish("news", data)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert heard == [b"1"]


async def test_tombstone_that_expires_under_the_hands_of_its_writer() -> None:
    """A key deleted long ago can be created, even if its mark vanishes in the middle of it."""
    clock = ManualClock()
    bus = MemoryBus(clock=clock)
    await bus.ensure_bucket(BucketSpec("B"))
    await bus.kv_put("B", "k", b"1")
    await bus.kv_delete("B", "k")
    # Runs while the creator reads what stands in its way.
    asyncio.get_running_loop().call_soon(clock.advance, TOMBSTONE_TTL_S + 1)
    revision = await bus.kv_create("B", "k", b"2")
    assert (await bus.kv_get("B", "k")).revision == revision


async def test_deleted_keys_leave_nothing_after_a_while() -> None:
    """A bucket of short-lived keys stays small: marks of deletion expire."""
    clock = ManualClock()
    bus = MemoryBus(clock=clock)
    await bus.ensure_bucket(BucketSpec("B"))
    for number in range(10):
        await bus.kv_put("B", f"k{number}", b"")
        await bus.kv_delete("B", f"k{number}")
    clock.advance(TOMBSTONE_TTL_S + 1)
    assert (await bus.stream_state("KV_B")).messages == 0


async def test_closed_connection_leaves_nothing_on_the_server() -> None:
    """Connections come and go; the server keeps nothing of them."""
    bus = MemoryBus()
    await bus.ensure_stream(a_stream())
    await bus.ensure_consumer(a_consumer())
    for _ in range(10):
        peer = bus.connection()
        await peer.subscribe("news.*", lambda _: None)
        await pulling(peer)
        await peer.close()
    server = bus.server
    assert len(server._wild) == 1
    assert len(server.consumer_watchers) == 1
    assert server.consumer(STREAM, CONSUMER).state().waiting == 0
