"""The worker agent: takes orders for one engine, runs what it accepts, and tells what it does.

It pulls nothing: a broker sends orders, each answered at once. Whose orders count is the fence's
word, what runs is the ledger's, how one attempt lives is `attempt`'s. Bus and engine come from
outside, so a test may hand in either with faults.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict
from typing import TYPE_CHECKING

import structlog
from msgspec.structs import replace

from broker.bus.base import Bus, BusError, Message, NotFound, Subscription
from broker.wire import codec, subjects
from broker.wire.fields import Count
from broker.wire.messages import Heartbeat, Inventory, Leader, Load, Reason, Record
from worker_agent.acks import Acks
from worker_agent.attempt import Attempts
from worker_agent.cache_model import CacheLimits, CacheModel
from worker_agent.config import WorkerConfig
from worker_agent.engine.base import Engine, Facts
from worker_agent.engine.tokenizer import Tokenizing
from worker_agent.engine_watch import EngineWatch
from worker_agent.fence import Fence
from worker_agent.heartbeat import Report
from worker_agent.ledger import Ledger, Running, Stop
from worker_agent.models import ModelNames
from worker_agent.notes import Notes
from worker_agent.orders import Effects, OrderDesk
from worker_agent.records import RecordWriter, backoff_s
from worker_agent.supervised import Supervisor

if TYPE_CHECKING:
    from worker_agent.kv_events import KvEvents

_log = structlog.get_logger(__name__)

NOTICE_CHARS_MAX = 256
"""Of a heartbeat's notice, `ShortText` on the wire."""


class Superseded(Exception):
    """A newer agent runs under this worker's name: this one must not go on."""


class _Life(Record, frozen=True, kw_only=True):
    """What a heartbeat says of whose it is; the rest is not decoded."""

    incarnation: Count


