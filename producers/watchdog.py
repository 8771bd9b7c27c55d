"""Looks after tickets that hear nothing: a lost end is found, a lost job is submitted again.

The order of the looks is the proof. A job's message leaves its stream only after the terminal
record stands, so a job that is absent from its stream and *then* from RESULTS is nowhere, and may
be submitted anew. (Looking in RESULTS first proves nothing: the job may end between the two looks.)
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import msgspec
import structlog

from broker.bus.base import Bus, BusError, NoStream, NotFound, StoredMessage, StreamFull
from broker.wire import subjects
from broker.wire.codec import MalformedMessage, decode
from broker.wire.json_form import begins_json
from broker.wire.messages import Job, Kind, Reason, TerminalRecord
from producers.config import ClientConfig
from producers.door import Door
from producers.errors import ClientClosed, Refused
from producers.ticket import Ticket

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class WatchdogCounts:
    """What the watchdog did since the client started."""

    looks: int = 0
    healed: int = 0
    """Records that were found by looking: their ends were not heard."""
    resubmitted: int = 0
    """Jobs that were nowhere, or whose rejection was waited out."""


class Keeper(Protocol):
    """Who is told what a look found."""

    def found_record(self, ticket: Ticket, record: TerminalRecord) -> None:
        """The job has ended."""
        ...

    def found_refusal(self, ticket: Ticket, refusal: Refused) -> None:
        """The job was lost and can't be submitted again."""
        ...


FindCopy = Callable[[str], Awaitable[StoredMessage | None]]
"""Reads the copy of a job's record where RESULTS has it no more; None without one."""


async def no_copy(_job_id: str) -> StoredMessage | None:
    """Find none: most records have no copy."""
    return None


class _JobName(msgspec.Struct):
    """The one field of a stored job that a look compares; in msgpack, the form of our own."""

    id: str


class Watchdog:
    """Looks for the jobs of tickets that are due."""

    def __init__(
        self,
        bus: Bus,
        door: Door,
        tickets: Mapping[str, Ticket],
        config: ClientConfig,
        keeper: Keeper,
        find_copy: FindCopy,
    ) -> None:
        self.counts = WatchdogCounts()
        self._bus = bus
        self._door = door
        self._tickets = tickets
        self._config = config
        self._keeper = keeper
        self._find_copy = find_copy
        self._urgent = asyncio.Event()
        self._slots = asyncio.Semaphore(config.lookups_max)

    async def run(self) -> None:
        """Look after all tickets until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.sweep_s):
                    await self._urgent.wait()
            self._urgent.clear()
            now_s = time.monotonic()
            due = [ticket for ticket in self._tickets.values() if ticket.due_at_s <= now_s]
            async with asyncio.TaskGroup() as looks:
                for ticket in due:
                    await self._slots.acquire()
                    looks.create_task(self._look_in_turn(ticket))

    def give_up(self) -> None:
        """Look after nothing any more: who waits is told, and how many jobs go on unattended."""
        for ticket in self._tickets.values():
            ticket.fail(ClientClosed("the client was closed; the job goes on"))
        if self._tickets:
            _log.warning(
                "client.closed_before_its_jobs",
                jobs_that_go_on=len(self._tickets),
                lane=self._door.lane,
                see="`inferlane job LANE.ID` has the result, `inferlane cancel` ends one or all",
            )

    def heard(self, ticket: Ticket) -> None:
        """Something was heard of the job: nothing to look for, for a while."""
        ticket.look_in_s = self._config.watchdog_s
        ticket.due_at_s = time.monotonic() + self._config.watchdog_s

    def look_now(self, ticket: Ticket) -> None:
        """Look for this job's record without delay: there is reason to think that it stands."""
        ticket.ended_unread = True
        ticket.due_at_s = 0.0
        self._urgent.set()

    def look_in(self, ticket: Ticket, pause_s: float) -> None:
        """Look for this job after a pause, unless something is heard before."""
        ticket.due_at_s = time.monotonic() + pause_s

    def link_restored(self) -> None:
        """Ends may have passed unheard: every ticket looks, soon and spread out."""
        for ticket in self._tickets.values():
            if ticket.sequence and not ticket.rejected:
                self.look_in(ticket, random.uniform(0.0, self._config.reconnect_spread_s))

    async def find_record(self, job_id: str) -> TerminalRecord | None:
        """Read a job's terminal record; None when there is none. Raises BusError."""
        lane = self._door.lane
        subject = subjects.result(lane, job_id)
        try:
            stored = await self._bus.last_message(
                subjects.results_stream(lane), subject, timeout_s=self._config.lookup_s
            )
        except NotFound:
            stored = await self._find_copy(job_id)
            if stored is None:
                return None
        try:
            return decode(stored.data, TerminalRecord)
        except MalformedMessage as error:
            return TerminalRecord(
                job=job_id,
                lane=lane,
                kind=Kind.FAILED,
                ended_at_s=stored.at_s,
                reason=Reason.MALFORMED,
                message=f"the stored record can't be read: {error}",
            )

    async def is_stored(self, ticket: Ticket) -> bool:
        """Say whether the job's message is still in its stream. Raises BusError."""
        stream = subjects.jobs_stream(ticket.job.lane, ticket.job.band)
        try:
            stored = await self._bus.message_at(
                stream, ticket.sequence, timeout_s=self._config.lookup_s
            )
            kind = Job if begins_json(stored.data) else _JobName
            return decode(stored.data, kind).id == ticket.job_id
        except (NotFound, MalformedMessage):
            return False

    async def _look_in_turn(self, ticket: Ticket) -> None:
        try:
            await self._look(ticket)
        except BusError:
            self.look_in(ticket, self._config.lookup_retry_s)
        finally:
            self._slots.release()

    async def _look(self, ticket: Ticket) -> None:
        """Look for one job, and do what the finding asks for. Raises BusError."""
        self.counts.looks += 1
        for_record_alone = ticket.rejected or ticket.ended_unread or not ticket.sequence
        if not for_record_alone and await self.is_stored(ticket):
            ticket.look_in_s = min(ticket.look_in_s * 2.0, self._config.watchdog_s_max)
            self.look_in(ticket, ticket.look_in_s)
            return
        record = await self.find_record(ticket.job_id)
        if ticket.record is not None or ticket.due_at_s > time.monotonic():
            return  # It was heard meanwhile.
        if record is None and (ticket.rejected or not for_record_alone):
            await self._submit_again(ticket)
        elif record is None:
            ticket.ended_unread = False
            self.look_in(ticket, self._config.lookup_retry_s)
        elif ticket.rejected:
            self.look_in(
                ticket, self._config.lookup_retry_s
            )  # The old rejection still stands; it is short-lived.
        else:
            self.counts.healed += 1
            self._keeper.found_record(ticket, record)

    async def _submit_again(self, ticket: Ticket) -> None:
        """Submit a job that is nowhere, under the next number. Raises BusError."""
        job = msgspec.structs.replace(ticket.job, submission=ticket.submission + 1)
        try:
            appended = await self._door.store(job)
        except StreamFull:
            ticket.submission = job.submission
            self.look_in(ticket, self._door.retry_after_s(job))
        except NoStream:
            refusal = await self._door.refusal(job)
            if refusal is None:
                self.look_in(ticket, self._config.lookup_retry_s)
            else:
                self._keeper.found_refusal(ticket, refusal)
        else:
            self.counts.resubmitted += 1
            ticket.requeue(submission=job.submission, sequence=appended.sequence)
            self.look_in(ticket, self._config.watchdog_s)
