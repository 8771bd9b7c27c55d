"""Tasks that live as long as an object whose life is no `with` block: a bus from connect to close.

A bus is opened in one place and closed in another, so a TaskGroup can't hold what it runs beside
its caller. This is the one place that starts a bare task; it keeps what TaskGroup gives: strong
references, no exception that vanishes, and no task that outlives its owner.
"""

import asyncio
from collections.abc import Coroutine

from broker.bus.logs import Log

_log = Log(__name__)


class Background:
    """The background tasks of one owner."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def start(self, work: Coroutine[None, None, None]) -> None:
        """Run `work` until it ends or the owner closes; after close it is dropped."""
        if self._closed:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("background task failed", exc_info=error)

    async def close(self) -> None:
        """Cancel all and wait until they have ended. Idempotent; may be called from one of them."""
        self._closed = True
        others = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)