class Agent:
    """One worker."""

    def __init__(
        self,
        *,
        config: WorkerConfig,
        bus: Bus,
        engine: Engine,
        now_s: Callable[[], float] = time.time,
        version: str = "",
    ) -> None:
        self.config = config
        self.incarnation = round(now_s() * 1000)
        self.up = asyncio.Event()
        """Set once orders are heard."""
        self.on_urgent: Callable[[], None] = lambda: None
        """Called when the next heartbeat should not wait for its time."""
        self.fence = Fence()
        self.ledger = _make_ledger(config)
        self._bus = bus
        self._now_s = now_s
        self._version = version
        self._names = ModelNames(config.models)
        self._cache = CacheModel(_cache_limits(config))
        self._kv_events = _make_kv_events(config, engine, self._cache)
        self.watch = self._make_watch(engine)
        self._notes = Notes(bus, worker=config.worker, incarnation=self.incarnation)
        self._acks = _make_acks(config, bus, self.ledger)
        writer = self._make_writer()
        self._supervisor = Supervisor(
            engine=engine,
            writer=writer,
            cache=self._cache,
            notes=self._notes,
            names=self._names,
            kv_events=self._kv_events,
            check_s_max=config.check_s_max,
            now_s=now_s,
        )
        self._attempts = Attempts(
            worker=config.worker,
            ledger=self.ledger,
            supervisor=self._supervisor,
            writer=writer,
            acks=self._acks,
            notes=self._notes,
            has_died=self.watch.has_died,
            now_s=now_s,
        )
        self._desk = OrderDesk(
            fence=self.fence,
            ledger=self.ledger,
            watch=self.watch,
            names=self._names,
            incarnation=self.incarnation,
            effects=Effects(self._begin, self._supervisor.stop, self._drain_ordered),
            now_s=now_s,
        )
        self._waiting_records: Counter[str] = Counter()
        """Records that a full results stream refuses, by lane."""
        self._leaving = asyncio.Event()
        self._link_is_up = asyncio.Event()
        self._lives: set[asyncio.Task[None]] = set()
        self._spawn: Callable[[Coroutine[None, None, None]], asyncio.Task[None]] | None = None
        self._is_superseded = False
        self._drain_changed = asyncio.Event()
        self._engine_incarnation = 0
        self._reports = 0
        self._drained = False
        self._has_seen_decoding = False
        """Until then the engine's own figure counts, though it holds other prompts' prefill."""

    def _make_watch(self, engine: Engine) -> EngineWatch:
        return EngineWatch(
            engine,
            poll_s=self.config.poll_s,
            poll_s_max=self.config.poll_s_max,
            on_change=self._engine_changed,
            on_facts=self._engine_told,
        )

    def _make_writer(self) -> RecordWriter:
        return RecordWriter(
            self._bus,
            retry_base_s=self.config.retry_base_s,
            retry_s_max=self.config.retry_s_max,
            call_s_max=self.config.call_s_max,
            on_full=self._results_full,
            on_room=self._results_have_room,
        )

    # ---- life ----

    async def run(self) -> None:
        """Serve until `leave` was called and what ran has ended. Cancelling it aborts all at once.

        Raises Superseded when a newer agent took this worker's name.
        """
        self._bus.on_link(self._link_changed)
        await self.watch.ask()
        async with asyncio.TaskGroup() as group:
            self._spawn = group.create_task
            duties = [
                group.create_task(_kept_up(duty, pause_s=self.config.duty_pause_s))
                for duty in (
                    self.watch.run,
                    self._acks.renew,
                    self._acks.retry,
                    self._follow_leader,
                    self._age_cache,
                    *([self._kv_events.run] if self._kv_events else []),
                )
            ]
            try:
                await self._serve()
            finally:
                # Also when cancelled: an order that comes while all ends is refused.
                self._desk.is_leaving = True
            for task in (*duties, *self._lives):
                task.cancel()
        if self._is_superseded:
            message = (
                f"another agent runs as worker {self.config.worker} and started later: "
                "give each worker a name of its own"
            )
            raise Superseded(message)

    async def _serve(self) -> None:
        subscriptions = await self._listen()
        await self._are_heard()
        self.up.set()
        self.on_urgent()
        await self._leaving.wait()
        await self._empty()
        for subscription in subscriptions:
            await subscription.unsubscribe()

    def leave(self) -> None:
        """Take nothing new, finish what runs within `drain_s_max`, hand the rest back, end."""
        self._desk.is_leaving = True
        self._leaving.set()
        self.on_urgent()

    async def _listen(self) -> list[Subscription]:
        if not await self._learn_epoch():
            self._link_is_up.set()
        worker = self.config.worker
        return [
            await self._bus.subscribe(subjects.heartbeat(worker), self._heard_heartbeat),
            await self._bus.subscribe(subjects.INVENTORY, self._heard_inventory),
            await self._bus.subscribe(subjects.work(worker), self._heard_order),
        ]

    async def _are_heard(self) -> None:
        """Wait until the server knows our subscriptions: an order sent before reaches nobody."""
        for pause_s in backoff_s(
            base_s=self.config.retry_base_s, longest_s=self.config.retry_s_max
        ):
            if self._leaving.is_set():
                return
            try:
                await self._bus.rtt_s(timeout_s=self.config.call_s_max)
            except BusError as error:
                _log.warning("orders are not heard yet", error=repr(error))
                await asyncio.sleep(pause_s)
            else:
                return

    async def _empty(self) -> None:
        """Let what runs end, then hand it back, then let acks follow: each within a bound."""
        await self._drain()
        for running in list(self.ledger.running.values()):
            self._supervisor.stop(running, Stop(Reason.HANDED_BACK))
        await self._lives_end(self.config.leave_s_max)
        try:
            async with asyncio.timeout(self.config.leave_s_max):
                await self._acks.paid()
        except TimeoutError:
            _log.warning("left with acks not confirmed", acks=self._acks.owed)

    async def _drain(self) -> None:
        """Give what runs its time, unless a newer agent of this name has come."""
        try:
            async with asyncio.timeout(self.config.drain_s_max):
                while self._lives and not self._is_superseded:
                    self._drain_changed.clear()
                    await self._drain_changed.wait()
        except TimeoutError:
            _log.warning("drain took too long", running=len(self.ledger.running))

    async def _lives_end(self, longest_s: float) -> None:
        if self._lives:
            await asyncio.wait(self._lives, timeout=longest_s)

    # ---- orders ----

    async def _heard_order(self, message: Message) -> None:
        epoch = self.fence.epoch
        reply = self._desk.take(message.data)
        if self.fence.epoch != epoch:
            _log.info("new leader", epoch=self.fence.epoch)
        if message.reply:
            try:
                await self._bus.publish(message.reply, codec.encode(reply))
            except BusError as error:
                # The broker reads the order's fate from the echo.
                _log.warning("order not answered", error=repr(error))

    def _heard_inventory(self, message: Message) -> None:
        try:
            inventory = codec.decode(message.data, Inventory)
        except codec.MalformedMessage as error:
            _log.warning("not an inventory", error=str(error))
            return
        self.fence.learn(inventory.epoch)
        is_for_us = inventory.worker in ("", self.config.worker)
        if is_for_us and inventory.epoch == self.fence.epoch:
            self._cache.ask_full()
            self.on_urgent()

    def _heard_heartbeat(self, message: Message) -> None:
        """Hear our own name: only a second agent under it has another incarnation."""
        try:
            life = codec.decode(message.data, _Life)
        except codec.MalformedMessage:
            return
        if life.incarnation > self.incarnation:
            self._is_superseded = True
            self._drain_changed.set()
            self.leave()

    def _begin(self, running: Running) -> None:
        assert self._spawn is not None, "orders are heard only while the agent runs"
        task = self._spawn(self._attempts.live(running))
        self._lives.add(task)
        task.add_done_callback(self._life_ended)

    def _life_ended(self, task: asyncio.Task[None]) -> None:
        self._lives.discard(task)
        self._drain_changed.set()
        if self._desk.draining and not self._lives:
            self.on_urgent()

    def _drain_ordered(self) -> None:
        _log.info("drain ordered", draining=self._desk.is_draining)
        self.on_urgent()

    # ---- the leader ----

    def _link_changed(self, up: bool, /) -> None:  # noqa: FBT001  # As `Bus.on_link` calls it.
        if up:
            self._link_is_up.set()
            self._acks.nudge()
            self.on_urgent()

    async def _follow_leader(self) -> None:
        """Read the leader key after each reconnect: an epoch may have passed meanwhile."""
        config = self.config
        while True:
            await self._link_is_up.wait()
            self._link_is_up.clear()
            for pause_s in backoff_s(base_s=config.retry_base_s, longest_s=config.retry_s_max):
                if await self._learn_epoch():
                    break
                await asyncio.sleep(pause_s)

    async def _learn_epoch(self) -> bool:
        """Read the leader key; False when the bus could not tell. Orders teach the epoch too."""
        try:
            entry = await self._bus.kv_get(subjects.LEADER_BUCKET, subjects.LEADER_KEY)
            leader = codec.decode(entry.value, Leader)
            self.fence.learn(leader.epoch or entry.revision)
        except NotFound:
            return True  # Nobody leads now.
        except codec.MalformedMessage as error:
            _log.warning("the leader key can't be read", error=str(error))
        except BusError as error:
            _log.debug("the leader is not known yet", error=repr(error))
            return False
        return True

    # ---- the engine ----

    def _engine_changed(self) -> None:
        self._names.learn(self.watch.readiness.models)
        self.on_urgent()

    def _engine_told(self, facts: Facts) -> None:
        self._cache.resize(facts.kv_tokens_max)
        if facts.incarnation != self._engine_incarnation:
            self._engine_incarnation = facts.incarnation
            self.ledger.faults.clear()
            self._cache.clear()
            if self._kv_events is not None:
                self._kv_events.resync()
            self.on_urgent()

    async def _age_cache(self) -> None:
        while True:
            await asyncio.sleep(self.config.cache_refresh_s)
            self._cache.expire(at_s=time.monotonic())
            for source, seen in self._cache.predictions.items():
                if seen.requests:
                    _log.info("cache predictions", source=source, **asdict(seen))

    def _results_full(self, lane: str) -> None:
        self._waiting_records[lane] += 1
        _log.error("results stream full", lane=lane, waiting=self._waiting_records[lane])
        self.on_urgent()

    def _results_have_room(self, lane: str) -> None:
        self._waiting_records[lane] -= 1
        self.on_urgent()

    # ---- reports ----

    def report(self, sent_number: int) -> Report:
        """Make the next heartbeat, given the number of the last one that went out (0: none)."""
        if sent_number == self._reports:
            if sent_number:
                self.ledger.reported()
        else:
            self._cache.ask_full()
        self._reports += 1
        return Report(self._reports, self._heartbeat())

    def _heartbeat(self) -> Heartbeat:
        facts = self.watch.facts
        return Heartbeat(
            worker=self.config.worker,
            incarnation=self.incarnation,
            sequence=0,
            epoch=self.fence.epoch,
            echo=self.fence.echo,
            at_s=self._now_s(),
            models=self._names.served,
            slots=facts.slots,
            # Not before orders are heard: one that nobody hears makes a worker look dead.
            ready=self.watch.readiness.ready and self.up.is_set(),
            draining=self._desk.draining,
            drained=self._is_drained(),
            inflight=self.ledger.inflight(),
            finished=self.ledger.finished(),
            load=self._load(),
            summary=self._cache.report(),
            engine_incarnation=facts.incarnation,
            version=self._version,
            notice=self._notice()[:NOTICE_CHARS_MAX],
            engine_faults=self.ledger.faults.jobs,
            cache_sequences=self.config.cached_sequences,
        )

    def _load(self) -> Load:
        """Tell the engine's load; how fast it decodes is seen by its answers."""
        seen = self._supervisor.decode_tokens_s()
        self._has_seen_decoding = self._has_seen_decoding or seen > 0
        load = self.watch.load
        return replace(load, decode_tokens_s=seen) if self._has_seen_decoding else load

    def _is_drained(self) -> bool:
        empty = not self.ledger.running and not self.ledger.unacknowledged
        drained = self._desk.draining and empty
        if drained and not self._drained:
            _log.info("drained")
        self._drained = drained
        return drained

    def _notice(self) -> str:
        parts: list[str] = []
        lanes = sorted(+self._waiting_records)
        if lanes:
            parts.append(f"results stream full: lanes {', '.join(lanes)}")
        if self._acks.owed:
            parts.append(f"{self._acks.owed} acks not confirmed")
        if not self.watch.readiness.ready:
            parts.append(f"engine not ready: {self.watch.readiness.detail}")
        if self._kv_events is not None and self._kv_events.notice:
            parts.append(self._kv_events.notice)
        return "; ".join(parts)


