"""Room for jobs in flight."""

import asyncio

from producers.batch.room import Room


async def waits(room: Room, size: int = 1) -> bool:
    """Say whether a job must wait for its place; if not, it has it."""
    taking = asyncio.create_task(room.take(size))
    await asyncio.sleep(0)
    if taking.done():
        return False
    taking.cancel()
    return True


async def test_number_and_bytes_are_bounded() -> None:
    """And one job always fits."""
    room = Room(jobs_max=2, bytes_max=10)
    assert not await waits(room, 99)
    assert await waits(room)
    room.give_back(99)
    assert not await waits(room)
    assert not await waits(room)
    assert await waits(room)


async def test_those_that_have_not_started_are_bounded() -> None:
    """One that started makes room, as one that ended does; the bound may change."""
    bound = 2
    room = Room(jobs_max=9, bytes_max=99, waiting_max=lambda: bound)
    assert not await waits(room)
    assert not await waits(room)
    assert await waits(room)
    room.started()
    assert not await waits(room)
    assert await waits(room)
    bound = 3
    assert not await waits(room)
    assert await waits(room)
    assert room.jobs == 4


async def test_who_waits_is_woken_by_a_start() -> None:
    """No clock is needed."""
    room = Room(jobs_max=9, bytes_max=99, waiting_max=lambda: 1)
    await room.take(1)
    taking = asyncio.create_task(room.take(1))
    await asyncio.sleep(0)
    room.started()
    await asyncio.wait_for(taking, 5)
    assert room.jobs == 2
