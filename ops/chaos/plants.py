"""Faults planted in the product on purpose: each must make the checker fail.

They stand here and nowhere in the product: a process of a chaos run that is told to carries one. It
hits one job in `ONE_IN`, chosen by name, so the same ones in every process and life.
"""

import zlib
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Any, cast

from msgspec.structs import replace

from broker.bus.base import Appended, Bus, Delivery, DeliveryHandler, Pull
from broker.core.rows import Borrow, RowUsage
from broker.wire import codec
from broker.wire.messages import Job, TerminalRecord

ONE_IN = 40


class Plant(StrEnum):
    """What is planted, in workers or in brokers."""

    LOSE = "lose"
    """A worker acknowledges jobs whose record it never stored."""
    DOUBLE = "double"
    """A worker replaces the record that stands by another."""
    STUCK = "stuck"
    """A broker never takes notice of jobs that it pulled."""
    OVERSHOOT = "overshoot"
    """A broker finds a free seat in every quota row."""


def is_hit(job_id: str) -> bool:
    """Say whether a plant hits this job."""
    return zlib.crc32(job_id.encode()) % ONE_IN == 0


def planted(bus: Bus, plant: Plant | None) -> Bus:
    """Plant a fault in this process, which works with the bus that is returned."""
    if plant is Plant.OVERSHOOT:
        RowUsage.lacks_seat = _lacks_no_seat
    return bus if plant is None else cast("Bus", _PlantedBus(bus, plant))


def _lacks_no_seat(self: RowUsage, borrow: Borrow) -> bool:
    del self, borrow
    return False


class _PlantedBus:
    def __init__(self, bus: Bus, plant: Plant) -> None:
        self._bus = bus
        self._plant = plant

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the real bus has
        real = getattr(self._bus, name)
        return self._append(real) if name == "append" else real

    def _append(self, real: Callable[..., Awaitable[Appended]]) -> Callable[..., Any]:
        async def append(subject: str, data: bytes, **fields: Any) -> Appended:  # noqa: ANN401 - as the bus takes them
            hit = subject.startswith("results.") and is_hit(subject.rpartition(".")[2])
            if hit and self._plant is Plant.LOSE:
                return Appended(subject, 0)
            appended = await real(subject, data, **fields)
            if hit and self._plant is Plant.DOUBLE:
                await self._bus.delete_message(appended.stream, appended.sequence)
                again = codec.decode(data, TerminalRecord)
                again = replace(again, message="a second result")
                await real(subject, codec.encode(again))
            return appended

        return append

    async def pull(
        self, stream: str, consumer: str, handler: DeliveryHandler, *, window: int
    ) -> Pull:
        """Pull, and keep some of it from the broker."""

        def take(deliveries: list[Delivery]) -> None:
            handler([one for one in deliveries if not self._hides(one)])

        return await self._bus.pull(stream, consumer, take, window=window)

    def _hides(self, delivery: Delivery) -> bool:
        if self._plant is not Plant.STUCK:
            return False
        try:
            return is_hit(codec.decode(delivery.data, Job).id)
        except codec.MalformedMessage:
            return False
