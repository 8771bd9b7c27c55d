"""Streams and work-queue consumers of the in-process bus: the server's side of the promises.

Behaviour follows nats-server 2.15 where callers can tell: the order in which an append is checked
(duplicate, then compare-and-set, then bounds), a refused message leaves no trace (its id stays
free), an acknowledged message leaves a work queue whoever acknowledges it, and a reset delivers
everything again in stream order.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from broker.bus.base import (
    Appended,
    BusError,
    ConsumerSpec,
    ConsumerState,
    Delivery,
    StoredMessage,
    StreamFull,
    StreamSpec,
    StreamState,
    WrongSequence,
)
from broker.bus.memory_clock import Clock, Timer

_RECORD_OVERHEAD_BYTES = 30
"""What a stored message costs beyond its parts; the file store's record header is about as long."""


def subject_matches(pattern: str, subject: str) -> bool:
    """Say whether a subject falls under a pattern with `*` (one token) and `>` (the rest)."""
    if pattern == subject:
        return True
    wanted, given = pattern.split("."), subject.split(".")
    for index, part in enumerate(wanted):
        if part == ">":
            return len(given) > index
        if index >= len(given) or part not in ("*", given[index]):
            return False
    return len(wanted) == len(given)


def patterns_overlap(left: str, right: str) -> bool:
    """Say whether some subject falls under both patterns."""
    a_tokens, b_tokens = left.split("."), right.split(".")
    for a_token, b_token in zip(a_tokens, b_tokens, strict=False):
        if ">" in (a_token, b_token):
            return True
        if a_token != b_token and "*" not in (a_token, b_token):
            return False
    return len(a_tokens) == len(b_tokens)


