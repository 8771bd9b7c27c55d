"""What the bus promises of files (`broker.bus.files`), held on both."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from broker.bus import topology
from broker.bus.base import BusError, StreamFull, WrongSequence
from broker.bus.files import FileExists, FileGone, Files, FilesFull, FileTooLarge, Tail, new_file_id
from broker.bus.topology import Bounds, LanePlan
from broker.wire import subjects
from broker.wire.files import FileInfo
from tests.buses import World

LANE = "acme"
CHUNK = 1000


async def the_files(world: World, **bounds: Any) -> Files:
    """The files of a lane whose streams are set up, in small chunks."""
    await topology.apply(world.bus, topology.of([LanePlan(LANE, ("tiny",))], Bounds(**bounds)))
    return Files(world.bus, LANE, append_s_max=5.0, chunk_bytes=CHUNK)


def an_info(file_id: str = "file-1", **fields: Any) -> FileInfo:
    """An input as its gateway knows it before it came."""
    return FileInfo(id=file_id, lane=LANE, filename="in.jsonl", created_at_s=1000.0, **fields)


async def pieces(*given: bytes) -> AsyncIterator[bytes]:
    """A source that gives these."""
    for piece in given:
        yield piece


async def read(files: Files, info: FileInfo) -> bytes:
    """The whole content."""
    return b"".join([chunk async for chunk in files.content(info)])


async def chunks_left(world: World) -> int:
    """Chunks of any file that the lane's stream holds."""
    return (await world.bus.stream_state(subjects.files_stream(LANE))).messages


async def test_a_file_comes_back_as_it_went_in(world: World) -> None:
    """Any cut of the input gives the same bytes, counted, and known to another connection."""
    files = await the_files(world)
    data = random.Random(1).randbytes(10 * CHUNK + 17) + b"\n"
    given = [data[:1], b"", data[1 : 3 * CHUNK], data[3 * CHUNK :]]
    whole = await files.put(an_info(), pieces(*given), bytes_max=len(data))
    assert (whole.bytes, whole.lines) == (len(data), data.count(b"\n"))
    other = Files(world.peer, LANE)
    found = await other.find("file-1")
    assert found == whole
    assert await read(other, whole) == data
    assert await chunks_left(world) == 11


@pytest.mark.parametrize(("data", "lines"), [(b"", 0), (b"a\n", 1), (b"a\nb", 2), (b"\n\n", 2)])
async def test_lines_are_counted(world: World, data: bytes, lines: int) -> None:
    """As an editor does: a last line may lack its end. An empty file is a file."""
    files = await the_files(world)
    whole = await files.put(an_info(), pieces(data), bytes_max=10)
    assert (whole.lines, await read(files, whole)) == (lines, data)


async def test_too_large_a_file_leaves_nothing(world: World) -> None:
    """A byte over the bound, and neither the file nor a chunk of it is kept."""
    files = await the_files(world)
    data = b"x" * (3 * CHUNK + 1)
    with pytest.raises(FileTooLarge):
        await files.put(an_info(), pieces(data), bytes_max=len(data) - 1)
    assert (await files.find("file-1"), await chunks_left(world)) == (None, 0)
    await files.put(an_info(), pieces(data), bytes_max=len(data))


async def test_a_source_that_breaks_off_leaves_nothing(world: World) -> None:
    """What the source raises is passed on; what it gave before is cleared away."""
    files = await the_files(world)

    async def broken() -> AsyncIterator[bytes]:
        yield b"x" * 2 * CHUNK
        assert await chunks_left(world) == 2
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await files.put(an_info(), broken(), bytes_max=10**6)
    assert (await files.find("file-1"), await chunks_left(world)) == (None, 0)


async def test_a_cancelled_put_leaves_nothing(world: World) -> None:
    """A client that goes away half way."""
    files = await the_files(world)
    never, begun = asyncio.Event(), asyncio.Event()

    async def stuck() -> AsyncIterator[bytes]:
        yield b"x" * 2 * CHUNK
        begun.set()
        await never.wait()

    putting = asyncio.create_task(files.put(an_info(), stuck(), bytes_max=10**6))
    await begun.wait()
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    assert (await files.find("file-1"), await chunks_left(world)) == (None, 0)


