"""The server behind the in-process bus: who listens, and which streams and consumers there are."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from broker.bus.base import (
    BusError,
    ConsumerSpec,
    Message,
    NotFound,
    PayloadTooLarge,
    StreamSpec,
)
from broker.bus.memory_clock import Clock, LoopClock
from broker.bus.memory_streams import (
    MemoryConsumer,
    MemoryStream,
    patterns_overlap,
    subject_matches,
)

PAYLOAD_BYTES_MAX = 8 * 1024 * 1024
"""Largest message, headers included: what our server configuration sets."""


@dataclass(slots=True, eq=False)
class Listener:
    """One subscription of one connection."""

    subject: str
    queue: str
    deliver: Callable[[Message], None]
    reachable: Callable[[], bool]


class MemoryServer:
    """What all connections share."""

    def __init__(
        self, *, clock: Clock | None = None, payload_bytes_max: int = PAYLOAD_BYTES_MAX
    ) -> None:
        self.clock: Clock = clock or LoopClock()
        self.payload_bytes_max = payload_bytes_max
        self.streams: dict[str, MemoryStream] = {}
        self.consumer_watchers: list[Callable[[], None]] = []
        self._exact: dict[str, list[Listener]] = {}
        self._wild: list[Listener] = []
        self._turns = itertools.count()
        self._connections = itertools.count(1)

    def next_connection(self) -> int:
        """Number a new connection."""
        return next(self._connections)

    def check_size(self, data: bytes, headers: Mapping[str, str] | None) -> None:
        """Raise PayloadTooLarge."""
        size = len(data) + sum(len(key) + len(value) + 4 for key, value in (headers or {}).items())
        if size > self.payload_bytes_max:
            message = f"{size} bytes are more than the server's {self.payload_bytes_max}"
            raise PayloadTooLarge(message)

    # core
    def listen(self, listener: Listener) -> None:
        """Add a subscription."""
        if "*" in listener.subject or ">" in listener.subject:
            self._wild.append(listener)
        else:
            self._exact.setdefault(listener.subject, []).append(listener)

    def leave(self, listener: Listener) -> None:
        """Remove a subscription. Idempotent."""
        if listener in self._wild:
            self._wild.remove(listener)
        exact = self._exact.get(listener.subject, [])
        if listener in exact:
            exact.remove(listener)
            if not exact:
                del self._exact[listener.subject]

    def route(self, message: Message) -> int:
        """Hand a message to whoever listens; returns to how many."""
        heard: list[Listener] = []
        groups: dict[str, list[Listener]] = {}
        candidates = [*self._exact.get(message.subject, ())]
        candidates += [one for one in self._wild if subject_matches(one.subject, message.subject)]
        for listener in candidates:
            if not listener.reachable():
                continue
            if listener.queue:
                groups.setdefault(listener.queue, []).append(listener)
            else:
                heard.append(listener)
        turn = next(self._turns) if groups else 0
        heard += [members[turn % len(members)] for members in groups.values()]
        for listener in heard:
            listener.deliver(message)
        return len(heard)

    # streams
    def stream(self, name: str) -> MemoryStream:
        """Find a stream. Raises NotFound."""
        found = self.streams.get(name)
        if found is None:
            message = f"no stream {name}"
            raise NotFound(message)
        return found

    def stream_for(self, subject: str) -> MemoryStream | None:
        """Find the stream that takes a subject."""
        for stream in self.streams.values():
            if stream.takes(subject):
                return stream
        return None

    def consumer(self, stream: str, name: str) -> MemoryConsumer:
        """Find a consumer. Raises NotFound."""
        found = self.stream(stream).consumers.get(name)
        if found is None:
            message = f"no consumer {name} of stream {stream}"
            raise NotFound(message)
        return found

    def ensure_stream(self, spec: StreamSpec) -> None:
        """Create or update a stream. Raises BusError when its subjects belong to another."""
        for other in self.streams.values():
            if other.spec.name == spec.name:
                continue
            for ours in spec.subjects:
                if any(patterns_overlap(ours, theirs) for theirs in other.spec.subjects):
                    message = f"stream {spec.name}: {ours} overlaps with stream {other.spec.name}"
                    raise BusError(message)
        known = self.streams.get(spec.name)
        if known is None:
            self.streams[spec.name] = MemoryStream(spec, self.clock)
        else:
            known.change(spec)

    def ensure_consumer(self, spec: ConsumerSpec, *, recreate: bool) -> None:
        """Create a consumer. Raises NotFound, and BusError where another works on its subject."""
        stream = self.stream(spec.stream)
        old = stream.consumers.get(spec.name)
        if old is not None and not recreate:
            old.change(spec)
            return
        for other in stream.consumers.values():
            if (
                stream.spec.work_queue
                and other is not old
                and patterns_overlap(other.spec.filter_subject, spec.filter_subject)
            ):
                message = f"consumer {spec.name}: {other.spec.name} works on the same subject"
                raise BusError(message)
        if old is not None:
            old.close()
        stream.consumers[spec.name] = MemoryConsumer(spec, stream, self.clock)
        for watch in self.consumer_watchers:
            watch()

    def delete_consumer(self, stream: str, name: str) -> None:
        """Delete a consumer, if it is there."""
        found = self.streams.get(stream)
        consumer = found.consumers.pop(name, None) if found is not None else None
        if consumer is not None:
            consumer.close()
