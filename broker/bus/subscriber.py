"""Runs a subscription's handler one message after another, and never holds up the reader.

A handler that returns nothing is called at once, which costs no task. While one that returned an
awaitable is at work, later messages wait here, up to `pending_messages_max`; beyond that the newest
is dropped and counted, because an unbounded queue behind a slow handler is memory that only grows
(NATS clients call it a slow consumer).
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable

from broker.bus.background import Background
from broker.bus.base import Handler, Message
from broker.bus.containment import Contained

PENDING_MESSAGES_MAX = 65_536
"""Messages that may wait behind one handler; nats.go allows 512k."""


class Subscriber:
    """One subscription's handler and what waits for it."""

    def __init__(
        self,
        subject: str,
        handler: Handler,
        *,
        background: Background,
        counts: Counter[str],
        pending_messages_max: int = PENDING_MESSAGES_MAX,
    ) -> None:
        self.subject = subject
        self._handler = handler
        self._background = background
        self._counts = counts
        self._contained = Contained(counts, f"handler of {subject}")
        self._pending: deque[Message] = deque()
        self._pending_messages_max = pending_messages_max
        self._at_work = False
        self._open = True

    def close(self) -> None:
        """Hear no more: what waits is dropped."""
        self._open = False
        self._pending.clear()

    def feed(self, message: Message) -> None:
        """Handle a message now, or after those before it."""
        if not self._open:
            return
        if self._at_work:
            self._queue(message)
            return
        awaitable = self._call(message)
        if awaitable is not None:
            self._at_work = True
            self._background.start(self._work(awaitable))

    def _queue(self, message: Message) -> None:
        if len(self._pending) >= self._pending_messages_max:
            self._counts["messages_dropped"] += 1
            return
        self._pending.append(message)

    def _call(self, message: Message) -> Awaitable[None] | None:
        with self._contained:
            return self._handler(message)
        return None

    async def _work(self, awaitable: Awaitable[None] | None) -> None:
        try:
            while True:
                if awaitable is not None:
                    await self._await(awaitable)
                if not self._pending:
                    return
                awaitable = self._call(self._pending.popleft())
        finally:
            self._at_work = False

    async def _await(self, awaitable: Awaitable[None]) -> None:
        with self._contained:
            try:
                await awaitable
            except asyncio.CancelledError as error:
                # Obeyed when the bus closes; a handler's own inner cancellation is its failure.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                message = "the handler was cancelled from within"
                raise RuntimeError(message) from error
