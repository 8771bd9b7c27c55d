"""A bus that writes down what its process does to jobs, and where it may be told to die or stand.

It passes all on to a real bus. Around each call that moves a job it writes an event of the history,
and looks whether an order stands in the process's file of orders: to die there, before or after
that very call, as by `kill -9`; or to stand still there until the fault that it waits for has come.
"""

import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast

from broker.bus.base import Bus, Delivery, Message, Pull, Subscription, WrongSequence
from broker.bus.base import DeliveryHandler as HandleDeliveries
from broker.bus.base import Handler as HandleMessage
from broker.wire import codec
from broker.wire.ids import job_key
from broker.wire.messages import Answer, Dispatch, Job, TerminalRecord, WorkReply
from ops.chaos.history import (
    Accepted,
    Acked,
    Died,
    Held,
    Ordered,
    Pen,
    Recorded,
    Submitted,
    Taken,
)

CALLS = frozenset({"publish", "request", "append", "last_message", "ack"})
"""Calls that move a job."""


DIE, STAND = "die", "stand"

STANDS_S_MAX = 10.0
"""Longest that a process stands still, should whoever told it to be gone."""

LOOK_S = 0.005
"""How often it looks whether it may go on."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process is to die or stand: `operation:before|after:beginning of its subject`."""

    operation: str
    when: str
    prefix: str
    step: str = ""
    """Of a job's life, for the history."""
    dies: bool = True

    @classmethod
    def read(cls, text: str) -> Self:
        """Read `die|stand step operation:when:prefix`. Raises ValueError."""
        what, step, place = text.split(" ", 2)
        operation, when, prefix = place.split(":", 2)
        return cls(operation, when, prefix, step, what == DIE)

    def order(self) -> str:
        """Write it, so that `read` reads it."""
        what = DIE if self.dies else STAND
        return f"{what} {self.step} {self.operation}:{self.when}:{self.prefix}"

    def is_at(self, operation: str, when: str, subject: str) -> bool:
        """Say whether this is the place."""
        here = (self.operation, self.when) == (operation, when)
        return here and subject.startswith(self.prefix)


@dataclass(slots=True)
class Doom:
    """The file in which a process is told where to die or to stand."""

    path: Path
    pen: Pen
    name: str

    def look(self, operation: str, when: str, subject: str) -> None:
        """Die or stand still, if it is here."""
        if not self.path.exists():
            return
        try:
            place = Place.read(self.path.read_text())
        except (OSError, ValueError):
            return
        if not place.is_at(operation, when, subject):
            return
        if place.dies:
            text = f"{operation}:{when}:{subject}"
            self.pen.write(Died(at_s=time.time(), by=self.name, step=place.step, place=text))
            os.kill(os.getpid(), signal.SIGKILL)
        self._stand()

    def _stand(self) -> None:
        """Stand still, all of the loop, until the order is taken back."""
        standing = standing_file(self.path)
        self.path.rename(standing)
        ends_s = time.monotonic() + STANDS_S_MAX
        while standing.exists() and time.monotonic() < ends_s:
            time.sleep(LOOK_S)
        standing.unlink(missing_ok=True)


