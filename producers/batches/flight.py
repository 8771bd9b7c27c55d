"""A batch's jobs in the cluster: each line submitted, waited for, and taken back at a stop.

A line ends here in one of two ways: its job's record was found, whatever it says; or the batch was
stopped (cancelled, or its window over) and the cluster said nothing of it in time.
"""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from msgspec.structs import replace

from broker.wire.messages import Kind, Reason, TerminalRecord
from producers.batch.lines import BadLine, Code, bad
from producers.batch.outcome import of_bad_line, of_record
from producers.batch.reader import Work
from producers.batch.room import Room
from producers.batches.config import BatchesConfig
from producers.batches.records import Batch
from producers.batches.results import Result
from producers.batches.traces import OldestJob, Trace
from producers.client import TRANSIENT, Client
from producers.errors import (
    ProducerError,
    QueueFull,
    Refused,
    UnknownLane,
    UnknownModel,
)
from producers.ticket import Ticket, TicketState

RECALLS_AT_ONCE_MAX = 64
"""Cancellations under way at once, of a batch that is stopped."""

_TIMED_OUT = frozenset((Reason.DEADLINE_INFEASIBLE, Reason.DEADLINE_EXPIRED, Reason.WAIT_EXPIRED))
"""Reasons that all mean to a batch's user that its window was over."""


class Recalled(ProducerError):
    """The batch was stopped, and its ticket is waited for no longer."""


