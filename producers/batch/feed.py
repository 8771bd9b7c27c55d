"""Hands lines from a thread that may block (on a pipe, say) to the event loop.

The thread reads at most one window ahead. What has come is handed over as soon as the window is
full or the input pauses, so a slow pipe is run as it comes. The thread is a daemon: one that waits
for a pipe doesn't hold up the end of the process.
"""

import asyncio
import threading
from collections.abc import Iterator

from producers.batch.plan import Bounds
from producers.batch.source import Line


class Feed:
    """Lines of one input, window by window. Made and asked on the event loop."""

    def __init__(self, lines: Iterator[Line], bounds: Bounds) -> None:
        self._lines = lines
        self._bounds = bounds
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._window: list[Line] = []
        self._window_bytes = 0
        self._error: Exception | None = None
        self._ended = False
        self._closed = False
        self._some = asyncio.Event()
        """Something can be taken."""
        self._full = asyncio.Event()
        """Waiting brings nothing more."""
        threading.Thread(target=self._read, name="batch-input", daemon=True).start()

    async def take(self) -> list[Line]:
        """Give the next window; an empty one at the end. Raises what reading raised."""
        await self._some.wait()
        try:
            async with asyncio.timeout(self._bounds.gather_s):
                await self._full.wait()
        except TimeoutError:
            pass  # The input pauses: go on with what there is.
        with self._changed:
            window, self._window, self._window_bytes = self._window, [], 0
            self._full.clear()
            if self._ended:
                self._full.set()
            else:
                self._some.clear()
            self._changed.notify()
        if not window and self._error is not None:
            raise self._error
        return window

    def close(self) -> None:
        """Read no further."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _read(self) -> None:
        """The thread: read until the end, a fault, or `close`."""
        error: Exception | None = None
        try:
            for line in self._lines:
                if not self._put(line):
                    return
        except Exception as raised:  # noqa: BLE001 - the edge of the thread: told to whoever takes.
            error = raised
        with self._changed:
            self._ended, self._error = True, error
        self._tell(self._some, self._full)

    def _put(self, line: Line) -> bool:
        """Add a line, once there is room; False when nobody wants it."""
        with self._changed:
            while self._is_full() and not self._closed:
                self._changed.wait()
            if self._closed:
                return False
            self._window.append(line)
            self._window_bytes += len(line.text)
            events = [self._some] if len(self._window) == 1 else []
            events += [self._full] if self._is_full() else []
            if events:
                self._tell(*events)
            return True

    def _is_full(self) -> bool:
        bounds = self._bounds
        return (
            len(self._window) >= bounds.lookahead_lines
            or self._window_bytes >= bounds.lookahead_bytes
        )

    def _tell(self, *events: asyncio.Event) -> None:
        """Set events of the loop; it may be gone."""
        try:
            for event in events:
                self._loop.call_soon_threadsafe(event.set)
        except RuntimeError:
            self._closed = True