class MemoryStream:
    """A stream, its messages and its consumers."""

    def __init__(self, spec: StreamSpec, clock: Clock) -> None:
        self.spec = spec
        self.consumers: dict[str, MemoryConsumer] = {}
        self.last_sequence = 0
        self._clock = clock
        self._bytes = 0
        self._messages: dict[int, StoredMessage] = {}
        self._by_subject: dict[str, dict[int, None]] = {}
        self._ids: dict[str, tuple[int, float]] = {}
        self._expiries: list[tuple[float, int]] = []

    # writing
    def append(
        self,
        subject: str,
        data: bytes,
        *,
        message_id: str = "",
        expected_last_subject_sequence: int | None = None,
        ttl_s: float = 0.0,
        headers: Mapping[str, str],
    ) -> Appended:
        """Store a message. Raises WrongSequence, StreamFull, BusError."""
        self._expire()
        known = self._ids.get(message_id) if message_id else None
        if known is not None:
            return Appended(self.spec.name, known[0], duplicate=True)
        self._check_expectation(subject, expected_last_subject_sequence)
        if ttl_s and not self.spec.allow_msg_ttl:
            message = f"stream {self.spec.name} takes no message with a lifetime"
            raise BusError(message)
        size = _size_bytes(subject, data, headers)
        self._make_room(subject, size)
        stored = self._store(subject, data, headers, ttl_s=ttl_s, size=size)
        if message_id:
            self._ids[message_id] = (stored.sequence, stored.at_s + self.spec.duplicate_window_s)
        for consumer in self.consumers.values():
            consumer.offer(stored)
        return Appended(self.spec.name, stored.sequence)

    def change(self, spec: StreamSpec) -> None:
        """Take on a new specification. A per-subject bound is never lowered."""
        ceiling = max(spec.max_msgs_per_subject, self.spec.max_msgs_per_subject)
        if 0 in (spec.max_msgs_per_subject, self.spec.max_msgs_per_subject):
            ceiling = 0
        self.spec = replace(spec, max_msgs_per_subject=ceiling)

    def remove(self, sequence: int) -> bool:
        """Take a message out; False when it is gone already."""
        message = self._messages.pop(sequence, None)
        if message is None:
            return False
        self._bytes -= _size_bytes(message.subject, message.data, message.headers)
        sequences = self._by_subject[message.subject]
        del sequences[sequence]
        if not sequences:
            del self._by_subject[message.subject]
        for consumer in self.consumers.values():
            consumer.forget(sequence)
        return True

    def _check_expectation(self, subject: str, expected: int | None) -> None:
        if expected is None:
            return
        last = self.last_of(subject)
        stands_at = 0 if last is None else last.sequence
        if stands_at != expected:
            message = f"{subject} stands at sequence {stands_at}, not {expected}"
            raise WrongSequence(message)

    def _make_room(self, subject: str, size: int) -> None:
        spec = self.spec
        of_subject = self._by_subject.get(subject, {})
        if spec.max_msgs_per_subject and len(of_subject) >= spec.max_msgs_per_subject:
            if spec.discard_new and spec.discard_new_per_subject:
                message = f"stream {spec.name}: maximum messages per subject exceeded on {subject}"
                raise StreamFull(message)
            self.remove(next(iter(of_subject)))
        while spec.max_bytes and self._bytes + size > spec.max_bytes:
            if spec.discard_new or not self._messages:
                message = f"stream {spec.name}: maximum bytes exceeded"
                raise StreamFull(message)
            self.remove(next(iter(self._messages)))

    def _store(
        self, subject: str, data: bytes, headers: Mapping[str, str], *, ttl_s: float, size: int
    ) -> StoredMessage:
        self.last_sequence += 1
        at_s = self._clock.now_s()
        stored = StoredMessage(subject, self.last_sequence, bytes(data), at_s, dict(headers))
        self._messages[stored.sequence] = stored
        self._by_subject.setdefault(subject, {})[stored.sequence] = None
        self._bytes += size
        lifetime_s = ttl_s or self.spec.max_age_s
        if lifetime_s:
            heapq.heappush(self._expiries, (at_s + lifetime_s, stored.sequence))
        return stored

    def _expire(self) -> None:
        now_s = self._clock.now_s()
        while self._expiries and self._expiries[0][0] <= now_s:
            self.remove(heapq.heappop(self._expiries)[1])
        # Ids were noted in order of time, so the oldest stand first.
        while self._ids and (oldest := next(iter(self._ids.items())))[1][1] <= now_s:
            del self._ids[oldest[0]]

    # reading
    def last_of(self, subject: str) -> StoredMessage | None:
        """Newest message of a subject."""
        self._expire()
        sequences = self._by_subject.get(subject)
        return self._messages[next(reversed(sequences))] if sequences else None

    def at(self, sequence: int) -> StoredMessage | None:
        """Message at a sequence."""
        self._expire()
        return self._messages.get(sequence)

    def matching(self, pattern: str, *, first_sequence: int = 1) -> Iterator[StoredMessage]:
        """What the stream holds now under a pattern, in order."""
        self._expire()
        for sequence, message in list(self._messages.items()):
            if sequence >= first_sequence and subject_matches(pattern, message.subject):
                yield message

    def counts(self, pattern: str) -> dict[str, int]:
        """Messages per subject under a pattern."""
        self._expire()
        return {
            subject: len(sequences)
            for subject, sequences in sorted(self._by_subject.items())
            if subject_matches(pattern, subject)
        }

    def state(self, subject: str) -> StreamState:
        """State of the stream; with a subject, `messages` is that subject's count."""
        self._expire()
        return StreamState(
            messages=sum(self.counts(subject).values()) if subject else len(self._messages),
            bytes=self._bytes,
            first_sequence=next(iter(self._messages), self.last_sequence + 1),
            last_sequence=self.last_sequence,
            bytes_max=self.spec.max_bytes,
            age_s_max=self.spec.max_age_s,
        )

    def takes(self, subject: str) -> bool:
        """Say whether a message on this subject belongs here."""
        return any(subject_matches(pattern, subject) for pattern in self.spec.subjects)


def _size_bytes(subject: str, data: bytes, headers: Mapping[str, str]) -> int:
    header_bytes = sum(len(key) + len(value) + 4 for key, value in headers.items())
    return len(subject) + len(data) + header_bytes + _RECORD_OVERHEAD_BYTES


@dataclass(slots=True, eq=False)
class Puller:
    """One continuous pull, seen from the consumer."""

    deliver: Callable[[Delivery], None]
    room: int = 0


@dataclass(slots=True)
class _Undelivered:
    """Sequences to deliver, in order. Removal from the middle is lazy: each step stays cheap."""

    order: deque[int] = field(default_factory=deque[int])
    live: set[int] = field(default_factory=set[int])

    def add(self, sequence: int) -> None:
        self.order.append(sequence)
        self.live.add(sequence)

    def pop(self) -> int | None:
        while self.order:
            sequence = self.order.popleft()
            if sequence in self.live:
                self.live.remove(sequence)
                return sequence
        return None


