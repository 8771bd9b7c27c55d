"""Deleting a lane's files and batches: what may go goes, and what a batch needs stays."""

from typing import Any

import pytest

from broker.bus.memory import MemoryBus
from broker.wire import subjects
from producers.batches.erasing import ErasedFiles, erase_files
from tests.batches import lines
from tests.builders import LANE
from tests.stored_batches import a_place

EVER_S = 1e11


async def test_ended_batches_go_with_their_files() -> None:
    """Input, output and errors; nothing is left in the stream, and the batch is not known."""
    async with a_place() as place:
        place.start_runner()
        await place.ended((await place.create([*lines(20), b"{no json"])).id)
        assert await erase_files(place.bus, LANE, before_s=0.0) == ErasedFiles()
        erased = await erase_files(place.bus, LANE, before_s=EVER_S)
        assert erased == ErasedFiles(files=3, batches=1)
        assert (await place.files.all(), await place.shelf.all()) == ([], [])
        state = await place.bus.stream_state(f"FILES_{LANE}")
        assert state.messages == 0
        assert await erase_files(place.bus, LANE, before_s=EVER_S) == ErasedFiles()


async def test_a_batch_that_has_not_ended_keeps_its_files() -> None:
    """Its runner reads one and writes two; another batch's go."""
    async with a_place() as place:
        other = await place.put(lines(3))
        place.responder.run_s = 0.01
        place.start_runner()
        batch = await place.create(lines(100))
        running = await place.when(batch.id, lambda one: bool(one.output_file_id))
        assert running.status == "in_progress"
        erased = await erase_files(place.bus, LANE, before_s=EVER_S)
        assert erased == ErasedFiles(files=1, in_use=2)
        assert await place.files.find(other.id) is None
        ended = await place.ended(batch.id)
        await place.check(ended, (f"id-{number}" for number in range(100)))


async def test_copies_of_lines_go_but_those_of_an_open_batch() -> None:
    """They are its results; one that is no more needs none."""
    async with a_place() as place:
        batch = await place.create(lines(1))
        for batch_id in (batch.id, "batch_gone"):
            await place.bus.append(subjects.line_copy(LANE, batch_id, 1), b"record")
        await erase_files(place.bus, LANE, before_s=EVER_S)
        counts = await place.bus.subject_counts(f"FILES_{LANE}", subject="kept.>")
        assert list(counts) == [subjects.line_copy(LANE, batch.id, 1)]


async def test_chunks_are_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleting alone leaves the text in the server's files; each chunk is, in bounded groups."""
    async with a_place() as place:
        info = await place.put(b"x" * 4096 * 20)
        asked: list[Any] = []
        delete = place.bus.delete_message

        async def watched(stream: str, sequence: int, *, erase: bool = False) -> bool:
            asked.append((stream, erase))
            return await delete(stream, sequence)

        monkeypatch.setattr(place.bus, "delete_message", watched)
        assert await erase_files(place.bus, LANE, before_s=EVER_S) == ErasedFiles(files=1)
        assert asked == [(f"FILES_{LANE}", True)] * 20
        assert await place.files.find(info.id) is None


async def test_a_lane_without_files_has_none_to_delete() -> None:
    """One that may not batch."""
    bus = MemoryBus()
    assert await erase_files(bus, LANE, before_s=EVER_S) == ErasedFiles()
    await bus.close()
