"""From delivered messages to held jobs: decoded and checked once, at this edge.

One pull per queue (lane, band, model), with a bounded window. A message that can't be read ends
here, with a record of its own; the loop lives on.
"""

from collections.abc import Callable
from typing import Protocol, cast

import msgspec
import structlog

from broker.bus.base import Bus, Delivery, Pull
from broker.core.events import Event, JobHeld, JobSpec, QueueDepth
from broker.service.attempts import AttemptBook
from broker.service.endings import Endings
from broker.service.held import BEHIND_MAX, DUPLICATES_MAX, Behind, Duplicate, Held, Shelf
from broker.service.learned import Learned
from broker.service.stages import Stage
from broker.wire import subjects
from broker.wire.codec import MalformedMessage, decode
from broker.wire.ids import MalformedName, is_token, job_key
from broker.wire.messages import Job, Reason
from broker.wire.prefix import BLOCKS_MAX, HASH_BYTES, unpack_hashes
from broker.wire.subjects import JobAddress

_log = structlog.get_logger(__name__)


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
        learned: Learned,
        counts: Counts,
        now: Callable[[], float],
    ) -> None:
        """`is_running(key)` says whether a worker has the job."""
        self._shelf = shelf
        self._endings = endings
        self._tell = tell
        self._is_running = is_running
        self._book = book
        self._learned = learned
        self._counts = counts
        self._now = now

    def take(self, delivery: Delivery, address: JobAddress, pull: Pull) -> None:
        """Take one delivery of a queue."""
        try:
            job = _read(delivery, address)
            spec = self._spec(job, delivery)
        except (MalformedMessage, MalformedName, ValueError) as error:
            pull.release()
            self._refuse(delivery, address, str(error))
            return
        known = self._shelf.get(spec.key)
        if known is None:
            self._hold(job, spec, delivery, pull)
        elif known.message_id == (delivery.stream, delivery.sequence):
            pull.release()
            self._again(known, job, spec, delivery)
        elif known.stage is Stage.CLOSING:
            self._behind(known, delivery, pull)
        else:
            pull.release()
            self._duplicate(known, job, delivery)

    def depth(self, address: JobAddress, pending_jobs: int) -> None:
        """Note how many messages of a queue are not pulled yet."""
        self._tell(QueueDepth(self._now(), address.lane, address.band, address.model, pending_jobs))

    def _hold(self, job: Job, spec: JobSpec, delivery: Delivery, pull: Pull) -> None:
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
        _describe(held, job, spec)
        dead_letter = self._book.dead_letters.get(held.key)
        running = self._is_running(held.key)
        self._shelf.put(held, None if running or dead_letter else delivery.data)
        if dead_letter is not None:
            self._endings.repeat(held, dead_letter)
            return
        if running:
            self._shelf.runs(held)
        self._tell(JobHeld(self._now(), spec))

    def _again(self, known: Held, job: Job, spec: JobSpec, delivery: Delivery) -> None:
        """Take a known job's own message again: it was slow, or its consumer was reset."""
        known.ack_subject = delivery.ack_subject
        self._shelf.renewed(known, at_s=self._now())
        if known.unread:
            # A worker's list tells little of a job; its message tells all.
            known.unread = False
            _describe(known, job, spec)
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
            prompt_tokens=self._learned.prompt_tokens(
                job.model,
                prompt_blocks=len(job.blocks) // HASH_BYTES,
                told=job.prompt_tokens,
            ),
            output_tokens_max=job.output_tokens_max,
            blocks=unpack_hashes(job.blocks),
            enqueued_at_s=delivery.stored_at_s,
            deadline_at_s=job.deadline_at_s,
            stream_sequence=delivery.sequence,
            streamed=job.stream,
            restart_visible=job.restart_visible,
            failures=self._book.failures.get(key, ()),
        )

    def _duplicate(self, known: Held, job: Job, delivery: Delivery) -> None:
        """Keep a second message of a known job until the first one's record stands."""
        message_id = (delivery.stream, delivery.sequence)
        is_new = message_id not in known.duplicates
        if is_new and len(known.duplicates) >= DUPLICATES_MAX:
            return
        if is_new:
            self._counts.duplicate(job.lane, job.band)
        known.duplicates[message_id] = Duplicate(
            job.client,
            delivery.stream,
            delivery.subject,
            delivery.sequence,
            delivery.ack_subject,
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
        )


def _describe(held: Held, job: Job, spec: JobSpec) -> None:
    """Note what only a job's message says."""
    held.client = job.client
    held.request_id = job.request_id
    held.api_key_name = job.api_key_name
    held.submitted_at_s = job.submitted_at_s
    held.prompt_blocks = len(job.blocks) // HASH_BYTES
    held.spec = spec


def _read(delivery: Delivery, address: JobAddress) -> Job:
    """Decode a job and check it against the subject it came on. Raises MalformedMessage."""
    job = decode(delivery.data, Job)
    said = (job.lane, job.band, job.model)
    if said != (address.lane, address.band, address.model):
        message = f"the job says {said}, its subject {delivery.subject}"
        raise MalformedMessage(message)
    if len(job.blocks) % HASH_BYTES or len(job.blocks) > BLOCKS_MAX * HASH_BYTES:
        message = f"{len(job.blocks)} bytes are no list of at most {BLOCKS_MAX} block hashes"
        raise MalformedMessage(message)
    return job


def _salvage(data: bytes) -> tuple[str, str]:
    """Find job id and client in a broken message, to tell its caller; empty if not there."""
    try:
        raw = msgspec.msgpack.decode(data)
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
