"""Giving the event loop its turns until something holds, instead of waiting for a time."""

import asyncio
from collections.abc import Awaitable, Callable

TURNS_MAX = 100_000


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    """Let other tasks run until `condition` holds. Fails after TURNS_MAX turns."""
    for _ in range(TURNS_MAX):
        held = condition()
        if held if isinstance(held, bool) else await held:
            return
        await asyncio.sleep(0)
    message = "it never came to hold"
    raise AssertionError(message)
