"""A caller's hold on one job: where it stands, its answer in pieces, its result.

A ticket only takes in what is heard of its job; looking after it (lost ends, lost jobs) is the
watchdog's.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from broker.wire.codec import decode
from broker.wire.messages import (
    Attempt,
    End,
    Job,
    OfOneJob,
    Queued,
    Reason,
    Started,
    StoredEnd,
    TerminalRecord,
    Tokens,
)
from producers.config import ClientConfig
from producers.errors import ProducerError, ResultTimeout, failure_of
from producers.token_stream import Chunk, TokenStream

if TYPE_CHECKING:  # It tells a ticket's states.
    from producers.looking import JobLook


class TicketState(StrEnum):
    """How far a job has come."""

    QUEUED = "queued"
    STARTED = "started"
    ENDED = "ended"


class Heard(StrEnum):
    """What a message means for whoever looks after the ticket."""

    NEWS = "news"
    RECORD = "record"
    """The job ended, and its record is at hand."""
    LOOK = "look"
    """The record has to be fetched."""


class TicketOwner(Protocol):
    """What a ticket asks of its client."""

    async def cancel_job(self, job_id: str) -> bool:
        """Ask the broker to cancel a job."""
        ...

    def queue_wait_s(self, band: int, model: str) -> float | None:
        """Expected wait in a queue, as the broker last said it; None when it said nothing."""
        ...

    async def look(self, job_id: str) -> "JobLook | None":
        """Say where a job stands now; None without such a job."""
        ...


class Ticket:
    """One job that was accepted. Made by `Client.submit`."""

    __slots__ = (
        "_back_off_until_tick_s",
        "_changed",
        "_chunks",
        "_error",
        "_owner",
        "_receipt",
        "attempt",
        "due_at_s",
        "ended_unread",
        "job",
        "look_in_s",
        "on_chunks",
        "on_start",
        "record",
        "rejected",
        "rejected_at_s",
        "sequence",
        "started_at_s",
        "state",
        "submission",
        "worker",
    )

    def __init__(self, job: Job, owner: TicketOwner, config: ClientConfig) -> None:
        self.job = job
        self.state = TicketState.QUEUED
        self.record: TerminalRecord | None = None
        self.worker = ""
        self.started_at_s = 0.0
        """Unix time at which its last start was heard; 0 before."""
        self.attempt: Attempt | None = None
        self.submission = job.submission
        self.sequence = 0
        """Of the job's message in its stream; 0 while not known."""
        self.due_at_s = math.inf
        """When the watchdog looks for this job (monotonic clock)."""
        self.look_in_s = config.watchdog_s
        """Pause before the next look: doubled while the job only waits."""
        self.ended_unread = False
        """Its record is said to stand: the next look is for that alone."""
        self.rejected = False
        """It was turned away and waits to be submitted again."""
        self.rejected_at_s = 0.0
        """Unix time of the last rejection that was waited out: its record is no news any more."""
        self._back_off_until_tick_s = 0.0
        """Unix time until which a rejection may be answered by another try; 0 = never."""
        self.on_chunks: Callable[[], bool] | None = None
        """Called when there are new chunks; says whether it sees to them. If not, and without it,
        who waits in `next_chunk` is woken, which costs more than a chunk itself."""
        self.on_start: Callable[[], None] | None = None
        """Called each time that a start is heard; one may pass unheard."""
        self._owner = owner
        self._receipt: Queued | None = None
        self._changed = asyncio.Event()
        self._error: ProducerError | None = None
        self._chunks = (
            TokenStream(
                chunks_max=config.stream_chunks_max,
                bytes_max=config.stream_bytes_max,
                reorder_max=config.stream_reorder_max,
            )
            if job.stream
            else None
        )

    # ---- for the caller -------------------------------------------------------------------------

    @property
    def job_id(self) -> str:
        """The job's id: its idempotency key within the lane."""
        return self.job.id

    @property
    def position(self) -> int | None:
        """Place in the queue as last told, 0 = next; None before it is known and once it runs."""
        waits = self.state is TicketState.QUEUED and self._receipt is not None
        return self._receipt.position if waits and self._receipt else None

    @property
    def wait_s(self) -> float | None:
        """Expected wait in seconds: this job's if told, else its queue's; 0 once it runs."""
        if self.state is not TicketState.QUEUED:
            return 0.0
        if self._receipt is not None:
            return self._receipt.wait_s
        return self._owner.queue_wait_s(self.job.band, self.job.model)

    async def result(
        self, timeout_s: float | None = None, *, raise_for_kind: bool = False
    ) -> TerminalRecord:
        """Wait for the job's end and return its record, whatever its kind.

        Raises ResultTimeout (the job goes on), ClientClosed; with `raise_for_kind` JobFailed or
        JobRejected for any kind but completed.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self.record is None:
                    await self._news()
        except TimeoutError as error:
            message = f"job {self.job_id} has no result after {timeout_s} s; it goes on, ask again"
            raise ResultTimeout(message) from error
        failure = failure_of(self.record) if raise_for_kind else None
        if failure is not None:
            raise failure
        return self.record

    async def stream(self, *, raise_for_kind: bool = True) -> AsyncIterator[Chunk]:
        """Give the answer piece by piece, in order; ends with the job. One reader per ticket.

        Another attempt before the first chunk is silent; after it, the next chunk is marked
        `restart`. A gap, a lost link or a reader slower than the buffer ends in one chunk marked
        `whole`, which has the complete answer; so does a job that was not submitted with `stream`.
        Raises JobFailed at the end of a job that did not complete, ClientClosed.
        """
        while (chunk := await self.next_chunk()) is not None:
            yield chunk
        assert self.record is not None, "the chunks end with the job"
        failure = failure_of(self.record)
        if failure is not None and raise_for_kind:
            raise failure
        if failure is None and self._chunks is None:
            yield Chunk(self.record.body, attempt=self.record.attempt, whole=True)

    async def look(self) -> "JobLook | None":
        """Ask where the job stands now, and show it from then on: state, position, wait.

        The broker tells them unasked once, when it takes the job up; this is for a job that waits
        beyond its window, and for a newer word. Nothing is required to ask. None if the job is
        nowhere, which its client will heal. Raises Unreachable.
        """
        before = (self.state, self.attempt, self._receipt)
        look = await self._owner.look(self.job_id)
        if look is None or before != (self.state, self.attempt, self._receipt):
            return look  # What was heard meanwhile is newer.
        if look.state is TicketState.QUEUED and look.position is not None:
            wait_s = look.wait_s or 0.0
            self._receipt = Queued(job=self.job_id, position=look.position, wait_s=wait_s)
            self.state = TicketState.QUEUED
        elif look.state is TicketState.STARTED:
            self.state, self.worker = TicketState.STARTED, look.worker
            self.attempt = look.attempt or self.attempt
        return look

    async def next_chunk(self) -> Chunk | None:
        """Wait for the next piece of a streamed answer; None once the job has ended.

        As `stream`, for a reader who must be able to stop waiting and go on later. Raises
        ClientClosed.
        """
        while True:
            chunk = self.ready_chunk()
            if chunk is not None or self.record is not None:
                return chunk
            await self._news()

    def ready_chunk(self, *, plain: bool = False) -> Chunk | None:
        """Take the next piece that is here already; None when there is none now.

        `plain`: only one that goes on where the last one ended.
        """
        return self._chunks.pop(plain=plain) if self._chunks is not None else None

    @property
    def has_chunks(self) -> bool:
        """Whether a piece is here that was not read."""
        return self._chunks is not None and self._chunks.is_ready

    def wake(self) -> None:
        """Wake who waits in `next_chunk`: `on_chunks` can't see to what is here."""
        self._changed.set()

    async def told(self) -> None:
        """Wait until it is known where the job stands: its place, its start or its end.

        Raises ClientClosed.
        """
        while self._receipt is None and self.state is TicketState.QUEUED:
            await self._news()

    async def cancel(self) -> bool:
        """Ask for the job's cancellation: its record says `cancelled`, unless it ended before.

        Returns whether the broker found something to cancel. Raises Unreachable when no broker
        answers.
        """
        return self.record is None and await self._owner.cancel_job(self.job_id)

    # ---- for the client that looks after it -----------------------------------------------------

    def hear(self, event: OfOneJob) -> tuple[Heard, TerminalRecord | None]:
        """Take in one message of the job; say what it asks for. Raises MalformedMessage."""
        match event:
            case Tokens():  # First, as they are the most.
                self.state = TicketState.STARTED
                if self._chunks is not None and self._chunks.add(event):
                    self._tell_chunks()
            case Queued():
                self._receipt = event
                self.state = TicketState.QUEUED
                self._changed.set()
            case Started(attempt=attempt, worker=worker):
                if self.attempt is None or attempt >= self.attempt:
                    self.attempt, self.worker = attempt, worker
                    self.state = TicketState.STARTED
                    self.started_at_s = time.time()
                    self._changed.set()
                    if self.on_start is not None:
                        self.on_start()
            case StoredEnd():
                return Heard.LOOK, None
            case End(record=packed):
                record = decode(packed, TerminalRecord)
                # Another copy of the job is known to the broker; that copy has the answer.
                other = record.reason is Reason.DUPLICATE or record.job != self.job_id
                return (Heard.LOOK, None) if other else (Heard.RECORD, record)
        return Heard.NEWS, None

    def _tell_chunks(self) -> None:
        if self.on_chunks is None or not self.on_chunks():
            self._changed.set()

    def link_lost(self) -> None:
        """Messages may have passed unheard."""
        if self._chunks is not None:
            self._chunks.doubt()

    def end(self, record: TerminalRecord, *, heard: bool) -> None:
        """Take the record. `heard` False: it was looked up, so messages may be missing."""
        assert self.record is None, "a job ends once"
        self.record = record
        self.state = TicketState.ENDED
        if self._chunks is not None:
            if not heard:
                self._chunks.doubt()
            self._chunks.finish(record)
        self._changed.set()

    def hold_back(self, record: TerminalRecord) -> None:
        """Note a rejection that will be answered by another try."""
        self.rejected = True
        self.rejected_at_s = record.ended_at_s
        self.state = TicketState.QUEUED
        self._receipt = None

    def requeue(self, *, submission: int, sequence: int) -> None:
        """Note that the job was submitted again."""
        self.rejected = False
        self.submission = submission
        self.sequence = sequence
        self.state = TicketState.QUEUED
        self._receipt = None

    def fail(self, error: ProducerError) -> None:
        """Wake whoever waits, with an error: nobody looks after this ticket any more."""
        self._error = error
        self._changed.set()

    def backs_off_for(self, wait_s: float) -> None:
        """Let transient rejections be waited out for so long from now; 0: not at all."""
        self._back_off_until_tick_s = time.monotonic() + wait_s if wait_s else 0.0

    def may_back_off(self, retry_after_s: float) -> bool:
        """Say whether another try after a rejection falls within the time given for it."""
        return time.monotonic() + retry_after_s < self._back_off_until_tick_s

    async def _news(self) -> None:
        """Wait until something changed. Raises what the ticket failed with."""
        if self._error is not None:
            raise self._error
        await self._changed.wait()
        if self.record is None:
            self._changed.clear()
            if self._error is not None:
                raise self._error
