"""Deletes a lane's files of batches, and the records of batches that have ended.

A batch that has not ended keeps its files: its runner reads one and writes two. It keeps the copies
of its lines' records, too, which stand with them.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from broker.bus.base import Bus, NoStream, NotFound
from broker.bus.files import Files
from broker.wire import subjects
from broker.wire.files import FileInfo
from producers.batches.shelf import all_batches, files_of

ERASES_AT_ONCE_MAX = 8
"""Chunks (256 KB) under way: each is written anew, more at once would only queue in the server."""


@dataclass(frozen=True, slots=True)
class ErasedFiles:
    """What was deleted, and what had to stay for now."""

    files: int = 0
    batches: int = 0
    in_use: int = 0
    """Files that stay because a batch that has not ended uses them."""


async def erase_files(bus: Bus, lane: str, *, before_s: float) -> ErasedFiles:
    """Delete files and ended batches that were created before an instant (Unix seconds).

    Interrupted and called again, it goes on with what is left. A lane without files has nothing to
    delete. Raises BusError.
    """
    files = Files(bus, lane)
    try:
        infos = [info for info in await files.all() if info.created_at_s < before_s]
        batches = await all_batches(bus, lane)
    except (NoStream, NotFound):
        return ErasedFiles()
    held = frozenset[str]().union(*(files_of(one) for one in batches if not one.has_ended))
    free = [info for info in infos if info.id not in held]
    for info in free:
        await _erase(bus, files, info)
    open_ids = frozenset(one.id for one in batches if not one.has_ended)
    await _erase_copies(bus, lane, before_s=before_s, but=open_ids)
    gone = [one.id for one in batches if one.has_ended and one.created_at_s < before_s]
    for batch_id in gone:
        await bus.kv_delete(subjects.BATCHES_BUCKET, subjects.batch_key(lane, batch_id))
    return ErasedFiles(files=len(free), batches=len(gone), in_use=len(infos) - len(free))


async def _erase(bus: Bus, files: Files, info: FileInfo) -> None:
    """Overwrite a file's chunks, then remove its name: whoever is stopped in between finds it."""
    stream = subjects.files_stream(files.lane)
    sequences: list[int] = []
    async for chunk in files.chunks(info.id):
        sequences.append(chunk.sequence)
        if len(sequences) >= ERASES_AT_ONCE_MAX:
            await _overwrite(bus, stream, sequences)
            sequences = []
    await _overwrite(bus, stream, sequences)
    await files.delete(info.id)


async def _erase_copies(bus: Bus, lane: str, *, before_s: float, but: frozenset[str]) -> None:
    """Overwrite copies of lines' records, but for those of the batches `but`."""
    stream = subjects.files_stream(lane)
    async for copy in bus.messages(stream, subject=subjects.line_copy(lane, "*", "*")):
        if copy.at_s >= before_s:
            return
        if subjects.batch_of_copy(copy.subject) not in but:
            await _overwrite(bus, stream, [copy.sequence])


async def _overwrite(bus: Bus, stream: str, sequences: Iterable[int]) -> None:
    await asyncio.gather(*(bus.delete_message(stream, one, erase=True) for one in sequences))
