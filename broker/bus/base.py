"""What the rest of the system may ask of the message bus, and what the bus promises.

Two implementations keep the same promises and pass the same suite (`tests/contract/test_bus.py`):
`bus.nats`
over a NATS server, and `bus.memory` inside one process. Nothing outside `bus.nats` imports nats.

Promises
- `publish` is at most once and never waits for anybody; while the link is down it raises LinkDown
(a stale
  order must not go out after a reconnect).
- `append` returns only after the stream has stored the message (or found it a duplicate of
`message_id`).
- A pulled message is delivered again until acknowledged, whatever becomes of the consumer's
process.
- Handlers run one after another per subscription, in order of arrival; one that raises is logged
and counted, and
  the subscription lives on. Handlers must not block.
"""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol


class BusError(Exception):
    """Root of everything a bus raises."""


class BadLink(BusError):
    """Where to connect, or as whom, can't be: no server was asked, and none will be."""


class LinkDown(BusError):
    """The server can't be reached now. Nothing was sent, or it is not known whether it arrived."""


class Timeout(BusError):
    """No answer came in time. Whether the request arrived is not known."""


class NoResponders(BusError):
    """Nobody listens on that subject: the request reached no one."""


class NotFound(BusError):
    """No such message, key, stream or consumer."""


class WrongSequence(BusError):
    """Compare-and-set lost: the subject or key holds something else than expected."""


class NoStore(BusError):
    """The server could not make a stream's files: its disk is full, or it may not write there."""


class StreamFull(BusError):
    """The stream refused the message: its bound is reached. Nothing was stored."""


class NoRoom(BusError):
    """The server can't set aside what a stream may hold. It is as it was, or not there."""


class NotTaken(BusError):
    """A setting doesn't stand as it was asked for: an old server ignores it, or another set it."""


class NoStream(BusError):
    """No stream takes this subject (or its election is under way)."""


class PayloadTooLarge(BusError):
    """Larger than the server takes, headers included. Nothing was sent."""


@dataclass(frozen=True, slots=True)
class Message:
    """A core message."""

    subject: str
    data: bytes
    reply: str = ""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Appended:
    """Where a stream stored a message; `duplicate` when it knew the message id already."""

    stream: str
    sequence: int
    duplicate: bool = False


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message as a stream holds it."""

    subject: str
    sequence: int
    data: bytes
    at_s: float
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message pulled from a work queue; it stays in the stream until `Bus.ack` (ack_subject)."""

    subject: str
    stream: str
    consumer: str
    sequence: int
    """Of the message in its stream."""
    data: bytes
    ack_subject: str
    stored_at_s: float
    """Unix seconds when the stream stored it."""
    pending: int
    """Messages of this consumer not delivered yet, after this one."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class KeyValue:
    """An entry of a bucket."""

    key: str
    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """A consumer as the server sees it."""

    delivered_sequence: int
    """Stream sequence of the newest message delivered so far: the high-water mark."""
    ack_pending: int
    pending: int
    waiting: int
    """Outstanding pulls, of anybody."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """A stream as the server sees it."""

    messages: int
    bytes: int
    first_sequence: int
    last_sequence: int
    bytes_max: int = 0
    """Bound of `bytes` as it stands at the server; 0 = none."""
    age_s_max: float = 0.0
    """How long a message is kept; 0 = without end."""


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """A stream as we want it. Fields as in NATS; 0 = no limit."""

    name: str
    subjects: tuple[str, ...]
    work_queue: bool = False
    max_msgs_per_subject: int = 0
    max_bytes: int = 0
    max_bytes_least: int = 0
    """Where the server can't set `max_bytes` aside, it may be less, down to this; 0: it may not."""
    max_age_s: float = 0.0
    discard_new: bool = True
    discard_new_per_subject: bool = False
    duplicate_window_s: float = 120.0
    allow_direct: bool = True
    allow_msg_ttl: bool = False
    allow_atomic: bool = False
    replicas: int = 1
    file_storage: bool = True


