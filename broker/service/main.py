"""The broker process: connect, declare the topology, stand for election, lead, stop cleanly."""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import orjson
import structlog
import uvloop

from broker.bus import logs
from broker.bus import nats as nats_bus
from broker.bus.base import Bus, BusError, NoStream, Timeout
from broker.bus.nats_wire import Credentials
from broker.service.clock import WallClock
from broker.service.config import Config, ConfigError, load
from broker.service.decision_log import DecisionLog
from broker.service.departures import Departures
from broker.service.election import Election, leader_now
from broker.service.file_marks import FileWatch, write_mark
from broker.service.fleet import Fleet
from broker.service.garbage import Garbage
from broker.service.leadership import Leadership
from broker.service.learned import Learned
from broker.service.loop_watch import LoopWatch
from broker.service.metrics import Metrics
from broker.service.observer import Observer
from broker.service.queues import models_of
from broker.service.recovery import NOT_YET
from broker.service.reload import declare, make_first_buckets, merged, offer
from broker.service.retiring import with_offered
from broker.service.state_folder import StateTaken, own_state
from broker.service.status import Health, PageUnavailable, StatusServer
from broker.service.views import Snapshots
from broker.service.watchdogs import Watchdogs, cut, differing, either, full, lacking, risen, slow

EXIT_FAILED, EXIT_CONFIG, EXIT_UNREACHABLE = 1, 2, 3

PREPARE_S_MAX = 30.0
"""How long a start waits for the message server: a cluster's own elections take 4 to 9 s."""

PREPARE_RETRY_S = 0.5

LEAD_AGAIN_S_MIN = 0.5
LEAD_AGAIN_S_MAX = 30.0
"""Pause after a leadership that ended by a fault of ours: doubled each time it happens again, so
that another broker gets its chance; short again once one has lasted longer than the longest."""

_log = structlog.get_logger(__name__)


Reread = Callable[[], Config]
"""Reads the configuration anew. Raises ConfigError."""

OpenBus = Callable[[Config], Awaitable[Bus]]
"""Opens the broker's connection."""


