"""Faults planted in the product on purpose: each must make the checker fail.

They stand here and nowhere in the product: a process of a chaos run that is told to carries one. It
hits one job in `ONE_IN`, chosen by name, so the same ones in every process and life.
"""

import zlib
from collections.abc import Awaitable, Callable, Iterable
from enum import StrEnum
from typing import Any, cast

from msgspec.structs import replace

from broker.bus.base import Appended, Bus, Delivery, DeliveryHandler, Message, Pull
from broker.core.rows import Borrow, RowUsage
from broker.service import accounting
from broker.wire import codec
from broker.wire.messages import Dispatch, Job, Reason, TerminalRecord
from broker.wire.usage import CountedRecord, UsageRow, summed
from worker_agent.attempt import Attempts
from worker_agent.engine.base import Completed
from worker_agent.fence import Fence
from worker_agent.fence import Verdict as FenceVerdict
from worker_agent.ledger import Running, Stop

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
    FENCE = "fence"
    """A broker orders in the name of the leader before it, and workers don't mind."""
    RERUN = "rerun"
    """A worker hands jobs back that it has run, once each."""
    MISCOUNT = "miscount"
    """A broker counts each record twice."""


def is_hit(job_id: str) -> bool:
    """Say whether a plant hits this job."""
    return zlib.crc32(job_id.encode()) % ONE_IN == 0


def planted(bus: Bus, plant: Plant | None) -> Bus:
    """Plant a fault in this process, which works with the bus that is returned."""
    match plant:
        case Plant.OVERSHOOT:
            RowUsage.lacks_seat = _lacks_no_seat
        case Plant.FENCE:
            Fence.judge = _minds_nothing
        case Plant.RERUN:
            agent = cast("Any", Attempts)
            agent._conclude = _hands_back(agent._conclude)  # noqa: SLF001 - what is broken has no door
        case Plant.MISCOUNT:
            accounting.summed = _summed_twice
        case _:
            pass
    return bus if plant is None else cast("Bus", _PlantedBus(bus, plant))


def _lacks_no_seat(self: RowUsage, borrow: Borrow) -> bool:
    del self, borrow
    return False


def _minds_nothing(self: Fence, *, epoch: int, number: int) -> FenceVerdict:
    self.learn(epoch)
    self.echo = number
    return FenceVerdict.NEXT


def _hands_back(conclude: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def conclude_again(self: Attempts, running: Running, verdict: Any) -> Any:  # noqa: ANN401 - as it was
        first = not running.order.failures
        if first and isinstance(verdict, Completed) and is_hit(running.job.id):
            verdict = Stop(Reason.HANDED_BACK)
        return await conclude(self, running, verdict)

    return conclude_again


class _PlantedBus:
    def __init__(self, bus: Bus, plant: Plant) -> None:
        self._bus = bus
        self._plant = plant

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the real bus has
        real = getattr(self._bus, name)
        if name == "request" and self._plant is Plant.FENCE:
            return self._order(real)
        return self._append(real) if name == "append" else real

    def _order(self, real: Callable[..., Awaitable[Message]]) -> Callable[..., Any]:
        async def request(subject: str, data: bytes, **fields: Any) -> Message:  # noqa: ANN401 - as the bus takes them
            if subject.startswith("work."):
                order = codec.decode_order(data)
                if isinstance(order, Dispatch) and is_hit(codec.decode(order.job, Job).id):
                    data = codec.encode(replace(order, epoch=order.epoch - 1))
            return await real(subject, data, **fields)

        return request

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


def _summed_twice(
    rows: Iterable[UsageRow], records: Iterable[CountedRecord] = ()
) -> tuple[UsageRow, ...]:
    found = list(records)
    return summed(rows, [*found, *found])
