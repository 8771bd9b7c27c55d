"""The start procedure, first or takeover: announce, reset, collect inventories, adopt, pull.

Without the reset, newer jobs come first and those a dead leader held hide for the ack-wait; with a
paused leader's pull outstanding, a reset would feed *it*, so the consumer is made anew under the
same name then. Whatever the server does not answer is asked again: a leader that has won starts
when the server lets it, or loses its key.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog

from broker.bus.base import (
    Bus,
    BusError,
    ConsumerSpec,
    LinkDown,
    NoResponders,
    NoStream,
    NotFound,
    Timeout,
)
from broker.service.fleet import Fleet
from broker.wire import subjects
from broker.wire.codec import encode
from broker.wire.messages import Inventory
from broker.wire.subjects import JobAddress

ANNOUNCE_S = 0.25
"""Between two announcements while some known worker has not answered."""

HEARTBEATS_HEARD = 1.5
"""Heartbeat intervals after which a listener has heard of every worker that can speak."""

RETRY_S = 0.2

NOT_YET = (Timeout, LinkDown, NoStream, NoResponders, NotFound)
"""What a server in election says, or one that has not heard of another broker's new stream."""

RESETS_AT_ONCE_MAX = 16
"""Consumers reset at the same time: a hundred queues take a tenth of a second at a start."""

_Result = TypeVar("_Result")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class QueueMark:
    """A queue as the last leader left it."""

    address: JobAddress
    delivered_sequence: int
    """High-water mark: messages up to here may have been held or running."""
    ack_pending: int
    recreated: bool


async def reset_queues(bus: Bus, queues: Mapping[JobAddress, ConsumerSpec]) -> list[QueueMark]:
    """Make every queue deliver its un-acknowledged messages again, oldest first, to us alone."""
    room = asyncio.Semaphore(RESETS_AT_ONCE_MAX)

    async def reset(address: JobAddress, spec: ConsumerSpec) -> QueueMark:
        async with room:
            return await until_answered(partial(_reset, bus, address, spec))

    async with asyncio.TaskGroup() as group:
        resets = [group.create_task(reset(address, spec)) for address, spec in queues.items()]
    return [task.result() for task in resets]


async def until_answered(
    step: Callable[[], Awaitable[_Result]], *, passing: tuple[type[BusError], ...] = (BusError,)
) -> _Result:
    """Repeat a step of the start until the server has answered it.

    Raises BusError where it is none of those that are `passing`.
    """
    while True:
        try:
            return await step()
        except passing as error:
            _log.warning("recovery.retry", error=str(error))
        await asyncio.sleep(RETRY_S)


async def _reset(bus: Bus, address: JobAddress, spec: ConsumerSpec) -> QueueMark:
    try:
        state = await bus.consumer_state(spec.stream, spec.name)
    except NotFound:
        await bus.ensure_consumer(spec)
        return QueueMark(address, 0, 0, recreated=True)
    recreate = state.waiting > 0
    if recreate:
        await bus.ensure_consumer(spec, recreate=True)
    elif state.ack_pending:
        await bus.reset_consumer(spec.stream, spec.name)
    return QueueMark(address, state.delivered_sequence, state.ack_pending, recreate)


async def collect_inventories(
    bus: Bus,
    fleet: Fleet,
    *,
    epoch: int,
    heartbeat_s: float,
    lease_s: float,
    now: Callable[[], float],
) -> list[str]:
    """Announce the epoch until every known-live worker has answered with it, or a lease has passed.

    Returns the names of workers that did not answer; their leases can't be adopted, and what they
    run is fenced by epoch and by compare-and-set.
    """
    give_up_at_s = now() + lease_s
    heard_at_s = fleet.listening_since_s + HEARTBEATS_HEARD * heartbeat_s
    while True:
        try:
            await bus.publish(subjects.INVENTORY, encode(Inventory(epoch=epoch)))
        except BusError as error:
            _log.warning("recovery.announce_failed", error=str(error))
        await asyncio.sleep(min(ANNOUNCE_S, heartbeat_s / 4))
        live = fleet.live(within_s=lease_s)
        silent = sorted(word.worker for word in live if word.epoch != epoch)
        if now() >= give_up_at_s or (not silent and now() >= heard_at_s):
            return silent
