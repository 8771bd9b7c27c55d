"""How the broker itself ends a job: which record, in which words, and what of its message."""

from collections.abc import Callable

from broker.bus.base import Delivery
from broker.core.events import Event, JobEnded
from broker.service.closer import Closer, Ending, Farewell
from broker.service.held import Held, Shelf, Stage
from broker.wire import subjects
from broker.wire.ids import job_key
from broker.wire.messages import Attempt, Failure, Kind, Reason, TerminalRecord
from broker.wire.subjects import JobAddress

RETRY_AFTER_S_MIN = 1.0
"""Least life of a rejection record; the server's shortest message TTL is one second."""

_TEXTS = {
    Reason.QUEUE_FULL: "The queue is full; try again after retry_after_s.",
    Reason.QUOTA_EXCEEDED: "The job is larger than a quota row allows; make it smaller.",
    Reason.DEADLINE_INFEASIBLE: "The deadline can't be met at today's load; allow more time.",
    Reason.DEADLINE_EXPIRED: "The deadline passed before the job could run.",
    Reason.WAIT_EXPIRED: "The job waited as long as its band allows; try later or a lower band.",
    Reason.CANCELLED: "Cancelled by its owner.",
    Reason.NO_WORKERS: "No worker serves this model.",
    Reason.DRAINING: "The cluster is draining; try again later.",
    Reason.LANE_PAUSED: "The lane is paused by an operator; try again later.",
    Reason.UNKNOWN_MODEL: "This lane may not use this model in this band; see its offer in CONFIG.",
    Reason.MALFORMED: "The message can't be read as a job.",
    Reason.PAYLOAD_TOO_LARGE: "The request is too large to be handed to a worker; send less.",
    Reason.WORKER_LOST: "The worker was lost after the first token; submit again.",
}


class Endings:
    """Turns decisions to end a job into work for the closer."""

    def __init__(
        self,
        shelf: Shelf,
        closer: Closer,
        *,
        now: Callable[[], float],
        tell: Callable[[Event], None],
    ) -> None:
        """Records carry the time of `now`; jobs found gone are told to the mind by `tell`."""
        self._shelf = shelf
        self._closer = closer
        self._now = now
        self._tell = tell

    def end(
        self,
        held: Held,
        kind: Kind,
        *,
        reason: Reason,
        detail: str = "",
        row: str = "",
        retry_after_s: float = 0.0,
        failures: tuple[Failure, ...] = (),
        attempt: Attempt | None = None,
    ) -> None:
        """End a held job. Its place on the shelf stays until its message is gone."""
        if held.stage is Stage.CLOSING:
            return
        held.stage = Stage.CLOSING
        self._shelf.drop_body(held)
        record = TerminalRecord(
            job=held.job_id,
            lane=held.lane,
            kind=kind,
            ended_at_s=self._now(),
            band=held.band,
            model=held.model,
            client=held.client,
            reason=reason,
            message=(_TEXTS.get(reason, "The job could not be run.") + detail)[:4096],
            attempt=attempt,
            submitted_at_s=held.submitted_at_s,
            retry_after_s=retry_after_s,
            failures=failures,
            request_id=held.request_id,
            row=row,
        )
        rejected = kind is Kind.REJECTED
        self._closer.put(
            Ending(
                key=held.key,
                record=record,
                stream=held.stream,
                sequence=held.sequence,
                ack_subject=held.ack_subject,
                client=held.client,
                ttl_s=max(retry_after_s, RETRY_AFTER_S_MIN) if rejected else 0.0,
                dead_letter=kind is Kind.DEAD_LETTERED,
                duplicates=tuple(held.duplicates.values()),
            )
        )

    def released(self, held: Held) -> None:
        """Let a job go whose record stands and whose message its agent acknowledges."""
        if held.stage is Stage.CLOSING:
            return
        self._shelf.remove(held.key)
        if held.duplicates:
            twins = tuple(held.duplicates.values())
            self._closer.put(Farewell(held.key, held.lane, held.job_id, twins))

    def end_unpulled(self, job_id: str, address: JobAddress, client: str, *, sequence: int) -> None:
        """Cancel a job that is still in its stream and not held."""
        record = TerminalRecord(
            job=job_id,
            lane=address.lane,
            kind=Kind.CANCELLED,
            ended_at_s=self._now(),
            band=address.band,
            model=address.model,
            client=client,
            reason=Reason.CANCELLED,
            message=_TEXTS[Reason.CANCELLED],
        )
        self._closer.put(
            Ending(
                key=job_key(address.lane, job_id),
                record=record,
                stream=subjects.jobs_stream(address.lane, address.band),
                sequence=sequence,
                ack_subject="",
                client=client,
            )
        )

    def refuse(
        self,
        delivery: Delivery,
        lane: str,
        *,
        reason: Reason,
        detail: str,
        job_id: str,
        client: str,
    ) -> None:
        """End a message that is no job: record under `bad-…`, word to a caller it names."""
        bad_id = subjects.bad_message_id(delivery.stream, delivery.sequence)
        record = TerminalRecord(
            job=job_id or bad_id,
            lane=lane,
            kind=Kind.REJECTED,
            ended_at_s=self._now(),
            client=client,
            reason=reason,
            message=f"{_TEXTS[reason]} {detail}"[:4096],
        )
        self._closer.put(
            Ending(
                key=job_key(lane, bad_id),
                record=record,
                stream=delivery.stream,
                sequence=delivery.sequence,
                ack_subject=delivery.ack_subject,
                client=client if job_id else "",
                record_id=bad_id,
            )
        )

    def message_gone(self, held: Held) -> None:
        """Forget a job whose message left its stream: by the rule of removal its record stands."""
        if held.stage is not Stage.CLOSING:
            self._tell(JobEnded(self._now(), held.key))
