"""A runner's hold on a batch: one at a time, renewed with each change, lost for good."""

import asyncio

import pytest
from msgspec.structs import replace

from broker.bus.base import Timeout
from producers.batches import life
from producers.batches.errors import LeaseLost
from producers.batches.hold import Hold, is_free, take
from producers.batches.records import Lease, Status
from producers.batches.shelf import Shelf
from tests.batches import lines
from tests.crashing import Failing, faulty
from tests.stored_batches import Place, a_batch, a_place


async def held(place: Place, batch_id: str, *, lease_s: float = 60.0, name: str = "r1") -> Hold:
    """A hold on a batch that is free."""
    hold = await take(place.shelf, batch_id, runner=name, lease_s=lease_s)
    assert hold is not None
    return hold


async def test_one_runner_takes_a_batch() -> None:
    """Of many at once; the others find it taken."""
    async with a_place() as place:
        batch = await place.create(lines(1))
        tries = [take(place.shelf, batch.id, runner=f"r{n}", lease_s=60.0) for n in range(5)]
        found = [hold for hold in await asyncio.gather(*tries) if hold is not None]
        assert len(found) == 1
        assert found[0].is_first


async def test_a_released_batch_is_free_at_once() -> None:
    """And the next runner knows that it is not the first."""
    async with a_place() as place:
        batch = await place.create(lines(1))
        first = await held(place, batch.id)
        await place.shelf.cancel(batch.id)  # What others wrote meanwhile is kept.
        await first.release()
        second = await held(place, batch.id, name="r2")
        assert (second.is_first, second.batch.status) == (False, Status.CANCELLING)


async def test_who_was_overtaken_hears_it_at_his_next_change() -> None:
    """And changes nothing any more."""
    async with a_place() as place:
        batch = await place.create(lines(1))
        first = await held(place, batch.id, lease_s=0.001)
        await asyncio.sleep(0.01)
        second = await held(place, batch.id, name="r2")
        for lost in (first.change(lambda now: now), first.look(), first.release()):
            with pytest.raises(LeaseLost):
                await lost
        assert (await place.shelf.get(batch.id)).lease == second.batch.lease


async def test_a_cancel_between_two_changes_is_kept() -> None:
    """The change is made to what stands by then."""
    async with a_place() as place:
        batch = await place.create(lines(1))
        hold = await held(place, batch.id)
        await place.shelf.cancel(batch.id)
        changed = await hold.change(lambda now: replace(now, lines=7))
        assert (changed.status, changed.lines) == (Status.CANCELLING, 7)


async def test_a_lost_answer_is_asked_for_again() -> None:
    """The change stands once, whether the first write arrived or not."""
    async with a_place() as place:
        batch = await place.create(lines(1))
        for when in ("before", "after"):
            failing = Failing("kv_update", Timeout("lost"), when=when)
            await place.shelf.change(batch.id, lambda now: replace(now, lease=None))
            shelf = Shelf(faulty(place.bus, failing), place.shelf.lane, place.files)
            entry, revision = await place.shelf.entry(batch.id)
            leased = replace(entry, lease=Lease(runner="r", until_s=0.0, number=5))
            revision = await place.shelf.put(leased, revision)
            hold = Hold(shelf, leased, revision, lease_s=60.0)
            changed = await hold.change(lambda now: replace(now, lines=9))
            assert failing.raised == 1
            assert (await place.shelf.get(batch.id)) == changed


async def test_a_lease_that_can_not_be_renewed_is_lost() -> None:
    """The server is out of reach until it is over."""
    async with a_place() as place:
        batch = await place.create(lines(1))
        failing = Failing("kv_update", Timeout("lost"), times=10**6)
        shelf = Shelf(faulty(place.bus, failing), place.shelf.lane, place.files)
        taken = await held(place, batch.id)
        entry, revision = await place.shelf.entry(batch.id)
        assert entry.lease == taken.batch.lease
        hold = Hold(shelf, entry, revision, lease_s=0.05)
        with pytest.raises(LeaseLost):
            await hold.change(lambda now: replace(now, lines=9))


def test_what_may_be_taken() -> None:
    """A batch without a runner, or whose runner's lease is over; never one that has ended."""
    lease = Lease(runner="r", until_s=100.0, number=1)
    assert is_free(a_batch(), now_s=50.0)
    assert not is_free(a_batch(lease=lease), now_s=99.9)
    assert is_free(a_batch(lease=lease), now_s=100.0)
    ended = life.fail(a_batch(lease=lease), [life.INPUT_GONE], at_s=1.0)
    assert not is_free(ended, now_s=1000.0)
