"""Handlers run one by one, are contained, and can be ended."""

import asyncio
from collections import Counter

import pytest
from structlog.testing import CapturingLogger

from broker.bus.background import Background
from broker.bus.base import Message
from broker.bus.containment import Contained
from broker.bus.subscriber import Subscriber


def a_message(data: bytes = b"") -> Message:
    """A message."""
    return Message("news", data)


async def test_what_waits_is_bounded() -> None:
    """The newest beyond the bound is dropped and counted; those before it are handled."""
    counts: Counter[str] = Counter()
    background, gate = Background(), asyncio.Event()
    handled: list[bytes] = []

    async def handler(message: Message) -> None:
        await gate.wait()
        handled.append(message.data)

    subscriber = Subscriber(
        "news", handler, background=background, counts=counts, pending_messages_max=2
    )
    for number in range(5):
        subscriber.feed(a_message(b"%d" % number))
    gate.set()
    while len(handled) < 3:
        await asyncio.sleep(0)
    assert (handled, counts["messages_dropped"]) == ([b"0", b"1", b"2"], 2)
    await background.close()


async def test_closed_subscriber_drops_what_waits() -> None:
    """After close no handler begins; the one at work ends."""
    background, gate = Background(), asyncio.Event()
    began: list[bytes] = []

    async def handler(message: Message) -> None:
        began.append(message.data)
        await gate.wait()

    subscriber = Subscriber("news", handler, background=background, counts=Counter())
    subscriber.feed(a_message(b"1"))
    subscriber.feed(a_message(b"2"))
    await asyncio.sleep(0)
    subscriber.close()
    subscriber.feed(a_message(b"3"))
    gate.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert began == [b"1"]
    await background.close()


async def test_handler_that_cancels_itself_is_only_a_failure() -> None:
    """A cancellation from within a handler does not end its subscription."""
    counts: Counter[str] = Counter()
    background = Background()
    handled: list[bytes] = []

    async def handler(message: Message) -> None:
        if message.data == b"bad":
            raise asyncio.CancelledError
        handled.append(message.data)

    subscriber = Subscriber("news", handler, background=background, counts=counts)
    subscriber.feed(a_message(b"bad"))
    subscriber.feed(a_message(b"good"))
    while not handled:
        await asyncio.sleep(0)
    assert counts["handler_errors"] == 1
    await background.close()


async def test_handler_at_work_when_the_bus_closes_is_no_failure() -> None:
    """Cancelled by the close of its bus, a handler is not counted as one that failed."""
    counts: Counter[str] = Counter()
    background = Background()
    subscriber = Subscriber(
        "news", lambda _: asyncio.sleep(3600), background=background, counts=counts
    )
    subscriber.feed(a_message())
    await asyncio.sleep(0)
    await background.close()
    assert counts == Counter()


async def test_background_ends_with_its_owner() -> None:
    """Close cancels what runs and waits for it; later work is dropped."""
    background = Background()
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("first")

    background.start(work())
    await asyncio.sleep(0)
    await background.close()
    await background.close()
    background.start(work())
    assert ended == ["first"]


async def test_background_failure_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A background task that fails is logged."""
    log = CapturingLogger()
    monkeypatch.setattr("broker.bus.background._log", log)
    background = Background()

    async def work() -> None:
        message = "background trouble"
        raise RuntimeError(message)

    background.start(work())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert str(log.calls[0].kwargs["exc_info"]) == "background trouble"
    await background.close()


async def test_background_can_be_closed_from_within() -> None:
    """A task that closes its own background does not wait for itself."""
    background = Background()
    done = asyncio.Event()

    async def work() -> None:
        await background.close()
        done.set()

    background.start(work())
    await asyncio.wait_for(done.wait(), 5)


def test_containment_lets_cancellation_through() -> None:
    """An Exception ends in the block and is counted; a cancellation does not."""
    counts: Counter[str] = Counter()
    with Contained(counts, "callback"):
        raise ValueError
    assert counts["handler_errors"] == 1
    with pytest.raises(asyncio.CancelledError), Contained(counts, "callback"):
        raise asyncio.CancelledError
    assert counts["handler_errors"] == 1