@dataclass(frozen=True, slots=True)
class ConsumerSpec:
    """A durable pull consumer with explicit acks."""

    stream: str
    name: str
    filter_subject: str
    ack_wait_s: float = 60.0
    max_ack_pending: int = 1000


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """A key-value bucket."""

    name: str
    ttl_s: float = 0.0
    replicas: int = 1
    max_bytes: int = 0


Handler = Callable[[Message], Awaitable[None] | None]
DeliveryHandler = Callable[[list[Delivery]], None]


class Subscription(Protocol):
    """A live core subscription."""

    async def unsubscribe(self) -> None:
        """Stop hearing. Idempotent."""
        ...


class Pull(Protocol):
    """A continuous pull: at most `window` messages are delivered and not released."""

    def release(self, count: int = 1) -> None:
        """Give back room for `count` messages: they were handed on, finished or dropped."""
        ...

    def resize(self, window: int) -> None:
        """Change the window; 0 pauses."""
        ...

    async def stop(self) -> list[Delivery]:
        """Stop pulling and wait until no pull of ours is outstanding at the server.

        Returns what arrived meanwhile and was not handed over, so that nothing is lost unseen.
        """
        ...


class Bus(Protocol):
    """The message bus."""

    @property
    def connected(self) -> bool:
        """Whether the link stands, as far as is known."""
        ...

    @property
    def counts(self) -> Counter[str]:
        """What happened and was survived, by kind: `handler_errors`, `links_lost`, ..."""
        ...

    def on_link(self, handler: Callable[[bool], None]) -> None:
        """Call `handler(True | False)` when the link comes back or is lost."""
        ...

    async def close(self) -> None:
        """Flush and close. Idempotent."""
        ...

    async def rtt_s(self, *, timeout_s: float = 2.0) -> float:
        """Time a round trip to the server. Raises Timeout or LinkDown."""
        ...

    # core
    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        reply: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send at most once. Raises LinkDown, PayloadTooLarge."""
        ...

    async def request(
        self,
        subject: str,
        data: bytes,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Message:
        """Send and wait for one answer, on one reply inbox shared by all requests.

        Raises NoResponders, Timeout, LinkDown, PayloadTooLarge.
        """
        ...

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """Hear a subject (wildcards allowed). Survives reconnects."""
        ...

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
        """Store a message and wait for the stream's word.

        Raises StreamFull, WrongSequence, NoStream, Timeout, LinkDown, PayloadTooLarge. After
        Timeout or LinkDown
        it may be stored or not: call again with the same `message_id` or expectation.
        """
        ...

    async def last_message(
        self, stream: str, subject: str, *, timeout_s: float = 5.0
    ) -> StoredMessage:
        """Read the newest message of a subject (direct get).

        Raises NotFound, NoStream (no such stream, or its election is under way), Timeout, LinkDown.
        """
        ...

    async def message_at(
        self, stream: str, sequence: int, *, timeout_s: float = 5.0
    ) -> StoredMessage:
        """Read a message by its sequence. Raises as `last_message`."""
        ...

    async def delete_message(self, stream: str, sequence: int, *, erase: bool = False) -> bool:
        """Remove one message; False when it was gone already.

        With `erase`, its bytes are overwritten in the server's files; else they stay there until
        the server happens to rewrite or drop that file.
        """
        ...

    async def purge(self, stream: str, subject: str) -> int:
        """Remove all messages of a subject (wildcards allowed); returns how many there were.

        Raises NotFound (no such stream), NoStream, Timeout, LinkDown.
        """
        ...

    def messages(
        self, stream: str, *, subject: str = ">", first_sequence: int = 1
    ) -> AsyncIterator[StoredMessage]:
        """Walk what a stream holds now, in order, by direct get; ends after the newest.

        Raises NotFound (no such stream), NoStream, Timeout, LinkDown.
        """
        ...

    # work queues
    async def pull(
        self, stream: str, consumer: str, handler: DeliveryHandler, *, window: int
    ) -> Pull:
        """Start a continuous pull; `handler` gets each batch as it arrives.

        A missing consumer, 409/503 statuses and lost links are retried with back-off until stopped.
        """
        ...

    async def ack(self, ack_subject: str, *, timeout_s: float = 5.0) -> None:
        """Acknowledge and wait for the server's word. Idempotent.

        Raises Timeout, LinkDown, NoResponders (no such consumer now). After a reset the server is
        silent (Timeout) until the message was delivered again: try again.
        """
        ...

    async def renew(self, ack_subject: str) -> None:
        """Say that a delivery is still worked on: its ack-wait starts anew. Raises LinkDown."""
        ...

    # topology
    async def ensure_stream(self, spec: StreamSpec) -> None:
        """Create a stream or bring it to `spec`, then read it back.

        Raises BusError naming the field when the server did not take a setting as it stands. Never
        lowers
        `max_msgs_per_subject` (the server would delete the oldest). A stream that may be smaller
        (`max_bytes_least`) is as large as the server has room for.
        """
        ...

    async def ensure_consumer(self, spec: ConsumerSpec, *, recreate: bool = False) -> None:
        """Create a consumer; with `recreate`, delete and create it anew under the same name."""
        ...

    async def delete_consumer(self, stream: str, consumer: str) -> None:
        """Delete a consumer, if it is there; messages that it never delivered stay."""
        ...

    async def delete_stream(self, stream: str) -> None:
        """Delete a stream with all that it holds, if it is there."""
        ...

    async def reset_consumer(self, stream: str, consumer: str) -> None:
        """Forget all deliveries, so that un-acknowledged messages come again in stream order.

        Recreates under the same name where the server can't reset.
        """
        ...

    async def stream_state(self, stream: str, *, subject: str = "") -> StreamState:
        """State of a stream; with `subject`, `messages` counts that one alone. Raises NotFound."""
        ...

    async def subject_counts(self, stream: str, *, subject: str = ">") -> dict[str, int]:
        """Messages per subject that matches; empty when none."""
        ...

    async def count_from(self, stream: str, *, subject: str, sequence: int) -> int:
        """Count messages of a subject that stand at this sequence or later. Raises as `messages`.

        The server counts; nothing but one message is read.
        """
        ...

    async def consumer_state(self, stream: str, consumer: str) -> ConsumerState:
        """State of a consumer. Raises NotFound."""
        ...

    # key-value
    async def ensure_bucket(self, spec: BucketSpec) -> None:
        """Create a bucket if it isn't there."""
        ...

    async def kv_get(self, bucket: str, key: str) -> KeyValue:
        """Read a key. Raises NotFound."""
        ...

    async def kv_create(self, bucket: str, key: str, value: bytes, *, ttl_s: float = 0.0) -> int:
        """Write a key that is not there; returns the revision. Raises WrongSequence."""
        ...

    async def kv_update(
        self, bucket: str, key: str, value: bytes, *, revision: int, ttl_s: float = 0.0
    ) -> int:
        """Write a key if it stands at `revision`; returns the new one. Raises WrongSequence.

        `ttl_s` sets the key's remaining life anew; 0 = no end.
        """
        ...

    async def kv_put(self, bucket: str, key: str, value: bytes, *, ttl_s: float = 0.0) -> int:
        """Write a key whatever it holds, for `ttl_s` (0 = no end); returns the revision."""
        ...

    async def kv_delete(self, bucket: str, key: str, *, revision: int | None = None) -> None:
        """Delete a key, if it stands at `revision` where given. Raises WrongSequence."""
        ...

    async def kv_keys(self, bucket: str) -> list[str]:
        """Keys of a bucket, sorted."""
        ...

    def kv_entries(self, bucket: str, pattern: str = ">") -> AsyncIterator[KeyValue]:
        """Walk the entries whose keys match (`*` one token, `>` the rest), oldest write first.

        An entry that is written meanwhile may come twice, the newer one later. Raises NotFound.
        """
        ...

    async def kv_listen(
        self, bucket: str, pattern: str, handler: Callable[[str], None]
    ) -> Subscription:
        """Hear the keys that somebody writes, deletes or tries to: a hint to read, never a promise.

        The handler must not block.
        """
        ...