class Flight:
    """The lines of one batch that are under way."""

    def __init__(
        self,
        batch: Batch,
        client: Client,
        take: Callable[[Result], Awaitable[None]],
        *,
        config: BatchesConfig,
        traces: dict[int, Trace],
        waiting_max: Callable[[], int],
    ) -> None:
        """`take` gets each line's end; `traces`: where earlier runners' jobs stand.

        `waiting_max`: how many lines may wait for their start, now.
        """
        self.oldest = OldestJob(batch.place.jobs_after_sequence)
        self.stopped: Code | None = None
        """Code of the lines that can't be run any more; None while they can."""
        self._batch = batch
        self._client = client
        self._take = take
        self._config = config
        self._traces = traces
        self._room = Room(
            jobs_max=config.lines_inflight_max,
            bytes_max=config.inflight_bytes_max,
            waiting_max=waiting_max,
        )
        self._waiting: set[int] = set()
        """Lines that have not started yet, as far as we heard."""
        self._begun = 0
        self._submitting: dict[int, asyncio.Task[None]] = {}
        self._tickets: dict[int, Ticket] = {}
        self._landed = asyncio.Event()
        for number, trace in traces.items():
            self.oldest.begin(number)
            self.oldest.stored(number, trace.sequence)

    @property
    def jobs(self) -> int:
        """Lines under way."""
        return self._room.jobs

    async def start(self, work: Work, lines: asyncio.TaskGroup) -> None:
        """Set a line going, once there is room."""
        await self._room.take(len(work.job.body))
        self._waiting.add(work.number)
        self._begun += 1
        behind = self._batch.counts.total - self._batch.counts.ended - self._begun
        job = replace(work.job, jobs_behind=max(0, behind))
        lines.create_task(self._run(dataclasses.replace(work, job=job)))

    async def close(self, number: int, custom_id: str) -> None:
        """End a line that was never submitted."""
        await self._take(self._unrun(number, custom_id))

    async def fault(self, fault: BadLine) -> None:
        """End a line that can't be run."""
        ended = of_bad_line(fault, batch_id=self._batch.id)
        await self._take(Result(ended=ended, custom_id=fault.custom_id))

    async def stop(self, code: Code) -> None:
        """Take back what is under way: what the cluster says of it in time still counts."""
        self.stopped = code
        await self._take_back_submissions()
        deadline_s = asyncio.get_running_loop().time() + self._config.grace_s
        try:
            async with asyncio.timeout_at(deadline_s):
                if code is Code.BATCH_CANCELLED:
                    await self._cancel_jobs()
                for ticket in list(self._tickets.values()):
                    if not ticket.rejected:
                        await ticket.result()
        except (TimeoutError, ProducerError):
            pass
        for ticket in list(self._tickets.values()):
            if ticket.record is None:
                self._client.forget(ticket)
                ticket.fail(Recalled("the batch was stopped"))

    async def _take_back_submissions(self) -> None:
        """Let those land that only wait for the stream's word; the others wait for room."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.grace_s / 4):
                while self._submitting:
                    self._landed.clear()
                    await self._landed.wait()
        for task in self._submitting.values():
            task.cancel()

    async def _cancel_jobs(self) -> None:
        slots = asyncio.Semaphore(RECALLS_AT_ONCE_MAX)

        async def ask(ticket: Ticket) -> None:
            async with slots:
                with suppress(ProducerError):  # No broker answers: the grace ends the line.
                    await ticket.cancel()

        async with asyncio.TaskGroup() as asking:
            for ticket in list(self._tickets.values()):
                if not ticket.rejected:
                    asking.create_task(ask(ticket))

    async def _run(self, work: Work) -> None:
        try:
            await self._take(await self._live(work))
        finally:
            self._tickets.pop(work.number, None)
            self._started(work.number)
            self._traces.pop(work.number, None)
            self.oldest.end(work.number)
            self._room.give_back(len(work.job.body))

    def _started(self, number: int) -> None:
        """A line waits no longer."""
        if number in self._waiting:
            self._waiting.remove(number)
            self._room.started()

    async def _live(self, work: Work) -> Result:
        """Submit a line, or take it up, and wait for its end."""
        if self.stopped and not work.known:
            return self._unrun(work.number, work.custom_id)
        try:
            ticket = await self._submitted(work)
            if ticket is None:
                return await self._last_look(work)
            self._tickets[work.number] = ticket
            ticket.on_start = partial(self._started, work.number)
            if ticket.state is not TicketState.QUEUED:
                self._started(work.number)
            self.oldest.stored(work.number, ticket.sequence)
            if self.stopped is Code.BATCH_CANCELLED and ticket.record is None:
                await ticket.cancel()
            record = await ticket.result(self._config.grace_s if self.stopped else None)
            work = _as_stored(work, ticket)
        except UnknownLane:
            raise
        except Refused as error:
            if isinstance(error, QueueFull):
                return await self._last_look(work)
            code = Code.MODEL_NOT_FOUND if isinstance(error, UnknownModel) else Code.INVALID_REQUEST
            return self._refused(bad(work.number, work.custom_id, code, str(error)))
        except ProducerError:
            if not self.stopped:
                raise
            return await self._last_look(work)
        if record.kind is Kind.REJECTED and record.reason in TRANSIENT:
            return self._unrun(work.number, work.custom_id, code=Code.BATCH_EXPIRED)
        return self._recorded(work, record)

    async def _submitted(self, work: Work) -> Ticket | None:
        """A ticket for the line's job; None when the batch was stopped before it was stored."""
        job, sequence = work.job, work.sequence
        if trace := self._traces.get(work.number):
            job, sequence = replace(job, submission=trace.submission), trace.sequence
        if self.stopped and not sequence:
            return None
        task = asyncio.current_task()
        assert task is not None
        self._submitting[work.number] = task
        self.oldest.begin(work.number)
        try:
            return await self._client.submit_job(
                job, queue_full_wait_s=max(0.0, self._left_s()), known=work.known, sequence=sequence
            )
        except asyncio.CancelledError:
            # Ours if the batch was stopped and nobody else cancelled this task.
            if self.stopped is None or task.uncancel():
                raise
            return None
        finally:
            self._submitting.pop(work.number, None)
            self._landed.set()

    async def _last_look(self, work: Work) -> Result:
        """The batch was stopped: what ended meanwhile still counts."""
        ticket = self._tickets.get(work.number)
        record = await self._client.find_record(work.job.id)
        if record is not None and not (record.kind is Kind.REJECTED and record.reason in TRANSIENT):
            return self._recorded(_as_stored(work, ticket) if ticket else work, record)
        return self._unrun(work.number, work.custom_id)

    def _recorded(self, work: Work, record: TerminalRecord) -> Result:
        timed_out = record.kind is Kind.EXPIRED or record.reason in _TIMED_OUT
        if timed_out and record.kind is not Kind.EXPIRED:
            record = replace(record, kind=Kind.EXPIRED)
        return Result(
            ended=of_record(work.number, work.custom_id, record, job_id=work.job.id),
            custom_id=work.custom_id,
            usage=record.usage,
            unrun=timed_out,
            job_id=work.job.id,
            sequence=work.sequence,
        )

    def _unrun(self, number: int, custom_id: str, *, code: Code | None = None) -> Result:
        code = code or self.stopped or Code.BATCH_EXPIRED
        told = (
            "the batch was cancelled before this line was run"
            if code is Code.BATCH_CANCELLED
            else "the batch's window was over before this line was run"
        )
        ended = of_bad_line(bad(number, custom_id, code, told), batch_id=self._batch.id)
        return Result(ended=ended, custom_id=custom_id, unrun=code is Code.BATCH_EXPIRED)

    def _refused(self, fault: BadLine) -> Result:
        return Result(ended=of_bad_line(fault, batch_id=self._batch.id), custom_id=fault.custom_id)

    def _left_s(self) -> float:
        return self._batch.deadline_at_s - time.time()


def _as_stored(work: Work, ticket: Ticket) -> Work:
    """The line with where its job's message was last stored."""
    return Work(work.number, work.custom_id, work.job, work.known, ticket.sequence)
