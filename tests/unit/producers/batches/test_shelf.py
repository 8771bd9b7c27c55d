"""A lane's batches: what is made of a request, and that nobody's change is lost."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from broker.bus import topology
from broker.bus.topology import DAY_S, Bounds, LanePlan
from broker.wire import subjects
from producers.batches import life
from producers.batches.errors import BadBatch, FileInUse, NoSuchBatch, NoSuchFile
from producers.batches.shelf import WINDOW_S_MAX, Wanted, all_batches
from tests.batches import lines
from tests.builders import LANE, MODEL
from tests.stored_batches import ENDPOINT, Place, a_place


async def wanted(place: Place, **fields: Any) -> Wanted:
    """A request for a batch of a stored input."""
    info = await place.put(lines(1))
    asked: dict[str, Any] = {"endpoint": ENDPOINT, "input_file_id": info.id, **fields}
    return Wanted(**asked)


async def test_a_batch_is_made_of_a_request() -> None:
    """Its window in seconds, its input's lines, and its life from now."""
    async with a_place() as place:
        batch = await place.shelf.create(await wanted(place, completion_window="1d12h"))
        assert (batch.window_s, batch.lines, batch.status) == (129_600.0, 1, "validating")
        assert await place.shelf.get(batch.id) == batch
        assert await all_batches(place.bus) == [batch]


@pytest.mark.parametrize(
    ("window", "param"),
    [("0s", "completion_window"), ("", "completion_window"), ("-1h", "completion_window")],
)
async def test_a_window_is_a_duration(window: str, param: str) -> None:
    """Above zero, and up to the bound."""
    async with a_place() as place:
        with pytest.raises(BadBatch) as error:
            await place.shelf.create(await wanted(place, completion_window=window))
        assert error.value.param == param
        longest = await wanted(place, completion_window=f"{WINDOW_S_MAX:.0f}s")
        assert (await place.shelf.create(longest)).window_s == WINDOW_S_MAX
        with pytest.raises(BadBatch):
            await place.shelf.create(replace_window(longest, f"{WINDOW_S_MAX + 1:.0f}s"))


@pytest.mark.parametrize("results_age_s", [3600.0, 3 * DAY_S])
async def test_a_window_may_be_longer_than_results_are_kept(results_age_s: float) -> None:
    """Its lines' records are copied; 3 days are what ships."""
    async with a_place(bounds=Bounds(results_age_s_max=results_age_s)) as place:
        made = await place.shelf.create(await wanted(place, completion_window="30d"))
        assert made.window_s == 30 * DAY_S
    assert Bounds().results_age_s_max == 3 * DAY_S


async def test_no_window_ends_after_its_input_is_gone() -> None:
    """The server drops files by their age; the way out is named, and is one."""
    async with a_place(bounds=Bounds(files_age_s_max=7 * DAY_S)) as place:
        asked = await wanted(place, completion_window="8d")
        with pytest.raises(BadBatch, match=r"raise streams.files_age_s_max to \d+$") as error:
            await place.shelf.create(asked)
        assert error.value.param == "completion_window"
        await place.shelf.create(replace_window(asked, "6d"))
        needed_s = float(str(error.value).rpartition(" ")[2])
        await topology.apply(
            place.bus, topology.of([LanePlan(LANE, (MODEL,))], Bounds(files_age_s_max=needed_s + 9))
        )
        await place.shelf.create(asked)


def replace_window(asked: Wanted, window: str) -> Wanted:
    """The same request with another window."""
    return Wanted(
        endpoint=asked.endpoint, input_file_id=asked.input_file_id, completion_window=window
    )


async def test_an_output_is_no_input() -> None:
    """Nor is a file that isn't there."""
    async with a_place() as place:
        place.start_runner()
        ended = await place.ended((await place.create(lines(3))).id)
        for file_id, error in ((ended.output_file_id, BadBatch), ("file-none", NoSuchFile)):
            with pytest.raises(error):
                await place.shelf.create(Wanted(endpoint=ENDPOINT, input_file_id=file_id))


async def test_a_repeat_in_the_midst_of_the_first_makes_the_same_batch() -> None:
    """Both write, one wins, and both are told the same."""
    async with a_place() as place:
        asked = await wanted(place)
        repeated = await wanted(place)
        repeated = Wanted(endpoint=ENDPOINT, input_file_id=asked.input_file_id, repeated=True)
        first = await place.shelf.create(asked)
        key = subjects.batch_key(place.shelf.lane, first.id)
        await place.bus.kv_delete(subjects.BATCHES_BUCKET, key)  # As if it came before the write.
        again = await asyncio.gather(*(place.shelf.create(repeated) for _ in range(5)))
        assert {batch.id for batch in again} == {first.id}
        assert len(await place.shelf.all()) == 1


async def test_changes_of_two_are_both_kept() -> None:
    """Whoever loses the race applies his change to what the other wrote."""
    async with a_place() as place:
        batch = await place.create(lines(1))

        async def note(number: int) -> None:
            await place.shelf.change(
                batch.id,
                lambda now: replace(now, metadata={**now.metadata, f"k{number}": "v"}),
            )

        await asyncio.gather(place.shelf.cancel(batch.id), *(note(number) for number in range(8)))
        found = await place.shelf.get(batch.id)
        assert (found.status, len(found.metadata)) == ("cancelling", 8)


async def test_an_unknown_batch() -> None:
    """Is told as such, whatever is asked of it; so is a record that can't be read."""
    async with a_place() as place:
        await place.create(lines(1))
        for unknown in ("batch_none", "*", ">", "a.b", ""):
            with pytest.raises(NoSuchBatch):
                await place.shelf.cancel(unknown)
        key = subjects.batch_key(place.shelf.lane, "batch_bad")
        await place.bus.kv_put(subjects.BATCHES_BUCKET, key, b"\xc1")
        with pytest.raises(NoSuchBatch):
            await place.shelf.get("batch_bad")
        assert [batch.status for batch in await place.shelf.all()] == ["validating"]


async def test_a_file_in_use_is_kept() -> None:
    """Until its batch has ended."""
    async with a_place() as place:
        batch = await place.create(lines(1))
        with pytest.raises(FileInUse):
            await place.shelf.delete_file(batch.input_file_id)
        await place.shelf.change(batch.id, lambda now: life.fail(now, [life.INPUT_GONE], at_s=1.0))
        await place.shelf.delete_file(batch.input_file_id)
        with pytest.raises(NoSuchFile):
            await place.shelf.delete_file(batch.input_file_id)
