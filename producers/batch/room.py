"""What bounds a run of a batch: a thread for its disk work, and room for its jobs in flight."""

import asyncio
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


class Room:
    """Jobs in flight, bounded in number and in bytes; one job always fits. One task takes."""

    def __init__(self, *, jobs_max: int, bytes_max: int) -> None:
        self.jobs = 0
        self._bytes = 0
        self._jobs_max = jobs_max
        self._bytes_max = bytes_max
        self._freed = asyncio.Event()

    async def take(self, size: int) -> None:
        """Wait until a job of so many bytes may fly, and take its place."""
        while self.jobs and (self.jobs >= self._jobs_max or self._bytes + size > self._bytes_max):
            self._freed.clear()
            await self._freed.wait()
        self.jobs += 1
        self._bytes += size

    def give_back(self, size: int) -> None:
        """Give up the place of a job that ended."""
        self.jobs -= 1
        self._bytes -= size
        self._freed.set()
