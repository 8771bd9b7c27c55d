"""Terminal records: what each end writes, and the compare-and-set that makes the first one win.

An append whose answer was lost may have been stored. It is sent again with the same expectation
(nothing on this subject yet): then either it is stored now, or the one that stands is read back,
and if it is byte for byte ours, we are the winner after all. A full results stream is waited for; a
record is never dropped.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import structlog
from msgspec.structs import replace

from broker.bus.base import (
    Bus,
    BusError,
    NotFound,
    PayloadTooLarge,
    StreamFull,
    WrongSequence,
)
from broker.wire import codec, subjects
from broker.wire.messages import Kind, Reason, TerminalRecord, Usage
from worker_agent.engine.base import Completed, EngineError
from worker_agent.ledger import Running, Stop

_log = structlog.get_logger(__name__)

MESSAGE_CHARS_MAX = 4096
"""Longest text of a record, `LongText` on the wire."""


@dataclass(frozen=True, slots=True)
class Standing:
    """The record that stands, and whether this attempt wrote it."""

    record: TerminalRecord
    data: bytes
    """As stored."""
    ours: bool


def backoff_s(*, base_s: float, longest_s: float) -> Iterator[float]:
    """Yield pauses for ever: base, twice as long each time, at most `longest_s`."""
    pause_s = base_s
    while True:
        yield min(pause_s, longest_s)
        pause_s = min(pause_s * 2.0, longest_s)


def record_of(running: Running, *, worker: str, kind: Kind, at_s: float) -> TerminalRecord:
    """Make a record with all that the job and its attempt say; the caller adds the end itself."""
    job = running.job
    return TerminalRecord(
        job=job.id,
        lane=job.lane,
        kind=kind,
        ended_at_s=at_s,
        band=job.band,
        model=job.model,
        client=job.client,
        attempt=running.attempt,
        worker=worker,
        submitted_at_s=job.submitted_at_s,
        dispatched_at_s=running.accepted_at_s,
        first_token_at_s=running.first_token_at_s,
        failures=running.order.failures,
        request_id=job.request_id,
        api_key_name=job.api_key_name,
    )


def completed(base: TerminalRecord, answer: Completed) -> TerminalRecord:
    """Record of an engine's answer."""
    return replace(base, status_code=answer.status_code, body=answer.body, usage=answer.usage)


def too_large(base: TerminalRecord, *, body_bytes: int, usage: Usage) -> TerminalRecord:
    """Record of an answer that no message can carry."""
    message = f"the answer has {body_bytes:,} bytes, more than a record can hold; ask for less"
    return replace(
        base,
        kind=Kind.FAILED,
        reason=Reason.PAYLOAD_TOO_LARGE,
        message=message,
        body=b"",
        usage=usage,
        failures=(),
    )


def refused(base: TerminalRecord, error: EngineError) -> TerminalRecord:
    """Record of an error that is the job's own: the engine's words go to the caller."""
    return replace(
        base,
        reason=error.reason,
        message=error.detail[:MESSAGE_CHARS_MAX],
        status_code=error.status_code,
        body=error.body,
    )


def stopped(base: TerminalRecord, stop: Stop) -> TerminalRecord:
    """Record of a job that was cancelled or whose time is over: the order's, else our own."""
    given = stop.record
    if given is not None and (given.lane, given.job) == (base.lane, base.job):
        return replace(given, api_key_name=base.api_key_name)
    if stop.reason is Reason.DEADLINE_EXPIRED:
        return replace(
            base,
            kind=Kind.EXPIRED,
            reason=stop.reason,
            message="the job's deadline passed while it ran",
        )
    return replace(base, kind=Kind.CANCELLED, reason=stop.reason, message="cancelled while it ran")


class RecordWriter:
    """Reads and writes terminal records over a bus that may fail."""

    def __init__(
        self,
        bus: Bus,
        *,
        retry_base_s: float,
        retry_s_max: float,
        call_s_max: float,
        on_full: Callable[[str], None],
        on_room: Callable[[str], None],
    ) -> None:
        self._bus = bus
        self._retry_base_s = retry_base_s
        self._retry_s_max = retry_s_max
        self._call_s_max = call_s_max
        self._on_full = on_full
        """Told when a lane's results stream refuses a record; ..."""
        self._on_room = on_room
        """... and when that record is settled after all (or given up with the process)."""

    async def find(self, lane: str, job_id: str) -> Standing | None:
        """Look for a job's record, trying until the bus answers."""
        pauses_s = self._pauses_s()
        while True:
            try:
                return await self._read(lane, job_id, ours=b"")
            except BusError as error:
                _log.warning("record not readable yet", lane=lane, job=job_id, error=repr(error))
            await asyncio.sleep(next(pauses_s))

    async def settle(self, record: TerminalRecord, *, speaks_json: bool = False) -> Standing:
        """Write a job's record unless one stands, trying until it is known which one does."""
        pauses_s = self._pauses_s()
        is_full = False
        try:
            while True:
                try:
                    standing = await self._write(record, speaks_json=speaks_json)
                    if standing is not None:
                        return standing
                except PayloadTooLarge:
                    body_bytes = len(record.body)
                    record = too_large(record, body_bytes=body_bytes, usage=record.usage)
                except StreamFull:
                    if not is_full:
                        is_full = True
                        self._on_full(record.lane)
                except BusError as error:
                    text = repr(error)
                    _log.warning(
                        "record not confirmed yet", lane=record.lane, job=record.job, error=text
                    )
                await asyncio.sleep(next(pauses_s))
        finally:
            if is_full:
                self._on_room(record.lane)

    def _pauses_s(self) -> Iterator[float]:
        return backoff_s(base_s=self._retry_base_s, longest_s=self._retry_s_max)

    async def _write(self, record: TerminalRecord, *, speaks_json: bool) -> Standing | None:
        data = codec.encode_for(record, speaks_json=speaks_json)
        if len(data) > codec.MESSAGE_BYTES_MAX:
            message = f"a record of {len(data)} bytes, which no reader would take"
            raise PayloadTooLarge(message)
        try:
            await self._bus.append(
                subjects.result(record.lane, record.job),
                data,
                expected_last_subject_sequence=0,
                headers=codec.JSON_HEADERS if speaks_json else None,
                timeout_s=self._call_s_max,
            )
        except WrongSequence:
            # None: its time to live ran out between the two looks (a rejection's does). Again.
            return await self._read(record.lane, record.job, ours=data)
        return Standing(record, data, ours=True)

    async def _read(self, lane: str, job_id: str, *, ours: bytes) -> Standing | None:
        try:
            stored = await self._bus.last_message(
                subjects.results_stream(lane),
                subjects.result(lane, job_id),
                timeout_s=self._call_s_max,
            )
        except NotFound:
            return None
        return Standing(_readable(stored.data, lane, job_id), stored.data, ours=stored.data == ours)


def _readable(data: bytes, lane: str, job_id: str) -> TerminalRecord:
    """Decode what stands; garbage that a careless writer left is still the job's one record."""
    try:
        return codec.decode(data, TerminalRecord)
    except codec.MalformedMessage as error:
        return TerminalRecord(
            job=job_id,
            lane=lane,
            kind=Kind.FAILED,
            ended_at_s=0.0,
            reason=Reason.MALFORMED,
            message=f"the stored record can't be read: {error}"[:MESSAGE_CHARS_MAX],
        )
