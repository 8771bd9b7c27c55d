"""How crowded the machine was: the share of time in which something waited for a processor.

Linux counts it (pressure stall information); elsewhere nothing is known and nothing is excused.
"""

from bisect import bisect_left
from pathlib import Path

PRESSURE_FILE = Path("/proc/pressure/cpu")

_MICROSECONDS = 1e6


class Crowd:
    """Notes of the kernel's count, taken whenever there is a reason to."""

    def __init__(self, path: Path = PRESSURE_FILE) -> None:
        """Begin without notes."""
        self._path = path
        self._at_s: list[float] = []
        self._waited_s: list[float] = []

    def note(self, at_s: float) -> None:
        """Take a note; nothing where the kernel does not count."""
        waited_s = _waited_s(self._path)
        if waited_s is not None:
            self._at_s.append(at_s)
            self._waited_s.append(waited_s)

    def share(self, from_s: float, to_s: float) -> float:
        """Tell in which share of this time something waited; 0 where that is not known.

        Between two notes it is taken to be even.
        """
        if to_s <= from_s or len(self._at_s) < 2:  # noqa: PLR2004 - a difference takes two
            return 0.0
        return (self._at(to_s) - self._at(from_s)) / (to_s - from_s)

    def whole_share(self) -> float:
        """Tell it of all the time from the first note to the last."""
        return self.share(self._at_s[0], self._at_s[-1]) if self._at_s else 0.0

    def _at(self, at_s: float) -> float:
        after = min(max(1, bisect_left(self._at_s, at_s)), len(self._at_s) - 1)
        begin_s, end_s = self._at_s[after - 1 : after + 1]
        begun_s, ended_s = self._waited_s[after - 1 : after + 1]
        rate = (ended_s - begun_s) / (end_s - begin_s) if end_s > begin_s else 0.0
        return begun_s + rate * (at_s - begin_s)


def _waited_s(path: Path) -> float | None:
    """Read `some avg10=… total=<microseconds>`; None where it isn't there."""
    try:
        some = path.read_text().splitlines()[0]
        return int(some.rpartition("total=")[2]) / _MICROSECONDS
    except (OSError, ValueError, IndexError):
        return None