class Broker:
    """A broker: a standby until it wins, a leader while it holds the key."""

    def __init__(self, bus: Bus, config: Config, *, metrics: Metrics, log: DecisionLog) -> None:
        """Make a broker on a connected bus."""
        self._bus = bus
        self._config = config
        self._reloading: Config | None = None
        """Given to the leadership and not taken yet."""
        self._was_told = False
        """Its file was taken by a reload: what it lacks shall go."""
        self._now = WallClock()
        self._learned = Learned()
        departures = Departures()
        self._observer = Observer(metrics, log, self._learned, departures)
        self._metrics = metrics
        self.fleet = Fleet(now=self._now, malformed=self._observer.malformed)
        self.election = Election(
            bus,
            broker=config.broker.name,
            ttl_s=config.broker.leader_ttl_s,
            now=self._now,
            make_bucket=lambda: make_first_buckets(self._bus, self._config),
            known_epoch=lambda: self.fleet.newest_epoch,
        )
        self.loop_watch = LoopWatch(stuck_s_max=config.broker.loop_stuck_s_max)
        self.file_watch = FileWatch(
            bus, config=lambda: self._config, leads=lambda: self.leadership is not None
        )
        self.watchdogs = self._make_watchdogs(log)
        self.snapshots = Snapshots(
            config, self._learned, departures, watches=self.watchdogs.views, now=self._now
        )
        bus.on_link(self._link_changed)

    def _make_watchdogs(self, log: DecisionLog) -> Watchdogs:
        counts = self._bus.counts
        stalled = "messages waited and none was delivered"
        return Watchdogs(
            {
                "link": cut(self._bus),
                "deliveries": risen(counts, "pulls_stalled", stalled),
                "loop": self.loop_watch.looked_at(),
                "store": slow(lambda: self.election.write_s, stuck=lambda: self.election.stuck),
                "results": full(self._scarce_lanes),
                "accounts": self._miscounted,
                "file": either(
                    lacking(self._lacking), differing(lambda: self.file_watch.different)
                ),
                "log": lambda: log.trouble,
            },
            now=self._now,
        )

    def _scarce_lanes(self) -> tuple[str, ...]:
        return self.leadership.results_room.scarce if self.leadership is not None else ()

    def _lacking(self) -> tuple[str, ...]:
        return self.leadership.retiring.lacking if self.leadership is not None else ()

    def _miscounted(self) -> str:
        return self.leadership.accounting.trouble() if self.leadership is not None else ""

    @property
    def leadership(self) -> Leadership | None:
        """What exists while this broker leads."""
        return self.snapshots.leadership

    async def prepare(self, *, patience_s: float = PREPARE_S_MAX) -> None:
        """Declare the topology and publish the lanes' offers where nobody leads; start listening.

        While another leads, what stands at the server is its matter: our file may be another one.
        What a server in election can't do yet is tried again for `patience_s`; so is a stream that
        another broker is making, of which not all servers know yet. Raises BusError.
        """
        give_up_at_s = self._now() + patience_s
        while True:
            try:
                await self._declare()
                break
            except NOT_YET as error:
                if self._now() >= give_up_at_s:
                    message = (
                        f"the message server was not ready within {patience_s:g} s ({error}); "
                        "see whether JetStream is on and its cluster has a leader"
                    )
                    raise Timeout(message) from error
                _log.warning("broker.server_not_ready", error=str(error))
            await asyncio.sleep(PREPARE_RETRY_S)
        await self.fleet.listen(self._bus)

    async def _declare(self) -> None:
        if await self._somebody_leads():
            return
        config = await with_offered(self._bus, self._config)
        await declare(self._bus, config)
        await offer(self._bus, config)
        await write_mark(self._bus, self._config)

    async def _somebody_leads(self) -> bool:
        try:
            return await leader_now(self._bus) is not None
        except NoStream:
            # No broker has run here yet, or the server is in election.
            await make_first_buckets(self._bus, self._config)
            return await leader_now(self._bus) is not None

    async def run(self) -> None:
        """Stand for election and lead, again and again, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.loop_watch.run())
            group.create_task(self.watchdogs.run())
            group.create_task(self.file_watch.run())
            await self._lead_for_ever()

    async def _lead_for_ever(self) -> None:
        pause_s = LEAD_AGAIN_S_MIN
        while True:
            began_at_s = self._now()
            try:
                await self._lead_once()
            except Exception:  # noqa: BLE001 - the edge of a leadership: it left, and another may follow
                _log.exception("broker.leadership_failed", pause_s=pause_s)
                self._observer.loop_error("leadership")
            else:
                continue
            if self._now() - began_at_s > LEAD_AGAIN_S_MAX:
                pause_s = LEAD_AGAIN_S_MIN
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LEAD_AGAIN_S_MAX)

    def reload(self, given: Config) -> None:
        """Take a new configuration: soon as leader, else when this broker leads.

        All brokers must be given the same one.
        """
        self._was_told = True
        config, late = merged(self._config, given)
        if late:
            _log.warning("reload.needs_restart", keys=late)
        if self.leadership is None:
            self._configure(config)
        else:
            self._reloading = config
            self.leadership.reload(config, done=partial(self._reloaded, config))

    def _reloaded(self, config: Config, taken: bool) -> None:  # noqa: FBT001 - leadership calls it so
        if self._reloading is config:
            self._reloading = None
        if taken:
            self._configure(config)

    def _configure(self, config: Config) -> None:
        self._config = config
        self.snapshots.configure(config)
        self._metrics.configure(
            lanes=[lane.name for lane in config.policy.lanes], models=_models(config)
        )
        _log.info("reload.taken", lanes=len(config.policy.lanes), models=_models(config))

    def health(self) -> Health:
        """Tell the status page how this process is."""
        leadership = self.leadership
        if leadership is None:
            stuck = self.election.stuck
            reason = stuck or "another broker leads, or none yet"
            return Health("standby", ready=not stuck, reason=reason)
        ago_s = leadership.loop.turned_ago_s
        role = "leader" if leadership.ready else "starting"
        reason = "" if leadership.ready else "adopting what runs"
        return Health(role, leadership.ready, reason, leadership.term.epoch, ago_s)

    async def _lead_once(self) -> None:
        term = await self.election.win()
        leadership = Leadership(
            self._bus,
            self.fleet,
            self._config,
            term,
            snapshots=self.snapshots,
            learned=self._learned,
            observer=self._observer,
            now=self._now,
        )
        leadership.retires = self._was_told
        self.snapshots.leads(leadership)
        self._metrics.leadership(leader=True)
        try:
            await leadership.run(self.election)
        finally:
            self.snapshots.leads(None)
            self._metrics.leadership(leader=False)
            if self._reloading is not None:
                # Half done, it is finished by whoever leads next, by this broker too.
                self._configure(self._reloading)
                self._reloading = None

    def _link_changed(self, up: bool) -> None:  # noqa: FBT001 - the bus calls it so
        if self.leadership is not None:
            self.leadership.link_changed(up=up)


async def serve(
    config: Config, *, reread: Reread | None = None, open_bus: OpenBus | None = None
) -> None:
    """Run a broker until SIGTERM or SIGINT; a graceful stop hands over at once.

    SIGHUP takes what `reread` returns; a mistake in it is told in the log and changes nothing.
    Raises StateTaken at once when another broker has its state_dir.
    """
    with own_state(config.broker):
        await _serve(config, reread or (lambda: config), open_bus or connect)


async def _serve(config: Config, reread: Reread, open_bus: OpenBus) -> None:
    stop, told = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, told.set)
    metrics = Metrics(lanes=[lane.name for lane in config.policy.lanes], models=_models(config))
    log = DecisionLog(
        Path(config.broker.state_dir),
        file_bytes_max=config.broker.decision_log_bytes_max,
        files_max=config.broker.decision_log_files_max,
        prefixes=config.broker.decision_log_prefixes,
    )
    try:
        bus = await open_bus(config)
        try:
            broker = Broker(bus, config, metrics=metrics, log=log)
            work = partial(_work, broker, config, reread, told)
            await _serve_on(broker, config, metrics, log, stop=stop, work=work)
        finally:
            await bus.close()
    finally:
        log.close()


async def connect(config: Config) -> Bus:
    """Connect as `[nats]` says. Raises BusError."""
    creds = Path(config.nats.creds_file) if config.nats.creds_file else None
    return await nats_bus.connect(
        config.nats.url,
        name=config.broker.name,
        credentials=Credentials(
            user=config.nats.user, password=config.nats.password, creds_file=creds
        ),
    )


async def _reload_when_told(broker: Broker, reread: Reread, told: asyncio.Event) -> None:
    while True:
        await told.wait()
        told.clear()
        try:
            broker.reload(await asyncio.to_thread(reread))
        except ConfigError as error:
            _log.error("reload.mistaken", error=str(error))
        except Exception:  # noqa: BLE001 - the edge of this duty: no file may end a leader
            _log.exception("reload.failed")


async def _serve_on(
    broker: Broker,
    config: Config,
    metrics: Metrics,
    log: DecisionLog,
    *,
    stop: asyncio.Event,
    work: Callable[[str], Coroutine[None, None, None]],
) -> None:
    metrics.attach(broker.snapshots, log=log)
    status = StatusServer(metrics, broker.snapshots, health=broker.health)
    try:
        url = await status.start(config.broker.http_host, config.broker.http_port)
        async with asyncio.TaskGroup() as group:
            working = group.create_task(work(url))
            await stop.wait()
            working.cancel()
    finally:
        await status.stop()


async def _work(
    broker: Broker, config: Config, reread: Reread, told: asyncio.Event, url: str
) -> None:
    await broker.prepare()
    _say_ready(config, url)
    async with asyncio.TaskGroup() as group:
        group.create_task(_reload_when_told(broker, reread, told))
        group.create_task(Garbage().run())
        await broker.run()


def _models(config: Config) -> list[str]:
    lanes = config.policy.lanes
    return sorted({model for lane in lanes for model in models_of(config.policy, lane)})


def _say_ready(config: Config, url: str) -> None:
    """Tell a launcher, on standard output, that the broker is up and where its page is."""
    line = orjson.dumps({"event": "ready", "broker": config.broker.name, "http": url})
    sys.stdout.write(line.decode() + "\n")
    sys.stdout.flush()


def run(config: Config, *, reread: Reread | None = None) -> None:
    """Run the broker until it is told to stop; `reread` reads its configuration anew on SIGHUP.

    Raises BusError, PageUnavailable, StateTaken, OSError.
    """
    logs.set_up(broker=config.broker.name)
    try:
        uvloop.run(serve(config, reread=reread))
    except* (BusError, PageUnavailable, OSError) as errors:
        # One sentence for whoever started it, not a tree of groups.
        raise _first(errors) from None


def _first(error: BaseException) -> BaseException:
    if not isinstance(error, BaseExceptionGroup):
        return error
    return _first(cast("BaseException", error.exceptions[0]))


def main(arguments: Sequence[str]) -> int:
    """Run with the configuration file named in `arguments`; return the exit code."""
    try:
        if arguments:
            reread = partial(load, Path(arguments[0]))
            run(reread(), reread=reread)
        else:
            run(Config())
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIG
    except (BusError, PageUnavailable, StateTaken, OSError) as error:
        sys.stderr.write(f"the broker could not run: {error}\n")
        return EXIT_UNREACHABLE if isinstance(error, BusError) else EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