async def test_what_a_killed_put_left_is_swept(world: World) -> None:
    """Chunks of no file go once nobody adds to them; those of files and of fresh puts stay."""
    files = await the_files(world)
    kept = await files.put(an_info("file-kept"), pieces(b"kept"), bytes_max=10)
    tail = Tail(world.bus, LANE, "file-dead")
    await tail.append(b"half", patience_s=1.0)
    last = await files.last_chunk("file-dead")
    assert last is not None
    assert await files.find("file-dead") is None
    assert [info.id for info in await files.all()] == ["file-kept"]
    assert await files.sweep(now_s=last.at_s + 59, abandoned_s=60.0) == 0
    assert await files.sweep(now_s=last.at_s + 61, abandoned_s=60.0) == 1
    assert await chunks_left(world) == 1
    assert await read(files, kept) == b"kept"
    with pytest.raises(WrongSequence):
        await tail.append(b"late", patience_s=1.0)


async def test_expired_files_are_gone_and_swept(world: World) -> None:
    """From its instant on a file isn't found; one in use stays until it is not."""
    files = await the_files(world)
    await files.put(an_info(expires_at_s=2000.0), pieces(b"x"), bytes_max=10)
    assert await files.find("file-1", now_s=1999.9)
    assert await files.find("file-1", now_s=2000.0) is None
    assert await files.all(now_s=2000.0) == []
    assert await files.sweep(now_s=1999.0) == 0
    assert await files.sweep(now_s=2000.0, keep=frozenset({"file-1"})) == 0
    assert await files.sweep(now_s=2000.0) == 1
    assert (await files.find("file-1"), await chunks_left(world)) == (None, 0)


async def test_delete(world: World) -> None:
    """Removed with its chunks, once; whoever reads it then is told that it is not whole."""
    files = await the_files(world)
    whole = await files.put(an_info(), pieces(b"x" * 3 * CHUNK), bytes_max=10**6)
    assert (await files.delete("file-1"), await files.delete("file-1")) == (True, False)
    assert await chunks_left(world) == 0
    with pytest.raises(FileGone):
        await read(files, whole)


@pytest.mark.parametrize("name", ["*", ">", "a.b", "", "a b", "file-1.>"])
async def test_an_id_is_one_token(world: World, name: str) -> None:
    """What would mean other files, or all, means none: nothing is found, and nothing removed."""
    files = await the_files(world)
    whole = await files.put(an_info(), pieces(b"x"), bytes_max=10)
    assert (await files.find(name), await files.delete(name)) == (None, False)
    assert await read(files, whole) == b"x"


async def test_files_are_listed_oldest_first(world: World) -> None:
    """Of this lane only."""
    files = await the_files(world)
    for at_s, file_id in ((3.0, "file-c"), (1.0, "file-b"), (1.0, "file-a")):
        info = FileInfo(id=file_id, lane=LANE, created_at_s=at_s)
        await files.put(info, pieces(b"x"), bytes_max=10)
    assert [info.id for info in await files.all()] == ["file-a", "file-b", "file-c"]
    assert await Files(world.bus, "other").all() == []


async def test_an_id_is_given_once(world: World) -> None:
    """A second file of the same id is refused, and the first stays whole."""
    files = await the_files(world)
    first = await files.put(an_info(), pieces(b"one"), bytes_max=10)
    with pytest.raises(WrongSequence):
        await files.put(an_info(), pieces(b"two"), bytes_max=10)
    with pytest.raises(FileExists):
        await files.create(an_info(bytes=1))
    assert await read(files, first) == b"one"
    assert new_file_id() != new_file_id()


async def test_one_writer_at_a_time(world: World) -> None:
    """Who appends where another has begun to write is told, and nothing of it stands."""
    files = await the_files(world)
    old = Tail(world.bus, LANE, "file-1")
    first = await old.append(b"one ", patience_s=1.0)
    new = Tail(world.peer, LANE, "file-1", after_sequence=first)
    await new.append(b"two", {"Name": "value"}, patience_s=1.0)
    with pytest.raises(WrongSequence):
        await old.append(b"lost", patience_s=1.0)
    found = [chunk async for chunk in files.chunks("file-1")]
    assert [chunk.data for chunk in found] == [b"one ", b"two"]
    assert found[1].headers["Name"] == "value"
    after = [chunk async for chunk in files.chunks("file-1", after_sequence=first)]
    assert [chunk.data for chunk in after] == [b"two"]


