"""Keeps Python's search for cyclic garbage from holding the loop.

A full search looks at every object that there is: 50 to 150 ms of processor time where a broker has
some thousand jobs, and Python begins one whenever a quarter more objects live than the last time,
so a queue that fills or empties brings several. They find next to nothing: what a job was made of
goes by its count of references. So each second only what is new is searched, and what has survived
is set aside. What was set aside and became a cycle later is found once an hour.
"""

import asyncio
import gc
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

SEARCH_S = 1.0
"""How often what is new is searched: some thousand objects a second, in some milliseconds."""

WHOLE_SEARCHES = 3600
"""Each so many is a whole one: an hour's worth of cycles that were set aside is little."""

_NEVER = 1_000_000_000
"""Searches of the middle generation for each full one that Python begins by itself."""


class Garbage:
    """The duty of searching."""

    def __init__(self, *, search_s: float = SEARCH_S) -> None:
        """Search every so often."""
        self._search_s = search_s
        self.searches = 0

    async def run(self) -> None:
        """Search until cancelled; then Python does as it did before."""
        async with _set_aside():
            while True:
                await asyncio.sleep(self._search_s)
                self.searches += 1
                if self.searches % WHOLE_SEARCHES == 0:
                    gc.unfreeze()
                gc.collect()
                gc.freeze()


@asynccontextmanager
async def _set_aside() -> AsyncGenerator[None]:
    """Set aside all that lives now, and let Python begin no full search by itself."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(before[0], before[1], _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
