"""What bounds a run of a batch: a thread for its disk work, and room for its jobs in flight."""

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Disk:
    """One thread for all disk work: in order, and never on the loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batch-disk")

    async def do(self, call: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Run a call there and wait for it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: call(*args, **kwargs))

    def close(self) -> None:
        """Wait for what is under way."""
        self._pool.shutdown()


def _any_number() -> int:
    return sys.maxsize


class Room:
    """Jobs in flight, bounded in number, in bytes and in those that wait; one job always fits.

    One task takes.
    """

    def __init__(
        self, *, jobs_max: int, bytes_max: int, waiting_max: Callable[[], int] = _any_number
    ) -> None:
        """`waiting_max`: how many may fly, now, that have not started."""
        self.jobs = 0
        self._bytes = 0
        self._waiting = 0
        self._jobs_max = jobs_max
        self._bytes_max = bytes_max
        self._waiting_max = waiting_max
        self._freed = asyncio.Event()

    async def take(self, size: int) -> None:
        """Wait until a job of so many bytes may fly, and take its place."""
        while self.jobs and self._is_full(size):
            self._freed.clear()
            await self._freed.wait()
        self.jobs += 1
        self._waiting += 1
        self._bytes += size

    def started(self) -> None:
        """Note that a job waits no longer; each job does so once before its place is given up."""
        self._waiting -= 1
        self._freed.set()

    def give_back(self, size: int) -> None:
        """Give up the place of a job that ended."""
        self.jobs -= 1
        self._bytes -= size
        self._freed.set()

    def _is_full(self, size: int) -> bool:
        return (
            self.jobs >= self._jobs_max
            or self._bytes + size > self._bytes_max
            or self._waiting >= self._waiting_max()
        )