async def test_a_file_that_grows_is_read_as_it_stands(world: World) -> None:
    """Until it is settled; then its size is held."""
    files = await the_files(world)
    await files.create(an_info(growing=True))
    tail = Tail(world.bus, LANE, "file-1")
    await tail.append(b"one", patience_s=1.0)
    info = await files.find("file-1")
    assert info is not None
    assert await read(files, info) == b"one"
    await tail.append(b"two", patience_s=1.0)
    await files.settle(an_info(bytes=6))
    settled = await files.find("file-1")
    assert settled is not None
    assert (settled.growing, await read(files, settled)) == (False, b"onetwo")


async def test_a_lane_has_so_much_room(world: World) -> None:
    """A full lane refuses the chunk that finds no room, and the file leaves nothing."""
    files = await the_files(world, files_bytes_max=3 * CHUNK)
    with pytest.raises(StreamFull):
        await files.put(an_info(), pieces(b"x" * 4 * CHUNK), bytes_max=10**6)
    assert (await files.find("file-1"), await chunks_left(world)) == (None, 0)


async def test_room_is_seen_before_a_file_is_sent(world: World) -> None:
    """What is refused could not be stored, and what is not can, give or take half a KB a chunk."""
    files = await the_files(world, files_bytes_max=4 * CHUNK + 4 * 1024)
    await files.put(an_info(), pieces(b"x" * CHUNK), bytes_max=10**9)
    for size in (3 * CHUNK + 4 * 1024, 10**9):
        with pytest.raises(FilesFull, match="files_bytes_max"):
            await files.see_room(size, bytes_max=10**9)
    with pytest.raises(FileTooLarge, match="file_bytes_max"):
        await files.see_room(CHUNK, bytes_max=CHUNK - 1)
    await files.see_room(3 * CHUNK, bytes_max=3 * CHUNK)
    await files.put(an_info("file-2"), pieces(b"x" * 3 * CHUNK), bytes_max=3 * CHUNK)


async def test_a_cut_link_loses_no_chunk_and_doubles_none(world: World) -> None:
    """A put goes on where it was once the link is back."""
    files = await the_files(world)
    data = random.Random(2).randbytes(6 * CHUNK)

    async def cut_half_way() -> AsyncIterator[bytes]:
        yield data[: 3 * CHUNK]
        await world.cut()
        mending.set()
        yield data[3 * CHUNK :]

    mending = asyncio.Event()

    async def mend() -> None:
        await mending.wait()
        await world.mend()

    async with asyncio.TaskGroup() as group:
        group.create_task(mend())
        whole = await files.put(an_info(), cut_half_way(), bytes_max=10**6)
    assert await read(files, whole) == data


async def test_an_append_whose_answer_was_lost_is_known_again(world: World) -> None:
    """It stands once, and the writer goes on behind it."""
    files = await the_files(world)
    tail = Tail(world.bus, LANE, "file-1")
    await tail.append(b"one", patience_s=1.0)
    before = tail.sequence
    await tail.append(b"two", patience_s=1.0)
    tail.sequence, tail._number = before, 1  # As if nothing had been heard of the second.
    await tail.append(b"two", patience_s=1.0)
    await tail.append(b"three", patience_s=1.0)
    assert [chunk.data async for chunk in files.chunks("file-1")] == [b"one", b"two", b"three"]


async def test_trouble_that_lasts_is_told(world: World) -> None:
    """After the patience given, the put fails as the bus does."""
    files = await the_files(world)
    impatient = Files(world.bus, LANE, append_s_max=0.05, chunk_bytes=CHUNK)
    await world.cut()
    with pytest.raises(BusError):
        await impatient.put(an_info(), pieces(b"x"), bytes_max=10)
    await world.mend()
    assert await files.find("file-1") is None
