"""Runs batches in a process: takes those that nobody runs, a bounded number at once.

Any number of processes do this side by side. New batches are heard of at once; those whose runner
died are found by looking. A batch at which a run failed is left alone for a while, longer each
time.
"""

import asyncio
import random
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import structlog
from msgspec.structs import replace

from broker.bus.base import Bus, BusError, NoStream, NotFound
from broker.bus.files import Files
from broker.wire import subjects
from broker.wire.ids import new_job_id
from producers.batch.plan import OUTAGE_S
from producers.batches.census import LaneCensus, take_census
from producers.batches.config import BatchesConfig
from producers.batches.copies import Copies, sweep_copies
from producers.batches.errors import BatchesError, LeaseLost
from producers.batches.hold import Hold, is_free, take
from producers.batches.lanes import Lanes
from producers.batches.records import Batch, Status
from producers.batches.run import Run, end_without_lane
from producers.batches.shelf import Shelf, all_batches, files_of
from producers.client import Client
from producers.config import ClientConfig
from producers.door import lanes_of
from producers.errors import ProducerError, UnknownLane

RETRY_S = 1.0
"""Pause before a batch is taken up again at which a run failed; doubled each time."""

RELEASE_S_MAX = 2.0
"""A process that ends tries so long to hand its batches over; else their leases run out."""

LOOK_RATIO_MIN = 20
"""A look reads the records of all batches, also of those that ended: it takes a twentieth of the
time at most, however many there are."""

