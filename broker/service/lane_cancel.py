"""Cancels a whole lane, or a band or model of it, in bounded steps: queued and running jobs alike.

A job has a message in its stream until it has ended, so a walk through the lane's streams meets
each job once. What the mind knows is cancelled by the mind; what the broker has not pulled yet is
ended where it stands, record first, by the rule of removal. Each step is one request, and the asker
carries the place to go on from, and a hundred thousand queued jobs are two hundred short requests.
What the pulls bring in between ends at the door (`sweeps`), and all else is forgotten here.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from broker.bus.base import Bus, NotFound, StoredMessage
from broker.core.events import CancelRequested, Event
from broker.core.scheduler import Scheduler
from broker.service.endings import Endings, JobHead
from broker.service.held import Shelf
from broker.service.stages import Stage
from broker.wire import subjects
from broker.wire.codec import MalformedMessage, decode, speaks_json
from broker.wire.control import LaneCancelRequest, LaneCancelStep, StreamSpan
from broker.wire.ids import BANDS, MalformedName, escape_model, job_key
from broker.wire.subjects import JobAddress

STEP_JOBS_MAX = 500
"""Messages looked at in one step: a few tenths of a second, and no request waits longer."""

WALK_S_MAX = 4.0
"""Longest look at a step's messages: on a busy machine each turn of the loop takes long."""

WALK_SLICE_S = 0.002
"""Processor time that the walk takes before it gives way. By the clock it would give way at each
message where others have the processors, and a step would last as long as its asker waits."""

STEP_S_MAX = 5.0
"""Longest wait for a step's endings; what is left by then is the next one's."""

ENDED_AT_ONCE_MAX = 16
"""Unpulled jobs ended at the same time: half of the closer's room, so that other endings find
some."""


@dataclass(frozen=True, slots=True)
class _Unpulled:
    """A job that only its stream has, without its body: those of a step may be gigabytes."""

    job: JobHead
    address: JobAddress
    sequence: int
    speaks_json: bool


