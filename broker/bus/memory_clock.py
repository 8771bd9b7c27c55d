"""The clock of the in-process bus, injected so that tests move time themselves and never sleep."""

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A pending call."""

    def cancel(self) -> None:
        """Forget the call. Idempotent."""
        ...


class Clock(Protocol):
    """What the in-process bus needs to know of time."""

    def now_s(self) -> float:
        """Unix seconds."""
        ...

    def call_at(self, at_s: float, call: Callable[[], None]) -> Timer:
        """Call once the time has come."""
        ...


class LoopClock:
    """Real time, on the running event loop."""

    def now_s(self) -> float:
        """Unix seconds."""
        return time.time()

    def call_at(self, at_s: float, call: Callable[[], None]) -> Timer:
        """Call once the time has come."""
        return asyncio.get_running_loop().call_later(max(0.0, at_s - self.now_s()), call)


class _ManualTimer:
    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class ManualClock:
    """Time that stands still until `advance`."""

    def __init__(self, start_s: float = 1_700_000_000.0) -> None:
        self._now_s = start_s
        self._order = itertools.count()
        self._timers: list[tuple[float, int, _ManualTimer]] = []

    def now_s(self) -> float:
        """Unix seconds."""
        return self._now_s

    def call_at(self, at_s: float, call: Callable[[], None]) -> Timer:
        """Call once the time has come."""
        timer = _ManualTimer(call)
        heapq.heappush(self._timers, (at_s, next(self._order), timer))
        return timer

    def advance(self, seconds: float) -> None:
        """Move time on and run what falls due, in order, each at its own instant."""
        end_s = self._now_s + seconds
        while self._timers and self._timers[0][0] <= end_s:
            at_s, _, timer = heapq.heappop(self._timers)
            self._now_s = max(self._now_s, at_s)
            call, timer.call = timer.call, None
            if call is not None:
                call()
        self._now_s = end_s
