"""What the agent says at once: notes to the broker, tokens and ends to the caller.

All of it is at most once. A lost note is healed by the next heartbeat; a lost token shows as a gap
in the index, and the whole answer stands in the record; a lost end is found by the caller's own
watchdog.
"""

from collections import Counter

from broker.bus.base import Bus, BusError, PayloadTooLarge
from broker.wire import codec, subjects
from broker.wire.messages import (
    AttemptEnded,
    Finished,
    FirstToken,
    Job,
    StoredEnd,
    Tokens,
    WorkerNote,
)
from worker_agent.bundles import Bundles
from worker_agent.ledger import Running


class Notes:
    """Publishes, and counts what could not be sent."""

    def __init__(self, bus: Bus, *, worker: str, incarnation: int) -> None:
        self._bus = bus
        self._worker = worker
        self._incarnation = incarnation
        self._subject = subjects.worker_note(worker)
        self._bundles = Bundles(self._send_tokens)
        self.counts: Counter[str] = Counter()

    async def first_token(self, running: Running) -> None:
        """Tell the broker that a prefill is done."""
        await self._note(
            FirstToken(
                worker=self._worker,
                incarnation=self._incarnation,
                key=running.key,
                attempt=running.attempt,
                ttft_s=running.ttft_s,
                cached_tokens=running.cached_tokens,
            )
        )

    async def ended(self, finished: Finished) -> None:
        """Tell the broker that a slot is free."""
        await self._note(
            AttemptEnded(worker=self._worker, incarnation=self._incarnation, finished=finished)
        )

    async def tokens(self, running: Running, *, index: int, data: bytes) -> None:
        """Pass some of the answer on to the caller; by itself, or with others' of this turn."""
        job, speaks_json = running.job, running.order.speaks_json
        tokens = Tokens(job=job.id, attempt=running.attempt, index=index, data=data)
        if job.reads_bundles and not speaks_json:
            await self._bundles.add(job, tokens)
        else:
            await self._send_tokens(_out(job), codec.encode_for(tokens, speaks_json=speaks_json))

    async def end(self, job: Job, record: bytes, *, speaks_json: bool = False) -> None:
        """Tell the caller that its job ended: with the record, unless that is too large."""
        await self._bundles.flush()  # Its last tokens come before.
        data = _end(job, record, speaks_json=speaks_json)
        if 0 < len(data) <= codec.MESSAGE_BYTES_MAX and await self._sent_whole(_out(job), data):
            return
        stored = codec.encode_for(StoredEnd(job=job.id), speaks_json=speaks_json)
        await self._send(_out(job), stored, what="end")

    async def _sent_whole(self, subject: str, data: bytes) -> bool:
        try:
            await self._bus.publish(subject, data)
        except PayloadTooLarge:
            return False
        except BusError:
            self.counts["end_unsent"] += 1
        return True

    async def _note(self, note: WorkerNote) -> None:
        await self._send(self._subject, codec.encode(note), what="note")

    async def _send_tokens(self, subject: str, data: bytes) -> None:
        await self._send(subject, data, what="tokens")

    async def _send(self, subject: str, data: bytes, *, what: str) -> None:
        try:
            await self._bus.publish(subject, data)
        except BusError:
            self.counts[f"{what}_unsent"] += 1


def _end(job: Job, record: bytes, *, speaks_json: bool) -> bytes:
    """Encode the end in the caller's form; empty when the record that stands can't be read."""
    try:
        return codec.encode_end(job.id, record, speaks_json=speaks_json)
    except codec.MalformedMessage:
        return b""


def _out(job: Job) -> str:
    # From lane and client alone: no field of a message may choose where an answer goes.
    return subjects.out(job.lane, job.client, job.id)
