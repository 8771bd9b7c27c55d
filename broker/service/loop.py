"""The one loop: all that happens becomes an event, in order; every decision is carried out.

Nothing else touches the mind. Work is done in slices of under a millisecond, so that heartbeats,
renewals and the status page stay prompt whatever arrives. A surprise ends what it came in and
nothing else: not the loop, and not the other decisions of its step.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

import structlog

from broker.core import decisions as do
from broker.core.events import (
    AttemptEnded,
    DispatchAnswered,
    Event,
    FirstTokenSeen,
    JobEnded,
    JobSpec,
    Tick,
    Unanswered,
    WorkerReported,
)
from broker.core.scheduler import Scheduler
from broker.service.adoption import listed
from broker.service.attempts import AttemptBook
from broker.service.endings import Endings
from broker.service.held import Held, Shelf
from broker.service.outbox import Outbox
from broker.service.stages import Stage
from broker.wire import messages as wire
from broker.wire import subjects
from broker.wire.codec import encode
from broker.wire.messages import (
    Failure,
    Heartbeat,
    InFlight,
    Inventory,
    Queued,
    TerminalRecord,
    WorkerNote,
)

_log = structlog.get_logger(__name__)

SLICE_S = 0.0008
"""Longest run of the loop without giving way."""

TICK_S = 0.05
"""How often time itself is an event: deadlines and back-offs are this exact."""

INBOX_MAX = 200_000
"""Events waiting; beyond this heartbeats and notes are dropped (the next heartbeat repeats
them)."""


class Observer(Protocol):
    """Hears of all that is decided: metrics and the decision log."""

    def heard(self, event: Event) -> None:
        """An event is about to be handled."""
        ...

    def decided(self, decision: do.Decision, held: Held | None, *, at_s: float) -> None:
        """A decision is about to be carried out."""
        ...

    def malformed(self, where: str) -> None:
        """Bytes from `where` could not be read."""
        ...

    def duplicate(self, lane: str, band: int) -> None:
        """A further message came of a job that has not ended."""
        ...

    def usage_counted(self, lane: str, records: int) -> None:
        """So many records of a lane are in its accounts now."""
        ...

    def usage_gone(self, lane: str, records: int) -> None:
        """So many records of a lane left their stream uncounted."""
        ...

    def difference(self, kind: str) -> None:
        """Reconcile found and repaired a difference."""
        ...

    def closed(self, record: TerminalRecord, *, won: bool, job: JobSpec | None = None) -> None:
        """A job that the broker itself ended is gone from its stream; `job`: never dispatched."""
        ...

    def loop_error(self, where: str) -> None:
        """A surprise was survived at a loop's edge."""
        ...

    def lag(self, seconds: float, *, held_s: float) -> None:
        """How late the loop's tick came, and how much of that this process itself may have done."""
        ...