class MemoryConsumer:
    """A durable consumer: who has which message, and until when."""

    def __init__(self, spec: ConsumerSpec, stream: MemoryStream, clock: Clock) -> None:
        self.spec = spec
        self.pullers: list[Puller] = []
        self._stream = stream
        self._clock = clock
        self._delivered_sequence = 0
        self._deliveries = 0
        self._deadlines: dict[int, float] = {}
        self._again: list[int] = []
        self._new = _Undelivered()
        self._timer: Timer | None = None
        self.reset()

    def reset(self) -> None:
        """Forget all deliveries: what the stream still holds comes again, in order."""
        self._deadlines.clear()
        self._again.clear()
        self._delivered_sequence = 0
        self._new = _Undelivered()
        for message in self._stream.matching(self.spec.filter_subject):
            self._new.add(message.sequence)
        self.serve()

    def offer(self, message: StoredMessage) -> None:
        """Take note of a new message."""
        if subject_matches(self.spec.filter_subject, message.subject):
            self._new.add(message.sequence)
            self.serve()

    def forget(self, sequence: int) -> None:
        """Take note that a message has left the stream."""
        self._new.live.discard(sequence)
        if self._deadlines.pop(sequence, None) is not None:
            self.serve()

    def acknowledge(self, sequence: int) -> bool:
        """Settle a delivery, whoever got it.

        False when it was not delivered since the last reset: the server does not answer then.
        """
        if sequence > self._delivered_sequence:
            return False
        self._deadlines.pop(sequence, None)
        if self._stream.spec.work_queue:
            self._stream.remove(sequence)
        self.serve()
        return True

    def change(self, spec: ConsumerSpec) -> None:
        """Take on new bounds; what is out stays out."""
        self.spec = spec
        self.serve()

    def renew(self, sequence: int) -> None:
        """Start the ack-wait of a delivery anew."""
        if sequence in self._deadlines:
            self._deadlines[sequence] = self._clock.now_s() + self.spec.ack_wait_s

    def serve(self) -> None:
        """Deliver what there is to whom there is, the puller with most room first."""
        while self.pullers and len(self._deadlines) < self.spec.max_ack_pending:
            puller = max(self.pullers, key=lambda candidate: candidate.room)
            if puller.room <= 0:
                return
            message = self._next()
            if message is None:
                return
            puller.room -= 1
            puller.deliver(self._delivery(message))
        self._arm()

    def _next(self) -> StoredMessage | None:
        while self._again:
            message = self._stream.at(heapq.heappop(self._again))
            if message is not None:
                return message
        while (sequence := self._new.pop()) is not None:
            message = self._stream.at(sequence)
            if message is not None:
                return message
        return None

    def _delivery(self, message: StoredMessage) -> Delivery:
        self._deliveries += 1
        self._delivered_sequence = max(self._delivered_sequence, message.sequence)
        self._deadlines[message.sequence] = self._clock.now_s() + self.spec.ack_wait_s
        self._arm()
        pending = len(self._new.live)
        nanoseconds = int(message.at_s * 1e9)
        return Delivery(
            subject=message.subject,
            stream=self.spec.stream,
            consumer=self.spec.name,
            sequence=message.sequence,
            data=message.data,
            ack_subject=(
                f"$JS.ACK.{self.spec.stream}.{self.spec.name}.1."
                f"{message.sequence}.{self._deliveries}.{nanoseconds}.{pending}"
            ),
            stored_at_s=message.at_s,
            pending=pending,
            headers=message.headers,
        )

    def _arm(self) -> None:
        if self._timer is None and self._deadlines:
            self._timer = self._clock.call_at(min(self._deadlines.values()), self._redeliver)

    def _redeliver(self) -> None:
        self._timer = None
        now_s = self._clock.now_s()
        for sequence, deadline_s in list(self._deadlines.items()):
            if deadline_s <= now_s:
                del self._deadlines[sequence]
                heapq.heappush(self._again, sequence)
        self.serve()
        self._arm()

    def state(self) -> ConsumerState:
        """State as the server would tell it."""
        return ConsumerState(
            delivered_sequence=self._delivered_sequence,
            ack_pending=len(self._deadlines) + len(self._again),
            pending=len(self._new.live),
            waiting=sum(1 for puller in self.pullers if puller.room > 0),
        )

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
