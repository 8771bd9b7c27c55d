"""From delivered messages to held jobs: decoded and checked once, at this edge.

One pull per queue (lane, band, model), with a bounded window. A message that can't be read ends
here, with a
record of its own; the loop lives on.
"""

from collections.abc import Callable, Mapping
from typing import cast

import msgspec
import structlog

from broker.bus.base import Bus, Delivery, Pull
from broker.core.events import Event, JobHeld, JobSpec, QueueDepth
from broker.service.endings import Endings
from broker.service.held import DUPLICATES_MAX, Duplicate, Held, Shelf, Stage
from broker.service.learned import Learned
from broker.wire import subjects
from broker.wire.codec import MalformedMessage, decode
from broker.wire.ids import MalformedName, is_token, job_key
from broker.wire.messages import Failure, Job, Reason
from broker.wire.prefix import BLOCKS_MAX, HASH_BYTES, unpack_hashes
from broker.wire.subjects import JobAddress

_log = structlog.get_logger(__name__)


class Intake:
    """Takes deliveries in."""

    def __init__(
        self,
        shelf: Shelf,
        endings: Endings,
        *,
        tell: Callable[[Event], None],
        is_running: Callable[[str], bool],
        failures: Mapping[str, tuple[Failure, ...]],
        learned: Learned,
        malformed: Callable[[str], None],
        now: Callable[[], float],
    ) -> None:
        """`is_running(key)` says whether a worker has the job; `failures` are those of ATTEMPTS."""
        self._shelf = shelf
        self._endings = endings
        self._tell = tell
        self._is_running = is_running
        self._failures = failures
        self._learned = learned
        self._malformed = malformed
        self._now = now

    def take(self, delivery: Delivery, address: JobAddress, pull: Pull) -> None:
        """Take one delivery of a queue."""
        try:
            job = _read(delivery, address)
        except (MalformedMessage, MalformedName, ValueError) as error:
            self._refuse(delivery, address, str(error))
            pull.release()
            return
        key = job_key(job.lane, job.id)
        known = self._shelf.get(key)
        if known is None:
            self._hold(job, key, delivery, pull)
            return
        pull.release()
        if known.sequence == delivery.sequence:
            known.ack_subject = delivery.ack_subject
            known.renewed_at_s = self._now()
        elif known.stage is not Stage.CLOSING and len(known.duplicates) < DUPLICATES_MAX:
            self._duplicate(known, job, delivery)

    def depth(self, address: JobAddress, pending_jobs: int) -> None:
        """Note how many messages of a queue are not pulled yet."""
        self._tell(QueueDepth(self._now(), address.lane, address.band, address.model, pending_jobs))

    def _hold(self, job: Job, key: str, delivery: Delivery, pull: Pull) -> None:
        held = Held(
            key=key,
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
            request_id=job.request_id,
            submitted_at_s=job.submitted_at_s,
            prompt_blocks=len(job.blocks) // HASH_BYTES,
            pull=pull,
            renewed_at_s=self._now(),
        )
        running = self._is_running(key)
        self._shelf.put(held, None if running else delivery.data)
        if running:
            held.stage = Stage.RUNNING
            held.pull = None
            pull.release()
        self._tell(JobHeld(self._now(), self._spec(job, key, delivery)))

    def _spec(self, job: Job, key: str, delivery: Delivery) -> JobSpec:
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
            failures=self._failures.get(key, ()),
        )

    def _duplicate(self, known: Held, job: Job, delivery: Delivery) -> None:
        """Keep a second message of a known job until the first one's record stands."""
        twin = Duplicate(job.client, delivery.sequence, delivery.ack_subject)
        known.duplicates[delivery.sequence] = twin
        _log.info("intake.duplicate", job=known.key, sequence=delivery.sequence)

    def _refuse(self, delivery: Delivery, address: JobAddress, detail: str) -> None:
        self._malformed("job")
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
