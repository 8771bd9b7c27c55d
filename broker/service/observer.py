"""Turns what the loop hears and decides into metrics and the decision log.

A worker's word of an ended attempt and the decision it leads to come in the same step of the mind,
so the reports of the event at hand are all that has to be kept to tell how a job ended.
"""

from broker.core import decisions as do
from broker.core import events
from broker.core.events import Event, JobSpec, Unanswered
from broker.service.decision_log import DecisionLog, Dispatched, Ended
from broker.service.departures import Departures
from broker.service.held import Held
from broker.service.learned import Learned
from broker.service.metrics import Metrics
from broker.service.stages import Stage
from broker.wire.ids import job_key
from broker.wire.messages import Finished, Kind, Outcome, Reason, TerminalRecord

ESTIMATES_MAX = 20_000
"""Wait estimates remembered until their job is dispatched; further jobs go unmeasured."""


class Observer:
    """Hears of all that happens in the loop (`loop.Observer`)."""

    def __init__(
        self, metrics: Metrics, log: DecisionLog, learned: Learned, departures: Departures
    ) -> None:
        """Tell these what is heard and decided."""
        self._metrics = metrics
        self._departures = departures
        self._log = log
        self._learned = learned
        self._arrived: JobSpec | None = None
        self._finished: dict[str, Finished] = {}
        self._reporter = ""
        self._told: dict[str, tuple[float, float]] = {}
        """Key to (when, wait told) of a job's first receipt."""

    def heard(self, event: Event) -> None:
        """An event is about to be handled."""
        self._settle_arrival()
        if self._finished:
            self._finished = {}
        match event:
            case events.JobHeld(_, job):
                self._arrived = job
            case events.AttemptEnded(_, worker, _, finished):
                self._reporter = worker
                self._finished = {finished.key: finished}
            case events.WorkerReported(_, heartbeat):
                self._reporter = heartbeat.worker
                self._finished = {one.key: one for one in heartbeat.finished}
            case events.DispatchAnswered(answer=Unanswered() as cause):
                self._metrics.unanswered(cause.value)
            case _:
                pass

    def decided(self, decision: do.Decision, held: Held | None, *, at_s: float) -> None:
        """A decision is about to be carried out."""
        match decision:
            case do.Dispatch():
                self._dispatched(decision, held, at_s)
            case do.Queued(key, _, wait_s):
                self._queued(key, wait_s, at_s)
            case do.Reject(key):
                self._refused(key)
            case do.Release(key):
                self._released(key, held, at_s)
            case do.Requeue(key, failure):
                if failure is not None:
                    self._metrics.attempt_failed(failure.reason)
                self._attempt_ended(key, at_s)
            case do.DeadLetter(key, failures) | do.FailStream(key, failures):
                # The last failure, which no requeue tells.
                if failures:
                    self._metrics.attempt_failed(failures[-1].reason)
                self._attempt_ended(key, at_s)
            case do.Difference(kind):
                self._metrics.difference(kind.value)
            case do.WorkerGone(_, cause):
                self._metrics.worker_gone(cause)
                self._departures.note(decision, at_s=at_s)
            case _:
                pass

    def closed(self, record: TerminalRecord, *, won: bool, job: JobSpec | None = None) -> None:
        """The broker itself ended a job, and its message is gone; `won`: by this very record.

        `job` is what it asked for, where no worker was ever offered it.
        """
        lane, band, reason = record.lane, record.band, record.reason
        key = job_key(lane, record.job)
        self._told.pop(key, None)
        if won and record.kind is Kind.REJECTED and reason is not None:
            self._metrics.rejected(reason, lane=lane, band=band)
        if won and record.kind is Kind.DEAD_LETTERED:
            self._metrics.dead_lettered(lane=lane)
        self._metrics.ended(record.kind if won else None, lane=lane, band=band)
        row = record.row
        self._log.put(
            Ended(record.ended_at_s, key, kind=record.kind, reason=reason, row=row, job=job)
        )

    def usage_counted(self, lane: str, records: int) -> None:
        """So many records of a lane are in its accounts now."""
        self._metrics.usage_counted(lane, records)

    def usage_gone(self, lane: str, records: int) -> None:
        """So many records of a lane left their stream uncounted."""
        self._metrics.usage_gone(lane, records)

    def difference(self, kind: str) -> None:
        """A reconcile found a difference of this kind."""
        self._metrics.difference(kind)

    def malformed(self, where: str) -> None:
        """Bytes from `where` could not be read."""
        self._metrics.malformed(where)

    def duplicate(self, lane: str, band: int) -> None:
        """A further message came of a job that has not ended; that one's end is its answer."""
        self._metrics.rejected(Reason.DUPLICATE, lane=lane, band=band)

    def loop_error(self, where: str) -> None:
        """A surprise was survived at a loop's edge."""
        self._metrics.loop_error(where)

    def lag(self, seconds: float, *, held_s: float) -> None:
        """How late the loop's tick came, and how much of that this process may have done."""
        self._metrics.loop_lag(seconds, held_s=held_s)

    def _settle_arrival(self) -> None:
        """A job that its own step did not reject is admitted."""
        job, self._arrived = self._arrived, None
        if job is not None:
            self._metrics.admitted(lane=job.lane, band=job.band, model=job.model)

    def _dispatched(self, decision: do.Dispatch, held: Held | None, at_s: float) -> None:
        told = self._told.pop(decision.key, None)
        if held is None:
            return
        why = decision.explanation
        self._metrics.dispatched(
            lane=held.lane, band=held.band, model=held.model, held_by=why.held_by.value
        )
        if not decision.failures:
            self._metrics.queued_s(why.queue_s, lane=held.lane, band=held.band)
        if told is not None:
            self._metrics.wait_estimated(told_s=told[1], had_s=at_s - told[0], band=held.band)
        self._log.put(Dispatched(at_s, decision, held.band, held.model, held.spec))

    def _queued(self, key: str, wait_s: float, at_s: float) -> None:
        if len(self._told) < ESTIMATES_MAX:
            self._told.setdefault(key, (at_s, wait_s))

    def _refused(self, key: str) -> None:
        """A job refused in the step that brought it was never admitted."""
        if self._arrived is not None and self._arrived.key == key:
            self._arrived = None

    def _released(self, key: str, held: Held | None, at_s: float) -> None:
        """A record stands: written by the worker that reports it, or found."""
        if held is not None and held.stage is Stage.CLOSING:
            return  # `closed` tells of it when its message is gone.
        finished = self._finished.get(key)
        if finished is None or finished.outcome is not Outcome.SETTLED:
            self._ended(key, None, held, at_s)
            return
        self._ended(key, finished, held, at_s)
        if finished.ran:
            self._learned.ran(self._reporter, finished.usage)
        if held is not None and finished.ran:
            self._learned.measured(
                held.model,
                prompt_blocks=held.prompt_blocks,
                prompt_tokens=finished.usage.prompt_tokens,
            )
        if held is not None and finished.ran and finished.ttft_s:
            ttft_s = at_s - held.enqueued_at_s - finished.run_s + finished.ttft_s
            self._metrics.first_token(max(ttft_s, 0.0), lane=held.lane, band=held.band)

    def _ended(self, key: str, finished: Finished | None, held: Held | None, at_s: float) -> None:
        self._told.pop(key, None)
        kind, reason = (None, None) if finished is None else (finished.kind, finished.reason)
        e2e_s = None if held is None else max(at_s - held.enqueued_at_s, 0.0)
        if held is not None:
            self._metrics.ended(
                kind,
                lane=held.lane,
                band=held.band,
                e2e_s=e2e_s,
                usage=finished.usage if finished is not None and finished.ran else None,
                predicted_hit_tokens=0 if finished is None else finished.predicted_hit_tokens,
            )
        self._log.put(Ended(at_s, key, self._reporter, finished, kind, reason, e2e_s))

    def _attempt_ended(self, key: str, at_s: float) -> None:
        finished = self._finished.get(key)
        if finished is not None:
            self._log.put(Ended(at_s, key, self._reporter, finished, None, finished.reason))
