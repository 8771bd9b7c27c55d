"""What the agent owes a job's message: its ack-wait renewed while it runs, an ack after the record.

Both go straight to the server, so a dead broker disturbs no running job. An ack that was not
confirmed is tried again in the background until it is; the ledger refuses new jobs when too many
wait (`ack_retries_max`).
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from broker.bus.base import Bus, BusError, NotFound, Timeout
from broker.wire.messages import Attempt
from worker_agent.ledger import Ledger, Running
from worker_agent.records import backoff_s

_log = structlog.get_logger(__name__)

RENEWALS_PER_PERIOD = 4
"""How often within `renew_s` is looked for what is due: a renewal is late by a quarter at most."""


@dataclass(frozen=True, slots=True)
class _Message:
    """A job's message, where it is and how it is acknowledged."""

    stream: str
    sequence: int
    ack_subject: str


class Acks:
    """Renewals and acknowledgements of one agent."""

    def __init__(
        self,
        bus: Bus,
        ledger: Ledger,
        *,
        renew_s: float,
        retry_base_s: float,
        retry_s_max: float,
        call_s_max: float,
        tick_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._ledger = ledger
        self._renew_s = renew_s
        self._retry_base_s = retry_base_s
        self._retry_s_max = retry_s_max
        self._call_s_max = call_s_max
        self._tick_s = tick_s
        self._owed: dict[tuple[str, Attempt], _Message] = {}
        """Messages of jobs whose first ack was not confirmed; bounded with the ledger's ends."""
        self._is_owed = asyncio.Event()
        self._nudged = asyncio.Event()
        self._is_paid = asyncio.Event()
        self._is_paid.set()

    @property
    def owed(self) -> int:
        """Acks not confirmed and being retried."""
        return len(self._owed)

    async def acknowledge(self, running: Running) -> None:
        """Acknowledge a settled job's message; if that fails, later."""
        order = running.order
        message = _Message(order.stream, order.stream_sequence, running.ack_subject)
        if not await self._ack(running.key, running.attempt, message):
            self._owed[running.key, running.attempt] = message
            self._is_paid.clear()
            self._is_owed.set()

    def nudge(self) -> None:
        """Retry now: the link is back."""
        self._nudged.set()

    async def paid(self) -> None:
        """Wait until no ack is owed."""
        await self._is_paid.wait()

    async def retry(self) -> None:
        """Retry what is owed, for ever."""
        while True:
            await self._is_owed.wait()
            for pause_s in backoff_s(base_s=self._retry_base_s, longest_s=self._retry_s_max):
                await self._pause(pause_s)
                if await self._pay():
                    break

    async def renew(self) -> None:
        """Renew what is due, for ever."""
        while True:
            await asyncio.sleep(self._renew_s / RENEWALS_PER_PERIOD)
            tick_s = self._tick_s()
            try:
                for due in self._ledger.renewals_due(before_tick_s=tick_s - self._renew_s):
                    await self._bus.renew(due.ack_subject)
                    due.renewed_tick_s = tick_s
            except BusError as error:
                _log.warning("ack-wait not renewed", error=repr(error))

    async def _pay(self) -> bool:
        """Try all that is owed, until one fails. True when nothing is left."""
        for (key, attempt), message in list(self._owed.items()):
            is_paid = await self._ack(key, attempt, message)
            del self._owed[key, attempt]
            if not is_paid:
                self._owed[key, attempt] = message  # Behind the others, which it may not hold up.
                return False
        if self._owed:
            return False
        self._is_owed.clear()
        self._is_paid.set()
        return True

    async def _ack(self, key: str, attempt: Attempt, message: _Message) -> bool:
        try:
            await self._bus.ack(message.ack_subject, timeout_s=self._call_s_max)
        except BusError as error:
            if not (isinstance(error, Timeout) and await self._is_gone(message)):
                _log.warning("ack not confirmed", key=key, error=repr(error))
                return False
        self._ledger.acknowledged(key, attempt)
        return True

    async def _is_gone(self, message: _Message) -> bool:
        """Say whether a message has left its stream, taken out by a broker.

        A consumer that was reset since then knows nothing of it, and answers no ack of it before it
        has delivered something newer, which in an idle queue is never.
        """
        try:
            await self._bus.message_at(message.stream, message.sequence, timeout_s=self._call_s_max)
        except NotFound:
            return True
        except BusError:
            pass
        return False

    async def _pause(self, pause_s: float) -> None:
        try:
            async with asyncio.timeout(pause_s):
                await self._nudged.wait()
        except TimeoutError:
            return
        self._nudged.clear()
