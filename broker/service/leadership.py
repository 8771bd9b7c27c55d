"""One leadership: made when the key is won, run until it is lost, dropped whole and silently."""

import asyncio
import random
from collections.abc import Callable
from functools import partial

import structlog

from broker.bus.base import Bus, BusError, Delivery, Pull
from broker.core.events import DispatchAllowed, LinkChanged
from broker.core.routing import make_router
from broker.core.scheduler import Scheduler
from broker.service.attempts import AttemptBook
from broker.service.closer import Closer, Ending
from broker.service.config import Config
from broker.service.control import Control
from broker.service.election import Election, Term
from broker.service.endings import Endings
from broker.service.fleet import Fleet
from broker.service.held import Shelf, Stage
from broker.service.intake import Intake, open_pull
from broker.service.learned import Learned
from broker.service.loop import Loop, Observer
from broker.service.offer import publish_offers
from broker.service.outbox import Outbox
from broker.service.queues import queue_consumers, window_of
from broker.service.reconcile import Reconciler
from broker.service.recovery import collect_inventories, reset_queues
from broker.service.snapshot import SnapshotSource
from broker.service.views import lane_states
from broker.wire import subjects
from broker.wire.codec import encode
from broker.wire.messages import TerminalRecord
from broker.wire.subjects import JobAddress

QUEUE_STATE_S = 1.0
"""How often clients hear the state of their lane's queues."""

LEARNED_S = 5.0
"""How often clients may hear a better figure of a model's bytes per token."""

RENEWALS_PER_TURN_MAX = 256
"""Renewals sent without giving way: about half a millisecond of work."""

DEPTH_POLLS_MAX = 32
"""Queues asked for their depth at once."""

_log = structlog.get_logger(__name__)


