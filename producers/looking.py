"""Where any job of a lane stands, whoever submitted it: its record, the broker's word, its message.

A job that has not ended has a message in its stream, held and running ones too. So where no broker
answers, or none knows the job, the lane's streams are searched, and what is absent there and *then*
in RESULTS does not exist. A search reads messages one after the other: it is for the few jobs
beyond the broker's window, and bounded.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from broker.bus.base import Bus, LinkDown, NoResponders, NoStream, NotFound, Timeout
from broker.wire import subjects
from broker.wire.codec import MalformedMessage, decode, encode
from broker.wire.control import ControlReply, JobPhase, JobRequest, JobState
from broker.wire.ids import BATCH_BAND, ONLINE_BANDS
from broker.wire.messages import Attempt, TerminalRecord
from producers.errors import Unreachable
from producers.ticket import TicketState


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job's message stands: the word that its publisher was given."""

    stream: str
    sequence: int


@dataclass(frozen=True, slots=True)
class JobLook:
    """Where a job stands, as far as could be learned."""

    job_id: str
    state: TicketState
    position: int | None = None
    """Jobs of its queue before it, 0 = next; None once it runs, and while no broker says."""
    wait_s: float | None = None
    """Expected wait from now on; 0 once it runs, None while no broker says."""
    held_by: str = ""
    """What it waits for, in the words of `why`; empty when nobody said."""
    worker: str = ""
    attempt: Attempt | None = None
    record: TerminalRecord | None = None
    """How it ended."""
    place: Place | None = None
    """Of its message, where that had to be looked for: with it, the next look is cheap."""


FindRecord = Callable[[str], Awaitable[TerminalRecord | None]]
"""Reads a job's record; None without one. Raises BusError."""


class Looks:
    """Looks for jobs of one lane."""

    def __init__(
        self, bus: Bus, lane: str, find_record: FindRecord, *, timeout_s: float, jobs_max: int
    ) -> None:
        """Each question may take `timeout_s`; a search reads at most `jobs_max` messages."""
        self._bus = bus
        self._lane = lane
        self._find_record = find_record
        self._timeout_s = timeout_s
        self._jobs_max = jobs_max

    async def look(self, job_id: str, place: Place | None) -> JobLook | None:
        """Say where a job stands; None when there is none. Raises Unreachable, BusError.

        `place`, where known, spares the search.
        """
        look = await self._ended(job_id) or await self._told(job_id, place)
        if look is not None:
            return look
        searched = None
        if place is None:
            searched = await self.search(job_id)
            place = searched
        if place is not None:
            # With a place, the broker can count what is before it; without a broker, it waits.
            look = await self._told(job_id, place)
            if look is None and await self._stands(job_id, place):
                look = JobLook(job_id, TicketState.QUEUED)
        if look is None:
            return await self._ended(job_id)
        return look if searched is None else replace(look, place=searched)

    async def search(self, job_id: str) -> Place | None:
        """Find a job's message in the lane's streams, online ones first. Raises Unreachable.

        None when it is in none of them.
        """
        read = 0
        for band in (ONLINE_BANDS[0], BATCH_BAND):
            stream = subjects.jobs_stream(self._lane, band)
            async for sequence, found in names(self._bus, stream):
                if found == job_id:
                    return Place(stream, sequence)
                read += 1
                if read >= self._jobs_max:
                    message = (
                        f"job {job_id} is not among the first {read} jobs of lane {self._lane!r}, "
                        "and no broker holds it; say where it is, or ask later"
                    )
                    raise Unreachable(message)
        return None

    async def _ended(self, job_id: str) -> JobLook | None:
        record = await self._find_record(job_id)
        if record is None:
            return None
        return JobLook(
            job_id,
            TicketState.ENDED,
            wait_s=0.0,
            worker=record.worker,
            attempt=record.attempt,
            record=record,
        )

    async def _told(self, job_id: str, place: Place | None) -> JobLook | None:
        """Ask the broker; None when none answers, or it does not know the job."""
        request = JobRequest(
            job=job_id,
            stream="" if place is None else place.stream,
            stream_sequence=0 if place is None else place.sequence,
        )
        subject = subjects.lane_control(self._lane, "job")
        try:
            answer = await self._bus.request(subject, encode(request), timeout_s=self._timeout_s)
            reply = decode(answer.data, ControlReply)
            state = msgspec.json.decode(reply.data, type=JobState) if reply.ok else None
        except (NoResponders, Timeout, LinkDown, MalformedMessage, msgspec.MsgspecError):
            return None
        match None if state is None else state.phase:
            case JobPhase.QUEUED if state is not None:
                return JobLook(
                    job_id,
                    TicketState.QUEUED,
                    position=state.position,
                    wait_s=state.wait_s,
                    held_by=state.held_by,
                )
            case JobPhase.STARTED if state is not None:
                return JobLook(
                    job_id,
                    TicketState.STARTED,
                    wait_s=0.0,
                    worker=state.worker,
                    attempt=state.attempt,
                )
            case JobPhase.ENDING:
                # Its record stands by now, or will in a moment.
                waits = JobLook(job_id, TicketState.QUEUED, wait_s=0.0, held_by=JobPhase.ENDING)
                return await self._ended(job_id) or waits
            case _:
                return None

    async def _stands(self, job_id: str, place: Place) -> bool:
        with suppress(NotFound, NoStream, MalformedMessage):
            stored = await self._bus.message_at(
                place.stream, place.sequence, timeout_s=self._timeout_s
            )
            return decode(stored.data, _Name).id == job_id
        return False


class _Name(msgspec.Struct):
    """The one field of a stored job that a search compares."""

    id: str


async def names(bus: Bus, stream: str) -> AsyncIterator[tuple[int, str]]:
    """Walk a stream's jobs: (sequence, job id); empty without such a stream. Raises BusError.

    A message that can't be read has no name and is passed over.
    """
    try:
        async for stored in bus.messages(stream):
            with suppress(MalformedMessage):
                yield stored.sequence, decode(stored.data, _Name).id
    except (NotFound, NoStream):
        return
