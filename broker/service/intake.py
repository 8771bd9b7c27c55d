"""From delivered messages to held jobs: decoded and checked once, at this edge.

One pull per queue (lane, band, model), with a bounded window. A message that can't be read ends
here, with a record of its own; the loop lives on. One that takes long to read is read aside.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol, cast

import msgspec
import structlog

from broker.bus.base import Bus, BusError, Delivery, Pull
from broker.core.events import Event, JobHeld, JobSpec, QueueDepth
from broker.service.attempts import AttemptBook
from broker.service.endings import Endings
from broker.service.held import BEHIND_MAX, DUPLICATES_MAX, Behind, Duplicate, Held, Shelf
from broker.service.reading import Reader, Whole
from broker.service.stages import Stage
from broker.wire import subjects
from broker.wire.codec import MalformedMessage, speaks_json
from broker.wire.ids import MalformedName, is_token, job_key
from broker.wire.json_form import begins_json
from broker.wire.messages import Job, Kind, Reason
from broker.wire.prefix import HASH_BYTES, unpack_hashes
from broker.wire.prompt import OUTPUT_TOKENS_MAX
from broker.wire.subjects import JobAddress

_log = structlog.get_logger(__name__)

CLOCK_S_OFF = 5.0
"""So much later than its producer says a job may be stored and still have been on its way; what
NTP leaves is a thousandth of it."""


class Counts(Protocol):
    """Hears of what did not become a job."""

    def malformed(self, where: str) -> None:
        """Bytes could not be read."""
        ...

    def duplicate(self, lane: str, band: int) -> None:
        """A further message came of a job that has not ended."""
        ...


class Intake:
    """Takes deliveries in."""

    def __init__(
        self,
        shelf: Shelf,
        endings: Endings,
        *,
        tell: Callable[[Event], None],
        is_running: Callable[[str], bool],
        book: AttemptBook,
        reader: Reader,
        counts: Counts,
        now: Callable[[], float],
    ) -> None:
        """`is_running(key)` says whether a worker has the job."""
        self._shelf = shelf
        self._endings = endings
        self._tell = tell
        self._is_running = is_running
        self._book = book
        self._reader = reader
        self._counts = counts
        self._now = now

    def take(self, delivery: Delivery, address: JobAddress, pull: Pull) -> None:
        """Take one delivery of a queue."""
        try:
            whole = self._reader.read_soon(delivery, address)
        except (MalformedMessage, MalformedName, ValueError) as error:
            self._read(address, pull, delivery, error)
            return
        if whole is None:
            self._reader.read_aside(delivery, address, then=partial(self._read, address, pull))
        else:
            self._read(address, pull, delivery, whole)

    def _read(
        self, address: JobAddress, pull: Pull, delivery: Delivery, found: Whole | Exception
    ) -> None:
        """Take what a delivery was read as, or what kept it from being read."""
        if not isinstance(found, Whole):
            pull.release()
            self._unread(delivery, address, found)
            return
        spec = self._spec(found.job, delivery)
        known = self._shelf.get(spec.key)
        if known is None:
            self._hold(found, spec, delivery, address, pull)
        elif known.message_id == (delivery.stream, delivery.sequence):
            pull.release()
            self._again(known, found, spec, delivery)
        elif known.stage is Stage.CLOSING:
            self._behind(known, delivery, pull)
        else:
            pull.release()
            self._duplicate(known, found, delivery)

    def _unread(self, delivery: Delivery, address: JobAddress, error: Exception) -> None:
        if isinstance(error, BusError):
            # Not known what it is: it comes again, if it is still there.
            _log.warning("intake.unread", stream=delivery.stream, sequence=delivery.sequence)
        else:
            self._refuse(delivery, address, str(error))

    def depth(self, address: JobAddress, pending_jobs: int) -> None:
        """Note how many messages of a queue are not pulled yet."""
        self._tell(QueueDepth(self._now(), address.lane, address.band, address.model, pending_jobs))

    def _hold(
        self, whole: Whole, spec: JobSpec, delivery: Delivery, address: JobAddress, pull: Pull
    ) -> None:
        job = whole.job
        held = Held(
            key=spec.key,
            lane=job.lane,
            band=job.band,
            model=job.model,
            job_id=job.id,
            client=job.client,
            stream=delivery.stream,
            subject=delivery.subject,
            sequence=delivery.sequence,
            ack_subject=delivery.ack_subject,
            enqueued_at_s=delivery.stored_at_s,
            pull=pull,
            renewed_at_s=self._now(),
        )
        _describe(held, whole, spec)
        dead_letter = self._book.dead_letters.get(held.key)
        running = self._is_running(held.key)
        self._shelf.put(held, None if running or dead_letter else whole.message)
        if dead_letter is not None:
            self._endings.repeat(held, dead_letter)
            return
        if running:
            self._shelf.runs(held)
        elif self._endings.sweeps.takes(address, sequence=held.sequence):
            self._endings.end(held, Kind.CANCELLED, reason=Reason.CANCELLED)
            return
        self._tell(JobHeld(self._now(), spec))

    def _again(self, known: Held, whole: Whole, spec: JobSpec, delivery: Delivery) -> None:
        """Take a known job's own message again: it was slow, or its consumer was reset."""
        known.ack_subject = delivery.ack_subject
        self._shelf.renewed(known, at_s=self._now())
        if known.unread:
            # A worker's list tells little of a job; its message tells all.
            known.unread = False
            _describe(known, whole, spec)
            self._tell(JobHeld(self._now(), spec))

    def _spec(self, job: Job, delivery: Delivery) -> JobSpec:
        key = job_key(job.lane, job.id)
        return JobSpec(
            key=key,
            lane=job.lane,
            band=job.band,
            model=job.model,
            client=job.client,
            session=job.session,
            adapter=job.adapter,
            prompt_tokens=self._reader.prompt_tokens(job),
            output_tokens_max=min(job.output_tokens_max, OUTPUT_TOKENS_MAX),
            blocks=unpack_hashes(job.blocks),
            enqueued_at_s=delivery.stored_at_s,
            deadline_at_s=deadline_of(job, stored_at_s=delivery.stored_at_s),
            stream_sequence=delivery.sequence,
            jobs_behind=job.jobs_behind,
            streamed=job.stream,
            restart_visible=job.restart_visible,
            failures=self._book.failures.get(key, ()),
        )

    def _duplicate(self, known: Held, whole: Whole, delivery: Delivery) -> None:
        """Keep a second message of a known job until the first one's record stands."""
        message_id = (delivery.stream, delivery.sequence)
        is_new = message_id not in known.duplicates
        if is_new and len(known.duplicates) >= DUPLICATES_MAX:
            return
        if is_new:
            self._counts.duplicate(whole.job.lane, whole.job.band)
        known.duplicates[message_id] = Duplicate(
            whole.job.client,
            delivery.stream,
            delivery.subject,
            delivery.sequence,
            delivery.ack_subject,
            whole.speaks_json,
        )
        _log.info("intake.duplicate", job=known.key, sequence=delivery.sequence)

    def _behind(self, known: Held, delivery: Delivery, pull: Pull) -> None:
        """Keep a message of a job being closed: it may be the next try after a rejection."""
        message_id = (delivery.stream, delivery.sequence)
        if message_id in known.duplicates:
            pull.release()
        elif message_id in known.behind:
            known.behind[message_id] = Behind(delivery, pull)
            pull.release()
        elif len(known.behind) < BEHIND_MAX:
            known.behind[message_id] = Behind(delivery, pull)
        else:
            pull.release()

    def _refuse(self, delivery: Delivery, address: JobAddress, detail: str) -> None:
        self._counts.malformed("job")
        _log.warning(
            "intake.malformed", stream=delivery.stream, sequence=delivery.sequence, error=detail
        )
        job_id, client = _salvage(delivery.data)
        self._endings.refuse(
            delivery,
            address.lane,
            reason=Reason.MALFORMED,
            detail=detail,
            job_id=job_id,
            client=client,
            speaks_json=speaks_json(delivery.data, delivery.headers),
        )