HEARD_MAX = 1000
"""Batches heard of and not yet looked at; others are found by looking."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Failed:
    """A batch at which a run failed."""

    pause_s: float = 0.0
    again_at_s: float = 0.0


_NEVER = _Failed()


@dataclass(slots=True)
class RunnerCounts:
    """What a process did for batches since its start."""

    taken: int = 0
    taken_over: int = 0
    """Of these, those that another runner had before."""
    ended: int = 0
    left: int = 0
    """Another runner had them."""
    failed: int = 0
    """Runs that ended by a fault; their batches go on."""
    swept: int = 0
    by_status: Counter[str] = field(default_factory=Counter[str])
    lines: Counter[tuple[str, bool]] = field(default_factory=Counter[tuple[str, bool]])
    """Lines that were stored, by lane and whether they completed."""


class BatchRunner:
    """The batches of one process."""

    def __init__(
        self,
        bus: Bus,
        *,
        config: BatchesConfig | None = None,
        client: ClientConfig | None = None,
        name: str = "",
    ) -> None:
        """`name`: told in the lease, so that people see who runs a batch."""
        self.name = name or new_job_id()
        self.counts = RunnerCounts()
        self.census: dict[str, LaneCensus] = {}
        """The cluster's batches and files by lane; empty while they can't be read."""
        self._bus = bus
        self._config = config or BatchesConfig()
        # An outage of minutes is waited out, no error.
        self._client = replace(client or ClientConfig(), submit_s=OUTAGE_S, no_stream_s=OUTAGE_S)
        self._lanes = Lanes(self._config)
        self._runs: dict[str, Run] = {}
        self._running: dict[str, str] = {}
        """Lane of each batch that is taken here."""
        self._failed: dict[str, _Failed] = {}
        self._missing_since_s: dict[str, float] = {}
        """Lanes of batches that nobody offers."""
        self._news = asyncio.Event()
        self._heard: set[tuple[str, str]] = set()
        self._looks_now = True
        self._trouble = ""
        """Why batches could not be read at the last look."""

    @property
    def running(self) -> int:
        """Batches that this process runs now."""
        return len(self._running)

    async def run(self) -> None:
        """Run batches until cancelled; then hand them over."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._sweep_all())
            tasks.create_task(self._count_all())
            if self._config.batches_running_max:
                await self._take_all(tasks)

    async def _take_all(self, tasks: asyncio.TaskGroup) -> None:
        """Take free batches, as they are heard of and as they are found."""
        pattern = subjects.batch_key("*", "*")
        subscription = await self._bus.kv_listen(subjects.BATCHES_BUCKET, pattern, self._hear)
        look_at_s = 0.0
        try:
            while True:
                heard, self._heard = self._heard, set()
                self._news.clear()
                try:
                    if self._looks_now or time.monotonic() >= look_at_s:
                        self._looks_now = False
                        began_s = time.monotonic()
                        await self._take_found(tasks)
                        now_s = time.monotonic()
                        pause_s = LOOK_RATIO_MIN * (now_s - began_s)
                        look_at_s = now_s + max(self._config.scan_s, pause_s)
                    else:
                        for lane, batch_id in heard:
                            await self._take(lane, batch_id, tasks)
                    self._trouble = ""
                except (BusError, BatchesError) as error:
                    if str(error) != self._trouble:  # Told once, not at each look.
                        self._trouble = str(error)
                        _log.warning("batches.not_readable", error=self._trouble)
                except Exception:  # noqa: BLE001 - the edge of the loop: it lives on
                    self.counts.failed += 1
                    _log.exception("batches.not_taken")
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._config.scan_s):
                        await self._news.wait()
        finally:
            with suppress(BusError):
                await subscription.unsubscribe()

    def _hear(self, key: str) -> None:
        """Somebody wrote a batch's record."""
        _, lane, batch_id = key.split(".")
        self._lanes.heard(lane, batch_id)
        if (run := self._runs.get(batch_id)) is not None:
            run.heard()
        elif batch_id not in self._running and len(self._heard) < HEARD_MAX:
            self._heard.add((lane, batch_id))
            self._news.set()

    async def _take_found(self, tasks: asyncio.TaskGroup) -> None:
        """Look at all batches, and take free ones: first of the lanes that have fewest here."""
        batches = await all_batches(self._bus)
        now_s = time.time()
        self._lanes.seen(batches, at_s=now_s)
        free = [batch for batch in batches if is_free(batch, now_s=now_s)]
        free.reverse()  # Oldest first.
        while free and self._has_room:
            lanes = Counter(self._running.values())
            batch = min(free, key=lambda one: lanes[one.lane])
            free.remove(batch)
            await self._take(batch.lane, batch.id, tasks)

    @property
    def _has_room(self) -> bool:
        return len(self._running) < self._config.batches_running_max

    async def _take(self, lane: str, batch_id: str, tasks: asyncio.TaskGroup) -> None:
        """Take a batch and run it, if nobody does and there is room. Raises BusError."""
        failed = self._failed.get(batch_id, _NEVER)
        if batch_id in self._running or not self._has_room:
            return
        if time.monotonic() < failed.again_at_s:
            return
        files = Files(self._bus, lane)
        shelf = Shelf(self._bus, lane, files)
        hold = await take(shelf, batch_id, runner=self.name, lease_s=self._config.lease_s)
        if hold is not None:
            self.counts.taken += 1
            self.counts.taken_over += not hold.is_first
            self._running[batch_id] = lane
            tasks.create_task(self._run(hold, files))

    async def _run(self, hold: Hold, files: Files) -> None:
        batch_id = hold.batch.id
        try:
            await self._run_once(hold, files)
        except asyncio.CancelledError:
            await _released(hold)
            raise
        finally:
            self._runs.pop(batch_id, None)
            self._running.pop(batch_id, None)
            self._looks_now = True
            self._news.set()

    async def _run_once(self, hold: Hold, files: Files) -> None:
        """Run a batch; whatever happens to it is told here, and the others go on."""
        batch_id = hold.batch.id
        log = _log.bind(lane=hold.batch.lane, batch=batch_id)
        log.info("batches.taken", status=hold.batch.status.value)
        try:
            if await self._lane_is_gone(hold.batch):
                await end_without_lane(hold, files)
                log.warning("batches.lane_gone")
                return
            async with Client(
                self._bus,
                lane=hold.batch.lane,
                client_id=batch_id,
                config=self._client,
                find_copy=Copies(self._bus, hold.batch).find,
            ) as client:
                count = partial(self._count, hold.batch.lane)
                run = Run(hold, self._bus, files, client, self._config, count, self._lanes)
                self._runs[batch_id] = run
                await run.go()
        except* LeaseLost as group:
            self.counts.left += 1
            log.warning("batches.left", reason=_said(group))
        except* Exception as group:
            self._note_failure(batch_id)
            log.warning("batches.run_failed", reason=_said(group), exc_info=_is_surprise(group))
            await _released(hold)
        else:
            self.counts.ended += 1
            self._failed.pop(batch_id, None)
            self.counts.by_status[hold.batch.status.value] += 1
            log.info("batches.ended", status=hold.batch.status.value)

    async def _lane_is_gone(self, batch: Batch) -> bool:
        """Say whether a batch's lane was taken out of the configuration, `lane_gone_s` ago.

        Raises UnknownLane while it is out for less than that, unless the batch is cancelled: then
        no line runs, and what ran is written without the lane's offer. Raises BusError.
        """
        lane = batch.lane
        try:
            await self._bus.kv_get(subjects.CONFIG_BUCKET, subjects.lane_offer_key(lane))
        except NotFound:
            since_s = self._missing_since_s.setdefault(lane, time.monotonic())
        else:
            self._missing_since_s.pop(lane, None)
            return False
        if time.monotonic() >= since_s + self._config.lane_gone_s:
            return True
        if batch.status is Status.CANCELLING:
            return False
        message = f"lane {lane!r} is not configured; its batches fail if it isn't put back"
        raise UnknownLane(message)

    def _count(self, lane: str, lines: int, completed: bool) -> None:  # noqa: FBT001 - as called
        """Lines of a batch were stored."""
        self.counts.lines[lane, completed] += lines

    async def _count_all(self) -> None:
        """Look now and then at what there is in the cluster."""
        while True:
            began_s = time.monotonic()
            try:
                self.census = await take_census(self._bus, now_s=time.time())
            except BusError as error:
                self.census = {}  # Old figures would look like new ones.
                _log.warning("batches.not_counted", error=str(error))
            except Exception:  # noqa: BLE001 - the edge of the loop: it lives on
                self.counts.failed += 1
                _log.exception("batches.not_counted")
            took_s = time.monotonic() - began_s
            await asyncio.sleep(max(self._config.census_s, LOOK_RATIO_MIN * took_s))

    def _note_failure(self, batch_id: str) -> None:
        self.counts.failed += 1
        before = self._failed.get(batch_id, _NEVER)
        pause_s = min(before.pause_s * 2 or RETRY_S, self._config.retry_s_max)
        self._failed[batch_id] = _Failed(pause_s, time.monotonic() + pause_s)

    async def _sweep_all(self) -> None:
        """Clear away files that are expired, what half-arrived ones left, and copies of lines."""
        while True:
            await asyncio.sleep(self._config.sweep_s * random.uniform(0.5, 1.0))
            try:
                batches = await all_batches(self._bus)
                in_use = [files_of(batch) for batch in batches if not batch.has_ended]
                keep = frozenset[str]().union(*in_use)
                for lane in await lanes_of(self._bus):
                    with suppress(NotFound, NoStream):  # A lane without batch has no files.
                        files = Files(self._bus, lane)
                        self.counts.swept += await files.sweep(now_s=time.time(), keep=keep)
                        await sweep_copies(self._bus, Shelf(self._bus, lane, files))
            except BusError as error:
                _log.warning("batches.not_swept", error=str(error))
            except Exception:  # noqa: BLE001 - the edge of the loop: it lives on
                self.counts.failed += 1
                _log.exception("batches.not_swept")


async def _released(hold: Hold) -> None:
    """Hand a batch over, if that can be done soon: else its lease runs out."""
    with suppress(TimeoutError, BusError, BatchesError):
        async with asyncio.timeout(RELEASE_S_MAX):
            await hold.release()


def _first(error: Exception) -> Exception:
    """The first error of a group that is none."""
    if not isinstance(error, ExceptionGroup):
        return error
    return _first(cast("ExceptionGroup[Exception]", error).exceptions[0])


def _said(group: ExceptionGroup[Exception]) -> str:
    return str(_first(group))


def _is_surprise(group: ExceptionGroup[Exception]) -> bool:
    return not isinstance(_first(group), BusError | ProducerError)
