"""Fair shares between lanes: virtual token counters, one per lane and model pool.

Theory: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). Each lane's counter
rises by the weighted tokens dispatched for it ÷ its weight; the lane with the least counter goes
first. Tokens, not jobs: a lane of long jobs and one of short jobs get the same work. A lane that
wakes is lifted to the least counter of those that wait, so that idleness is not banked. A corrected
cost corrects the counter. Two lanes that both wait stay within U + Q + K·E of each other: the
largest cost, the slack within which locality may choose, and the jobs in flight × the largest error
of an estimate.

Bands 0-2 share one counter per lane; batch has its own, else a night of batch would cost a tenant
its day.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from broker.wire.ids import BATCH_BAND

ONLINE = 0
BATCH = 1


def group_of(band: int) -> int:
    """Say which of a lane's two counters pays for a band."""
    return BATCH if band == BATCH_BAND else ONLINE


class Ranking:
    """Lanes in the order of their counters; equal counters by name."""

    def __init__(self) -> None:
        self._sorted: list[tuple[float, str]] = []
        self._counters: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[tuple[float, str]]:
        return iter(self._sorted)

    def __contains__(self, lane: str) -> bool:
        return lane in self._counters

    def put(self, lane: str, counter: float) -> None:
        """Give a lane its place, or move it."""
        self.drop(lane)
        self._counters[lane] = counter
        insort(self._sorted, (counter, lane))

    def drop(self, lane: str) -> None:
        """Take a lane out, if it is in."""
        counter = self._counters.pop(lane, None)
        if counter is not None:
            del self._sorted[bisect_left(self._sorted, (counter, lane))]

    @property
    def first(self) -> str:
        """The lane with the least counter; there must be one."""
        return self._sorted[0][1]

    @property
    def least(self) -> float | None:
        """The least counter."""
        return self._sorted[0][0] if self._sorted else None

    @property
    def spread(self) -> float:
        """Greatest less least counter; 0 with fewer than two lanes."""
        return self._sorted[-1][0] - self._sorted[0][0] if self._sorted else 0.0


class LaneCounters:
    """The counters of one model pool."""

    def __init__(self) -> None:
        self._counters: tuple[dict[str, float], dict[str, float]] = ({}, {})
        self._waiting: tuple[dict[str, int], dict[str, int]] = ({}, {})
        self._left: list[str] = ["", ""]
        """The lane that last stopped waiting: a lane that wakes alone is lifted to its counter, as
        that is by then (charged for its last job, or refunded)."""
        self.awake: tuple[Ranking, Ranking] = (Ranking(), Ranking())
        """Lanes that wait for something."""
        self.cost_max: float = 0.0
        """U: largest cost ÷ weight charged."""
        self.error_max: float = 0.0
        """E: largest correction ÷ weight."""

    def counter(self, lane: str, *, group: int) -> float:
        """Tell a lane's counter."""
        return self._counters[group].get(lane, 0.0)

    def is_awake(self, lane: str, *, group: int) -> bool:
        """Say whether a lane waits for something."""
        return lane in self._waiting[group]

    def job_waits(self, lane: str, *, group: int) -> None:
        """Note one more waiting job; a lane that wakes is lifted."""
        waiting = self._waiting[group]
        jobs = waiting.get(lane, 0)
        waiting[lane] = jobs + 1
        if jobs:
            return
        least = self.awake[group].least
        floor = self.counter(self._left[group], group=group) if least is None else least
        counter = max(self.counter(lane, group=group), floor)
        self._counters[group][lane] = counter
        self.awake[group].put(lane, counter)

    def job_left(self, lane: str, *, group: int) -> None:
        """Note one waiting job less."""
        waiting = self._waiting[group]
        waiting[lane] -= 1
        if not waiting[lane]:
            del waiting[lane]
            self._left[group] = lane
            self.awake[group].drop(lane)

    def charge(self, lane: str, amount: float, *, group: int) -> float:
        """Charge (or refund, when negative) work ÷ weight; return the new counter."""
        counter = self.counter(lane, group=group) + amount
        self._counters[group][lane] = counter
        if lane in self.awake[group]:
            self.awake[group].put(lane, counter)
        return counter
