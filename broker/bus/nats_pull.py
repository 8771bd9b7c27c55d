"""A continuous pull: asks a consumer for messages whenever there is room, and for no more.

Room = window − delivered and not released − asked for and not arrived. Requests for messages
("pulls") stand at the server for at most `PULL_EXPIRES_S`; each ends when it is served in full, by
a status that says so, or by our own clock if that status never comes. Messages carry no mark of the
pull they answer, but a server serves pulls in order of arrival, so they are booked on the oldest.

(The client's `fetch` asks, waits until all came or the time is over, and asks again: it stalls on
every gap.)
"""

import asyncio
import itertools
import secrets
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from broker.bus.base import Delivery, DeliveryHandler, LinkDown, Timeout
from broker.bus.containment import Contained
from broker.bus.logs import Log
from broker.bus.nats_codec import (
    NANOSECONDS,
    decode_delivery,
    decode_status,
)
from broker.bus.nats_link import Link, Route

_log = Log(__name__)

PULL_EXPIRES_S = 2.0
"""Longest life of a pull at the server: must end before the puller's leader lease does."""

PULL_GRACE_S = 1.0
"""How long after its expiry we wait for the server's word on a pull before we write it off."""

TOP_UP_SHARE = 4
"""Ask at once when a quarter of the window is free; nats.go asks at a half."""

TOP_UP_DELAY_S = 0.002
"""Smaller room is asked for this much later: single releases don't cost a request each. Only who
has his hands full waits for it."""

HEARTBEAT, NO_MESSAGES, EXPIRED = 100, 404, 408
"""Statuses that end no pull (the first) or end it in good order; others (409, 503) refuse it."""

BACK_OFF_S = 0.05
BACK_OFF_S_MAX = 2.0
"""Wait after a missing consumer or a refusal: doubles from the first to the second."""

STALL_S = 5.0
"""With a pull standing, messages pending and none delivered for this long, something is stuck."""


@dataclass(slots=True, eq=False)
class _Open:
    """A pull that stands at the server."""

    number: int
    left: int
    deadline_s: float


