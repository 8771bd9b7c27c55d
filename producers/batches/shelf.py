"""A lane's batches in the bucket BATCHES: create one, find them, ask for their end.

Every change is a compare-and-set on the one record, so whoever runs a batch and whoever cancels it
never overwrite each other.
"""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import xxhash
from msgspec.structs import replace

from broker.bus.base import Bus, NotFound, WrongSequence
from broker.bus.files import Files
from broker.wire import subjects
from broker.wire.codec import MalformedMessage, decode, encode
from broker.wire.files import FileInfo
from broker.wire.ids import is_token
from producers.batches import life
from producers.batches.errors import BadBatch, FileInUse, NoSuchBatch, NoSuchFile
from producers.batches.forecast import duration
from producers.batches.records import Batch, new_batch_id
from producers.durations import parse_duration_s
from producers.request import ENDPOINTS

INPUT_PURPOSE = "batch"

WINDOW_S_MAX = 30 * 86_400.0
"""Longest window: half of what files may stand, so that results can still be fetched."""

FILE_LIFE_S = 30 * 86_400.0
"""Life of a file for which nobody said another, and the longest: as the hosted API has it."""

METADATA_PAIRS_MAX, METADATA_KEY_CHARS_MAX, METADATA_VALUE_CHARS_MAX = 16, 64, 512
"""As the hosted API has them."""

REPEAT_S = 600.0
"""A client's own repeat of a request comes within this: two tries with at most 120 s before each,
and their time-outs."""

KEY_LIFE_S = 86_400.0
"""How long an idempotency key is remembered, as the hosted API does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A batch as its caller asks for it."""

    endpoint: str
    input_file_id: str
    completion_window: str = "24h"
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    results_life_s: float = FILE_LIFE_S
    api_key_name: str = ""
    idempotency_key: str = ""
    """The same key is the same batch, ..."""
    repeated: bool = False
    """... and so is a request that its client says it repeats, by what it asks for."""


