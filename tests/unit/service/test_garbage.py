"""Full searches for cyclic garbage: of what is new, and at last of all."""

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from broker.service import garbage
from broker.service.garbage import Garbage
from tests.turns import until


class Cycle:
    """An object that only a search can free."""

    def __init__(self) -> None:
        self.itself = self


@asynccontextmanager
async def a_duty(*, search_s: float = 0.001) -> AsyncGenerator[Garbage]:
    """The duty at work."""
    duty = Garbage(search_s=search_s)
    task = asyncio.create_task(duty.run())
    await asyncio.sleep(0)
    try:
        yield duty
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def searched(duty: Garbage) -> None:
    """Wait for a search that began after now."""
    now = duty.searches
    await until(lambda: duty.searches >= now + 2)


async def test_a_new_cycle_goes_with_the_next_search() -> None:
    """What has survived one is looked at no more, until a whole search."""
    async with a_duty() as duty:
        old = Cycle()
        await searched(duty)
        set_aside, new = weakref.ref(old), weakref.ref(Cycle())
        del old
        await searched(duty)
        assert new() is None
        assert set_aside() is not None


async def test_a_whole_search_finds_what_was_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each WHOLE_SEARCHES: or cycles would be a leak."""
    monkeypatch.setattr(garbage, "WHOLE_SEARCHES", 10)
    async with a_duty() as duty:
        old = Cycle()
        await searched(duty)
        gone = weakref.ref(old)
        del old
        await until(lambda: duty.searches >= 20)
        assert gone() is None


async def test_python_begins_no_full_search_by_itself() -> None:
    """However many objects come to stay; and afterwards all is as it was."""
    before = gc.get_threshold()
    full = 0

    def count(phase: str, info: dict[str, int]) -> None:
        nonlocal full
        full += phase == "start" and info["generation"] == 2

    gc.callbacks.append(count)
    try:
        async with a_duty(search_s=3600.0):
            assert gc.get_freeze_count() > 0
            full = 0
            kept = [[number] for number in range(1_000_000)]
            assert full == 0
            del kept
    finally:
        gc.callbacks.remove(count)
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)