@dataclass(slots=True)
class Spy:
    """What a process of the cluster, whichever, lets the history know."""

    pen: Pen
    name: str
    doom: Doom
    keys: dict[str, str] = field(default_factory=dict[str, str])
    """Job key by what an engine calls the job; only a worker's."""
    acks: dict[str, str] = field(default_factory=dict[str, str])
    """Job key by the subject on which its message is acknowledged."""

    def on(self, bus: Bus) -> Bus:
        """Put the spy around a bus."""
        return cast("Bus", _SpiedBus(bus, self))

    def forget(self, key: str) -> None:
        """A job has ended here."""
        self.keys.pop(key, None)
        self.keys.pop(key.partition(".")[2], None)

    # ---- what a call says of a job ----

    def before(self, operation: str, subject: str, data: bytes) -> None:
        """Write what is about to happen."""
        if operation == "append" and subject.startswith("jobs."):
            self.pen.write(Submitted(at_s=time.time(), job=_job_of(data), by=self.name))
        elif operation == "request" and subject.startswith("work."):
            order = codec.decode_order(data)
            if isinstance(order, Dispatch):
                self._ordered(order, subject.partition(".")[2])

    def after(self, operation: str, subject: str, data: bytes, error: BaseException | None) -> None:
        """Write what happened; what is not known is not written."""
        if operation == "append" and subject.startswith("jobs.") and error is None:
            self.pen.write(Accepted(at_s=time.time(), job=_job_of(data), by=self.name))
        elif operation == "append" and subject.startswith("results."):
            self._recorded(data, error)
        elif operation == "ack" and error is None and subject in self.acks:
            job = self.acks.pop(subject)
            self.pen.write(Acked(at_s=time.time(), job=job, by=self.name))

    def _ordered(self, order: Dispatch, worker: str) -> None:
        key = _job_of(order.job)
        self.pen.write(
            Ordered(at_s=time.time(), job=key, by=self.name, worker=worker, attempt=order.attempt)
        )

    def _recorded(self, data: bytes, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, WrongSequence):
            return
        record = codec.decode(data, TerminalRecord)
        key = job_key(record.lane, record.job)
        self.pen.write(
            Recorded(
                at_s=time.time(), job=key, by=self.name, kind=record.kind.value, won=error is None
            )
        )

    def took(self, order: Dispatch, reply: bytes) -> None:
        """Write down that this worker accepted a job."""
        said = codec.decode(reply, WorkReply)
        if said.answer is not Answer.ACCEPTED:
            return
        job = codec.decode(order.job, Job)
        key = job_key(job.lane, job.id)
        self.keys[key] = key
        self.keys[job.request_id or key] = key
        self.acks[order.ack_subject] = key
        self.pen.write(
            Taken(
                at_s=time.time(),
                job=key,
                worker=self.name,
                life=os.getpid(),
                attempt=order.attempt,
                epoch=order.epoch,
                number=order.number,
                epoch_known=said.epoch,
            )
        )

    def pulled(self, delivery: Delivery) -> None:
        """Write down that this broker holds a job, and note where it may acknowledge it itself."""
        try:
            job = _job_of(delivery.data)
        except codec.MalformedMessage:
            return
        self.acks[delivery.ack_subject] = job
        self.pen.write(Held(at_s=time.time(), job=job, by=self.name))


def a_spy(*, folder: Path, name: str) -> Spy:
    """Make the spy of a process whose history and orders stand in `folder`."""
    pen = Pen(folder, name)
    return Spy(pen, name, Doom(orders_file(folder, name), pen, name))


def orders_file(folder: Path, name: str) -> Path:
    """Name the file in which a process is told where to die or stand."""
    return folder / f"{name}.doom"


def standing_file(orders: Path) -> Path:
    """Name what the file of orders becomes when the process stands at its place."""
    return orders.with_suffix(".standing")


class _SpiedBus:
    def __init__(self, bus: Bus, spy: Spy) -> None:
        self._bus = bus
        self._spy = spy
        self._heard: tuple[str, Dispatch] | None = None
        """The order that is being answered, and where."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the real bus has
        real = getattr(self._bus, name)
        return self._around(name, real) if name in CALLS else real

    def _around(self, name: str, real: Callable[..., Awaitable[Any]]) -> Any:  # noqa: ANN401 - as above
        spy = self._spy

        async def call(*args: Any, **fields: Any) -> Any:  # noqa: ANN401 - as above
            subject = str(args[0])
            data = args[1] if len(args) > 1 and isinstance(args[1], bytes) else b""
            spy.before(name, subject, data)
            if name == "publish" and self._heard is not None and subject == self._heard[0]:
                # Before it leaves: the broker may act on it before we write.
                spy.took(self._heard[1], data)
            spy.doom.look(name, "before", subject)
            error: BaseException | None = None
            try:
                return await real(*args, **fields)
            except BaseException as raised:
                error = raised
                raise
            finally:
                spy.after(name, subject, data, error)
                spy.doom.look(name, "after", subject)

        return call

    async def subscribe(
        self, subject: str, handler: HandleMessage, *, queue: str = ""
    ) -> Subscription:
        """Hear a subject, and know which order is being answered."""
        spy = self._spy

        async def hear(message: Message) -> None:
            self._heard = _order_in(message)
            spy.doom.look("hear", "before", subject)
            waiting = handler(message)
            if waiting is not None:
                await waiting
            spy.doom.look("hear", "after", subject)

        return await self._bus.subscribe(subject, hear, queue=queue)

    async def pull(
        self, stream: str, consumer: str, handler: HandleDeliveries, *, window: int
    ) -> Pull:
        """Pull, and know what comes."""
        spy = self._spy

        def take(deliveries: list[Delivery]) -> None:
            for delivery in deliveries:
                spy.pulled(delivery)
            spy.doom.look("deliver", "before", stream)
            handler(deliveries)
            spy.doom.look("deliver", "after", stream)

        return await self._bus.pull(stream, consumer, take, window=window)


def _order_in(message: Message) -> tuple[str, Dispatch] | None:
    if not (message.subject.startswith("work.") and message.reply):
        return None
    try:
        order = codec.decode_order(message.data)
    except codec.MalformedMessage:
        return None
    return (message.reply, order) if isinstance(order, Dispatch) else None


def _job_of(data: bytes) -> str:
    job = codec.decode(data, Job)
    return job_key(job.lane, job.id)