class Shelf:
    """The batches of one lane."""

    def __init__(self, bus: Bus, lane: str, files: Files) -> None:
        self.lane = lane
        self._bus = bus
        self.files = files

    async def create(self, wanted: Wanted) -> Batch:
        """Make a batch, or find the one that the same request made before.

        Raises BadBatch, NoSuchFile, BusError.
        """
        now_s = time.time()
        batch = await self._judged(wanted, now_s)
        batch_id = await self._id_for(wanted, batch.id)
        try:
            await self._bus.kv_create(
                subjects.BATCHES_BUCKET,
                subjects.batch_key(self.lane, batch_id),
                encode(replace(batch, id=batch_id)),
            )
        except WrongSequence:
            found = await self.get(batch_id)
            if _asks(found) != _asks(batch):
                message = "the Idempotency-Key was used for another batch; take a new one"
                raise BadBatch(message, param="Idempotency-Key") from None
            return found
        return replace(batch, id=batch_id)

    async def get(self, batch_id: str) -> Batch:
        """Read a batch. Raises NoSuchBatch, BusError."""
        return (await self.entry(batch_id))[0]

    async def entry(self, batch_id: str) -> tuple[Batch, int]:
        """Read a batch and the revision of its record. Raises NoSuchBatch, BusError."""
        if not is_token(batch_id):
            message = f"there is no batch {batch_id[:80]!r}"
            raise NoSuchBatch(message)
        try:
            key = subjects.batch_key(self.lane, batch_id)
            found = await self._bus.kv_get(subjects.BATCHES_BUCKET, key)
            return decode(found.value, Batch), found.revision
        except (NotFound, MalformedMessage) as error:
            message = f"there is no batch {batch_id!r}"
            raise NoSuchBatch(message) from error

    async def all(self) -> list[Batch]:
        """All batches of the lane, newest first."""
        return await all_batches(self._bus, self.lane)

    async def cancel(self, batch_id: str) -> Batch:
        """Ask for a batch's end, in any state; return it. Raises NoSuchBatch, BusError."""
        return await self.change(batch_id, lambda batch: life.cancel(batch, at_s=time.time()))

    async def change(self, batch_id: str, change: Callable[[Batch], Batch]) -> Batch:
        """Change a batch, whoever else does; return it. Raises NoSuchBatch, BusError."""
        while True:
            batch, revision = await self.entry(batch_id)
            changed = change(batch)
            if changed == batch:
                return batch
            with suppress(WrongSequence):
                await self.put(changed, revision)
                return changed

    async def put(self, batch: Batch, revision: int) -> int:
        """Write a batch's record that stands at `revision`. Raises WrongSequence, BusError."""
        key = subjects.batch_key(self.lane, batch.id)
        return await self._bus.kv_update(
            subjects.BATCHES_BUCKET, key, encode(batch), revision=revision
        )

    async def delete_file(self, file_id: str) -> None:
        """Remove a file. Raises NoSuchFile, FileInUse (by a batch that has not ended), BusError."""
        for batch in await self.all():
            if not batch.has_ended and file_id in files_of(batch):
                message = f"batch {batch.id} uses file {file_id}; cancel it, or wait for its end"
                raise FileInUse(message)
        if not await self.files.delete(file_id):
            message = f"there is no file {file_id!r}"
            raise NoSuchFile(message)

    async def _judged(self, wanted: Wanted, now_s: float) -> Batch:
        """The batch of a request, if it can be one. Raises BadBatch, NoSuchFile."""
        if wanted.endpoint not in ENDPOINTS:
            message = f"endpoint {wanted.endpoint!r} is none of {', '.join(ENDPOINTS)}"
            raise BadBatch(message, param="endpoint")
        window_s = parse_duration_s(wanted.completion_window)
        if not 0 < window_s <= WINDOW_S_MAX:
            message = (
                f"completion_window {wanted.completion_window[:40]!r} is no duration up to 30d; "
                "write 90m, 24h or 7d"
            )
            raise BadBatch(message, param="completion_window")
        _check_metadata(wanted.metadata)
        info = await self.files.find(wanted.input_file_id, now_s=now_s)
        if info is None:
            message = f"there is no file {wanted.input_file_id[:80]!r}"
            raise NoSuchFile(message)
        if info.purpose != INPUT_PURPOSE or info.growing:
            message = f"file {info.id} is no input of a batch: its purpose is {info.purpose!r}"
            raise BadBatch(message, param="input_file_id")
        await self._check_window(wanted.completion_window, window_s, info, now_s)
        return Batch(
            id=new_batch_id(),
            lane=self.lane,
            endpoint=wanted.endpoint,
            input_file_id=info.id,
            completion_window=wanted.completion_window,
            window_s=window_s,
            created_at_s=now_s,
            api_key_name=wanted.api_key_name,
            metadata=dict(wanted.metadata),
            lines=info.lines,
            results_life_s=wanted.results_life_s,
        )

    async def _check_window(
        self, given: str, window_s: float, info: FileInfo, now_s: float
    ) -> None:
        """See that a window ends before the server drops its input. Raises BadBatch, BusError."""
        age_s = (await self._bus.stream_state(subjects.files_stream(self.lane))).age_s_max
        left_s = info.created_at_s + age_s - now_s
        if not age_s or window_s <= left_s:
            return
        needed_s = math.ceil(window_s + now_s - info.created_at_s)
        message = (
            f"completion_window {given[:40]!r} is too long: the files of lane {self.lane!r} stand "
            f"for {duration(age_s)}, and {info.id} would be gone in {duration(max(0.0, left_s))}. "
            f"Upload it anew, or raise streams.files_age_s_max to {needed_s}"
        )
        raise BadBatch(message, param="completion_window")

    async def _id_for(self, wanted: Wanted, new_id: str) -> str:
        """The id that this request's batch has, or shall have.

        The request is noted before the batch is written: a repeat that comes in between makes the
        same batch, and only one of the two writes it.
        """
        if wanted.idempotency_key:
            key = subjects.batch_request_key(self.lane, _digest("key", wanted.idempotency_key))
            life_s = KEY_LIFE_S
        else:
            key = subjects.batch_request_key(self.lane, _digest("asks", _asked(wanted)))
            life_s = REPEAT_S
            if not wanted.repeated:
                await self._bus.kv_put(subjects.BATCHES_BUCKET, key, new_id.encode(), ttl_s=life_s)
                return new_id
        try:
            await self._bus.kv_create(subjects.BATCHES_BUCKET, key, new_id.encode(), ttl_s=life_s)
        except WrongSequence:
            return (await self._bus.kv_get(subjects.BATCHES_BUCKET, key)).value.decode()
        return new_id


async def all_batches(bus: Bus, lane: str = "*") -> list[Batch]:
    """All batches of a lane, or of all lanes, newest first. Raises BusError."""
    found: dict[str, Batch] = {}
    pattern = subjects.batch_key(lane, "*")
    async for entry in bus.kv_entries(subjects.BATCHES_BUCKET, pattern):
        with suppress(MalformedMessage):
            found[entry.key] = decode(entry.value, Batch)
    return sorted(found.values(), key=lambda one: (one.created_at_s, one.id), reverse=True)


def files_of(batch: Batch) -> frozenset[str]:
    """Ids of the files that a batch reads or writes."""
    return frozenset((batch.input_file_id, batch.output_id, batch.errors_id))


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > METADATA_PAIRS_MAX:
        message = f"metadata has {len(metadata)} pairs; it may have {METADATA_PAIRS_MAX}"
        raise BadBatch(message, param="metadata")
    for key, value in metadata.items():
        if len(key) > METADATA_KEY_CHARS_MAX or len(value) > METADATA_VALUE_CHARS_MAX:
            message = (
                f"metadata {key[:40]!r} is too long: a key has at most {METADATA_KEY_CHARS_MAX} "
                f"characters, a value {METADATA_VALUE_CHARS_MAX}"
            )
            raise BadBatch(message, param="metadata")


def _asks(batch: Batch) -> tuple[object, ...]:
    """What was asked for, as far as two requests may differ."""
    return (batch.endpoint, batch.input_file_id, batch.completion_window, batch.metadata)


def _asked(wanted: Wanted) -> str:
    """What the hosted API would take for the same request sent again, as text."""
    asked = (wanted.endpoint, wanted.input_file_id, sorted(wanted.metadata.items()))
    return msgspec.json.encode(asked).decode()


def _digest(kind: str, text: str) -> str:
    return xxhash.xxh3_128_hexdigest(f"{kind}:{text}".encode())
