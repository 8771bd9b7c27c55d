"""The rule of removal: a job's message leaves its stream only after its terminal record stands.

`Closer` carries out the broker's own endings (rejected, expired, cancelled, dead-lettered, worker
lost): record by compare-and-set, dead letter where there is one, word to the caller, then the
acknowledgement. Each step is repeated until its outcome is known; a crash between any two of them
is healed by redelivery. A dead letter's failures stand in ATTEMPTS before its record does, so that
the next leader knows that there is a letter to be written.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import msgspec
import structlog

from broker.bus.base import (
    Bus,
    BusError,
    NoResponders,
    NotFound,
    PayloadTooLarge,
    StoredMessage,
    StreamFull,
    Timeout,
    WrongSequence,
)
from broker.service.held import Duplicate
from broker.wire import subjects
from broker.wire.codec import (
    JSON_HEADERS,
    MalformedMessage,
    decode,
    encode,
    encode_end,
    encode_for,
)
from broker.wire.messages import DeadLetter, JobAttempts, Kind, StoredEnd, TerminalRecord

BEGUN_AT_ONCE_MAX = 16
"""Endings begun in one turn of the loop: a cancelled lane brings a whole window of them at once,
and beginning one takes a tenth of a millisecond."""

STEPS_MAX = 32
"""Steps under way at once: enough to fill a windowed publisher, few enough to leave room for
dispatches. An ending that waits to be tried again takes none, so that a lane whose results are full
holds up no other."""

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
    speaks_json: bool = False
    """The caller reads JSON, and so the record is written."""
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

    def __init__(
        self,
        bus: Bus,
        *,
        closed: Closed,
        given_up: Callable[[str], None] = lambda _: None,
        short_lived: Callable[[str, int], None] = lambda _lane, _sequence: None,
    ) -> None:
        """Call `closed` when a job's message is gone; `given_up` with its key after a surprise.

        `short_lived` hears of each record that will run out: lane and sequence in RESULTS.
        """
        self._bus = bus
        self._closed = closed
        self._given_up = given_up
        self._short_lived = short_lived
        self._work: asyncio.Queue[Ending | Farewell] = asyncio.Queue()
        self._room = asyncio.Semaphore(STEPS_MAX)
        self.failures = 0
        """Steps that had to be repeated."""

    def put(self, work: Ending | Farewell) -> None:
        """Queue one ending. Pull windows bound the queue: endings keep their places until done."""
        self._work.put_nowait(work)

    async def run(self) -> None:
        """Carry out endings until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                for _ in range(BEGUN_AT_ONCE_MAX):
                    group.create_task(self.carry_out(await self._work.get()))
                await asyncio.sleep(0)

    async def carry_out(self, work: Ending | Farewell) -> bool:
        """Carry out one ending and return when it is done; False: given up after a surprise."""
        try:
            match work:
                case Ending():
                    await self._close(work)
                case Farewell():
                    await self._dismiss(work, b"")
        except Exception:  # noqa: BLE001 - the edge of one ending: the others go on
            _log.exception("closer.surprise", job=work.key)
            self._given_up(work.key)
            return False
        return True

    async def _close(self, ending: Ending) -> None:
        if ending.dead_letter:
            await self._persistently(partial(self._announce, ending), "attempts", ending.key)
        record, won = await self._persistently(partial(self._record, ending), "record", ending.key)
        if ending.dead_letter and record.kind is Kind.DEAD_LETTERED:
            step = partial(self._dead_letter, ending, record)
            await self._persistently(step, "dead_letter", ending.key)
        data = encode_for(record, speaks_json=ending.speaks_json)
        if ending.client:
            subject = subjects.out(record.lane, ending.client, ending.record.job)
            await self._say(subject, _event(record.job, data, speaks_json=ending.speaks_json))
        remove = partial(self._remove, ending.ack_subject, ending.stream, ending.sequence)
        await self._persistently(remove, "remove", ending.key)
        twins = Farewell(ending.key, record.lane, ending.record.job, ending.duplicates)
        await self._dismiss(twins, data)
        self._closed(ending, record, won=won)

    async def _announce(self, ending: Ending) -> None:
        """Let ATTEMPTS say that this job is at its end before its record does."""
        attempts = JobAttempts(failures=ending.record.failures)
        await self._bus.kv_put(subjects.ATTEMPTS_BUCKET, ending.key, encode(attempts))

    async def _record(self, ending: Ending) -> tuple[TerminalRecord, bool]:
        """Write the record unless one stands; return the one that stands and whether it is ours."""
        record = ending.record
        subject = subjects.result(record.lane, ending.record_id or record.job)
        data = encode_for(record, speaks_json=ending.speaks_json)
        try:
            appended = await self._bus.append(
                subject,
                data,
                expected_last_subject_sequence=0,
                ttl_s=ending.ttl_s,
                headers=JSON_HEADERS if ending.speaks_json else None,
            )
            sequence = appended.sequence
        except WrongSequence:
            stored = await self._standing(subjects.results_stream(record.lane), subject)
            if stored.data != data:
                return _decoded(stored.data, record), False
            sequence = stored.sequence
        if ending.ttl_s:
            self._short_lived(record.lane, sequence)
        return record, True

    async def _standing(self, stream: str, subject: str) -> StoredMessage:
        try:
            return await self._bus.last_message(stream, subject)
        except NotFound as error:
            message = f"the record on {subject} ran out just now"
            raise Timeout(message) from error

    async def _dead_letter(self, ending: Ending, record: TerminalRecord) -> None:
        """Publish the dead letter once: its message id is the job's, and an older one is found."""
        try:
            job = await self._bus.message_at(ending.stream, ending.sequence)
        except NotFound:
            _log.info("closer.dead_letter_gone", job=ending.key)
            return
        letter = DeadLetter(job=job.data, subject=job.subject, record=record)
        try:
            await self._append_letter(letter, ending)
        except PayloadTooLarge:
            # The job alone fits a message; with its history it does not.
            _log.exception("closer.dead_letter_without_job", job=ending.key)
            await self._append_letter(msgspec.structs.replace(letter, job=b""), ending)
        except StreamFull:
            _log.exception("closer.dead_letters_full", lane=record.lane, job=ending.key)
            raise

    async def _append_letter(self, letter: DeadLetter, ending: Ending) -> None:
        record, data = letter.record, encode(letter)
        subject = subjects.dead_letter(record.lane, record.job)
        try:
            last = await self._bus.last_message(subjects.dead_letters_stream(record.lane), subject)
        except NotFound:
            pass
        else:
            if last.data == data:
                return
        message_id = f"dlq-{ending.key}-{ending.sequence}"
        await self._bus.append(subject, data, message_id=message_id)

    async def _dismiss(self, twins: Farewell, record: bytes) -> None:
        """Answer and acknowledge further messages of an ended job. Without `record`: it stands."""
        for twin in twins.duplicates:
            event = _event(twins.job_id, record, speaks_json=twin.speaks_json)
            await self._say(subjects.out(twins.lane, twin.client, twins.job_id), event)
            remove = partial(self._remove, twin.ack_subject, twin.stream, twin.sequence)
            await self._persistently(remove, "ack", twins.key)

    async def _say(self, subject: str, event: bytes) -> None:
        """Send a caller its end; its ticket looks in RESULTS if this is lost."""
        try:
            await self._bus.publish(subject, event)
        except BusError as error:
            _log.info("closer.end_unsent", subject=subject, error=str(error))

    async def _remove(self, ack_subject: str, stream: str, sequence: int) -> None:
        """Take a message out of its stream: by its ack, or by its sequence where none is heard.

        A consumer that was made anew knows nothing of a delivery until it comes again, and never
        answers if the message is gone.
        """
        if ack_subject:
            try:
                await self._bus.ack(ack_subject)
            except (Timeout, NoResponders):
                _log.info("closer.ack_unheard", stream=stream, sequence=sequence)
            else:
                return
        await self._bus.delete_message(stream, sequence)

    async def _persistently(
        self, step: Callable[[], Awaitable[_Result]], name: str, key: str
    ) -> _Result:
        """Repeat a step until the bus has answered it, leaving room to others in between."""
        pause_s = RETRY_S_MIN
        while True:
            try:
                async with self._room:
                    return await step()
            except BusError as error:
                self.failures += 1
                _log.warning("closer.retry", step=name, job=key, error=str(error), pause_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, RETRY_S_MAX)


def _event(job_id: str, record: bytes, *, speaks_json: bool) -> bytes:
    """Tell a caller the end: with the record, unless it is large or not at hand."""
    if record and len(record) <= END_BYTES_MAX:
        return encode_end(job_id, record, speaks_json=speaks_json)
    return encode_for(StoredEnd(job=job_id), speaks_json=speaks_json)


def _decoded(stored: bytes, fallback: TerminalRecord) -> TerminalRecord:
    """Read the record that stands; one that can't be read still ends the job."""
    try:
        return decode(stored, TerminalRecord)
    except MalformedMessage:
        _log.warning("closer.record_unreadable", job=fallback.job)
        return fallback
