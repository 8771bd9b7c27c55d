"""The bus over NATS: `base.Bus`, put together from link, replies, pulls and streams."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from broker.bus.background import Background
from broker.bus.base import (
    Appended,
    BusError,
    ConsumerSpec,
    ConsumerState,
    DeliveryHandler,
    Handler,
    Message,
    NoResponders,
    NoStream,
    StoredMessage,
    StreamSpec,
    StreamState,
    Timeout,
)
from broker.bus.key_value import StreamBuckets
from broker.bus.logs import Log
from broker.bus.nats_codec import (
    check_subject,
    decode_headers,
    decode_pub_ack,
    encode_headers,
    is_no_responders,
)
from broker.bus.nats_link import Link, Route, parse_urls
from broker.bus.nats_pull import NatsPull
from broker.bus.nats_replies import Replies, Window
from broker.bus.nats_streams import TOO_MANY_REQUESTS, Streams, error_of
from broker.bus.nats_wire import Credentials
from broker.bus.subscriber import Subscriber

_log = Log(__name__)

APPEND_OUTSTANDING_MAX = 4096
"""Messages on their way to streams at once; the server refuses beyond 10,000 a stream."""

APPEND_BYTES_MAX = 64 * 1024 * 1024
"""As above in bytes; the server refuses beyond 128 MB a stream."""

TOO_MANY_WAIT_S = 0.05
"""Wait before a message is sent again that the server had no room to look at."""

SEND_BYTES_YIELD = 1024 * 1024
"""A publisher that has this much waiting lets the loop run, so that it leaves."""

PULL_CHECK_S = 1.0
"""How often pulls are checked for being stuck."""

_ACK, _RENEW = b"+ACK", b"+WPI"


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server says of itself."""

    name: str
    version: str
    cluster: str
    """Name of its cluster; empty for a lone server."""
    payload_bytes_max: int
    jetstream: bool
    memory_bytes: int = 0
    memory_bytes_max: int = -1
    storage_bytes: int = 0
    storage_bytes_max: int = -1
    """Used, and allowed for this account; -1 = no limit of the account's own."""


class NatsSubscription:
    """A live subscription."""

    def __init__(
        self, link: Link, route: Route, subscriber: Subscriber, subscribers: set[Subscriber]
    ) -> None:
        self._subscribers = subscribers
        self._link = link
        self._route = route
        self._subscriber = subscriber

    async def unsubscribe(self) -> None:
        """Stop hearing. Idempotent."""
        self._link.leave(self._route)
        self._subscriber.close()
        self._subscribers.discard(self._subscriber)


async def connect(
    url: str | Sequence[str],
    *,
    name: str,
    credentials: Credentials | None = None,
    connect_timeout_s: float = 5.0,
    inbox_prefix: str = "_INBOX",
) -> "NatsBus":
    """Connect to one or more servers (`nats://[user:password@]host:port`, comma-separated).

    Raises BusError within `connect_timeout_s`: no server there, refused credentials, a server too
    old.
    """
    options = replace(
        parse_urls(url, credentials or Credentials()),
        name=name,
        connect_timeout_s=connect_timeout_s,
    )
    counts: Counter[str] = Counter()
    background = Background()
    link = Link(options, counts=counts, background=background)
    bus = NatsBus(link, counts=counts, background=background, inbox_prefix=inbox_prefix)
    try:
        await link.open()
    except BaseException:
        await bus.close()
        raise
    background.start(bus.watch_pulls())
    return bus


