"""Giving the event loop its turns until something holds, instead of waiting for a time."""

import asyncio
import time
from collections.abc import Awaitable, Callable

HOLDS_S_MAX = 30.0
"""Longest patience, on a machine that is busy with other things; what holds is seen at once."""


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    """Let other tasks run until `condition` holds. Fails after HOLDS_S_MAX."""
    ends_at_s = time.monotonic() + HOLDS_S_MAX
    while time.monotonic() < ends_at_s:
        held = condition()
        if held if isinstance(held, bool) else await held:
            return
        await asyncio.sleep(0)
    message = "it never came to hold"
    raise AssertionError(message)