class Loop:
    """Drives the mind."""

    def __init__(
        self,
        scheduler: Scheduler,
        shelf: Shelf,
        *,
        observer: Observer,
        book: AttemptBook,
        now: Callable[[], float],
    ) -> None:
        """Make the loop; `connect` gives it its hands before it runs."""
        self.scheduler = scheduler
        self._shelf = shelf
        self._observer = observer
        self._book = book
        self._now = now
        self._inbox: deque[Callable[[], object]] = deque()
        self._wake = asyncio.Event()
        self._outbox: Outbox | None = None
        self._endings: Endings | None = None
        self._epoch = 0
        self._has_more = False
        """The mind has more to dispatch than it did in one go."""
        self._turned_at_s = time.monotonic()
        self.dropped = 0

    def connect(self, outbox: Outbox, endings: Endings, *, epoch: int) -> None:
        """Give the loop what it needs to act in this epoch."""
        self._outbox = outbox
        self._endings = endings
        self._epoch = epoch

    # ---- what comes in ----

    def tell(self, event: Event) -> None:
        """Queue an event."""
        self.call(partial(self._step, event))

    def call(self, work: Callable[[], object]) -> None:
        """Queue a piece of work that may tell events; it must be short."""
        self._inbox.append(work)
        self._wake.set()

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        """Queue a heartbeat."""
        self._offer(partial(self._heartbeat, heartbeat))

    def note(self, note: WorkerNote) -> None:
        """Queue what a worker says between heartbeats."""
        match note:
            case wire.FirstToken():
                event = FirstTokenSeen(self._now(), note)
            case wire.AttemptEnded():
                event = AttemptEnded(self._now(), note.worker, note.incarnation, note.finished)
        self._offer(partial(self._step, event))

    @property
    def backlog(self) -> int:
        """Count events waiting."""
        return len(self._inbox)

    @property
    def turned_ago_s(self) -> float:
        """Seconds since the loop last turned."""
        return time.monotonic() - self._turned_at_s

    async def run(self) -> None:
        """Handle events until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tick())
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._inbox or self._has_more:
                    self._slice()
                    await asyncio.sleep(0)

    def _slice(self) -> None:
        """Handle what has come, then settle it: order and place are chosen among all of it."""
        end_s = time.perf_counter() + SLICE_S
        inbox = self._inbox
        while inbox:
            self._handle(inbox.popleft())
            if time.perf_counter() >= end_s:
                break
        self._handle(self._settle)

    def _handle(self, work: Callable[[], object]) -> None:
        """Do one piece of work; a surprise is logged, counted and survived."""
        try:
            work()
        except Exception:  # noqa: BLE001 - the edge of the loop, which must live on
            _log.exception("loop.surprise")
            self._observer.loop_error("loop")

    def _offer(self, work: Callable[[], object]) -> None:
        if len(self._inbox) >= INBOX_MAX:
            self.dropped += 1
            return
        self.call(work)

    async def _tick(self) -> None:
        clock = asyncio.get_running_loop()
        due_s = clock.time() + TICK_S
        while True:
            worked_s = time.thread_time()
            await asyncio.sleep(max(0.0, due_s - clock.time()))
            self._turned_at_s = time.monotonic()
            lag_s = max(0.0, clock.time() - due_s)
            # On a busy machine a tick is late because others have the processors.
            self._observer.lag(lag_s, held_s=min(lag_s, time.thread_time() - worked_s))
            due_s = max(due_s, clock.time()) + TICK_S
            self.tell(Tick(self._now()))

    # ---- events ----

    def _step(self, event: Event) -> list[do.Decision]:
        self._observer.heard(event)
        decisions = self.scheduler.step(event, settles=False)
        self._carry_all(decisions, event.at_s)
        return decisions

    def forget(self, key: str) -> None:
        """Let the mind forget a job before it decides anything more: from work given to `call`."""
        self._step(JobEnded(self._now(), key))

    def _settle(self) -> None:
        self._has_more = False  # Should it raise, the next event comes first.
        self._carry_all(self.scheduler.settle(), self._now())
        self._has_more = self.scheduler.is_unsettled

    def _carry_all(self, decisions: list[do.Decision], at_s: float) -> None:
        for decision in decisions:
            try:
                self._carry(decision, at_s)
            except Exception:  # noqa: BLE001 - the edge of one decision: the others stand
                _log.exception("loop.surprise", decision=type(decision).__name__)
                self._observer.loop_error("loop")
                if isinstance(decision, do.Dispatch):
                    self._unsent(decision)

    def _unsent(self, decision: do.Dispatch) -> None:
        """Let the mind take back a lease whose order did not leave."""
        at_s, answer = self._now(), Unanswered.UNSENT
        self.tell(DispatchAnswered(at_s, decision.worker, decision.key, decision.attempt, answer))

    def _heartbeat(self, heartbeat: Heartbeat) -> None:
        decisions = self._step(WorkerReported(self._now(), heartbeat))
        adopted = {
            decision.key
            for decision in decisions
            if isinstance(decision, do.Difference)
            and decision.kind is do.DifferenceKind.RUNS_UNLEASED
        }
        for entry in heartbeat.inflight if adopted else ():
            if entry.key in adopted:
                self._adopt(entry)

    def _adopt(self, entry: InFlight) -> None:
        """Hold a job that runs already, so that it can be found again if its worker dies."""
        held = self._shelf.get(entry.key)
        if held is None:
            held = listed(entry)
            if held is None:
                self._observer.malformed("inflight")
                return
            self._shelf.put(held, None)
        if held.stage is not Stage.CLOSING:
            held.sent = entry.attempt
            self._shelf.runs(held)

    # ---- decisions ----

    def _carry(self, decision: do.Decision, at_s: float) -> None:
        outbox, endings = self._outbox, self._endings
        assert outbox is not None, "connect() comes before run()"
        assert endings is not None, "connect() comes before run()"
        key = getattr(decision, "key", "")
        held = self._shelf.get(key) if key else None
        self._observer.decided(decision, held, at_s=at_s)
        match decision:
            case do.Dispatch():
                outbox.dispatch(decision)
            case do.Abort():
                outbox.abort(decision)
            case do.Probe():
                outbox.probe(decision)
            case do.DrainOrder():
                outbox.drain(decision)
            case do.Resync(worker):
                outbox.mail(subjects.INVENTORY, encode(Inventory(epoch=self._epoch, worker=worker)))
            case do.Requeue(_, failure):
                self._requeued(decision.key, failure, held)
            case do.Queued(_, position, wait_s) if held is not None:
                outbox.receipt(held, Queued(job=held.job_id, position=position, wait_s=wait_s))
            case do.Release():
                self._released(decision.key, held, endings)
            case _ if held is not None:
                if isinstance(decision, do.DeadLetter):
                    self._book.failures[decision.key] = decision.failures
                endings.decided(decision, held)
            case _:
                pass

    def _requeued(self, key: str, failure: Failure | None, held: Held | None) -> None:
        if failure is not None:
            self._book.add(key, failure)
        if held is not None and held.stage is not Stage.CLOSING:
            self._shelf.waits(held)

    def _released(self, key: str, held: Held | None, endings: Endings) -> None:
        if held is not None and held.stage is Stage.CLOSING:
            return  # The closer still needs its place and its failures, and forgets both.
        self._book.forget(key)
        if held is not None:
            endings.released(held)
