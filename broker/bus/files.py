"""Files of a lane, on the bus: streamed in and out in chunks, whatever their size.

Two places: the chunks of a file stand one after another on a subject of the lane's stream
`FILES_<lane>`, and what is known of it under a key of the bucket `FILES`. The key is written last
and removed first, so a file that half arrived, or is half removed, was never there; `sweep` clears
away the chunks that such a one left.

Each chunk is appended by compare-and-set on its subject, so a file has one writer at a time: who
was overtaken hears WrongSequence at its next chunk. Chunks are read by direct get, which needs no
consumer (NATS's own object stores need a push consumer, which no tenant may create).
"""

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from contextlib import suppress

from msgspec.structs import replace

from broker.bus.base import (
    Bus,
    BusError,
    LinkDown,
    NoStream,
    NotFound,
    StoredMessage,
    StreamFull,
    Timeout,
    WrongSequence,
)
from broker.wire import subjects
from broker.wire.codec import MalformedMessage, decode, encode
from broker.wire.files import FileInfo
from broker.wire.ids import is_token

CHUNK_BYTES = 256 * 1024
"""Of a file's chunks: twice what NATS's own object stores take, and small beside any `max_payload`
(1 MB where nobody set it)."""

CHUNK_EXTRA_BYTES = 512
"""What a stored chunk costs beyond its data: subject, headers and the server's own (measured: 150).
"""

APPEND_S_MAX = 60.0
"""How long one chunk is tried while the server can't be reached: a restart or an election takes
less."""

ABANDONED_S = 3600.0
"""Chunks of no file are cleared away once nothing was added for so long: no upload pauses for an
hour."""

CHUNK_HEADER = "Inferlane-Chunk"
"""Who wrote a chunk, and its number: known again when the answer to its append was lost."""

_RETRY_S = (0.05, 2.0)


class FileTooLarge(BusError):
    """The file has more bytes than one may have. Nothing of it is kept."""


class FilesFull(StreamFull):
    """The lane's files have no room for the file. Nothing of it was sent."""


class FileExists(BusError):
    """There is a file of this id."""


class FileGone(BusError):
    """Chunks are missing: the file was removed while it was read."""


def new_file_id() -> str:
    """Make a file id that nobody else will make."""
    return f"file-{secrets.token_hex(12)}"


class Tail:
    """A writer's place at the end of a file; a second writer that begins there ends the first."""

    def __init__(self, bus: Bus, lane: str, file_id: str, *, after_sequence: int = 0) -> None:
        """`after_sequence`: of the file's last chunk; 0 of a file without one."""
        self.sequence = after_sequence
        self._bus = bus
        self._subject = subjects.file_chunks(lane, file_id)
        self._stream = subjects.files_stream(lane)
        self._writer = secrets.token_hex(8)
        self._number = 0

    async def append(
        self, data: bytes, headers: Mapping[str, str] | None = None, *, patience_s: float
    ) -> int:
        """Append a chunk and return its sequence. Not to be called twice at once.

        Raises WrongSequence (another writer, or the file is gone), StreamFull, PayloadTooLarge, and
        after `patience_s` of trouble Timeout, LinkDown or NoStream.
        """
        self._number += 1
        name = f"{self._writer}.{self._number}"
        fields = {**(headers or {}), CHUNK_HEADER: name}
        give_up_at_s = time.monotonic() + patience_s
        pause_s = _RETRY_S[0]
        while True:
            try:
                appended = await self._bus.append(
                    self._subject,
                    data,
                    expected_last_subject_sequence=self.sequence,
                    headers=fields,
                )
                self.sequence = appended.sequence
            except WrongSequence:
                self.sequence = await self._own(name)
            except (Timeout, LinkDown, NoStream):
                if time.monotonic() > give_up_at_s:
                    raise
                await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
                pause_s = min(2 * pause_s, _RETRY_S[1])
                continue
            return self.sequence

    async def _own(self, name: str) -> int:
        """Sequence of the last chunk, if it is ours: its answer was lost. Raises WrongSequence."""
        try:
            last = await self._bus.last_message(self._stream, self._subject)
        except NotFound:
            last = None
        if last is None or last.headers.get(CHUNK_HEADER) != name:
            message = f"{self._subject} has another writer now, or was removed"
            raise WrongSequence(message)
        return last.sequence


