"""The rule of removal: a job's message leaves its stream only after its terminal record stands.

`Closer` carries out the broker's own endings (rejected, expired, cancelled, dead-lettered, worker
lost): record by
compare-and-set, dead letter where there is one, word to the caller, then the acknowledgement. Each
step is
repeated until its outcome is known; a crash between any two of them is healed by redelivery.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import structlog

from broker.bus.base import Bus, BusError, NotFound, StreamFull, Timeout, WrongSequence
from broker.service.held import Duplicate
from broker.wire import subjects
from broker.wire.codec import MalformedMessage, decode, encode
from broker.wire.ids import split_job_key
from broker.wire.messages import DeadLetter, End, Kind, StoredEnd, TerminalRecord

CLOSERS = 32
"""Endings carried out at once: enough to fill a windowed publisher, few enough to leave room for
dispatches."""

RETRY_S_MIN = 0.05
RETRY_S_MAX = 5.0

END_BYTES_MAX = 1_000_000
"""A larger record isn't repeated to the caller, who reads it from RESULTS."""

_Result = TypeVar("_Result")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Ending:
    """One job's end as the broker decided it."""

    key: str
    record: TerminalRecord
    stream: str
    sequence: int
    ack_subject: str
    """Empty: the message is removed by its sequence instead."""
    client: str = ""
    """Who hears of it; empty when the message named nobody."""
    record_id: str = ""
    """Where the record stands; empty = the record's own job id."""
    ttl_s: float = 0.0
    """Life of the record; 0 = as long as its stream keeps it."""
    dead_letter: bool = False
    duplicates: tuple[Duplicate, ...] = ()
    """Further messages with the same id."""


@dataclass(frozen=True, slots=True)
class Farewell:
    """Further messages of a job whose record stands: tell their callers, acknowledge them."""

    key: str
    lane: str
    job_id: str
    duplicates: tuple[Duplicate, ...]


class Closed(Protocol):
    """Hears of each ending that is done: its message is gone."""

    def __call__(self, ending: Ending, record: TerminalRecord, *, won: bool) -> None:
        """Take the record that stands, ours if `won`."""
        ...


class Closer:
    """Ends jobs durably, many at a time."""

    def __init__(self, bus: Bus, *, closed: Closed) -> None:
        """Call `closed` when a job's message is gone."""
        self._bus = bus
        self._closed = closed
        self._work: asyncio.Queue[Ending | Farewell] = asyncio.Queue()
        self.failures = 0
        """Steps that had to be repeated."""

    def put(self, work: Ending | Farewell) -> None:
        """Queue one ending. Pull windows bound the queue: endings keep their places until done."""
        self._work.put_nowait(work)

    @property
    def backlog(self) -> int:
        """Count endings not begun yet."""
        return self._work.qsize()

    async def run(self) -> None:
        """Carry out endings until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(CLOSERS):
                group.create_task(self._close_one_by_one())

    async def _close_one_by_one(self) -> None:
        while True:
            match await self._work.get():
                case Ending() as ending:
                    await self._close(ending)
                case Farewell() as farewell:
                    stored = encode(StoredEnd(job=farewell.job_id))
                    await self._dismiss(farewell.key, farewell.lane, farewell.duplicates, stored)

    async def _close(self, ending: Ending) -> None:
        record, won = await self._persistently(partial(self._record, ending), "record", ending.key)
        if ending.dead_letter and record.kind is Kind.DEAD_LETTERED:
            step = partial(self._dead_letter, ending, record)
            await self._persistently(step, "dead_letter", ending.key)
        data = encode(record)
        end = End(job=record.job, record=data)
        event = encode(end if len(data) <= END_BYTES_MAX else StoredEnd(job=record.job))
        if ending.client:
            await self._say(subjects.out(record.lane, ending.client, ending.record.job), event)
        await self._persistently(partial(self._remove, ending), "remove", ending.key)
        await self._dismiss(ending.key, record.lane, ending.duplicates, event)
        self._closed(ending, record, won=won)

    async def _record(self, ending: Ending) -> tuple[TerminalRecord, bool]:
        """Write the record unless one stands; return the one that stands and whether it is ours."""
        record = ending.record
        subject = subjects.result(record.lane, ending.record_id or record.job)
        data = encode(record)
        try:
            await self._bus.append(
                subject, data, expected_last_subject_sequence=0, ttl_s=ending.ttl_s
            )
        except WrongSequence:
            stored = await self._standing(subjects.results_stream(record.lane), subject)
            if stored == data:
                return record, True
            return _decoded(stored, record), False
        return record, True

    async def _standing(self, stream: str, subject: str) -> bytes:
        try:
            return (await self._bus.last_message(stream, subject)).data
        except NotFound as error:
            message = f"the record on {subject} ran out just now"
            raise Timeout(message) from error

    async def _dead_letter(self, ending: Ending, record: TerminalRecord) -> None:
        """Publish the dead letter once: its message id is the job's."""
        try:
            job = await self._bus.message_at(ending.stream, ending.sequence)
        except NotFound:
            _log.info("closer.dead_letter_gone", job=ending.key)
            return
        letter = DeadLetter(job=job.data, subject=job.subject, record=record)
        try:
            await self._bus.append(
                subjects.dead_letter(record.lane, record.job),
                encode(letter),
                message_id=f"dlq-{ending.key}-{ending.sequence}",
            )
        except StreamFull:
            _log.exception("closer.dead_letters_full", lane=record.lane, job=ending.key)
            raise

    async def _dismiss(
        self, key: str, lane: str, duplicates: tuple[Duplicate, ...], event: bytes
    ) -> None:
        """Answer and acknowledge further messages of an ended job."""
        _, job_id = split_job_key(key)
        for twin in duplicates:
            await self._say(subjects.out(lane, twin.client, job_id), event)
            await self._persistently(partial(self._bus.ack, twin.ack_subject), "ack", key)

    async def _say(self, subject: str, event: bytes) -> None:
        """Send a caller its end; its ticket looks in RESULTS if this is lost."""
        try:
            await self._bus.publish(subject, event)
        except BusError as error:
            _log.info("closer.end_unsent", subject=subject, error=str(error))

    async def _remove(self, ending: Ending) -> None:
        if ending.ack_subject:
            await self._bus.ack(ending.ack_subject)
        else:
            await self._bus.delete_message(ending.stream, ending.sequence)

    async def _persistently(
        self, step: Callable[[], Awaitable[_Result]], name: str, key: str
    ) -> _Result:
        """Repeat a step until the bus has answered it."""
        pause_s = RETRY_S_MIN
        while True:
            try:
                return await step()
            except BusError as error:
                self.failures += 1
                _log.warning("closer.retry", step=name, job=key, error=str(error), pause_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, RETRY_S_MAX)


def _decoded(stored: bytes, fallback: TerminalRecord) -> TerminalRecord:
    """Read the record that stands; one that can't be read still ends the job."""
    try:
        return decode(stored, TerminalRecord)
    except MalformedMessage:
        _log.warning("closer.record_unreadable", job=fallback.job)
        return fallback
