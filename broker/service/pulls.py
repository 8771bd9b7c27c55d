"""The pulls of all queues: opened, paused, closed; and the set of queues that grows and shrinks."""

import asyncio
from collections.abc import Callable
from functools import partial

from broker.bus.base import Bus, ConsumerSpec, Delivery, Pull
from broker.service.intake import open_pull
from broker.wire.subjects import JobAddress

Take = Callable[[JobAddress, list[Delivery]], None]


class Pulls:
    """One continuous pull for each queue."""

    def __init__(self, bus: Bus, queues: dict[JobAddress, ConsumerSpec], *, take: Take) -> None:
        """`queues` are those to be pulled; it is changed as queues come and go."""
        self._bus = bus
        self.queues = queues
        self._take = take
        self._pulls: dict[JobAddress, Pull] = {}

    def of(self, address: JobAddress) -> Pull:
        """Return a queue's pull, which must be open."""
        return self._pulls[address]

    async def open(self, address: JobAddress, spec: ConsumerSpec, *, window: int) -> None:
        """Pull a queue; one that is pulled already gets this window. Raises BusError."""
        self.queues[address] = spec
        known = self._pulls.get(address)
        if known is not None:
            known.resize(window)
            return
        take = partial(self._take, address)
        self._pulls[address] = await open_pull(self._bus, address, window=window, take=take)

    async def close(self, address: JobAddress) -> None:
        """Pull a queue no more, and forget it: it is empty, and nothing comes into it."""
        pull = self._pulls.get(address)
        if pull is not None:
            await pull.stop()
            del self._pulls[address]
        self.queues.pop(address, None)

    def pause(self) -> None:
        """Ask for nothing more."""
        for pull in self._pulls.values():
            pull.resize(0)

    async def stop(self) -> None:
        """Close all, so that no pull of ours stands at the server."""
        async with asyncio.TaskGroup() as group:
            for pull in self._pulls.values():
                group.create_task(pull.stop())
