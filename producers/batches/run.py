"""Brings one batch to its end, from wherever the runner before left it.

    look over → take over → lines → files whole → ended

Beside it, one duty renews the lease and notes the counts, one writes results, one lets records go.
Whatever fails here ends this run and not the batch: another one goes on from what stands.
"""

import asyncio
import dataclasses
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from broker.bus.base import Bus
from broker.bus.files import FileGone, Files
from broker.wire import subjects
from broker.wire.ids import BATCH_BAND
from broker.wire.messages import Job
from producers.batch.lines import BadLine, Code, Request
from producers.batch.reader import Reader, Work
from producers.batch.room import Disk
from producers.batch.source import Line
from producers.batch.state import Identity, State
from producers.batches import life
from producers.batches.clearing import Clearing
from producers.batches.config import BatchesConfig
from producers.batches.copies import Copies
from producers.batches.errors import BatchesError
from producers.batches.flight import Flight
from producers.batches.forecast import Pace, aged
from producers.batches.hold import Hold
from producers.batches.journal import numbers_of
from producers.batches.lanes import Lanes
from producers.batches.lines import windows
from producers.batches.records import Batch, Place, Status
from producers.batches.results import ResultFiles
from producers.batches.survey import Survey
from producers.batches.traces import Trace, find_traces
from producers.batches.writer import Count, Writer
from producers.client import Client
from producers.request import Wish, build_job