class Files:
    """The files of one lane."""

    def __init__(
        self, bus: Bus, lane: str, *, append_s_max: float = APPEND_S_MAX, chunk_bytes: int = 0
    ) -> None:
        """`chunk_bytes` 0: CHUNK_BYTES."""
        self.lane = lane
        self.bus = bus
        self._stream = subjects.files_stream(lane)
        self._append_s_max = append_s_max
        self._chunk_bytes = chunk_bytes or CHUNK_BYTES

    async def see_room(self, file_bytes: int, *, bytes_max: int) -> None:
        """See whether a file of so many bytes can be stored now.

        Raises FileTooLarge (over `bytes_max`), FilesFull, BusError.
        """
        if file_bytes > bytes_max:
            raise _too_large(bytes_max)
        state = await self.bus.stream_state(self._stream)
        left = state.bytes_max - state.bytes
        needs = file_bytes + CHUNK_EXTRA_BYTES * (1 + file_bytes // self._chunk_bytes)
        if state.bytes_max and needs > left:
            message = (
                f"the file has {file_bytes:,} bytes, and the files of lane {self.lane!r} have room "
                f"for {max(0, left):,} more: they may take {state.bytes_max:,} "
                "(streams.files_bytes_max, or less where the message server's max_file or disk has "
                "no room); delete some"
            )
            raise FilesFull(message)

    async def put(
        self, info: FileInfo, source: AsyncIterable[bytes], *, bytes_max: int
    ) -> FileInfo:
        """Store a file, holding no more than a chunk of it; return what is known of it then.

        Whatever stops it leaves nothing to be seen. Raises FileTooLarge (over `bytes_max`),
        FileExists, StreamFull, WrongSequence (removed meanwhile), BusError, and what `source` does.
        """
        try:
            return await self._put(info, source, bytes_max)
        except (FileExists, WrongSequence):
            raise  # The chunks are another's.
        except BaseException:
            # Not in vain when cancelled: only the wait that was under way is.
            with suppress(BusError):
                await self.bus.purge(self._stream, self._chunks_of(info.id))
            raise

    async def _put(self, info: FileInfo, source: AsyncIterable[bytes], bytes_max: int) -> FileInfo:
        tail = Tail(self.bus, self.lane, info.id)
        size = lines = 0
        last = b"\n"
        async for chunk in _cut(source, self._chunk_bytes):
            size += len(chunk)
            if size > bytes_max:
                raise _too_large(bytes_max)
            lines += chunk.count(b"\n")
            last = chunk[-1:]
            await tail.append(chunk, patience_s=self._append_s_max)
        whole = replace(info, bytes=size, lines=lines + (last != b"\n"), growing=False)
        await self.create(whole)
        return whole

    async def create(self, info: FileInfo) -> None:
        """Make a file known; its chunks stand, or will follow. Raises FileExists, BusError."""
        key = subjects.file_key(self.lane, info.id)
        try:
            await self.bus.kv_create(subjects.FILES_BUCKET, key, encode(info))
        except WrongSequence as error:
            if await self.find(info.id) != info:  # It may be the word to ours that was lost.
                message = f"there is a file {info.id}"
                raise FileExists(message) from error

    async def settle(self, info: FileInfo) -> None:
        """Say what a file that grew has become. Raises NotFound, BusError."""
        key = subjects.file_key(self.lane, info.id)
        entry = await self.bus.kv_get(subjects.FILES_BUCKET, key)
        with suppress(WrongSequence):  # Only its end is ever written: somebody else did.
            await self.bus.kv_update(
                subjects.FILES_BUCKET, key, encode(info), revision=entry.revision
            )

    async def find(self, file_id: str, *, now_s: float | None = None) -> FileInfo | None:
        """What is known of a file; None when there is none, or none any more at `now_s`."""
        if not is_token(file_id):
            return None  # `*` in a subject would mean all of them.
        try:
            key = subjects.file_key(self.lane, file_id)
            entry = await self.bus.kv_get(subjects.FILES_BUCKET, key)
            info = decode(entry.value, FileInfo)
        except (NotFound, MalformedMessage):
            return None
        return None if is_expired(info, now_s) else info

    async def all(self, *, now_s: float | None = None) -> list[FileInfo]:
        """All files that are not expired at `now_s`, oldest first; files of an instant by id."""
        found = [info for info in await self._infos() if not is_expired(info, now_s)]
        return sorted(found, key=lambda info: (info.created_at_s, info.id))

    async def chunks(
        self, file_id: str, *, after_sequence: int = 0
    ) -> AsyncIterator[StoredMessage]:
        """Read the chunks that stand now, in order; none of a file that isn't there."""
        async for message in self.bus.messages(
            self._stream, subject=self._chunks_of(file_id), first_sequence=after_sequence + 1
        ):
            yield message

    async def content(self, info: FileInfo) -> AsyncIterator[bytes]:
        """Read a file chunk by chunk; of one that grows, what stands now.

        Raises FileGone when it was removed meanwhile, BusError.
        """
        size = 0
        async for message in self.chunks(info.id):
            size += len(message.data)
            if message.data:
                yield message.data
        if not info.growing and size != info.bytes:
            message = f"file {info.id} has {size} of its {info.bytes} bytes: it was removed"
            raise FileGone(message)

    async def last_chunk(self, file_id: str) -> StoredMessage | None:
        """Newest chunk of a file; None without one."""
        try:
            return await self.bus.last_message(self._stream, self._chunks_of(file_id))
        except NotFound:
            return None

    async def delete(self, file_id: str) -> bool:
        """Remove a file; False when there is none. Whoever reads it hears FileGone."""
        if await self.find(file_id) is None:
            return False
        await self._remove(file_id)
        return True

    async def sweep(
        self, *, now_s: float, keep: frozenset[str] = frozenset(), abandoned_s: float = ABANDONED_S
    ) -> int:
        """Remove what is expired (but for the ids of `keep`), and chunks of no file; say how many.

        Chunks whose file is not known stay until nothing was added for `abandoned_s`.
        """
        infos = {info.id: info for info in await self._infos()}
        gone = 0
        for info in infos.values():
            if is_expired(info, now_s) and info.id not in keep:
                await self._remove(info.id)
                gone += 1
        counts = await self.bus.subject_counts(self._stream, subject=self._chunks_of("*"))
        for subject in counts:
            file_id = subject.rpartition(".")[2]
            if file_id not in infos and await self._is_abandoned(file_id, now_s - abandoned_s):
                await self.bus.purge(self._stream, subject)
                gone += 1
        return gone

    async def _is_abandoned(self, file_id: str, before_s: float) -> bool:
        last = await self.last_chunk(file_id)
        return last is not None and last.at_s < before_s and await self.find(file_id) is None

    async def _remove(self, file_id: str) -> None:
        await self.bus.kv_delete(subjects.FILES_BUCKET, subjects.file_key(self.lane, file_id))
        await self.bus.purge(self._stream, self._chunks_of(file_id))

    async def _infos(self) -> list[FileInfo]:
        found: dict[str, FileInfo] = {}
        keys = subjects.file_key(self.lane, "*")
        async for entry in self.bus.kv_entries(subjects.FILES_BUCKET, keys):
            with suppress(MalformedMessage):
                found[entry.key] = decode(entry.value, FileInfo)
        return list(found.values())

    def _chunks_of(self, file_id: str) -> str:
        return subjects.file_chunks(self.lane, file_id)


def _too_large(bytes_max: int) -> FileTooLarge:
    return FileTooLarge(f"the file has more than {bytes_max:,} bytes (file_bytes_max)")


def is_expired(info: FileInfo, now_s: float | None) -> bool:
    """Say whether a file is gone at `now_s`; never, where no time is given."""
    return now_s is not None and 0 < info.expires_at_s <= now_s


async def _cut(source: AsyncIterable[bytes], chunk_bytes: int) -> AsyncIterator[bytes]:
    """Cut a stream of bytes into chunks of equal size, the last one as it comes."""
    held = bytearray()
    async for piece in source:
        held += piece
        while len(held) >= chunk_bytes:
            yield bytes(held[:chunk_bytes])
            del held[:chunk_bytes]
    if held:
        yield bytes(held)
