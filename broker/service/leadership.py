"""One leadership: made when the key is won, run until it is lost, dropped whole and silently."""

import asyncio
import random
from collections.abc import Callable
from functools import partial

import structlog

from broker.bus import topology
from broker.bus.base import Bus, BusError, ConsumerSpec, Delivery, NoStream
from broker.core.events import DispatchAllowed, LinkChanged, PolicyChanged
from broker.core.routing import make_router
from broker.core.scheduler import Scheduler
from broker.service.accounting import Accounting
from broker.service.announcements import Announcements
from broker.service.attempts import AttemptBook
from broker.service.closer import Closer, Ending
from broker.service.config import Config
from broker.service.control import Control
from broker.service.election import Election, Term
from broker.service.endings import Endings
from broker.service.file_marks import is_declared, write_mark
from broker.service.fleet import Fleet
from broker.service.held import Shelf
from broker.service.intake import Intake
from broker.service.learned import Learned
from broker.service.loop import Loop, Observer
from broker.service.offer import told_bytes_per_token
from broker.service.outbox import Outbox
from broker.service.pulls import Pulls
from broker.service.queues import queue_consumers, results_ages_s, topology_of, window_of
from broker.service.reading import Reader
from broker.service.reconcile import Reconciler
from broker.service.recovery import NOT_YET, collect_inventories, reset_queues, until_answered
from broker.service.redelivered import Redelivered
from broker.service.reload import close, declare, make_first_buckets, offer, withdraw
from broker.service.renewals import Renewals
from broker.service.results_room import ResultsRoom, policy_of
from broker.service.retiring import Retiring, former_queues, with_offered
from broker.service.snapshot import SnapshotSource
from broker.wire import subjects
from broker.wire.ids import job_key
from broker.wire.messages import Job, TerminalRecord
from broker.wire.subjects import JobAddress

LEAVE_S_MAX = 3.0
"""Longest time that giving up the key, and then the pulls, may take: a pull stands for 2 s."""

_log = structlog.get_logger(__name__)


