"""Where a job stands, for whoever asks: held, running, ending, or still in its stream.

A job beyond the window is counted, not read: before it are the jobs that its queue holds, and the
messages of its subject that were not delivered yet and stand before its own.
"""

from broker.bus.base import Bus, NotFound, StoredMessage
from broker.core.scheduler import Scheduler
from broker.service.held import Shelf
from broker.service.stages import Stage
from broker.wire import subjects
from broker.wire.codec import MalformedMessage, decode
from broker.wire.control import JobPhase, JobRequest, JobState
from broker.wire.ids import MalformedName, job_key
from broker.wire.messages import Job
from broker.wire.subjects import JobAddress


class JobStates:
    """Answers from what one leadership knows, and its streams."""

    def __init__(self, bus: Bus, shelf: Shelf, scheduler: Scheduler) -> None:
        """Look at these; nothing is changed."""
        self._bus = bus
        self._shelf = shelf
        self._scheduler = scheduler

    async def of(self, request: JobRequest, lane: str) -> JobState:
        """Say where a job of a lane stands. Raises BusError."""
        known = self._known(request.job, lane)
        if known is not None:
            return known
        found = await self.unpulled(
            request.job, lane, stream=request.stream, sequence=request.stream_sequence
        )
        if found is None:
            return JobState(job=request.job, phase=JobPhase.UNKNOWN)
        _, address, stored = found
        undelivered = await self._before(address, stored)
        # It may have been pulled while the server counted.
        return self._known(request.job, lane) or self._beyond(request.job, address, undelivered)

    async def unpulled(
        self, job_id: str, lane: str, *, stream: str, sequence: int
    ) -> tuple[Job, JobAddress, StoredMessage] | None:
        """Read a job's message at a place of its lane; None when it isn't there. Raises BusError.

        That it is not held is for the caller to know.
        """
        if not sequence or stream not in (f"JOBS_{lane}", f"BATCH_{lane}"):
            return None
        try:
            stored = await self._bus.message_at(stream, sequence)
            job = decode(stored.data, Job)
            address = subjects.parse_jobs(stored.subject)
        except (NotFound, MalformedMessage, MalformedName):
            return None
        return (job, address, stored) if job.id == job_id else None

    def _known(self, job_id: str, lane: str) -> JobState | None:
        """Tell what is held or runs; None when it is neither."""
        key = job_key(lane, job_id)
        held = self._shelf.get(key)
        if held is not None and held.stage is Stage.CLOSING:
            return JobState(job=job_id, phase=JobPhase.ENDING)
        why = self._scheduler.views.why(key)
        if why is None:
            # Taken in, and the mind was not told yet; or let go, and its message comes again.
            return None if held is None else JobState(job=job_id, phase=JobPhase.QUEUED)
        if why.leased:
            return JobState(
                job=job_id, phase=JobPhase.STARTED, worker=why.worker, attempt=why.attempt
            )
        return JobState(
            job=job_id,
            phase=JobPhase.QUEUED,
            position=why.position,
            wait_s=why.wait_s,
            held_by=why.held_by.value,
        )

    async def _before(self, address: JobAddress, stored: StoredMessage) -> int:
        """Count undelivered messages of a queue before one of them."""
        stream = subjects.jobs_stream(address.lane, address.band)
        consumer = subjects.job_consumer(address.band, address.model)
        state = await self._bus.consumer_state(stream, consumer)
        from_here = await self._bus.count_from(
            stream, subject=stored.subject, sequence=stored.sequence
        )
        return max(0, state.pending - from_here)

    def _beyond(self, job_id: str, address: JobAddress, undelivered: int) -> JobState:
        views = self._scheduler.views
        lane, band, model = address.lane, address.band, address.model
        position = undelivered + views.queue(lane=lane, band=band, model=model).waiting_jobs
        wait_s = views.wait_s(lane=lane, band=band, model=model, position=position)
        return JobState(job=job_id, phase=JobPhase.QUEUED, position=position, wait_s=wait_s)
