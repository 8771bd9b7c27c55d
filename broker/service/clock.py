"""The one clock of the broker: Unix seconds that never go back."""

import time
from collections.abc import Callable


def since_boot_s() -> float:
    """Return seconds that count on while the machine sleeps, where the system has such a clock.

    Python's monotonic clock stands still then (Linux): a broker that woke up would take itself for
    the leader, and tell deadlines, by hours that have passed.
    """
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class WallClock:
    """Wall time taken once, carried on by a steady clock: clock steps change nothing here.

    What was off at the start (no NTP yet) stays off until the next start, by the same amount: waits
    and leases are right, since they are differences, and `inferlane doctor` tells of it.
    """

    def __init__(
        self,
        *,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = since_boot_s,
    ) -> None:
        """Take the wall time of now as the origin."""
        self._steady = steady
        self._offset_s = wall() - steady()

    def __call__(self) -> float:
        """Return Unix seconds, never less than before."""
        return self._offset_s + self._steady()
