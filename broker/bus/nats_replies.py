"""Requests and stored messages that wait for an answer, all on one reply inbox of our own.

One subscription hears every answer; a token in the subject says whose it is. A waiter always
settles: by the answer, by its deadline, or by the loss of the link. (The client's own
`publish_async` leaves its futures pending on errors; its `request` costs twice as much.)
"""

import asyncio
import itertools
import secrets
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from broker.bus.base import BusError, LinkDown, Timeout
from broker.bus.nats_link import Link

WAITING_MAX = 100_000
"""Requests under way at once; beyond it something is wrong with who asks."""


class Reply(NamedTuple):
    """An answer as it came."""

    subject: bytes
    data: bytes
    headers: bytes | None


class Replies:
    """Who waits for which answer."""

    def __init__(self, link: Link, *, inbox_prefix: str) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._prefix = f"{inbox_prefix}.{secrets.token_hex(8)}."
        self._prefix_chars = len(self._prefix)
        self._tokens = itertools.count(1)
        self._waiting: dict[bytes, asyncio.Future[Reply]] = {}
        self._collectors: dict[bytes, Callable[[Reply | None], None]] = {}
        link.hear(f"{self._prefix}*", self._heard)
        link.on_link(self._link_changed)

    @property
    def waiting(self) -> int:
        """How many wait for an answer."""
        return len(self._waiting)

    async def ask(
        self, subject: str, data: bytes, *, headers: bytes = b"", timeout_s: float
    ) -> Reply:
        """Send and wait for one answer. Raises Timeout, LinkDown, PayloadTooLarge, BusError."""
        if len(self._waiting) >= WAITING_MAX:
            message = f"{WAITING_MAX} requests wait for their answers already"
            raise BusError(message)
        token = b"%d" % next(self._tokens)
        future: asyncio.Future[Reply] = self._loop.create_future()
        self._link.send(subject, data, reply=f"{self._prefix}{token.decode()}", headers=headers)
        self._waiting[token] = future
        timer = self._loop.call_later(timeout_s, _expire, future, subject)
        try:
            return await future
        finally:
            timer.cancel()
            self._waiting.pop(token, None)

    def collect(
        self, subject: str, data: bytes, collector: Callable[[Reply | None], None]
    ) -> Callable[[], None]:
        """Send and hear any number of answers, None if the link is lost; returns how to stop."""
        token = b"%d" % next(self._tokens)
        self._link.send(subject, data, reply=f"{self._prefix}{token.decode()}")
        self._collectors[token] = collector

        def stop() -> None:
            self._collectors.pop(token, None)

        return stop

    def _heard(self, subject: bytes, _: bytes, data: bytes, headers: bytes | None) -> None:
        token = subject[self._prefix_chars :]
        future = self._waiting.get(token)
        if future is not None:
            if not future.done():
                future.set_result(Reply(subject, data, headers))
            return
        collector = self._collectors.get(token)
        if collector is not None:
            collector(Reply(subject, data, headers))

    def _link_changed(self, up: bool) -> None:  # noqa: FBT001 # The contract's signature.
        if up:
            return
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(LinkDown("the link was lost while waiting for an answer"))
        for collector in list(self._collectors.values()):
            collector(None)


def _expire(future: asyncio.Future[Reply], subject: str) -> None:
    if not future.done():
        future.set_exception(Timeout(f"no answer on {subject} in time"))


class Window:
    """Bounds what is outstanding, in number and bytes; who comes beyond waits in order."""

    def __init__(self, *, outstanding_max: int, bytes_max: int) -> None:
        self._outstanding_max = outstanding_max
        self._bytes_max = bytes_max
        self._outstanding = 0
        self._bytes = 0
        self._queue: deque[tuple[asyncio.Future[None], int]] = deque()

    @property
    def outstanding(self) -> int:
        """How many are inside."""
        return self._outstanding

    def enter_now(self, size: int) -> bool:
        """Take room if there is any and nobody waits for it."""
        if self._queue or not self._fits(size):
            return False
        self._take(size)
        return True

    async def enter(self, size: int) -> None:
        """Wait for room and take it."""
        if self.enter_now(size):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (future, size)
        self._queue.append(entry)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.leave(size)
            elif entry in self._queue:
                self._queue.remove(entry)
                self._admit()
            raise

    def leave(self, size: int) -> None:
        """Give room back."""
        self._outstanding -= 1
        self._bytes -= size
        self._admit()

    def _fits(self, size: int) -> bool:
        # One alone always fits, however large: the server's own limit is checked elsewhere.
        return self._outstanding == 0 or (
            self._outstanding < self._outstanding_max and self._bytes + size <= self._bytes_max
        )

    def _take(self, size: int) -> None:
        self._outstanding += 1
        self._bytes += size

    def _admit(self) -> None:
        while self._queue and self._fits(self._queue[0][1]):
            future, size = self._queue.popleft()
            if not future.done():
                self._take(size)
                future.set_result(None)