def deadline_of(job: Job, *, stored_at_s: float) -> float | None:
    """Tell a job's deadline by the server's clock; None: it has none.

    A producer's clock may be minutes off. What it says of its submission and its deadline is off by
    as much, so the time between the two holds, counted from when the server stored the job. Up to
    `CLOCK_S_OFF` it is taken at its word: so long a submission may have been on its way, and a
    deadline is not put off by that. A job put in anew keeps the deadline of its first submission.
    """
    if job.deadline_at_s is None or job.submission or not job.submitted_at_s:
        return job.deadline_at_s
    off_s = stored_at_s - job.submitted_at_s
    return job.deadline_at_s + off_s if abs(off_s) > CLOCK_S_OFF else job.deadline_at_s


def _describe(held: Held, whole: Whole, spec: JobSpec) -> None:
    """Note what only a job's message says."""
    job = whole.job
    held.speaks_json = whole.speaks_json
    held.client = job.client
    held.request_id = job.request_id
    held.api_key_name = job.api_key_name
    held.submitted_at_s = job.submitted_at_s
    held.prompt_blocks = len(job.blocks) // HASH_BYTES
    held.spec = spec


def _salvage(data: bytes) -> tuple[str, str]:
    """Find job id and client in a broken message, to tell its caller; empty if not there."""
    decode = msgspec.json.decode if begins_json(data) else msgspec.msgpack.decode
    try:
        raw: object = decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError):
        return "", ""
    if not isinstance(raw, dict):
        return "", ""
    fields = cast("dict[object, object]", raw)
    names = [fields.get("id"), fields.get("client")]
    job_id, client = (name if isinstance(name, str) and is_token(name) else "" for name in names)
    return (job_id, client) if job_id and client else ("", "")


async def open_pull(
    bus: Bus, address: JobAddress, *, window: int, take: Callable[[list[Delivery]], None]
) -> Pull:
    """Start the continuous pull of one queue."""
    return await bus.pull(
        subjects.jobs_stream(address.lane, address.band),
        subjects.job_consumer(address.band, address.model),
        take,
        window=window,
    )
