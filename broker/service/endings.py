"""How the broker itself ends a job: which record, in which words, and what of its message."""

from collections.abc import Callable

import msgspec

from broker.bus.base import Delivery
from broker.core import decisions as do
from broker.core.events import Event, JobEnded
from broker.service.closer import Closer, Ending, Farewell
from broker.service.held import Duplicate, Held, Shelf
from broker.service.stages import Stage
from broker.service.sweeps import Sweeps
from broker.service.texts import ending_text
from broker.wire import codec, subjects
from broker.wire.fields import Seconds, ShortText, Token
from broker.wire.ids import job_key
from broker.wire.messages import Attempt, Failure, Job, Kind, Reason, TerminalRecord
from broker.wire.subjects import JobAddress

RETRY_AFTER_S_MIN = 1.0
"""Least life of a rejection record; the server's shortest message TTL is one second."""


class JobHead(msgspec.Struct, frozen=True):
    """What of a stored job its ending needs, where no broker holds it: all but its body."""

    id: Token
    client: Token
    submitted_at_s: Seconds = 0.0
    request_id: ShortText = ""
    api_key_name: ShortText = ""


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
        self.sweeps = Sweeps()
        """Lanes whose jobs end as they are pulled."""
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
        held.enter(Stage.CLOSING)
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
            message=ending_text(held.key, kind, reason, failures=failures, detail=detail),
            attempt=attempt,
            submitted_at_s=held.submitted_at_s,
            retry_after_s=retry_after_s,
            failures=failures,
            request_id=held.request_id,
            row=row,
            api_key_name=held.api_key_name,
        )
        # A rejection runs out, so that the next try can succeed; one without a next try stays.
        ttl_s = max(retry_after_s, RETRY_AFTER_S_MIN) if retry_after_s else 0.0
        self._closer.put(
            Ending(
                key=held.key,
                record=record,
                stream=held.stream,
                sequence=held.sequence,
                ack_subject=held.ack_subject,
                client=held.client,
                speaks_json=held.speaks_json,
                ttl_s=ttl_s,
                dead_letter=kind is Kind.DEAD_LETTERED,
                duplicates=tuple(held.duplicates.values()),
            )
        )

    def decided(self, decision: do.Decision, held: Held) -> None:
        """End a held job as the mind decided; other decisions end nothing."""
        match decision:
            case do.Reject(_, reason, row, used, limit, retry_after_s):
                over = f"Row {row}: {used:g} of {limit:g} used." if row else ""
                self.end(
                    held,
                    Kind.REJECTED,
                    reason=reason,
                    detail=over,
                    row=row,
                    retry_after_s=retry_after_s,
                )
            case do.Expire(_, reason):
                self.end(held, Kind.EXPIRED, reason=reason)
            case do.Cancel():
                self.end(held, Kind.CANCELLED, reason=Reason.CANCELLED)
            case do.DeadLetter(_, failures):
                self.end(
                    held,
                    Kind.DEAD_LETTERED,
                    reason=failures[-1].reason if failures else Reason.WORKER_LOST,
                    failures=failures,
                )
            case do.FailStream(_, failures):
                reason = failures[-1].reason if failures else Reason.WORKER_LOST
                self.end(held, Kind.FAILED, reason=reason, failures=failures)
            case _:
                pass

    def released(self, held: Held) -> None:
        """Let a job go whose record stands and whose message its agent acknowledges."""
        if held.stage is Stage.CLOSING:
            return
        self._shelf.remove(held.key)
        if held.duplicates:
            twins = tuple(held.duplicates.values())
            self._closer.put(Farewell(held.key, held.lane, held.job_id, twins))

    def ended_before(self, delivery: Delivery, job: Job) -> None:
        """Finish a job whose record stands: its caller may not know, and its message must go."""
        one = Duplicate(
            job.client,
            delivery.stream,
            delivery.subject,
            delivery.sequence,
            delivery.ack_subject,
            codec.speaks_json(delivery.data, delivery.headers),
        )
        self._closer.put(Farewell(job_key(job.lane, job.id), job.lane, job.id, (one,)))

    def repeat(self, held: Held, record: TerminalRecord) -> None:
        """Finish what an earlier leader began: the record of this dead letter stands."""
        held.enter(Stage.CLOSING)
        self._shelf.drop_body(held)
        self._closer.put(
            Ending(
                key=held.key,
                record=record,
                stream=held.stream,
                sequence=held.sequence,
                ack_subject=held.ack_subject,
                client=held.client,
                speaks_json=held.speaks_json,
                dead_letter=True,
            )
        )

    def end_unpulled(
        self, job: Job | JobHead, address: JobAddress, *, sequence: int, speaks_json: bool = False
    ) -> None:
        """Cancel a job that is still in its stream and not held."""
        self._closer.put(self._unpulled(job, address, sequence, speaks_json=speaks_json))

    async def end_unpulled_now(
        self, job: Job | JobHead, address: JobAddress, *, sequence: int, speaks_json: bool = False
    ) -> bool:
        """Cancel such a job, and return when it is gone; False after a fault of ours."""
        ending = self._unpulled(job, address, sequence, speaks_json=speaks_json)
        return await self._closer.carry_out(ending)

    def _unpulled(
        self, job: Job | JobHead, address: JobAddress, sequence: int, *, speaks_json: bool
    ) -> Ending:
        key = job_key(address.lane, job.id)
        record = TerminalRecord(
            job=job.id,
            lane=address.lane,
            kind=Kind.CANCELLED,
            ended_at_s=self._now(),
            band=address.band,
            model=address.model,
            client=job.client,
            reason=Reason.CANCELLED,
            message=ending_text(key, Kind.CANCELLED, Reason.CANCELLED),
            submitted_at_s=job.submitted_at_s,
            request_id=job.request_id,
            api_key_name=job.api_key_name,
        )
        return Ending(
            key=key,
            record=record,
            stream=subjects.jobs_stream(address.lane, address.band),
            sequence=sequence,
            ack_subject="",
            client=job.client,
            speaks_json=speaks_json,
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
        speaks_json: bool = False,
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
            message=ending_text(job_key(lane, bad_id), Kind.REJECTED, reason, detail=detail),
        )
        self._closer.put(
            Ending(
                key=job_key(lane, bad_id),
                record=record,
                stream=delivery.stream,
                sequence=delivery.sequence,
                ack_subject=delivery.ack_subject,
                client=client if job_id else "",
                speaks_json=speaks_json,
                record_id=bad_id,
            )
        )

    def message_gone(self, held: Held) -> None:
        """Forget a job whose message left its stream: by the rule of removal its record stands."""
        if held.stage is not Stage.CLOSING:
            self.forget(held.key)

    def forget(self, key: str) -> None:
        """Let the mind forget a job; if its message is still in its stream, it comes again."""
        self._tell(JobEnded(self._now(), key))
