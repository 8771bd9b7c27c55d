"""One attempt: look for a record, run the engine, write the record, say so, acknowledge.

Each step may be the last one this process makes, and each order of death leaves the job whole:
before the record nothing is settled and the message is delivered again; after it the next attempt
finds it and only acks.

    check ──► engine ──► record (compare-and-set) ──► slot free, end to the caller, note ──► ack
      │          │
      │          └─ stopped, stalled, failed: a record if the job itself ends so, else a retry
      └─ a record stands: nothing runs
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from broker.wire.messages import (
    BODY_BYTES_MAX,
    Finished,
    Kind,
    Outcome,
    Reason,
    TerminalRecord,
    Usage,
)
from worker_agent import records
from worker_agent.acks import Acks
from worker_agent.engine.base import (
    Completed,
    EngineAway,
    EngineBusy,
    EngineDisconnected,
    EngineError,
    EngineFailed,
)
from worker_agent.ledger import Ledger, Running, Step, Stop
from worker_agent.notes import Notes
from worker_agent.records import RecordWriter, Standing, record_of
from worker_agent.supervised import Supervisor, Verdict

_log = structlog.get_logger(__name__)

DETAIL_CHARS_MAX = 512
"""Of a failure's detail in notes and heartbeats, which repeat it."""

RECORDED_STOPS = (Reason.CANCELLED, Reason.DEADLINE_EXPIRED)
"""Orders and limits that end the job itself; all others end only this attempt."""


@dataclass(frozen=True, slots=True)
class _Ending:
    """What to report, and the record to send to the caller, if that is ours to do."""

    finished: Finished
    end: bytes | None = None


class Attempts:
    """Lives attempts, any number at once."""

    def __init__(
        self,
        *,
        worker: str,
        ledger: Ledger,
        supervisor: Supervisor,
        writer: RecordWriter,
        acks: Acks,
        notes: Notes,
        has_died: Callable[[int], Awaitable[bool]],
        now_s: Callable[[], float],
    ) -> None:
        """`has_died(incarnation)` asks whether that engine is no more."""
        self._has_died = has_died
        self._worker = worker
        self._ledger = ledger
        self._supervisor = supervisor
        self._writer = writer
        self._acks = acks
        self._notes = notes
        self._now_s = now_s

    async def live(self, running: Running) -> None:
        """Live one attempt to its end. Whatever happens, its slot is free afterwards."""
        try:
            ending = await self._ending(running)
            self._ledger.end(running, ending.finished)
        finally:
            self._ledger.drop(running)
        if ending.end is not None:
            speaks_json = running.order.speaks_json
            await self._notes.end(running.job, ending.end, speaks_json=speaks_json)
        await self._notes.ended(ending.finished)
        if ending.finished.outcome is Outcome.SETTLED:
            await self._acks.acknowledge(running)

    async def _ending(self, running: Running) -> _Ending:
        try:
            verdict = await self._supervisor.run(running)
            running.step = Step.RECORDING
            return await self._conclude(running, verdict)
        except Exception as error:  # noqa: BLE001  # The edge of an attempt.
            # A fault of ours costs the job one charged attempt, never the agent.
            _log.exception("attempt failed", key=running.key, attempt=running.attempt)
            fault = EngineFailed(f"fault of the agent: {error!r}")
            return _Ending(self._retry(running, fault.reason, detail=fault.detail))

    async def _conclude(self, running: Running, verdict: Verdict) -> _Ending:
        match verdict:
            case Standing():
                # Its writer may have died before it told the caller; a second end does no harm.
                return _Ending(self._settled(running, verdict, ran=False), verdict.data)
            case Completed():
                return await self._record(running, self._answer(running, verdict))
            case EngineError() if not verdict.retriable:
                return await self._record(
                    running, records.refused(self._base(running, Kind.FAILED), verdict)
                )
            case EngineAway():
                await self._has_died(running.engine_incarnation)  # So that all hear it is away.
                return _Ending(
                    self._retry(running, verdict.reason, charged=False, detail=verdict.detail)
                )
            case EngineDisconnected() if await self._has_died(running.engine_incarnation):
                # With it died all that ran there: the broker says whom that is charged to.
                detail = f"the engine died: {verdict.detail}"
                return _Ending(
                    self._retry(running, Reason.WORKER_LOST, charged=False, detail=detail)
                )
            case EngineError():
                charged = not isinstance(verdict, EngineBusy)
                return _Ending(
                    self._retry(running, verdict.reason, charged=charged, detail=verdict.detail)
                )
            case Stop(reason=reason) if verdict.record is not None or reason in RECORDED_STOPS:
                base = self._base(running, Kind.CANCELLED)
                return await self._record(running, records.stopped(base, verdict))
            case Stop():
                return _Ending(self._stopped(running, verdict))

    async def _record(self, running: Running, record: TerminalRecord) -> _Ending:
        standing = await self._writer.settle(record, speaks_json=running.order.speaks_json)
        end = standing.data if standing.ours else None
        return _Ending(self._settled(running, standing, ran=True), end)

    def _answer(self, running: Running, answer: Completed) -> TerminalRecord:
        base = self._base(running, Kind.COMPLETED)
        if len(answer.body) > BODY_BYTES_MAX:
            return records.too_large(base, body_bytes=len(answer.body), usage=answer.usage)
        return records.completed(base, answer)

    def _base(self, running: Running, kind: Kind) -> TerminalRecord:
        return record_of(running, worker=self._worker, kind=kind, at_s=self._now_s())

    def _settled(self, running: Running, standing: Standing, *, ran: bool) -> Finished:
        record = standing.record
        ours = ran and standing.ours
        knows_cache = running.cached_tokens is not None
        return Finished(
            key=running.key,
            attempt=running.attempt,
            outcome=Outcome.SETTLED,
            kind=record.kind,
            reason=record.reason,
            detail=record.message[:DETAIL_CHARS_MAX],
            usage=record.usage if ours else Usage(),
            # An engine that doesn't tell its hits says nothing against the prediction.
            predicted_hit_tokens=running.order.predicted_hit_tokens if ours and knows_cache else 0,
            ttft_s=running.ttft_s,
            run_s=running.run_s(tick_s=time.monotonic()),
            ran=ran,
            stream_sequence=running.order.stream_sequence,
            cache_source=running.cache_source if ours else "",
        )

    def _stopped(self, running: Running, stop: Stop) -> Finished:
        match stop.reason:
            case Reason.STALLED:
                detail = f"no new token for {running.order.stall_s:g} s"
            case Reason.RUN_TIME_EXCEEDED:
                detail = f"ran for more than {running.order.run_s_max:g} s"
            case _:
                detail = f"stopped: {stop.reason}"
        charged = stop.reason in (Reason.STALLED, Reason.RUN_TIME_EXCEEDED)
        return self._retry(running, stop.reason, charged=charged, detail=detail)

    def _retry(
        self, running: Running, reason: Reason, *, charged: bool = True, detail: str
    ) -> Finished:
        _log.warning("attempt ended", key=running.key, reason=reason, detail=detail)
        return Finished(
            key=running.key,
            attempt=running.attempt,
            outcome=Outcome.RETRY,
            reason=reason,
            charged=charged,
            detail=detail[:DETAIL_CHARS_MAX],
            ttft_s=running.ttft_s,
            run_s=running.run_s(tick_s=time.monotonic()),
            stream_sequence=running.order.stream_sequence,
        )