class Leadership:
    """Everything that exists only while this broker leads."""

    def __init__(
        self,
        bus: Bus,
        fleet: Fleet,
        config: Config,
        term: Term,
        *,
        snapshots: SnapshotSource,
        learned: Learned,
        observer: Observer,
        now: Callable[[], float],
    ) -> None:
        """Build the mind and its hands for one epoch."""
        self.term = term
        self._bus = bus
        self._fleet = fleet
        self._config = config
        self._observer = observer
        self._learned = learned
        self._now = now
        self.queues = queue_consumers(config)
        self.shelf = Shelf(
            bytes_max=config.broker.held_bytes_max,
            reserve_ratios=config.broker.held_reserve_ratios,
        )
        self.book = AttemptBook(bus)
        self.scheduler = Scheduler(
            config.policy,
            epoch=term.epoch,
            router=make_router(config.policy.routing),
            rng=random.Random(term.epoch),
        )
        self.loop = Loop(self.scheduler, self.shelf, observer=observer, book=self.book, now=now)
        self.closer = Closer(bus, closed=self._closed)
        self.endings = Endings(self.shelf, self.closer, now=now, tell=self.loop.tell)
        self.outbox = Outbox(
            bus,
            self.shelf,
            self.endings,
            epoch=term.epoch,
            answer_s=config.policy.leases.dispatch_answer_s,
            tell=self.loop.tell,
            now=now,
        )
        self.loop.connect(self.outbox, self.endings, epoch=term.epoch)
        self.intake = Intake(
            self.shelf,
            self.endings,
            tell=self.loop.tell,
            is_running=self.scheduler.is_leased,
            failures=self.book.failures,
            learned=learned,
            malformed=observer.malformed,
            now=now,
        )
        self.reconciler = Reconciler(
            bus=bus,
            loop=self.loop,
            shelf=self.shelf,
            queues=self.queues,
            now=now,
            found=observer.difference,
            alarm_jobs=config.broker.reconcile_alarm_jobs,
            alarm_ratio=config.broker.reconcile_alarm_ratio,
        )
        self.control = Control(
            bus, self.loop, self.shelf, self.endings, self.reconciler, snapshots, now=now
        )
        self._pulls: dict[JobAddress, Pull] = {}
        self.ready = False

    async def run(self, election: Election) -> None:
        """Lead until the key is lost; then stop all at once, dropping held jobs silently."""
        async with asyncio.TaskGroup() as group:
            work = group.create_task(self._lead())
            await election.keep(self.term)
            work.cancel()

    async def _lead(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                self._fleet.listener = self.loop
                for background in (
                    self.loop.run(),
                    self.outbox.run(),
                    self.closer.run(),
                    self.book.run(),
                ):
                    group.create_task(background)
                await self._start()
                group.create_task(self.control.run())
                group.create_task(self.reconciler.run(every_s=self._config.broker.reconcile_s))
                group.create_task(self._renew_held())
                group.create_task(self._publish_states())
                group.create_task(self._publish_learned())
                self.ready = True
                _log.info("leadership.ready", epoch=self.term.epoch, queues=len(self.queues))
        finally:
            self.ready = False
            self._fleet.listener = None
            for pull in self._pulls.values():
                pull.resize(0)

    async def _start(self) -> None:
        """Announce, reset, adopt, pull: in this order."""
        leases = self._config.policy.leases
        marks = await reset_queues(self._bus, self.queues)
        await self.book.load()
        silent = await collect_inventories(
            self._bus,
            self._fleet,
            epoch=self.term.epoch,
            heartbeat_s=leases.heartbeat_s,
            lease_s=leases.lease_s,
            now=self._now,
        )
        _log.info(
            "leadership.adopting",
            epoch=self.term.epoch,
            delivered_before=sum(mark.ack_pending for mark in marks),
            recreated=sum(mark.recreated for mark in marks),
            silent_workers=silent,
        )
        for address in self.queues:
            await self._open(address)
        self.loop.tell(DispatchAllowed(self._now()))

    async def _open(self, address: JobAddress) -> None:
        window = window_of(self._config, address)
        self._pulls[address] = await open_pull(
            self._bus, address, window=window, take=partial(self._taken, address)
        )

    def _taken(self, address: JobAddress, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            self.loop.call(partial(self._take, address, delivery))
        if deliveries:
            pending = deliveries[-1].pending
            self.loop.call(partial(self.intake.depth, address, pending))

    def _take(self, address: JobAddress, delivery: Delivery) -> None:
        self.intake.take(delivery, address, self._pulls[address])

    def _closed(self, ending: Ending, record: TerminalRecord, *, won: bool) -> None:
        held = self.shelf.get(ending.key)
        if held is not None and held.sequence == ending.sequence:
            self.shelf.remove(ending.key)
        self.book.forget(ending.key)
        self._observer.closed(record, won=won)

    def link_changed(self, *, up: bool) -> None:
        """Tell the mind that the broker's own link was lost or is back."""
        self.loop.tell(LinkChanged(self._now(), up))

    async def _renew_held(self) -> None:
        """Start the ack-wait of held jobs anew; running ones are renewed by their agents."""
        renew_s = self._config.broker.renew_s
        while True:
            await asyncio.sleep(renew_s / 20)
            due_before_s = self._now() - renew_s
            sent = 0
            for held in self.shelf.jobs():
                if held.stage is Stage.RUNNING or held.renewed_at_s > due_before_s:
                    continue
                held.renewed_at_s = self._now()
                try:
                    await self._bus.renew(held.ack_subject)
                except BusError:
                    break
                sent += 1
                if sent % RENEWALS_PER_TURN_MAX == 0:
                    await asyncio.sleep(0)

    async def _publish_states(self) -> None:
        while True:
            await asyncio.sleep(QUEUE_STATE_S)
            await self._poll_depths()
            for state in lane_states(self.scheduler, epoch=self.term.epoch, at_s=self._now()):
                self.outbox.mail(subjects.queue_state(state.lane), encode(state))

    async def _poll_depths(self) -> None:
        """Ask for the depth of queues that are not wholly pulled: deliveries tell the others'."""
        deep = [queue for queue in self.scheduler.views.queues() if queue.pending_jobs]
        for queue in deep[:DEPTH_POLLS_MAX]:
            address = JobAddress(queue.lane, queue.band, queue.model)
            spec = self.queues.get(address)
            if spec is None:
                continue
            try:
                state = await self._bus.consumer_state(spec.stream, spec.name)
            except BusError:
                continue
            self.intake.depth(address, state.pending)

    async def _publish_learned(self) -> None:
        """Tell clients what was learned of the models' tokens."""
        while True:
            await asyncio.sleep(LEARNED_S)
            bytes_per_token = self._learned.news()
            if bytes_per_token is None:
                continue
            try:
                await publish_offers(self._bus, self._config, bytes_per_token=bytes_per_token)
            except BusError as error:
                _log.warning("leadership.offer_unsent", error=str(error))
