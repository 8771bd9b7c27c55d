"""Every minute and on demand: ledger ↔ consumers' un-acked ↔ the streams' own counts.

The core compares its leases with every heartbeat; what is done here is the rest: jobs held that the
mind does not know, jobs held whose message is gone, deliveries nobody holds, messages that their
consumer will never deliver, messages that have no consumer at all, and streams and buckets that are
gone.

All sides move while they are counted, so a count only raises suspicion. It becomes a difference
where it stays through several looks: what is gone or unheld is followed message by message, and
what is undelivered is counted in both orders.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from broker.bus.base import Bus, BusError, ConsumerSpec, ConsumerState, NotFound
from broker.service.held import Held, MessageId, Shelf
from broker.service.loop import Loop
from broker.service.snapshot import sliced
from broker.service.stages import Stage
from broker.wire.subjects import JobAddress

LOOKUPS_MAX = 200
"""Messages looked up one by one for one queue in a single pass; the rest waits for the next."""

LOOKS = 4
"""How often a suspicion is looked at again before it is believed."""

LOOK_AGAIN_S = 0.5
"""Between two looks: over all of them, each worker has told its finished jobs in a heartbeat."""

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


@dataclass(slots=True)
class _Known:
    """Messages of one queue that we hold or know to run."""

    jobs: list[Held] = field(default_factory=list[Held])
    messages: set[MessageId] = field(default_factory=set[MessageId])


@dataclass(slots=True)
class _Suspicion:
    """What may be wrong with one queue."""

    name: str
    address: JobAddress
    spec: ConsumerSpec
    gone: list[Held]
    """Held, and not in the stream."""
    unheld: list[int]
    """In the stream, delivered, and held by nobody."""
    undelivered: int
    """In the stream, and neither delivered nor to be delivered."""

    def __bool__(self) -> bool:
        """Say whether anything is left of it."""
        return bool(self.gone or self.unheld or self.undelivered)


@dataclass(slots=True)
class Reconciler:
    """Compares and repairs."""

    bus: Bus
    loop: Loop
    shelf: Shelf
    queues: Mapping[JobAddress, ConsumerSpec]
    found: Callable[[str], None]
    """Called with the kind of each difference."""
    alarm_jobs: int
    alarm_ratio: float
    find_orphans: Callable[[], Awaitable[list[JobAddress]]]
    """Finds queues with messages that no consumer would ever deliver, and takes them up."""
    restore: Callable[[], Awaitable[list[str]]]
    """Makes anew what somebody deleted at the server; returns its streams."""
    forget: Callable[[str], None]
    """Called with the key of a job whose message is gone: its record stands."""
    look_again_s: float = LOOK_AGAIN_S
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)
    _wanted: asyncio.Event = field(default_factory=asyncio.Event)

    def soon(self) -> None:
        """Reconcile now: what was on its way when a link broke would else wait for its ack-wait."""
        self._wanted.set()

    async def run(self, *, every_s: float) -> None:
        """Reconcile each `every_s`, and when asked by `soon`, until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await self._wanted.wait()
            self._wanted.clear()
            try:
                await self.reconcile()
            except BusError as error:
                _log.warning("reconcile.failed", error=str(error))

    async def reconcile(self) -> Report:
        """Do one pass. Raises BusError when the server can't be asked."""
        async with self._one_at_a_time:
            return await self._pass()

    async def _pass(self) -> Report:
        checked = len(self.shelf)
        # Without one of them all that follows would end in an error, for all lanes.
        differences = [Found("stream_gone", name) for name in await self.restore()]
        differences += await self._unknown()
        differences += [Found("orphaned", _name(one)) for one in await self.find_orphans()]
        suspicions = await self._suspect(differences)
        for look in range(LOOKS):
            if not suspicions:
                break
            await asyncio.sleep(self.look_again_s)
            known = await self._by_subject()
            for suspicion in suspicions:
                await self._look_again(suspicion, known, look=look)
            suspicions = [one for one in suspicions if one and one.address in self.queues]
        for suspicion in suspicions:
            differences += await self._repair(suspicion)
        for found in differences:
            self.found(found.kind)
            _log.warning(
                "reconcile.difference", kind=found.kind, job=found.key, detail=found.detail
            )
        if len(differences) >= max(self.alarm_jobs, self.alarm_ratio * checked):
            _log.error("reconcile.alarm", differences=len(differences), checked_jobs=checked)
            self.found("alarm")
        return Report(checked, tuple(differences))

    # ---- the shelf and the mind ----

    async def _unknown(self) -> list[Found]:
        """Let go of held jobs that the mind does not know: not renewed, they come again."""
        suspects = [held async for held in sliced(self.shelf.jobs()) if self._is_unknown(held)]
        if not suspects:
            return []
        await self._all_told()
        found: list[Found] = []
        for held in suspects:
            if self._is_unknown(held):
                self.shelf.remove(held.key)
                found.append(Found("held_unknown", held.key))
        return found

    def _is_unknown(self, held: Held) -> bool:
        return (
            held.stage is not Stage.CLOSING
            and self.shelf.get(held.key) is held
            and not self.loop.scheduler.is_known(held.key)
        )

    async def _all_told(self) -> None:
        """Wait until the loop has handled all that it was told before."""
        told = asyncio.Event()
        self.loop.call(told.set)
        await told.wait()

    async def _by_subject(self) -> dict[str, _Known]:
        """Sort what is held by queue, in one pass."""
        known: dict[str, _Known] = {}
        async for held in sliced(self.shelf.jobs()):
            of_queue = known.setdefault(held.subject, _Known())
            of_queue.jobs.append(held)
            of_queue.messages.add(held.message_id)
            for twin in held.duplicates.values():
                known.setdefault(twin.subject, _Known()).messages.add((twin.stream, twin.sequence))
            for message_id, behind in held.behind.items():
                known.setdefault(behind.delivery.subject, _Known()).messages.add(message_id)
        return known

    # ---- the shelf and the server ----

    async def _suspect(self, differences: list[Found]) -> list[_Suspicion]:
        """Count each queue on all sides."""
        known = await self._by_subject()
        suspicions: list[_Suspicion] = []
        for address, spec in list(self.queues.items()):
            name, of_queue = _name(address), known.get(spec.filter_subject, _Known())
            try:
                state = await self.bus.consumer_state(spec.stream, spec.name)
            except NotFound:
                if address not in self.queues:
                    continue  # It was removed meanwhile, empty.
                await self.bus.ensure_consumer(spec)
                differences.append(Found("consumer_gone", name))
                continue
            suspicion = _Suspicion(name, address, spec, [], [], 0)
            try:
                suspicion.undelivered = await self._undelivered(spec)
            except NotFound:
                continue
            if len(of_queue.messages) > state.ack_pending:
                suspicion.gone = await self._gone(of_queue.jobs)
            elif len(of_queue.messages) < state.ack_pending:
                suspicion.unheld = await self._unheld(spec, state, of_queue)
            if suspicion:
                suspicions.append(suspicion)
        return suspicions

    async def _look_again(
        self, suspicion: _Suspicion, known: Mapping[str, _Known], *, look: int
    ) -> None:
        """Drop what has proved to be only on its way."""
        spec = suspicion.spec
        held = known.get(spec.filter_subject, _Known()).messages
        suspicion.gone = [one for one in suspicion.gone if self._is_held(one)]
        suspicion.unheld = [one for one in suspicion.unheld if (spec.stream, one) not in held]
        if suspicion.undelivered:
            again = await self._undelivered(spec, state_first=look % 2 == 0)
            suspicion.undelivered = min(suspicion.undelivered, again)

    async def _repair(self, suspicion: _Suspicion) -> list[Found]:
        """Put right what stayed wrong."""
        spec, name = suspicion.spec, suspicion.name
        found: list[Found] = []
        for held in await self._gone(suspicion.gone):
            self.forget(held.key)
            found.append(Found("held_gone", held.key))
        unheld = [one for one in suspicion.unheld if await self._is_stored(spec.stream, one)]
        if suspicion.undelivered:
            await self.bus.ensure_consumer(spec, recreate=True)
            found.append(Found("undelivered", name, detail=f"{suspicion.undelivered} messages"))
        elif unheld:
            await self.bus.reset_consumer(spec.stream, spec.name)
        found += [Found("delivered_unheld", name, detail=f"message {one}") for one in unheld]
        return found

    async def _gone(self, jobs: Sequence[Held]) -> list[Held]:
        """Pick the held jobs whose message left its stream: by the rule of removal, they ended."""
        return [
            held
            for held in jobs[:LOOKUPS_MAX]
            if not await self._is_stored(held.stream, held.sequence) and self._is_held(held)
        ]

    def _is_held(self, held: Held) -> bool:
        return self.shelf.get(held.key) is held and held.stage is not Stage.CLOSING

    async def _unheld(self, spec: ConsumerSpec, state: ConsumerState, known: _Known) -> list[int]:
        """Pick messages, oldest first, that were delivered to nobody that is left."""
        unheld: list[int] = []
        looked = 0
        async for message in self.bus.messages(spec.stream, subject=spec.filter_subject):
            looked += 1
            if looked > LOOKUPS_MAX or message.sequence > state.delivered_sequence:
                break
            if (spec.stream, message.sequence) not in known.messages:
                unheld.append(message.sequence)
        return unheld

    async def _undelivered(self, spec: ConsumerSpec, *, state_first: bool = False) -> int:
        """Count messages that the consumer neither has delivered nor will.

        What comes and goes between the two questions shows as more in one order of asking and as
        less in the other.
        """
        if state_first:
            state = await self.bus.consumer_state(spec.stream, spec.name)
            stored = await self._stored(spec)
        else:
            stored = await self._stored(spec)
            state = await self.bus.consumer_state(spec.stream, spec.name)
        return max(0, stored - state.pending - state.ack_pending)

    async def _stored(self, spec: ConsumerSpec) -> int:
        counts = await self.bus.subject_counts(spec.stream, subject=spec.filter_subject)
        return counts.get(spec.filter_subject, 0)

    async def _is_stored(self, stream: str, sequence: int) -> bool:
        try:
            await self.bus.message_at(stream, sequence)
        except NotFound:
            return False
        return True


def _name(address: JobAddress) -> str:
    return f"{address.lane}.{address.band}.{address.model}"
