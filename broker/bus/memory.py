"""The bus inside one process: the same promises as over NATS, without a server.

For a single-process set-up and for tests. `MemoryBus()` is a connection to a server of its own;
`connection()` opens another to the same server, and `disconnect`/`reconnect` cut and mend one of
them, so that link loss can be shown. Time comes from the server's clock (`memory_clock`), so that
no test has to wait.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping

from broker.bus.background import Background
from broker.bus.base import (
    Appended,
    ConsumerSpec,
    ConsumerState,
    DeliveryHandler,
    Handler,
    LinkDown,
    Message,
    NoResponders,
    NoStream,
    NotFound,
    StoredMessage,
    StreamSpec,
    StreamState,
    Timeout,
)
from broker.bus.containment import Contained
from broker.bus.key_value import StreamBuckets
from broker.bus.memory_clock import Clock, Timer
from broker.bus.memory_pull import MemoryPull
from broker.bus.memory_server import Listener, MemoryServer
from broker.bus.memory_streams import MemoryStream
from broker.bus.subscriber import Subscriber

_ACK_TOKENS = 9
"""`$JS.ACK.<stream>.<consumer>.<count>.<stream seq>.<consumer seq>.<time>.<pending>`."""


class MemorySubscription:
    """A live subscription."""

    def __init__(
        self,
        server: MemoryServer,
        listeners: dict[Subscriber, Listener],
        subscriber: Subscriber,
    ) -> None:
        self._server = server
        self._listeners = listeners
        self._subscriber = subscriber

    async def unsubscribe(self) -> None:
        """Stop hearing. Idempotent."""
        listener = self._listeners.pop(self._subscriber, None)
        if listener is not None:
            self._server.leave(listener)
            self._subscriber.close()


class MemoryBus(StreamBuckets):
    """One connection to an in-process server."""

    def __init__(self, server: MemoryServer | None = None, *, clock: Clock | None = None) -> None:
        assert server is None or clock is None, "the clock is the server's"
        self.server = server or MemoryServer(clock=clock)
        self.counts: Counter[str] = Counter()
        self._background = Background()
        self._connected = True
        self._closed = False
        self._link_handlers: list[Callable[[bool], None]] = []
        self._inbox: list[tuple[Subscriber, Message]] = []
        self._listeners: dict[Subscriber, Listener] = {}
        self._pulls: list[MemoryPull] = []
        self._tokens = itertools.count(1)
        self._waiting: dict[str, tuple[asyncio.Future[Message], Timer]] = {}
        self._reply_prefix = f"_INBOX.{self.server.next_connection()}."
        self._replies = Listener(
            f"{self._reply_prefix}*", "", self._answered, lambda: self._connected
        )
        self.server.listen(self._replies)
        self.server.consumer_watchers.append(self._attach_pulls)

    # the link
    def connection(self) -> "MemoryBus":
        """Open another connection to the same server."""
        return MemoryBus(self.server)

    @property
    def connected(self) -> bool:
        """Whether the link stands."""
        return self._connected

    def on_link(self, handler: Callable[[bool], None]) -> None:
        """Call `handler` when the link comes back or is lost."""
        self._link_handlers.append(handler)

    def disconnect(self) -> None:
        """Cut the link: what is under way is lost, who waits hears LinkDown. Idempotent."""
        if not self._connected:
            return
        self._connected = False
        self._inbox.clear()
        for future, timer in self._waiting.values():
            timer.cancel()
            if not future.done():
                future.set_exception(LinkDown("the link was lost while waiting for an answer"))
        self._waiting.clear()
        for pull in self._pulls:
            pull.lose()
        self._tell_link(up=False)

    def reconnect(self) -> None:
        """Mend the link: subscriptions hear again, pulls go on. Idempotent."""
        if self._connected or self._closed:
            return
        self._connected = True
        self._attach_pulls()
        self._tell_link(up=True)

    def _attach_pulls(self) -> None:
        for pull in self._pulls:
            pull.attach()

    def _tell_link(self, *, up: bool) -> None:
        for handler in self._link_handlers:
            with Contained(self.counts, "link handler"):
                handler(up)

    async def close(self) -> None:
        """Close. Idempotent."""
        if self._closed:
            return
        # What was published before must still arrive: one turn of the loop hands it over.
        await asyncio.sleep(0)
        self._closed = True
        self._link_handlers.clear()
        self.disconnect()
        self.server.consumer_watchers.remove(self._attach_pulls)
        self.server.leave(self._replies)
        for subscriber, listener in self._listeners.items():
            self.server.leave(listener)
            subscriber.close()
        await self._background.close()

    async def rtt_s(self, *, timeout_s: float = 2.0) -> float:
        """Time a round trip."""
        del timeout_s
        await self._turn()
        return 0.0

    def _require_link(self) -> None:
        if not self._connected:
            message = "not connected"
            raise LinkDown(message)

    async def _turn(self) -> None:
        """Let others run, as a real round trip would; the link may be lost meanwhile."""
        self._require_link()
        await asyncio.sleep(0)
        self._require_link()

    # core
    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        reply: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send at most once."""
        self._require_link()
        self.server.check_size(data, headers)
        message = Message(subject, bytes(data), reply, dict(headers or {}))
        self.server.route(message)
        stream = self.server.stream_for(subject)
        if stream is not None:
            stream.append(subject, message.data, headers=message.headers)

    async def request(
        self,
        subject: str,
        data: bytes,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Message:
        """Send and wait for one answer."""
        self._require_link()
        self.server.check_size(data, headers)
        token = str(next(self._tokens))
        message = Message(subject, bytes(data), f"{self._reply_prefix}{token}", dict(headers or {}))
        if not self.server.route(message):
            text = f"nobody listens on {subject}"
            raise NoResponders(text)
        return await self._answer(token, subject, timeout_s)

    async def _answer(self, token: str, subject: str, timeout_s: float) -> Message:
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        clock = self.server.clock
        timer = clock.call_at(clock.now_s() + timeout_s, lambda: self._timed_out(token, subject))
        self._waiting[token] = (future, timer)
        try:
            return await future
        finally:
            timer.cancel()
            self._waiting.pop(token, None)

    def _timed_out(self, token: str, subject: str) -> None:
        future, _ = self._waiting.pop(token)
        if not future.done():
            future.set_exception(Timeout(f"no answer from {subject} in time"))

    def _answered(self, message: Message) -> None:
        waiting = self._waiting.get(message.subject[len(self._reply_prefix) :])
        if waiting is not None and not waiting[0].done():
            waiting[0].set_result(message)

    async def subscribe(
        self, subject: str, handler: Handler, *, queue: str = ""
    ) -> MemorySubscription:
        """Hear a subject."""
        subscriber = Subscriber(subject, handler, background=self._background, counts=self.counts)
        listener = Listener(
            subject,
            queue,
            lambda message: self._receive(subscriber, message),
            lambda: self._connected,
        )
        self._listeners[subscriber] = listener
        self.server.listen(listener)
        return MemorySubscription(self.server, self._listeners, subscriber)

    def _receive(self, subscriber: Subscriber, message: Message) -> None:
        """Deliver in the loop's next turn, so that no handler runs inside another's publish."""
        self._inbox.append((subscriber, message))
        if len(self._inbox) == 1:
            asyncio.get_running_loop().call_soon(self._read)

    def _read(self) -> None:
        batch, self._inbox = self._inbox, []
        for subscriber, message in batch:
            # A handler may cut the link: what was behind it is lost, as on a socket.
            if self._connected:
                subscriber.feed(message)

    # streams
    async def append(
        self,
        subject: str,
        data: bytes,
        *,
        message_id: str = "",
        expected_last_subject_sequence: int | None = None,
        ttl_s: float = 0.0,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 5.0,
    ) -> Appended:
        """Store a message and wait for the stream's word."""
        del timeout_s
        self._require_link()
        self.server.check_size(data, headers)
        stream = self.server.stream_for(subject)
        if stream is None:
            message = f"no stream takes {subject}"
            raise NoStream(message)
        appended = stream.append(
            subject,
            data,
            message_id=message_id,
            expected_last_subject_sequence=expected_last_subject_sequence,
            ttl_s=ttl_s,
            headers=headers or {},
        )
        if not appended.duplicate:
            self.server.route(Message(subject, bytes(data), "", dict(headers or {})))
        await self._turn()
        return appended

    async def last_message(
        self, stream: str, subject: str, *, timeout_s: float = 5.0
    ) -> StoredMessage:
        """Read the newest message of a subject."""
        del timeout_s
        await self._turn()
        found = self._readable(stream).last_of(subject)
        if found is None:
            message = f"no message on {subject}"
            raise NotFound(message)
        return found

    async def message_at(
        self, stream: str, sequence: int, *, timeout_s: float = 5.0
    ) -> StoredMessage:
        """Read a message by its sequence."""
        del timeout_s
        await self._turn()
        found = self._readable(stream).at(sequence)
        if found is None:
            message = f"no message {sequence} in stream {stream}"
            raise NotFound(message)
        return found

    async def delete_message(self, stream: str, sequence: int, *, erase: bool = False) -> bool:
        """Remove one message; there are no files to erase it from."""
        del erase
        await self._turn()
        return self.server.stream(stream).remove(sequence)

    async def purge(self, stream: str, subject: str) -> int:
        """Remove all messages of a subject."""
        await self._turn()
        held = self.server.stream(stream)
        return sum(held.remove(message.sequence) for message in held.matching(subject))

    async def messages(
        self, stream: str, *, subject: str = ">", first_sequence: int = 1
    ) -> AsyncIterator[StoredMessage]:
        """Walk what a stream holds now, in order."""
        await self._turn()
        held = self.server.stream(stream).matching(subject, first_sequence=first_sequence)
        for message in list(held):
            yield message

    # work queues
    async def pull(
        self, stream: str, consumer: str, handler: DeliveryHandler, *, window: int
    ) -> MemoryPull:
        """Start a continuous pull."""
        pull = MemoryPull(
            self.server,
            stream,
            consumer,
            handler,
            window=window,
            counts=self.counts,
            linked=lambda: self._connected,
        )
        self._pulls.append(pull)
        pull.attach()
        return pull

    async def ack(self, ack_subject: str, *, timeout_s: float = 5.0) -> None:
        """Acknowledge and wait for the server's word."""
        self._require_link()
        stream, consumer, sequence = _parse_ack(ack_subject)
        try:
            found = self.server.consumer(stream, consumer)
        except NotFound as error:
            message = f"no consumer {consumer} of {stream} to acknowledge to"
            raise NoResponders(message) from error
        if not found.acknowledge(sequence):
            await self._answer(str(next(self._tokens)), ack_subject, timeout_s)
        await self._turn()

    async def renew(self, ack_subject: str) -> None:
        """Say that a delivery is still being worked on."""
        self._require_link()
        stream, consumer, sequence = _parse_ack(ack_subject)
        found = self.server.streams.get(stream)
        if found is not None and consumer in found.consumers:
            found.consumers[consumer].renew(sequence)

    # topology
    async def ensure_stream(self, spec: StreamSpec) -> None:
        """Create a stream or bring it to `spec`."""
        await self._turn()
        self.server.ensure_stream(spec)

    async def ensure_consumer(self, spec: ConsumerSpec, *, recreate: bool = False) -> None:
        """Create a consumer."""
        await self._turn()
        self.server.ensure_consumer(spec, recreate=recreate)

    async def delete_consumer(self, stream: str, consumer: str) -> None:
        """Delete a consumer, if it is there."""
        await self._turn()
        self.server.delete_consumer(stream, consumer)

    async def delete_stream(self, stream: str) -> None:
        """Delete a stream, if it is there."""
        await self._turn()
        self.server.streams.pop(stream, None)

    async def reset_consumer(self, stream: str, consumer: str) -> None:
        """Forget all deliveries."""
        await self._turn()
        self.server.consumer(stream, consumer).reset()

    async def stream_state(self, stream: str, *, subject: str = "") -> StreamState:
        """State of a stream."""
        await self._turn()
        return self.server.stream(stream).state(subject)

    async def subject_counts(self, stream: str, *, subject: str = ">") -> dict[str, int]:
        """Messages per subject that matches."""
        await self._turn()
        return self.server.stream(stream).counts(subject)

    async def count_from(self, stream: str, *, subject: str, sequence: int) -> int:
        """Count messages of a subject from a sequence on."""
        await self._turn()
        held = self.server.stream(stream).matching(subject, first_sequence=sequence)
        return sum(1 for _ in held)

    async def consumer_state(self, stream: str, consumer: str) -> ConsumerState:
        """State of a consumer."""
        await self._turn()
        return self.server.consumer(stream, consumer).state()

    def _readable(self, stream: str) -> MemoryStream:
        found = self.server.streams.get(stream)
        if found is None:
            message = f"no stream {stream} answers"
            raise NoStream(message)
        return found


def _parse_ack(ack_subject: str) -> tuple[str, str, int]:
    """Return stream, consumer and sequence of an ack subject."""
    parts = ack_subject.split(".")
    assert len(parts) == _ACK_TOKENS, f"not an ack subject of this bus: {ack_subject}"
    return parts[2], parts[3], int(parts[5])
