"""Buckets of keys, built on streams: one implementation for every bus.

Laid out as NATS's own key-value stores are (stream `KV_<bucket>`, subjects `$KV.<bucket>.<key>`,
one message a key, `KV-Operation: DEL` as tombstone), so that `nats kv` reads them. A key's revision
is its message's sequence.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping

from broker.bus.base import (
    Appended,
    BucketSpec,
    Handler,
    KeyValue,
    Message,
    NotFound,
    StoredMessage,
    StreamSpec,
    Subscription,
    WrongSequence,
)

OPERATION_HEADER = "KV-Operation"

TOMBSTONE_TTL_S = 60.0
"""A deleted key leaves a mark this long, then nothing: buckets of short-lived keys stay small."""


def bucket_stream(spec: BucketSpec) -> StreamSpec:
    """Specify the stream behind a bucket."""
    window_s = min(120.0, spec.ttl_s) if spec.ttl_s else 120.0
    return StreamSpec(
        name=f"KV_{spec.name}",
        subjects=(f"$KV.{spec.name}.>",),
        max_msgs_per_subject=1,
        max_bytes=spec.max_bytes,
        max_age_s=spec.ttl_s,
        duplicate_window_s=window_s,
        allow_msg_ttl=True,
        replicas=spec.replicas,
    )


def _is_tombstone(message: StoredMessage) -> bool:
    return message.headers.get(OPERATION_HEADER, "") in ("DEL", "PURGE")


class StreamBuckets(ABC):
    """The key-value part of a bus, in terms of its streams."""

    @abstractmethod
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
        """See `Bus.append`."""

    @abstractmethod
    async def last_message(
        self, stream: str, subject: str, *, timeout_s: float = 5.0
    ) -> StoredMessage:
        """See `Bus.last_message`."""

    @abstractmethod
    def messages(
        self, stream: str, *, subject: str = ">", first_sequence: int = 1
    ) -> AsyncIterator[StoredMessage]:
        """See `Bus.messages`."""

    @abstractmethod
    async def ensure_stream(self, spec: StreamSpec) -> None:
        """See `Bus.ensure_stream`."""

    @abstractmethod
    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """See `Bus.subscribe`."""

    async def ensure_bucket(self, spec: BucketSpec) -> None:
        """Create a bucket if it isn't there."""
        await self.ensure_stream(bucket_stream(spec))

    async def kv_get(self, bucket: str, key: str) -> KeyValue:
        """Read a key. Raises NotFound."""
        message = await self.last_message(f"KV_{bucket}", f"$KV.{bucket}.{key}")
        if _is_tombstone(message):
            text = f"no key {key} in bucket {bucket}"
            raise NotFound(text)
        return KeyValue(key, message.data, message.sequence)

    async def kv_create(self, bucket: str, key: str, value: bytes, *, ttl_s: float = 0.0) -> int:
        """Write a key that is not there; returns the revision. Raises WrongSequence."""
        try:
            return await self.kv_update(bucket, key, value, revision=0, ttl_s=ttl_s)
        except WrongSequence:
            # It may be a tombstone that stands there.
            revision = await self._free_revision(bucket, key)
        return await self.kv_update(bucket, key, value, revision=revision, ttl_s=ttl_s)

    async def _free_revision(self, bucket: str, key: str) -> int:
        """Revision at which an absent key may be written. Raises WrongSequence if it is there."""
        try:
            message = await self.last_message(f"KV_{bucket}", f"$KV.{bucket}.{key}")
        except NotFound:
            return 0
        if _is_tombstone(message):
            return message.sequence
        text = f"key {key} of bucket {bucket} exists"
        raise WrongSequence(text)

    async def kv_update(
        self, bucket: str, key: str, value: bytes, *, revision: int, ttl_s: float = 0.0
    ) -> int:
        """Write a key if it stands at `revision`; returns the new one. Raises WrongSequence.

        A key's lifetime is that of its last write: pass `ttl_s` again to renew it, or the key stays
        for good.
        """
        appended = await self.append(
            f"$KV.{bucket}.{key}", value, expected_last_subject_sequence=revision, ttl_s=ttl_s
        )
        return appended.sequence

    async def kv_put(self, bucket: str, key: str, value: bytes, *, ttl_s: float = 0.0) -> int:
        """Write a key whatever it holds; returns the revision."""
        appended = await self.append(f"$KV.{bucket}.{key}", value, ttl_s=ttl_s)
        return appended.sequence

    async def kv_delete(self, bucket: str, key: str, *, revision: int | None = None) -> None:
        """Delete a key, if it stands at `revision` where given. Raises WrongSequence."""
        await self.append(
            f"$KV.{bucket}.{key}",
            b"",
            expected_last_subject_sequence=revision,
            ttl_s=TOMBSTONE_TTL_S,
            headers={OPERATION_HEADER: "DEL"},
        )

    async def kv_keys(self, bucket: str) -> list[str]:
        """Keys of a bucket, sorted."""
        return sorted([entry.key async for entry in self.kv_entries(bucket)])

    async def kv_entries(self, bucket: str, pattern: str = ">") -> AsyncIterator[KeyValue]:
        """Walk the entries whose keys match, oldest write first. Raises NotFound."""
        prefix = f"$KV.{bucket}."
        async for message in self.messages(f"KV_{bucket}", subject=f"{prefix}{pattern}"):
            if not _is_tombstone(message):
                key = message.subject.removeprefix(prefix)
                yield KeyValue(key, message.data, message.sequence)

    async def kv_listen(
        self, bucket: str, pattern: str, handler: Callable[[str], None]
    ) -> Subscription:
        """Hear the keys that somebody writes, deletes or tries to. Must not block."""
        prefix = f"$KV.{bucket}."

        def heard(message: Message) -> None:
            handler(message.subject.removeprefix(prefix))

        return await self.subscribe(f"{prefix}{pattern}", heard)
