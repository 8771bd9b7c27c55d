"""Batches from a shell: handed in from files, watched, fetched; and how they are told."""

import gzip
import os
from pathlib import Path

import pytest

from broker.bus.files import FileGone
from broker.bus.memory import MemoryBus
from ops.cli.batch_stored import told
from producers.batch.errors import InputUnusable, OutputUnusable
from producers.batches.desk import Desk
from producers.batches.errors import BadBatch, NoSuchFile
from producers.batches.records import Batch, Counts, Fault, Forecast, Status
from producers.batches.view import batch_object
from producers.errors import UnknownLane, Unreachable
from tests.batches import a_line, lines
from tests.builders import LANE, MODEL
from tests.stored_batches import ENDPOINT, Place, a_batch, a_place


async def handed_in(place: Place, path: Path, *, file_bytes_max: int = 10**6) -> Batch:
    """Hand a file in."""
    return await Desk(place.bus, LANE).hand_in(
        str(path), endpoint=ENDPOINT, window="24h", file_bytes_max=file_bytes_max
    )


@pytest.mark.parametrize("is_packed", [False, True])
async def test_a_file_is_handed_in_and_its_results_fetched(tmp_path: Path, is_packed: bool) -> None:
    """Decompressed on the way; each change is seen until the end, and bytes come as they are."""
    content = b"\n".join(lines(50))
    source = tmp_path / ("in.jsonl.gz" if is_packed else "in.jsonl")
    source.write_bytes(gzip.compress(content) if is_packed else content)
    async with a_place() as place:
        batch = await handed_in(place, source)
        assert batch.lines == 50
        place.start_runner()
        desk = Desk(place.bus.connection(), LANE)
        seen = [one.status async for one in desk.changes(batch.id)]
        assert seen[-1] is Status.COMPLETED
        ended = await desk.shelf.get(batch.id)
        output = tmp_path / "out.jsonl"
        beside = tmp_path / "out.jsonl.part"
        beside.write_bytes(b"somebody's")
        for _ in range(2):  # Again, as of a batch that runs.
            size = await desk.fetch(ended.output_file_id, output, batch_id=batch.id)
            assert size == output.stat().st_size
            assert output.read_bytes().count(b"\n") == 50
        assert beside.read_bytes() == b"somebody's"
        assert set(tmp_path.iterdir()) == {source, output, beside}


async def test_the_endpoint_is_that_of_the_first_good_line(tmp_path: Path) -> None:
    """Whoever names none has it read from his lines; without a good one the batch fails later."""
    body = {"model": MODEL, "input": "a"}
    good = a_line("a", url="/v1/embeddings", body=body)
    async with a_place() as place:
        for content, endpoint in (
            (b"{no json\n" + good, "/v1/embeddings"),
            (good + b"\n" + a_line("b") + b"\n", "/v1/embeddings"),
            (b"{no json\n", ENDPOINT),
            (b"", ENDPOINT),
        ):
            path = tmp_path / "in.jsonl"
            path.write_bytes(content)
            batch = await Desk(place.bus, LANE).hand_in(
                str(path), window="24h", file_bytes_max=10**6, api_key_name="night"
            )
            assert (batch.endpoint, batch.api_key_name) == (endpoint, "night")
            stored = await place.files.find(batch.input_file_id)
            assert stored is not None
            assert b"".join([part async for part in place.files.content(stored)]) == content


async def test_a_name_that_is_no_utf_8(tmp_path: Path) -> None:
    """It is told as far as it can be."""
    source = tmp_path / os.fsdecode(b"caf\xe9.jsonl")
    source.write_bytes(b"\n".join(lines(2)))
    async with a_place() as place:
        batch = await handed_in(place, source)
        stored = await place.files.find(batch.input_file_id)
        assert stored is not None
        assert stored.filename == "caf?.jsonl"


async def test_what_can_not_be_handed_in(tmp_path: Path) -> None:
    """No such file; one that is too large leaves nothing."""
    async with a_place() as place:
        with pytest.raises(InputUnusable):
            await handed_in(place, tmp_path / "none.jsonl")
        with pytest.raises(InputUnusable, match="File name too long"):
            await handed_in(place, tmp_path / ("x" * 300))
        large = tmp_path / "large.jsonl"
        large.write_bytes(b"x" * 11)
        with pytest.raises(BadBatch):
            async with Desk(place.bus, LANE).trouble_told():
                await handed_in(place, large, file_bytes_max=10)
        assert await place.files.all() == []


async def test_what_can_not_be_fetched(tmp_path: Path) -> None:
    """A file that isn't there, and a place that takes none."""
    async with a_place() as place:
        desk = Desk(place.bus, LANE)
        with pytest.raises(NoSuchFile):
            await desk.fetch("file-none", tmp_path / "out.jsonl", batch_id="batch_1")
        info = await place.put(lines(1))
        path = tmp_path / "no folder" / "out.jsonl"
        with pytest.raises(OutputUnusable):
            await desk.fetch(info.id, path, batch_id="batch_1")
        standing = tmp_path / "in.jsonl"
        standing.write_bytes(a_line("a"))
        with pytest.raises(OutputUnusable, match="something else than results of batch_1"):
            await desk.fetch(info.id, standing, batch_id="batch_1")
        assert standing.read_bytes() == a_line("a")


async def test_trouble_is_told_in_a_sentence() -> None:
    """A lane without files, a server out of reach, a file that went away."""
    bus = MemoryBus()
    desk = Desk(bus, LANE)
    with pytest.raises(UnknownLane):
        async with desk.trouble_told():
            await desk.shelf.all()
    with pytest.raises(NoSuchFile):
        async with desk.trouble_told():
            raise FileGone
    bus.disconnect()
    with pytest.raises(Unreachable):
        async with desk.trouble_told():
            await desk.shelf.all()


def test_a_batch_in_a_line() -> None:
    """What it is, how far, how long, and why not."""
    assert told(a_batch()) == "batch_1 is validating"
    running = a_batch(
        status=Status.IN_PROGRESS,
        counts=Counts(total=2000, completed=5, failed=1),
        forecast=Forecast(at_s=0.0, takes_s=600.0, miss_ratio=0.25),
    )
    assert told(running) == (
        "batch_1 is in_progress; 2,000 lines: 5 completed, 1 failed; at today's capacity it takes "
        "10 min; chance to miss its window 25%"
    )
    fault = Fault(code="invalid_json_line", message="no JSON", line=7)
    assert told(a_batch(status=Status.FAILED, errors=(fault,))).endswith("line 7: no JSON")


def test_a_batch_as_the_api_shows_it() -> None:
    """Every field is there; what isn't known is null."""
    shown = batch_object(a_batch(metadata={"run": "7"}))
    assert (shown["object"], shown["status"], shown["metadata"]) == (
        "batch",
        "validating",
        {"run": "7"},
    )
    assert (shown["created_at"], shown["expires_at"]) == (1000, 87_400)
    unknown = {name for name, value in shown.items() if value is None}
    assert unknown == {
        "errors",
        "output_file_id",
        "error_file_id",
        *(
            f"{state}_at"
            for state in ("in_progress", "finalizing", "completed", "failed", "expired")
        ),
        "cancelling_at",
        "cancelled_at",
    }
