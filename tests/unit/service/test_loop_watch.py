"""The thread that watches the loop: it tells what holds it, and ends a process that stays stuck."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import structlog

from broker.service.loop_watch import EXIT_STUCK, LoopWatch


@asynccontextmanager
async def a_watch(*, stuck_s_max: float) -> AsyncGenerator[tuple[LoopWatch, list[int]]]:
    """A watch of this loop, impatient, that notes its exit code instead of ending us."""
    ended: list[int] = []
    watch = LoopWatch(stuck_s_max=stuck_s_max, stall_s=0.04, look_s=0.01, end=ended.append)
    task = asyncio.create_task(watch.run())
    await asyncio.sleep(0)
    try:
        yield watch, ended
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def hold_the_loop(until: threading.Event) -> None:
    """Stand still in one place, as a bug would."""
    assert until.wait(10)


async def test_a_stalled_loop_is_told_with_its_place_and_its_process_lives_on() -> None:
    """Once for each stall, however long; it can be told on the page when it is over."""
    with structlog.testing.capture_logs() as logs:
        async with a_watch(stuck_s_max=0) as (watch, ended):
            look = watch.looked_at()
            assert look() == ""
            until = threading.Event()
            threading.Timer(0.3, until.set).start()
            hold_the_loop(until)
            assert watch.stalls == 1
            assert "stood still for 0.04 s" in look()
            assert look() == ""
    stalls = [one for one in logs if one["event"] == "loop.stalled"]
    assert len(stalls) == 1
    assert "hold_the_loop" in stalls[0]["held_by"]
    assert ended == []


async def test_a_stuck_loop_ends_its_process() -> None:
    """Its supervisor starts it anew; another leads long since."""
    async with a_watch(stuck_s_max=0.1) as (_, ended):
        ends_at_s = time.monotonic() + 10
        while not ended and time.monotonic() < ends_at_s:
            time.sleep(0.01)  # noqa: ASYNC251 - the loop is held on purpose
    assert ended == [EXIT_STUCK]


async def test_a_loop_that_turns_is_left_alone() -> None:
    """Also a busy one that turns now and then."""
    async with a_watch(stuck_s_max=0.1) as (watch, ended):
        for _ in range(15):
            await asyncio.sleep(0.01)
        assert watch.stalls == 0
    assert ended == []
