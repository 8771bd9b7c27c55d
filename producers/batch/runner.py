"""Runs a batch: keeps a bounded number of jobs in the cluster, writes results as they come.

Flow is bounded at three places: jobs and bytes in flight (`Room`), results that wait for the disk,
and windows read ahead. So memory is flat whatever the length of the input, and a full queue or a
slow disk only slows it.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import cast

import msgspec

from broker.wire.messages import Job, Kind, TerminalRecord
from producers.batch.errors import Interrupted
from producers.batch.feed import Feed
from producers.batch.lines import BadLine, Code, Request, bad
from producers.batch.outcome import Ended, of_bad_line, of_record
from producers.batch.plan import Bounds, Plan
from producers.batch.reader import Reader, Window, Work
from producers.batch.room import Disk, Room
from producers.batch.session import Session, Stored
from producers.batch.source import read_lines
from producers.batch.state import Counts, Identity
from producers.client import TRANSIENT, Client
from producers.errors import (
    ProducerError,
    QueueFull,
    Refused,
    ResultTimeout,
    UnknownLane,
    UnknownModel,
    Unreachable,
)
from producers.request import Wish, build_job
from producers.ticket import Ticket

Connect = Callable[[str], AbstractAsyncContextManager[Client]]
"""Opens a client with the given client id."""


@dataclass(slots=True)
class Tally:
    """How far the run is, for whoever shows it."""

    lines: int = 0
    """In the input; 0 while not known."""
    read: int = 0
    """Number of the last line read."""
    before: int = 0
    """Lines that had ended before this run."""
    completed: int = 0
    failed: int = 0
    submitted: int = 0
    inflight: int = 0

    @property
    def ended(self) -> int:
        """Lines that ended in this run."""
        return self.completed + self.failed


@dataclass(frozen=True, slots=True)
class Report:
    """How a run ended."""

    counts: Counts
    identity: Identity
    interrupted: bool
    expired: int
    """Lines that the window left no time for, in this run."""
    submitted: int
    collected_again: bool
    """Results had been taken away since the last run, and were collected anew."""


async def run_batch(
    plan: Plan,
    connect: Connect,
    *,
    stop: asyncio.Event,
    tally: Tally,
    bounds: Bounds | None = None,
    retry: bool = False,
) -> Report:
    """Run (or go on with) a batch until its lines ended, its window is over, or `stop` is set.

    With `retry` the lines that failed are put back first. Raises InputUnusable, OutputUnusable,
    Unreachable, UnknownLane; whatever ended until then is on disk, and another run goes on from
    there.
    """
    disk = Disk()
    try:
        session = await disk.do(Session, plan, retry=retry)
        try:
            async with connect(session.identity.batch_id) as client:
                run = _Run(session, client, disk, stop, tally, bounds or Bounds())
                return await run.go()
        except ExceptionGroup as group:
            raise _first(group) from group
        finally:
            await disk.do(session.__exit__)
    finally:
        disk.close()


def _first(group: ExceptionGroup[Exception]) -> Exception:
    """The first error that is no group."""
    error = group.exceptions[0]
    if isinstance(error, ExceptionGroup):
        return _first(cast("ExceptionGroup[Exception]", error))
    return error


class _Run:
    """One run under way."""

    def __init__(
        self,
        session: Session,
        client: Client,
        disk: Disk,
        stop: asyncio.Event,
        tally: Tally,
        bounds: Bounds,
    ) -> None:
        self._session = session
        self._client = client
        self._disk = disk
        self._stop = stop
        self._tally = tally
        self._bounds = bounds
        self._plan = session.plan
        self._identity = session.identity
        self._room = Room(jobs_max=self._plan.concurrency, bytes_max=bounds.inflight_bytes)
        self._tickets: dict[int, Ticket] = {}
        self._unwritten: list[Ended] = []
        self._unwritten_bytes = 0
        self._written = asyncio.Event()
        self._to_write = asyncio.Event()
        self._all_ended = False
        self._expired = 0

    async def go(self) -> Report:
        """Run to the end, or to the stop."""
        counts = await self._disk.do(self._session.state.counts)
        self._tally.lines = self._identity.lines
        self._tally.before = counts.total - counts.open
        interrupted = False
        failure: ExceptionGroup[ProducerError] | None = None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write_all())
            try:
                await self._run_lines()
            except* Interrupted:
                interrupted = True
            except* ProducerError as group:
                failure = group
            # Not in a `finally`: when the writer itself failed there is nothing left to wait for.
            self._all_ended = True
            self._to_write.set()
        if failure is not None:
            raise failure
        return Report(
            counts=await self._disk.do(self._session.state.counts),
            identity=self._identity,
            interrupted=interrupted,
            expired=self._expired,
            submitted=self._tally.submitted,
            collected_again=self._session.results_were_missing,
        )

    # ---- lines ----------------------------------------------------------------------------------

    async def _run_lines(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            watches = [
                tasks.create_task(self._interrupt_on_stop()),
                tasks.create_task(self._give_up_on_outage()),
            ]
            async with asyncio.TaskGroup() as lines:
                await self._feed(lines)
            for watch in watches:
                watch.cancel()

    async def _interrupt_on_stop(self) -> None:
        await self._stop.wait()
        message = "stopped by the user"
        raise Interrupted(message)

    async def _give_up_on_outage(self) -> None:
        """End the run when the server is out of reach for as long as a submission would try."""
        patience_s = self._client.config.submit_s
        connected_at_s = time.monotonic()
        while time.monotonic() < connected_at_s + patience_s:
            await asyncio.sleep(min(1.0, patience_s / 4))
            if self._client.connected:
                connected_at_s = time.monotonic()
        message = f"the message server was out of reach for {patience_s:.0f} s"
        raise Unreachable(message)

    async def _feed(self, lines: asyncio.TaskGroup) -> None:
        """Read windows, one ahead, and set their lines going as room allows."""
        reader = await self._disk.do(self._reader)
        feed = Feed(read_lines(self._plan.input), self._bounds)
        try:
            ahead = lines.create_task(self._next_window(feed, reader))
            while (window := await ahead) is not None:
                ahead = lines.create_task(self._next_window(feed, reader))
                await self._set_going(window, lines)
        finally:
            feed.close()

    async def _next_window(self, feed: Feed, reader: Reader) -> Window | None:
        taken = await feed.take()
        if taken:
            return await self._disk.do(reader.read, taken)
        await self._disk.do(reader.end)
        return None

    async def _set_going(self, window: Window, lines: asyncio.TaskGroup) -> None:
        for fault in window.bad:
            await self._end(of_bad_line(fault, batch_id=self._identity.batch_id))
        for work in window.work:
            await self._room.take(len(work.job.body))
            lines.create_task(self._run_line(work))
        self._tally.read = window.last_number

    def _reader(self) -> Reader:
        offer = self._client.offer
        return Reader(
            self._session.state,
            self._identity,
            build=self._build,
            models=frozenset(offer.models) if offer else None,
        )

    def _build(self, request: Request, job_id: str) -> Job:
        wish = Wish(
            job_id=job_id,
            band=self._identity.band,
            endpoint=request.url,
            request_id=job_id,
            api_key_name=self._plan.api_key_name,
            cache_scope=self._client.config.scope,
        )
        job = build_job(
            request.body,
            wish,
            lane=self._plan.lane,
            client=self._client.client_id,
            offer=self._client.offer,
        )
        return msgspec.structs.replace(job, deadline_at_s=self._identity.deadline_at_s)

    async def _run_line(self, work: Work) -> None:
        self._tally.inflight += 1
        try:
            await self._end(await self._live(work))
        finally:
            self._tickets.pop(work.number, None)
            self._tally.inflight -= 1
            self._room.give_back(len(work.job.body))

    async def _live(self, work: Work) -> Ended:
        """Submit one line and wait for its end."""
        if self._left_s() <= 0:
            return await self._expire(work)
        try:
            ticket = await self._client.submit_job(
                work.job,
                queue_full_wait_s=self._left_s(),
                known=work.known,
                sequence=work.sequence,
            )
            self._tally.submitted += 1
            self._tickets[work.number] = ticket
            record = await ticket.result(max(0.0, self._left_s()) + self._bounds.grace_s)
        except UnknownLane:
            raise
        except (QueueFull, ResultTimeout):
            return await self._expire(work)
        except Refused as error:
            code = Code.MODEL_NOT_FOUND if isinstance(error, UnknownModel) else Code.INVALID_REQUEST
            return self._refused(bad(work.number, work.custom_id, code, str(error)))
        if record.kind is Kind.REJECTED and record.reason in TRANSIENT:
            return self._expired_line(work)  # The window leaves no time for another try.
        return self._recorded(work, record)

    async def _expire(self, work: Work) -> Ended:
        """The window is over: what ended meanwhile still counts."""
        ticket = self._tickets.get(work.number)
        if ticket is not None:
            self._client.forget(ticket)
        if ticket is not None or work.known:
            record = await self._client.find_record(work.job.id)
            if record is not None:
                return self._recorded(work, record)
        return self._expired_line(work)

    def _expired_line(self, work: Work) -> Ended:
        self._expired += 1
        told = "the batch's window was over before it was run; `batch retry` runs it again"
        return self._refused(bad(work.number, work.custom_id, Code.BATCH_EXPIRED, told))

    def _recorded(self, work: Work, record: TerminalRecord) -> Ended:
        return of_record(work.number, work.custom_id, record, job_id=work.job.id)

    def _refused(self, fault: BadLine) -> Ended:
        return of_bad_line(fault, batch_id=self._identity.batch_id)

    def _left_s(self) -> float:
        return self._identity.deadline_at_s - time.time()

    # ---- results --------------------------------------------------------------------------------

    async def _end(self, ended: Ended) -> None:
        """Hand a result to the writer; wait while too much is unwritten."""
        while self._unwritten_bytes > self._bounds.unwritten_bytes:
            self._to_write.set()
            self._written.clear()
            await self._written.wait()
        self._unwritten.append(ended)
        self._unwritten_bytes += len(ended.text)

    async def _write_all(self) -> None:
        """Write results as they come, until all lines ended and theirs are on disk."""
        checkpoint_at_s = time.monotonic() + self._bounds.checkpoint_s
        while True:
            last = self._all_ended
            await self._write()
            if last or time.monotonic() >= checkpoint_at_s:
                await self._disk.do(self._session.checkpoint, self._take_stored())
                checkpoint_at_s = time.monotonic() + self._bounds.checkpoint_s
            if last:
                return
            self._to_write.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._bounds.write_s):
                    await self._to_write.wait()

    async def _write(self) -> None:
        batch, self._unwritten = self._unwritten, []
        if not batch:
            return
        self._unwritten_bytes = 0
        await self._disk.do(self._session.write, batch)
        self._written.set()
        self._tally.completed += sum(end.ok for end in batch)
        self._tally.failed += sum(not end.ok for end in batch)

    def _take_stored(self) -> dict[int, Stored]:
        """Where jobs were stored since the last checkpoint, resubmissions included."""
        return {
            number: Stored(ticket.submission, ticket.sequence)
            for number, ticket in self._tickets.items()
            if ticket.sequence
        }
