"""Every minute and on demand: ledger ↔ consumers' un-acked ↔ the streams' own counts.

The core compares its leases with every heartbeat; what is done here is the rest: leases nobody
reports, jobs held
whose message is gone, deliveries nobody holds, and messages that no consumer will ever deliver. A
difference that
may be a message in flight counts only when a second look finds it again.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog

from broker.bus.base import Bus, BusError, ConsumerSpec, NotFound
from broker.core.events import JobEnded
from broker.service.held import Held, Shelf, Stage
from broker.service.loop import Loop
from broker.wire.subjects import JobAddress

GONE_LOOKUPS_MAX = 200
"""Jobs looked up one by one in a single pass; the rest waits for the next."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """One difference, repaired."""

    kind: str
    key: str
    worker: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What one pass compared, and what it found and repaired."""

    checked_jobs: int
    differences: tuple[Found, ...] = ()


@dataclass(frozen=True, slots=True)
class _Count:
    """One queue counted on both sides."""

    address: JobAddress
    known: int
    """Messages of the queue that we hold or know to run."""
    ack_pending: int
    pending: int
    stored: int


@dataclass(slots=True)
class Reconciler:
    """Compares and repairs."""

    bus: Bus
    loop: Loop
    shelf: Shelf
    queues: Mapping[JobAddress, ConsumerSpec]
    now: Callable[[], float]
    found: Callable[[str], None]
    """Called with the kind of each difference."""
    alarm_jobs: int
    alarm_ratio: float
    _suspected: dict[tuple[str, JobAddress], int] = field(
        default_factory=dict[tuple[str, JobAddress], int]
    )
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, *, every_s: float) -> None:
        """Reconcile each `every_s` until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.reconcile()
            except BusError as error:
                _log.warning("reconcile.failed", error=str(error))

    async def reconcile(self) -> Report:
        """Do one pass. Raises BusError when the server can't be asked."""
        async with self._one_at_a_time:
            return await self._pass()

    async def _pass(self) -> Report:
        differences: list[Found] = []
        for address, spec in self.queues.items():
            count = await self._count(address, spec)
            if count is not None:
                differences += await self._repair(count, spec)
        for found in differences:
            self.found(found.kind)
            _log.warning(
                "reconcile.difference", kind=found.kind, job=found.key, detail=found.detail
            )
        checked = len(self.shelf)
        if len(differences) >= max(self.alarm_jobs, self.alarm_ratio * checked):
            _log.error("reconcile.alarm", differences=len(differences), checked_jobs=checked)
            self.found("alarm")
        return Report(checked, tuple(differences))

    async def _count(self, address: JobAddress, spec: ConsumerSpec) -> _Count | None:
        try:
            state = await self.bus.consumer_state(spec.stream, spec.name)
        except NotFound:
            await self.bus.ensure_consumer(spec)
            return None
        subject = spec.filter_subject
        stored = (await self.bus.subject_counts(spec.stream, subject=subject)).get(subject, 0)
        known = sum(1 + len(held.duplicates) for held in self._of(address))
        return _Count(address, known, state.ack_pending, state.pending, stored)

    async def _repair(self, count: _Count, spec: ConsumerSpec) -> list[Found]:
        differences = await self._gone(count) if count.known > count.ack_pending else []
        undelivered = count.stored - count.pending - count.ack_pending
        if self._seen_twice("undelivered", count.address, undelivered):
            await self.bus.ensure_consumer(spec, recreate=True)
            differences.append(Found("undelivered", _name(count.address), "", f"{undelivered}"))
        unheld = count.ack_pending - count.known
        if self._seen_twice("delivered_unheld", count.address, unheld):
            await self.bus.reset_consumer(spec.stream, spec.name)
            differences.append(Found("delivered_unheld", _name(count.address), "", f"{unheld}"))
        return differences

    def _seen_twice(self, kind: str, address: JobAddress, jobs: int) -> bool:
        """Say whether this difference stood at the last pass too: else it may be in flight."""
        if jobs <= 0:
            self._suspected.pop((kind, address), None)
            return False
        before = self._suspected.pop((kind, address), 0)
        if before:
            return True
        self._suspected[kind, address] = jobs
        return False

    async def _gone(self, count: _Count) -> list[Found]:
        """Find held jobs whose message left its stream, and forget them: their record stands."""
        gone: list[Found] = []
        suspects = [held for held in self._of(count.address) if held.stage is not Stage.CLOSING]
        for held in suspects[:GONE_LOOKUPS_MAX]:
            try:
                await self.bus.message_at(held.stream, held.sequence)
            except NotFound:
                if self.shelf.get(held.key) is held and held.stage is not Stage.CLOSING:
                    self.loop.tell(JobEnded(self.now(), held.key))
                    gone.append(Found("held_gone", held.key))
        return gone

    def _of(self, address: JobAddress) -> list[Held]:
        return [
            held
            for held in self.shelf.jobs()
            if (held.lane, held.band, held.model) == (address.lane, address.band, address.model)
        ]


def totals(report: Report) -> dict[str, int]:
    """Count a report's differences by kind."""
    return dict(Counter(found.kind for found in report.differences))


def _name(address: JobAddress) -> str:
    return f"{address.lane}.{address.band}.{address.model}"