class NatsBus(StreamBuckets):
    """A connection to NATS. Made by `connect`."""

    def __init__(
        self, link: Link, *, counts: Counter[str], background: Background, inbox_prefix: str
    ) -> None:
        self.counts = counts
        self._link = link
        self._background = background
        self._inbox_prefix = inbox_prefix
        self._replies = Replies(link, inbox_prefix=inbox_prefix)
        self._streams = Streams(link, self._replies)
        self._window = Window(outstanding_max=APPEND_OUTSTANDING_MAX, bytes_max=APPEND_BYTES_MAX)
        self._subscribers: set[Subscriber] = set()
        self._pulls: list[NatsPull] = []
        self._link_handlers: list[Callable[[bool], None]] = []

    # the link
    @property
    def connected(self) -> bool:
        """Whether the link stands, as far as is known."""
        return self._link.connected

    def on_link(self, handler: Callable[[bool], None]) -> None:
        """Call `handler` when the link comes back or is lost."""
        self._link_handlers.append(handler)
        self._link.on_link(handler)

    async def close(self) -> None:
        """Flush and close. Idempotent."""
        # Who closes knows: only a loss is told.
        for handler in self._link_handlers:
            self._link.off_link(handler)
        await self._link.close()
        for subscriber in self._subscribers:
            subscriber.close()
        await self._background.close()

    @property
    def outstanding(self) -> int:
        """Appends on their way to their streams."""
        return self._window.outstanding

    async def rtt_s(self, *, timeout_s: float = 2.0) -> float:
        """Time a round trip to the server."""
        return await self._link.rtt_s(timeout_s)

    async def server_info(self) -> ServerInfo:
        """Ask the server what it is and allows."""
        info = self._link.wire.info
        about = ServerInfo(
            name=str(info.get("server_name", "")),
            version=str(info.get("version", "")),
            cluster=str(info.get("cluster", "")),
            payload_bytes_max=int(info.get("max_payload", 0)),
            jetstream=False,
        )
        try:
            account = await self._streams.ask("INFO")
        except NoStream:
            return about
        return replace(
            about,
            jetstream=True,
            memory_bytes=account.memory,
            memory_bytes_max=account.limits.max_memory,
            storage_bytes=account.storage,
            storage_bytes_max=account.limits.max_storage,
        )

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
        check_subject(subject)
        if reply:
            check_subject(reply)
        block = encode_headers(headers) if headers else b""
        self._link.send(subject, data, reply=reply, headers=block)
        if self._link.wire.waiting_bytes > SEND_BYTES_YIELD:
            await asyncio.sleep(0)

    async def request(
        self,
        subject: str,
        data: bytes,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Message:
        """Send and wait for one answer."""
        check_subject(subject)
        block = encode_headers(headers) if headers else b""
        reply = await self._replies.ask(subject, data, headers=block, timeout_s=timeout_s)
        if is_no_responders(reply.data, reply.headers):
            message = f"nobody listens on {subject}"
            raise NoResponders(message)
        return Message(
            reply.subject.decode(),
            reply.data,
            headers=decode_headers(reply.headers) if reply.headers else {},
        )

    async def subscribe(
        self, subject: str, handler: Handler, *, queue: str = ""
    ) -> NatsSubscription:
        """Hear a subject."""
        check_subject(subject)
        subscriber = Subscriber(subject, handler, background=self._background, counts=self.counts)

        def heard(subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
            subscriber.feed(
                Message(
                    subject.decode(),
                    data,
                    reply.decode(),
                    decode_headers(headers) if headers else {},
                )
            )

        self._subscribers.add(subscriber)
        route = self._link.hear(subject, heard, queue=queue)
        return NatsSubscription(self._link, route, subscriber, self._subscribers)

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
        check_subject(subject)
        fields = dict(headers or {})
        if message_id:
            fields["Nats-Msg-Id"] = message_id
        if expected_last_subject_sequence is not None:
            fields["Nats-Expected-Last-Subject-Sequence"] = str(expected_last_subject_sequence)
        if ttl_s:
            # Whole seconds, at least one, are what the server takes.
            fields["Nats-TTL"] = f"{max(1, math.ceil(ttl_s))}s"
        block = encode_headers(fields) if fields else b""
        size = len(data) + len(block)
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        await self._enter(size, timeout_s)
        try:
            return await self._append(subject, data, block, deadline_s=deadline_s)
        finally:
            self._window.leave(size)

    async def _enter(self, size: int, timeout_s: float) -> None:
        if self._window.enter_now(size):
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._window.enter(size)
        except TimeoutError as error:
            message = f"{self._window.outstanding} messages wait for their streams already"
            raise Timeout(message) from error

    async def _append(
        self, subject: str, data: bytes, block: bytes, *, deadline_s: float
    ) -> Appended:
        loop = asyncio.get_running_loop()
        while True:
            left_s = deadline_s - loop.time()
            reply = await self._replies.ask(subject, data, headers=block, timeout_s=left_s)
            if is_no_responders(reply.data, reply.headers):
                message = f"no stream takes {subject}, or its election is under way"
                raise NoStream(message)
            answer = decode_pub_ack(reply.data)
            if answer.error is None:
                return Appended(answer.stream, answer.seq, answer.duplicate)
            if answer.error.err_code != TOO_MANY_REQUESTS:
                raise error_of(answer.error, what=subject)
            self.counts["appends_repeated"] += 1
            await asyncio.sleep(TOO_MANY_WAIT_S)

    async def last_message(
        self, stream: str, subject: str, *, timeout_s: float = 5.0
    ) -> StoredMessage:
        """Read the newest message of a subject."""
        check_subject(subject)
        return await self._streams.last(stream, subject, timeout_s=timeout_s)

    async def message_at(
        self, stream: str, sequence: int, *, timeout_s: float = 5.0
    ) -> StoredMessage:
        """Read a message by its sequence."""
        return await self._streams.get(
            stream, {"seq": sequence}, what=f"message {sequence}", timeout_s=timeout_s
        )

    async def delete_message(self, stream: str, sequence: int, *, erase: bool = False) -> bool:
        """Remove one message; False when it was gone already."""
        return await self._streams.delete_message(stream, sequence, erase=erase)

    async def purge(self, stream: str, subject: str) -> int:
        """Remove all messages of a subject; returns how many there were."""
        check_subject(subject)
        return await self._streams.purge(stream, subject=subject)

    def messages(
        self, stream: str, *, subject: str = ">", first_sequence: int = 1
    ) -> AsyncIterator[StoredMessage]:
        """Walk what a stream holds now, in order, by direct get."""
        return self._streams.walk(stream, subject=subject, first_sequence=first_sequence)

    # work queues
    async def pull(
        self, stream: str, consumer: str, handler: DeliveryHandler, *, window: int
    ) -> NatsPull:
        """Start a continuous pull."""
        pull = NatsPull(
            self._link,
            stream=stream,
            consumer=consumer,
            handler=handler,
            window=window,
            inbox_prefix=self._inbox_prefix,
            counts=self.counts,
            ended=self._forget_pull,
        )
        self._pulls.append(pull)
        return pull

    def _forget_pull(self, pull: NatsPull) -> None:
        if pull in self._pulls:
            self._pulls.remove(pull)

    async def watch_pulls(self) -> None:
        """Check pulls for being stuck, until the bus closes."""
        while True:
            await asyncio.sleep(PULL_CHECK_S)
            for pull in list(self._pulls):
                if pull.check():
                    await self._unstick(pull)

    async def _unstick(self, pull: NatsPull) -> None:
        """Messages pending, a pull standing, none delivered: ask anew, and say so."""
        try:
            undelivered = await self._streams.deliverable(pull.stream, pull.consumer)
        except BusError:
            return
        if undelivered:
            self.counts["pulls_stalled"] += 1
            _log.error(
                "deliveries stalled, asking anew",
                stream=pull.stream,
                consumer=pull.consumer,
                undelivered=undelivered,
            )
            pull.listen_anew()

    async def ack(self, ack_subject: str, *, timeout_s: float = 5.0) -> None:
        """Acknowledge and wait for the server's word."""
        reply = await self._replies.ask(ack_subject, _ACK, timeout_s=timeout_s)
        if is_no_responders(reply.data, reply.headers):
            message = f"no consumer to acknowledge to on {ack_subject}"
            raise NoResponders(message)

    async def renew(self, ack_subject: str) -> None:
        """Say that a delivery is still being worked on."""
        self._link.send(ack_subject, _RENEW)

    # topology
    async def ensure_stream(self, spec: StreamSpec) -> None:
        """Create a stream or bring it to `spec`, then read it back."""
        await self._streams.ensure_stream(spec)

    async def ensure_consumer(self, spec: ConsumerSpec, *, recreate: bool = False) -> None:
        """Create a consumer; with `recreate`, delete and create it anew under the same name."""
        await self._streams.ensure_consumer(spec, recreate=recreate)

    async def delete_consumer(self, stream: str, consumer: str) -> None:
        """Delete a consumer, if it is there."""
        await self._streams.delete_consumer(stream, consumer)

    async def delete_stream(self, stream: str) -> None:
        """Delete a stream with all that it holds, if it is there."""
        await self._streams.delete_stream(stream)

    async def reset_consumer(self, stream: str, consumer: str) -> None:
        """Forget all deliveries, so that un-acknowledged messages come again in stream order."""
        await self._streams.reset_consumer(stream, consumer)

    async def stream_state(self, stream: str, *, subject: str = "") -> StreamState:
        """State of a stream; with `subject`, `messages` counts that subject's alone."""
        return await self._streams.stream_state(stream, subject=subject)

    async def subject_counts(self, stream: str, *, subject: str = ">") -> dict[str, int]:
        """Messages per subject that matches; empty when none."""
        return await self._streams.subject_counts(stream, subject=subject)

    async def count_from(self, stream: str, *, subject: str, sequence: int) -> int:
        """Count messages of a subject from a sequence on."""
        return await self._streams.count_from(stream, subject=subject, sequence=sequence)

    async def consumer_state(self, stream: str, consumer: str) -> ConsumerState:
        """State of a consumer."""
        return await self._streams.consumer_state(stream, consumer)