async def _kept_up(duty: Callable[[], Awaitable[None]], *, pause_s: float) -> None:
    """Run a duty for ever: a fault in one may not end the jobs that run beside it."""
    while True:
        try:
            await duty()
        except Exception:  # noqa: BLE001  # The edge of a duty.
            _log.exception("duty failed", duty=duty)
            await asyncio.sleep(pause_s)


def _make_kv_events(config: WorkerConfig, engine: Engine, cache: CacheModel) -> "KvEvents | None":
    if not config.kv_events or not isinstance(engine, Tokenizing):
        return None
    from worker_agent.kv_events import KvEvents  # noqa: PLC0415  # It needs an extra, pyzmq.

    return KvEvents(
        cache=cache,
        engine=engine,
        endpoint=config.kv_events,
        replay_endpoint=config.kv_events_replay,
        tick_s=time.monotonic,
        silent_s_max=config.kv_silent_s_max,
        ranks=config.kv_events_ranks,
    )


def _make_ledger(config: WorkerConfig) -> Ledger:
    return Ledger(
        unacknowledged_max=config.ack_retries_max,
        finished_max=config.finished_max,
        seen_max=config.seen_max,
        finished_beats=config.finished_beats,
    )


def _make_acks(config: WorkerConfig, bus: Bus, ledger: Ledger) -> Acks:
    return Acks(
        bus,
        ledger,
        renew_s=config.renew_s,
        retry_base_s=config.retry_base_s,
        retry_s_max=config.retry_s_max,
        call_s_max=config.call_s_max,
    )


def _cache_limits(config: WorkerConfig) -> CacheLimits:
    return CacheLimits(
        tokens_max=config.cache_tokens,
        sequences=config.cached_sequences,
        ttl_s=config.cache_ttl_s,
        refresh_s=config.cache_refresh_s,
        prefix_tokens_min=config.prefix_tokens_min,
        summary_bytes_max=config.summary_bytes_max,
        ranks=config.kv_events_ranks,
    )
