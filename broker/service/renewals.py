"""Renews the ack-wait of held jobs, so that none comes again while it waits here.

Running jobs are renewed by their agents. The shelf keeps the rest in order of their last renewal,
so a look costs what is due, not what is held.
"""

import asyncio
from collections.abc import Callable

from broker.bus.base import Bus, LinkDown
from broker.service.held import Shelf

LOOKS_PER_PERIOD = 20
"""How often within a period is looked for what is due: a renewal is late by a twentieth at most."""

RENEWALS_PER_TURN_MAX = 128
"""Renewals sent without giving way: about half a millisecond of work."""


class Renewals:
    """The duty of renewing."""

    def __init__(self, bus: Bus, shelf: Shelf, *, renew_s: float, now: Callable[[], float]) -> None:
        """Renew each held job every `renew_s`."""
        self._bus = bus
        self._shelf = shelf
        self._renew_s = renew_s
        self._now = now

    async def run(self) -> None:
        """Renew until cancelled."""
        while True:
            await asyncio.sleep(self._renew_s / LOOKS_PER_PERIOD)
            await self.renew_due()

    async def renew_due(self) -> int:
        """Renew all that is due; returns how many were. Stops at a lost link: the rest is due."""
        at_s, renewed = self._now(), 0
        while (held := self._shelf.renewal_due(before_s=at_s - self._renew_s)) is not None:
            try:
                await self._bus.renew(held.ack_subject)
            except LinkDown:
                break
            self._shelf.renewed(held, at_s=at_s)
            renewed += 1
            if renewed % RENEWALS_PER_TURN_MAX == 0:
                await asyncio.sleep(0)
        return renewed