class LaneCancel:
    """Carries out steps, for one leadership."""

    def __init__(
        self,
        bus: Bus,
        shelf: Shelf,
        scheduler: Scheduler,
        endings: Endings,
        *,
        tell: Callable[[Event], None],
        now: Callable[[], float],
    ) -> None:
        """Tell the mind by `tell`; end the others by `endings`."""
        self._bus = bus
        self._shelf = shelf
        self._scheduler = scheduler
        self._endings = endings
        self._sweeps = endings.sweeps
        self._tell = tell
        self._now = now

    async def step(self, lane: str, request: LaneCancelRequest) -> LaneCancelStep:
        """Count what a cancellation would hit, or carry out one step of it. Raises BusError.

        Of a lane without such jobs, or with another lane's streams in the request: nothing.
        """
        if not request.spans:
            return await self._count(lane, request)
        span, *rest = request.spans
        if span.stream not in _streams(lane):
            return LaneCancelStep()
        return await self._walk(lane, request, span, tuple(rest))

    async def _count(self, lane: str, request: LaneCancelRequest) -> LaneCancelStep:
        spans: list[StreamSpan] = []
        jobs = 0
        for stream in _streams(lane):
            try:
                counts = await self._bus.subject_counts(stream, subject=_pattern(lane, request))
                state = await self._bus.stream_state(stream)
            except NotFound:
                continue
            here = sum(number for at, number in counts.items() if _is_meant(at, request))
            jobs += here
            if here:
                spans.append(
                    StreamSpan(
                        stream=stream,
                        next_sequence=state.first_sequence,
                        last_sequence=state.last_sequence,
                    )
                )
        running = sum(
            queue.inflight_jobs
            for queue in self._scheduler.views.queues()
            if queue.lane == lane
            and (not request.bands or queue.band in request.bands)
            and request.model in ("", queue.model)
        )
        return LaneCancelStep(jobs=jobs, running=min(running, jobs), spans=tuple(spans))

    async def _walk(
        self, lane: str, request: LaneCancelRequest, span: StreamSpan, rest: tuple[StreamSpan, ...]
    ) -> LaneCancelStep:
        """Look at the next messages of a stream, and cancel what is meant."""
        self._sweeps.begin(request, span, for_s=WALK_S_MAX + STEP_S_MAX)
        looked = asked = running = 0
        unpulled: list[_Unpulled] = []
        walk_ends_s = time.monotonic() + WALK_S_MAX
        turn_ends_s = time.thread_time() + WALK_SLICE_S
        next_sequence = span.last_sequence + 1
        async for stored in self._bus.messages(
            span.stream, subject=_pattern(lane, request), first_sequence=span.next_sequence
        ):
            if stored.sequence > span.last_sequence:
                break
            if looked >= STEP_JOBS_MAX or (looked and time.monotonic() >= walk_ends_s):
                next_sequence = stored.sequence
                break
            looked += 1
            one = _read(stored) if _is_meant(stored.subject, request) else None
            if one is not None and self._is_known(lane, one.job.id):
                known, leased = self._cancel_known(lane, one.job.id)
                asked, running = asked + known, running + leased
            elif one is not None:
                unpulled.append(one)
            if time.thread_time() >= turn_ends_s:
                await asyncio.sleep(0)
                turn_ends_s = time.thread_time() + WALK_SLICE_S
        ended, is_left = await self._end(span.stream, unpulled)
        if is_left:
            # The next step begins with what this one could not end.
            next_sequence = unpulled[0].sequence
        left = replace(span, next_sequence=next_sequence)
        spans = rest if next_sequence > span.last_sequence else (left, *rest)
        swept = self._sweeps.end_step(span.stream, is_last=spans == rest)
        return LaneCancelStep(jobs=asked + ended + swept, running=running, spans=spans)

    def _is_known(self, lane: str, job_id: str) -> bool:
        key = job_key(lane, job_id)
        return key in self._shelf or self._scheduler.is_known(key)

    def _cancel_known(self, lane: str, job_id: str) -> tuple[bool, bool]:
        """Ask the mind; say whether there was something to ask, and whether it is leased."""
        key = job_key(lane, job_id)
        held = self._shelf.get(key)
        if held is not None and held.stage is Stage.CLOSING:
            return False, False
        self._tell(CancelRequested(self._now(), key))
        return True, self._scheduler.is_leased(key)

    async def _end(self, stream: str, unpulled: list[_Unpulled]) -> tuple[int, bool]:
        """End jobs where they stand, some at once; tell how many are gone, and if any is left."""
        ended = passed = 0
        waiting = iter(unpulled)

        async def end_some() -> None:
            nonlocal ended, passed
            for one in waiting:
                if self._sweeps.has_ended(stream, one.sequence):
                    passed += 1
                    continue
                gone = await self._endings.end_unpulled_now(
                    one.job, one.address, sequence=one.sequence, speaks_json=one.speaks_json
                )
                if gone and self._sweeps.count(stream, one.sequence):
                    ended += 1
                elif gone:
                    passed += 1  # Pulled meanwhile: it was counted at the door.

        try:
            async with asyncio.timeout(STEP_S_MAX), asyncio.TaskGroup() as tasks:
                # A task for each job would take the loop's turn for longer than a frame lasts.
                for _ in range(min(ENDED_AT_ONCE_MAX, len(unpulled))):
                    tasks.create_task(end_some())
        except TimeoutError:
            pass
        return ended, ended + passed < len(unpulled)


def _streams(lane: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(subjects.jobs_stream(lane, band) for band in BANDS))


def _pattern(lane: str, request: LaneCancelRequest) -> str:
    """Subjects to look at: as narrow as a pattern can say."""
    band = str(request.bands[0]) if len(request.bands) == 1 else "*"
    model = escape_model(request.model) if request.model else "*"
    return f"jobs.{lane}.{band}.{model}"


def _is_meant(subject: str, request: LaneCancelRequest) -> bool:
    """Say whether a subject's jobs are meant: a pattern can't say "band 1 or 2"."""
    try:
        band = subjects.parse_jobs(subject).band
    except MalformedName:
        return False
    return not request.bands or band in request.bands


def _read(stored: StoredMessage) -> _Unpulled | None:
    """Read a job; None for a message that can't be read, which ends when it is pulled."""
    try:
        head, address = decode(stored.data, JobHead), subjects.parse_jobs(stored.subject)
    except (MalformedMessage, MalformedName):
        return None
    is_json = speaks_json(stored.data, stored.headers)
    return _Unpulled(head, address, stored.sequence, is_json)