class NatsPull:
    """One consumer's continuous pull."""

    def __init__(
        self,
        link: Link,
        *,
        stream: str,
        consumer: str,
        handler: DeliveryHandler,
        window: int,
        inbox_prefix: str,
        counts: Counter[str],
        ended: Callable[["NatsPull"], None],
    ) -> None:
        self.stream = stream
        self.consumer = consumer
        self._link = link
        self._handler = handler
        self._window = window
        self._counts = counts
        self._ended = ended
        self._inbox_prefix = inbox_prefix
        self._loop = asyncio.get_running_loop()
        self._contained = Contained(counts, f"deliveries of {stream}/{consumer}")
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._numbers = itertools.count(1)
        self._open: deque[_Open] = deque()
        self._asked = 0
        self.pulls_sent = 0
        self._unreleased = 0
        self._arrived: list[Delivery] = []
        self._timer: asyncio.TimerHandle | None = None
        self._back_off_s = 0.0
        self._refusals = 0
        self._idle_since_s = self._loop.time()
        self._stopping = False
        self._emptied: asyncio.Future[None] | None = None
        self._inbox = ""
        self._route = self._listen()
        link.on_link(self._link_changed)
        self._top_up()

    def _listen(self) -> Route:
        self._inbox = f"{self._inbox_prefix}.{secrets.token_hex(8)}."
        return self._link.hear(f"{self._inbox}*", self._heard)

    # what callers do
    def release(self, count: int = 1) -> None:
        """Give back room for messages."""
        assert count <= self._unreleased, "more released than delivered"
        self._unreleased -= count
        self._top_up()

    def resize(self, window: int) -> None:
        """Change the window; 0 pauses, and what is asked for already may still come."""
        self._window = window
        self._top_up()

    async def stop(self) -> list[Delivery]:
        """Stop asking, wait until no pull of ours stands at the server; returns what came.

        Nothing is lost if it is cancelled and called again.
        """
        self._stopping = True
        self._cancel_timer()
        try:
            await self._withdraw()
        except (LinkDown, Timeout):
            # The server drops the pulls of a lost connection by itself.
            self._counts["pulls_lost"] += 1
        self._link.leave(self._route)
        self._link.forget(self._route)
        self._link.off_link(self._link_changed)
        self._ended(self)
        left, self._arrived = self._arrived, []
        return left

    async def _withdraw(self) -> None:
        if self._link.clustered:
            # Word of our leaving may reach the consumer's leader late: let the pulls run out.
            await self._until_run_out()
        # One server drops our pulls with our interest, and puts back what it could not deliver.
        self._link.leave(self._route, deaf=False)
        await self._link.rtt_s(PULL_EXPIRES_S + PULL_GRACE_S)

    async def _until_run_out(self) -> None:
        if not self._open:
            return
        self._emptied = self._loop.create_future()
        timer = self._loop.call_later(PULL_EXPIRES_S + PULL_GRACE_S, self._write_off_all)
        try:
            await self._emptied
        finally:
            timer.cancel()

    # asking
    @property
    def _room(self) -> int:
        return self._window - self._unreleased - self._asked

    def _top_up(self) -> None:
        """Ask now, soon, or not: see the constants."""
        room = self._room
        if self._stopping or room <= 0 or self._back_off_s or not self._link.connected:
            return
        if self._asked * 2 > self._window:
            # Enough is asked for; the end of a pull brings us here again.
            return
        if room * TOP_UP_SHARE >= self._window:
            self._ask()
        elif self._timer is None:
            self._timer = self._loop.call_later(TOP_UP_DELAY_S, self._ask)

    def _ask(self) -> None:
        """Send a pull for all the room there is."""
        self._cancel_timer()
        self._back_off_s = 0.0
        room = self._room
        if self._stopping or room <= 0 or not self._link.connected:
            return
        number = next(self._numbers)
        order = b'{"batch":%d,"expires":%d}' % (room, int(PULL_EXPIRES_S * NANOSECONDS))
        self._link.send(self._subject, order, reply=f"{self._inbox}{number}")
        self.pulls_sent += 1
        deadline_s = self._loop.time() + PULL_EXPIRES_S + PULL_GRACE_S
        self._open.append(_Open(number, room, deadline_s))
        self._asked += room

    def _ask_later(self) -> None:
        """Ask again after a refusal, each time later."""
        self._cancel_timer()
        self._refusals += 1
        self._back_off_s = min(BACK_OFF_S * 2 ** min(self._refusals, 8), BACK_OFF_S_MAX)
        self._timer = self._loop.call_later(self._back_off_s, self._ask)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # hearing
    def _heard(self, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        if not reply:
            self._heard_status(subject, headers)
            return
        self._arrived.append(decode_delivery(subject, reply, data, headers))
        self._unreleased += 1
        self._book()
        if len(self._arrived) == 1:
            self._loop.call_soon(self._hand_over)

    def _book(self) -> None:
        """Take one message off the oldest pull; there is none if it came after its write-off."""
        if not self._open:
            return
        self._asked -= 1
        oldest = self._open[0]
        oldest.left -= 1
        if oldest.left == 0:
            self._open.popleft()
            self._settle_emptied()

    def _hand_over(self) -> None:
        if self._stopping or not self._arrived:
            return
        batch, self._arrived = self._arrived, []
        self._refusals = 0
        self._idle_since_s = self._loop.time()
        with self._contained:
            self._handler(batch)
        self._top_up()

    def _heard_status(self, subject: bytes, headers: bytes | None) -> None:
        status = decode_status(headers)
        if status is None or status.code == HEARTBEAT:
            return
        self._close(int(subject[len(self._inbox) :]))
        if status.code in (NO_MESSAGES, EXPIRED) or status.text == "Batch Completed":
            self._refusals = 0
            self._top_up()
            return
        self._counts["pulls_refused"] += 1
        _log.info("pull refused", consumer=self.consumer, code=status.code, text=status.text)
        if not self._stopping:
            self._ask_later()

    def _close(self, number: int) -> None:
        """Take note that a pull stands no more."""
        for pull in self._open:
            if pull.number == number:
                self._open.remove(pull)
                self._asked -= pull.left
                break
        self._settle_emptied()

    def _write_off_all(self) -> None:
        self._open.clear()
        self._asked = 0
        self._settle_emptied()

    def _settle_emptied(self) -> None:
        if not self._open and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)

    def _link_changed(self, up: bool) -> None:  # noqa: FBT001 # The contract's signature.
        self._cancel_timer()
        self._write_off_all()
        self._back_off_s = 0.0
        self._refusals = 0
        self._idle_since_s = self._loop.time()
        if up:
            self._top_up()

    # watching
    def check(self) -> bool:
        """Write off pulls that the server forgot; say whether nothing has come for too long."""
        now_s = self._loop.time()
        while self._open and self._open[0].deadline_s <= now_s:
            self._counts["pulls_lost"] += 1
            self._close(self._open[0].number)
        self._top_up()
        if not self._asked:
            self._idle_since_s = now_s
        return now_s - self._idle_since_s >= STALL_S

    def listen_anew(self) -> None:
        """Ask on a new inbox: whatever stuck to the old one is left behind."""
        self._link.leave(self._route)
        self._write_off_all()
        self._idle_since_s = self._loop.time()
        self._route = self._listen()
        self._top_up()
