"""When something must be looked at again: a heap whose dead entries don't stay for long.

An alarm is never searched for and removed: whoever set it says at the ring whether it still
matters. Dead alarms are swept out when they outnumber the living, so memory follows what is alive.
"""

import heapq
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

SWEEP_ALARMS_MIN = 1024
"""Below this many alarms a sweep isn't worth its walk."""


class Alarms(Generic[T]):
    """A heap of (time, what); equal times ring in the order they were set."""

    def __init__(self, alive: Callable[[T], bool]) -> None:
        self._alive = alive
        self._heap: list[tuple[float, int, T]] = []
        self._count = 0
        self._sweep_at = SWEEP_ALARMS_MIN

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, at_s: float, what: T) -> None:
        """Ring for `what` at `at_s`."""
        if len(self._heap) >= self._sweep_at:
            self._sweep()
        self._count += 1
        heapq.heappush(self._heap, (at_s, self._count, what))

    def due(self, at_s: float) -> Iterator[T]:
        """Take the living alarms up to `at_s`, earliest first. More may be set meanwhile."""
        while self._heap and self._heap[0][0] <= at_s:
            what = heapq.heappop(self._heap)[2]
            if self._alive(what):
                yield what

    def _sweep(self) -> None:
        self._heap = [alarm for alarm in self._heap if self._alive(alarm[2])]
        heapq.heapify(self._heap)
        self._sweep_at = max(SWEEP_ALARMS_MIN, 2 * len(self._heap))