class OldEpoch(Exception):
    """Workers have heard a later leader, and would refuse all orders of this one."""


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
        self.fleet = fleet
        self._config = config
        self._observer = observer
        self._learned = learned
        self._now = now
        self.shelf = _make_shelf(config)
        self.book = AttemptBook(bus)
        self.scheduler = _make_mind(config, term)
        self.loop = Loop(self.scheduler, self.shelf, observer=observer, book=self.book, now=now)
        ages_s = results_ages_s(config)
        self.accounting = Accounting(bus, results_age_s_max=ages_s, hears=observer, now=now)
        self.closer = self._make_closer()
        self.endings = Endings(self.shelf, self.closer, now=now, tell=self.loop.tell)
        self.reader = Reader(bus, learned, call=self.loop.call)
        self.outbox = Outbox(
            bus,
            self.shelf,
            self.endings,
            epoch=term.epoch,
            answer_s=config.policy.leases.dispatch_answer_s,
            tell=self.loop.tell,
            now=now,
            reader=self.reader,
        )
        self.loop.connect(self.outbox, self.endings, epoch=term.epoch)
        self.intake = self._make_intake()
        self.pulls = Pulls(bus, queue_consumers(config), take=self._taken)
        self.retiring = Retiring(bus, self.pulls, config)
        self.reconciler = self._make_reconciler()
        self.control = Control(
            bus, self.loop, self.shelf, self.endings, self.reconciler, snapshots, now=now
        )
        self.renewals = Renewals(bus, self.shelf, renew_s=config.broker.renew_s, now=now)
        self.announcements = Announcements(
            bus,
            config,
            self.scheduler,
            learned,
            epoch=term.epoch,
            mail=self.outbox.mail,
            tell=self.loop.tell,
            now=now,
        )
        self.redelivered = Redelivered(bus, take=self._came, settled=self._ended_before)
        lanes = tuple(lane.name for lane in config.policy.lanes)
        self.results_room = ResultsRoom(bus, lanes, tell=self.loop.tell, now=now)
        self._wanted: tuple[Config, Callable[[bool], None]] | None = None
        self._is_wanted = asyncio.Event()
        self.retires = True
        """Whether what the configuration lacks shall go: a reload has said so."""
        self.ready = False

    def _make_closer(self) -> Closer:
        return Closer(
            self._bus,
            closed=self._closed,
            given_up=self._given_up,
            short_lived=self.accounting.short_lived,
        )

    def _make_intake(self) -> Intake:
        return Intake(
            self.shelf,
            self.endings,
            tell=self.loop.tell,
            is_running=self.scheduler.is_leased,
            book=self.book,
            reader=self.reader,
            counts=self._observer,
            now=self._now,
        )

    def _make_reconciler(self) -> Reconciler:
        return Reconciler(
            bus=self._bus,
            loop=self.loop,
            shelf=self.shelf,
            queues=self.pulls.queues,
            found=self._observer.difference,
            find_orphans=self.retiring.find,
            restore=self._restore,
            forget=self.endings.forget,
            alarm_jobs=self._config.broker.reconcile_alarm_jobs,
            alarm_ratio=self._config.broker.reconcile_alarm_ratio,
        )

    async def run(self, election: Election) -> None:
        """Lead until the key is lost; then stop all at once, dropping held jobs silently.

        However it ends (the key lost, told to stop, a fault of ours), nothing of it works any more
        when the key is given up.
        """
        try:
            async with asyncio.TaskGroup() as group:
                work = group.create_task(self._lead())
                await election.keep(self.term)
                work.cancel()
        except* OldEpoch:
            pass  # It stands for election anew, with a later one.
        finally:
            await self._leave(election)

    async def _leave(self, election: Election) -> None:
        """Hand over: the key first, so that a successor need not wait for the pulls."""
        try:
            async with asyncio.timeout(LEAVE_S_MAX):
                await election.resign()
                await self.pulls.stop()
        except (TimeoutError, BusError, ExceptionGroup) as error:
            # The server drops what is left when pulls run out and the key does.
            _log.warning("leadership.left_unfinished", epoch=self.term.epoch, error=repr(error))

    async def _lead(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                self.fleet.listener = self.loop
                for background in (
                    self.loop.run(),
                    self.reader.run(),
                    self.outbox.run(),
                    self.closer.run(),
                    self.book.run(),
                    self.renewals.run(),
                    self.redelivered.run(),
                ):
                    group.create_task(background)
                await self._start()
                for duty in (
                    self.control.run(),
                    self.reconciler.run(every_s=self._config.broker.reconcile_s),
                    self.announcements.publish_states(),
                    self.announcements.poll_depths(self.pulls.queues),
                    self.results_room.run(),
                    self.announcements.publish_learned(),
                    self.accounting.run(),
                    self.retiring.run(),
                    self._reload_when_wanted(),
                    self._until_outdated(),
                ):
                    group.create_task(duty)
                self.ready = True
                _log.info("leadership.ready", epoch=self.term.epoch, queues=len(self.pulls.queues))
        finally:
            self.ready = False
            self.fleet.listener = None
            self.pulls.pause()

    async def _start(self) -> None:
        """Announce, reset, adopt, pull: in this order."""
        leases = self._config.policy.leases
        await until_answered(self._declare_own, passing=NOT_YET)
        former = await self._former()
        marks = await reset_queues(self._bus, {**self.pulls.queues, **former})
        self.redelivered.expect({one.address: one.delivered_sequence for one in marks})
        await self.book.load()
        self._learned.resume(
            await until_answered(lambda: told_bytes_per_token(self._bus, self._config))
        )
        silent = await collect_inventories(
            self._bus,
            self.fleet,
            epoch=self.term.epoch,
            heartbeat_s=leases.heartbeat_s,
            lease_s=leases.lease_s,
            now=self._now,
        )
        if self.fleet.newest_epoch > self.term.epoch:
            raise self._old_epoch()
        _log.info(
            "leadership.adopting",
            epoch=self.term.epoch,
            delivered_before=sum(mark.ack_pending for mark in marks),
            recreated=sum(mark.recreated for mark in marks),
            silent_workers=silent,
        )
        for lane in self.results_room.lanes:
            await until_answered(partial(self.results_room.look, lane))
        for address, spec in list(self.pulls.queues.items()):
            await until_answered(partial(self._open, address, spec))
        await until_answered(lambda: self.retiring.take(former))
        self.loop.tell(DispatchAllowed(self._now()))

    async def _until_outdated(self) -> None:
        """Wait for a worker that knows of a later leader, as one that was silent at our start."""
        await self.fleet.until_later(self.term.epoch)
        raise self._old_epoch()

    def _old_epoch(self) -> OldEpoch:
        _log.error(
            "leadership.outdated",
            epoch=self.term.epoch,
            epoch_known=self.fleet.newest_epoch,
            why="the server lost its store, or another broker leads; standing for election anew",
        )
        return OldEpoch()

    async def _declare_own(self) -> None:
        """Bring the server to our file, where it stands at another's. Raises BusError.

        What our file lacks is taken away only where a reload has said so.
        """
        try:
            if await is_declared(self._bus, self._config):
                return
        except NoStream:  # Of marks and offers.
            await make_first_buckets(self._bus, self._config)
        await self._declare_anew()

    async def _restore(self) -> list[str]:
        """Make anew what somebody deleted; returns its streams. Raises BusError."""
        async with self.retiring.still:
            gone = await topology.absent(self._bus, topology_of(self._config))
            if gone:
                _log.error("leadership.streams_gone", streams=gone)
                await make_first_buckets(self._bus, self._config)
                await self._declare_anew()
        return gone

    async def _declare_anew(self) -> None:
        config = self._config if self.retires else await with_offered(self._bus, self._config)
        await declare(self._bus, config)
        await offer(self._bus, config)
        await write_mark(self._bus, self._config)

    async def _former(self) -> dict[JobAddress, ConsumerSpec]:
        """Shut the door of queues that shall go, and find what waits there."""
        if not self.retires:
            await until_answered(self.retiring.leave_alone)
        if self.retiring.lacking:
            _log.error("leadership.file_lacks_queues", queues=self.retiring.lacking)
            return {}
        await until_answered(lambda: close(self._bus, self._config))
        await until_answered(lambda: withdraw(self._bus, self._config))
        return await until_answered(lambda: former_queues(self._bus, self._config))

    async def _open(self, address: JobAddress, spec: ConsumerSpec) -> None:
        await self.pulls.open(address, spec, window=window_of(self._config, address))

    def reload(self, config: Config, *, done: Callable[[bool], None]) -> None:
        """Take a new configuration soon; a newer one comes first.

        Calls `done(True)` when it counts, `done(False)` when the server refused it and nothing has
        changed.
        """
        self._wanted = (config, done)
        self._is_wanted.set()

    async def _reload_when_wanted(self) -> None:
        while True:
            await self._is_wanted.wait()
            self._is_wanted.clear()
            assert self._wanted is not None, "set before the event"
            config, done = self._wanted
            try:
                await self._reload(config)
            except BusError as error:
                _log.error("reload.refused", error=str(error))
                self._observer.loop_error("reload")
                done(False)  # noqa: FBT003 - its one argument
            else:
                done(True)  # noqa: FBT003 - its one argument

    async def _reload(self, config: Config) -> None:
        """Subjects, consumers, rules, pulls, offers: see `reload`. Raises BusError."""
        queues = queue_consumers(config)
        async with self.retiring.still:
            await declare(self._bus, config)
            await close(self._bus, config)
            gone = [address for address in self.pulls.queues if address not in queues]
            gone += await self._no_more_lacking(config)
            self._config = self.retiring.config = config
            self.loop.tell(PolicyChanged(self._now(), policy_of(config)))
            self.announcements.reconfigured(config)
            self.results_room.lanes = tuple(lane.name for lane in config.policy.lanes)
            self.accounting.reconfigured(results_ages_s(config))
            self.retiring.stay(queues)
            for address, spec in queues.items():
                await until_answered(partial(self._open, address, spec))
            await until_answered(lambda: self.retiring.take(gone))
            await until_answered(lambda: offer(self._bus, config))
            await until_answered(lambda: withdraw(self._bus, config))
            await until_answered(lambda: write_mark(self._bus, config))
        _log.info("reload.done", queues=len(queues), leaving=len(gone))

    async def _no_more_lacking(self, config: Config) -> list[JobAddress]:
        """List queues that were left alone until now; what a dead leader held comes at once."""
        if not self.retiring.lacking:
            return []
        former = await former_queues(self._bus, config)
        await reset_queues(self._bus, former)
        self.retiring.lacking = ()
        return list(former)

    def _taken(self, address: JobAddress, deliveries: list[Delivery]) -> None:
        self.redelivered.came(address, deliveries)
        if deliveries:
            pending = deliveries[-1].pending
            self.loop.call(partial(self.intake.depth, address, pending))

    def _came(self, address: JobAddress, delivery: Delivery) -> None:
        self.loop.call(partial(self._take, address, delivery))

    def _ended_before(
        self, address: JobAddress, delivery: Delivery, job: Job, record: TerminalRecord
    ) -> None:
        """Acknowledge a job whose record stood before we led, unless somebody runs it."""
        key = job_key(job.lane, job.id)
        if key in self.shelf or self.scheduler.is_known(key):
            self._came(address, delivery)
            return
        self.pulls.of(address).release()
        self.endings.ended_before(delivery, job)
        self._observer.closed(record, won=False)

    def _take(self, address: JobAddress, delivery: Delivery) -> None:
        self.intake.take(delivery, address, self.pulls.of(address))

    def _closed(self, ending: Ending, record: TerminalRecord, *, won: bool) -> None:
        """Forget a job whose message is gone, behind all that was delivered before."""
        self.loop.call(partial(self._forget, ending, record, won=won))

    def _forget(self, ending: Ending, record: TerminalRecord, *, won: bool) -> None:
        held = self.shelf.get(ending.key)
        is_other = held is not None and held.message_id != (ending.stream, ending.sequence)
        never_sent = held is not None and not is_other and held.sent is None
        self._observer.closed(record, won=won, job=held.spec if held and never_sent else None)
        if is_other:
            return
        self.book.forget(ending.key)
        if self.scheduler.is_known(ending.key):
            # It was cancelled in its stream, and pulled meanwhile. At once, or it may still go.
            self.loop.forget(ending.key)
        if held is not None:
            behind, held.behind = held.behind, {}
            self.shelf.remove(ending.key)
            for one in behind.values():
                address = subjects.parse_jobs(one.delivery.subject)
                self.loop.call(partial(self.intake.take, one.delivery, address, one.pull))

    def _given_up(self, key: str) -> None:
        """Let go of a job that could not be ended: not renewed, its message comes again."""
        self._observer.loop_error("closer")
        self.loop.call(partial(self.shelf.remove, key))

    def link_changed(self, *, up: bool) -> None:
        """Tell the mind that the broker's own link was lost or is back."""
        self.loop.tell(LinkChanged(self._now(), up))
        if up:
            self.reconciler.soon()


def _make_shelf(config: Config) -> Shelf:
    broker = config.broker
    return Shelf(bytes_max=broker.held_bytes_max, reserve_ratios=broker.held_reserve_ratios)


def _make_mind(config: Config, term: Term) -> Scheduler:
    policy = policy_of(config)
    router, rng = make_router(policy.routing), random.Random(term.epoch)
    return Scheduler(policy, epoch=term.epoch, router=router, rng=rng)