class InputGone(BatchesError):
    """The input file isn't there any more."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Ahead:
    """A window of the input, read and made ready."""

    faults: list[BadLine]
    work: list[Work] = dataclasses.field(default_factory=list[Work])
    unrun: list[Request] = dataclasses.field(default_factory=list[Request])
    """Lines that end without having run."""
    last_number: int = 0
    """Of the lines that may run; 0 where none may."""


class Run:
    """One run of a batch."""

    def __init__(
        self,
        hold: Hold,
        bus: Bus,
        files: Files,
        client: Client,
        config: BatchesConfig,
        count: Count,
        lanes: Lanes,
    ) -> None:
        """`client`: of the batch's lane, its id that of the batch."""
        self._lanes = lanes
        self._hold = hold
        self._bus = bus
        self._files = files
        self._client = client
        self._config = config
        self._results = ResultFiles(files, hold.batch)
        self._copies = Copies(bus, hold.batch)
        self._clearing = Clearing(
            bus,
            hold.batch.lane,
            hold.batch.job_id,
            after_s=config.clear_after_s,
            copies=self._copies,
        )
        self._writer = Writer(self._results, self._clearing, config, count)
        self._traces: dict[int, Trace] = {}
        self._flight: Flight | None = None
        self._took_over = False
        self._window_is_over = False
        self._read_to_before = 0
        self._read_to = hold.batch.place.read_to
        self._pace = Pace()
        self._news = asyncio.Event()
        self._stop_asked = asyncio.Event()

    @property
    def batch(self) -> Batch:
        """The batch as last seen."""
        return self._hold.batch

    def heard(self) -> None:
        """Somebody wrote the batch's record: look what he wants."""
        self._news.set()

    async def go(self) -> None:
        """Run the batch to its end. Raises LeaseLost, ProducerError, BusError, alone or grouped."""
        async with asyncio.TaskGroup() as tasks:
            duties = [tasks.create_task(duty) for duty in (self._keep(), self._watch())]
            clearing = tasks.create_task(self._clearing.run())
            await self._look_over()
            if not self.batch.has_ended:
                await self._take_over()
                await self._bring_to_end(tasks)
            for duty in duties:
                duty.cancel()
            # Its user need not wait for this.
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.clear_s_max):
                    await self._clearing.drained()
            clearing.cancel()
            await self._copies.remove_all()

    async def _bring_to_end(self, tasks: asyncio.TaskGroup) -> None:
        flight = self._flight = Flight(
            self.batch,
            self._client,
            self._writer.take,
            config=self._config,
            traces=self._traces,
            waiting_max=partial(self._lanes.lines_waiting_max, self.batch.lane),
        )
        flight.stopped = self._stop_code()
        stopping = tasks.create_task(self._stop_when_asked(flight))
        writing = tasks.create_task(self._writer.run())
        is_lost = False
        try:
            await self._run_lines(flight)
        except* (InputGone, FileGone):
            is_lost = True
        stopping.cancel()
        self._writer.close()
        await writing
        await self._end(is_lost=is_lost)

    # ---- before ---------------------------------------------------------------------------------

    async def _look_over(self) -> None:
        """Count the input's lines, and fail a batch of which none can run."""
        if self.batch.counts.total:
            return
        survey = Survey(self.batch.endpoint, self._client.offer)
        disk = Disk()
        try:
            async for lines in self._windows():
                await disk.do(survey.take, lines)
            faults = survey.verdict()
        except (InputGone, FileGone):
            faults = (life.INPUT_GONE,)
        finally:
            disk.close()
        state = await self._bus.stream_state(subjects.jobs_stream(self.batch.lane, BATCH_BAND))
        place = Place(jobs_after_sequence=state.last_sequence)

        def judged(batch: Batch) -> Batch:
            if batch.counts.total or batch.has_ended:
                return batch  # It was written already, and the word of it was lost.
            if faults and (batch.status is Status.VALIDATING or not survey.total):
                return life.fail(batch, faults, at_s=time.time())
            begun = life.begin(batch, total=survey.total, at_s=time.time())
            return replace(begun, place=place)

        await self._hold.change(judged)

    async def _take_over(self) -> None:
        """End whoever ran the batch before, and learn how far he was."""
        place = self.batch.place
        await self._copies.look()
        if not self._hold.is_first:
            self._read_to_before = place.read_to
            self._traces = await find_traces(self._bus, self.batch)
        await self._results.take_over()
        self._clearing.cleared_output = place.cleared_output
        self._clearing.cleared_errors = place.cleared_errors
        if not self._hold.is_first:
            await self._clear_the_rest(place)
        self._took_over = True

    async def _clear_the_rest(self, place: Place) -> None:
        """Let records go that the runner before didn't get to."""
        for file, is_output, after in (
            (self._results.output, True, place.cleared_output),
            (self._results.errors, False, place.cleared_errors),
        ):
            async for sequence, entry in file.entries(after_sequence=after):
                records: list[tuple[int, int]] = []
                for number in numbers_of(entry.lines):
                    trace = self._traces.pop(number, None)
                    where = trace.sequence if trace else 0
                    records.append((number, where))
                await self._clearing.add(records, is_output=is_output, sequence=sequence)

    # ---- lines ----------------------------------------------------------------------------------

    async def _run_lines(self, flight: Flight) -> None:
        """Read the input once, and bring each of its lines to its end."""
        disk = Disk()
        with tempfile.TemporaryDirectory(prefix="inferlane-batch-") as folder:
            try:
                state = await disk.do(State, Path(folder) / "state")
                try:
                    reader = await disk.do(self._reader, state)
                    async with asyncio.TaskGroup() as lines:
                        await self._feed(flight, reader, disk, lines)
                finally:
                    await disk.do(state.__exit__)
            finally:
                disk.close()

    async def _feed(
        self, flight: Flight, reader: Reader, disk: Disk, lines: asyncio.TaskGroup
    ) -> None:
        """Set the lines of a window going while the next one is read."""
        given = self._windows()
        ahead = lines.create_task(self._next(given, flight, reader, disk))
        while (window := await ahead) is not None:
            ahead = lines.create_task(self._next(given, flight, reader, disk))
            await self._set_going(flight, window, lines)

    async def _next(
        self, given: AsyncIterator[list[Line]], flight: Flight, reader: Reader, disk: Disk
    ) -> _Ahead | None:
        """Read the next window and make its jobs; None after the last."""
        taken = await anext(given, None)
        if taken is None:
            return None
        if flight.stopped and taken[0].number > self._read_to_before:
            # None of these was ever submitted, and none will be.
            requests, faults = await disk.do(reader.skim, taken)
            return _Ahead(faults, unrun=requests)
        found = await disk.do(reader.read, taken)
        return _Ahead(found.bad, work=found.work, last_number=found.last_number)

    async def _set_going(self, flight: Flight, window: _Ahead, lines: asyncio.TaskGroup) -> None:
        if window.last_number > self._read_to:
            self._read_to = window.last_number
            await self._hold.change(self._counted)
        for fault in window.faults:
            await flight.fault(fault)
        for request in window.unrun:
            await flight.close(request.number, request.custom_id)
        for work in window.work:
            known = work.number <= self._read_to_before
            await flight.start(dataclasses.replace(work, known=known), lines)

    def _reader(self, state: State) -> Reader:
        batch = self.batch
        identity = Identity(
            batch_id=batch.id,
            input=batch.input_file_id,
            lane=batch.lane,
            band=BATCH_BAND,
            created_at_s=batch.created_at_s,
            window_s=batch.window_s,
            endpoint=batch.endpoint,
        )
        offer = self._client.offer
        return Reader(
            state,
            identity,
            build=self._build,
            models=frozenset(offer.models) if offer else None,
            has_ended=self._results.standing.__contains__,
        )

    def _build(self, request: Request, job_id: str) -> Job:
        wish = Wish(
            job_id=job_id,
            band=BATCH_BAND,
            endpoint=request.url,
            request_id=job_id,
            api_key_name=self.batch.api_key_name,
            cache_scope=self._client.config.scope,
        )
        job = build_job(
            request.body,
            wish,
            lane=self.batch.lane,
            client=self._client.client_id,
            offer=self._client.offer,
        )
        return replace(job, deadline_at_s=self.batch.deadline_at_s)

    async def _windows(self) -> AsyncIterator[list[Line]]:
        """The input's lines. Raises InputGone, FileGone, BusError."""
        info = await self._files.find(self.batch.input_file_id)
        if info is None:
            message = f"the input {self.batch.input_file_id} is gone"
            raise InputGone(message)
        async for window in windows(
            self._files.content(info),
            lines_max=self._config.lookahead_lines,
            bytes_max=self._config.lookahead_bytes_max,
        ):
            yield window

    # ---- the end --------------------------------------------------------------------------------

    async def _end(self, *, is_lost: bool) -> None:
        """Everything is written: make the files whole, and say so."""
        if not (is_lost or self._results.unrun):
            await self._hold.change(
                lambda batch: life.finalize(self._counted(batch), at_s=time.time())
            )
        await self._results.finish(life_s=self.batch.results_life_s)
        await self._hold.change(lambda batch: self._ended(batch, is_lost=is_lost))

    def _ended(self, batch: Batch, *, is_lost: bool) -> Batch:
        counted, at_s = self._counted(batch), time.time()
        if is_lost:
            return life.lose(counted, life.INPUT_GONE, at_s=at_s)
        return life.finish(counted, at_s=at_s)

    # ---- duties beside --------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Renew the lease, note progress, and hear what others want."""
        renewed_at_s = time.monotonic()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.progress_s):
                    await self._news.wait()
            if self._news.is_set():
                self._news.clear()
                await self._hold.look()
            due = time.monotonic() >= renewed_at_s + self._config.lease_s / 3
            if due or self._counted(self.batch) != self.batch:
                await self._hold.change(self._counted)
                renewed_at_s = time.monotonic()
            if self.batch.status is Status.CANCELLING:
                self._stop_asked.set()

    async def _watch(self) -> None:
        """Ask for the stop when the window is over."""
        await asyncio.sleep(self.batch.deadline_at_s - time.time())
        # Noted, since by the wall's clock it may be a hair too early still.
        self._window_is_over = True
        self._stop_asked.set()

    async def _stop_when_asked(self, flight: Flight) -> None:
        await self._stop_asked.wait()
        if (code := self._stop_code()) and not flight.stopped:
            await flight.stop(code)

    def _stop_code(self) -> Code | None:
        """Why no further line can be run; None while they can."""
        if self.batch.status is Status.CANCELLING:
            return Code.BATCH_CANCELLED
        is_over = self._window_is_over or time.time() >= self.batch.deadline_at_s
        return Code.BATCH_EXPIRED if is_over else None

    def _counted(self, batch: Batch) -> Batch:
        """Put into the record what stands, and what the next runner must know."""
        if not self._took_over or batch.has_ended:
            return batch
        flight = self._flight
        place = Place(
            read_to=self._read_to,
            jobs_inflight=flight.jobs if flight else 0,
            jobs_after_sequence=(
                flight.oldest.after_sequence if flight else batch.place.jobs_after_sequence
            ),
            cleared_output=self._clearing.cleared_output,
            cleared_errors=self._clearing.cleared_errors,
        )
        counted = replace(self._results.counted(batch), place=place)
        now_s = time.time()
        self._pace.note(counted.counts.ended, at_s=now_s)
        ahead = self._lanes.forecast(counted, self._pace.rate, at_s=now_s)
        if batch.forecast and (ahead is None or counted.counts == batch.counts):
            left_s = batch.deadline_at_s - now_s
            ahead = aged(batch.forecast, left_s=left_s, at_s=now_s)
        return replace(counted, forecast=ahead)


async def end_without_lane(hold: Hold, files: Files) -> None:
    """End a batch whose lane was taken out: what stands in its files stays, and can be read.

    Raises LeaseLost, BusError.
    """
    results = ResultFiles(files, hold.batch)
    await results.take_over()
    await results.finish(life_s=hold.batch.results_life_s)
    await hold.change(
        lambda batch: life.lose(results.counted(batch), life.LANE_GONE, at_s=time.time())
    )
    await Copies(files.bus, hold.batch).remove_all()
