"""What those who don't run batches know of one: how long its lines' records are needed.

The whole record of a batch is `producers/batches/records.py`; it stands in the bucket BATCHES.
"""

from msgspec import Struct

from broker.wire.fields import Seconds

RESULTS_GRACE_S, RESULTS_GRACE_RATIO = 86_400.0, 1 / 3
"""A line's record is kept for so long beyond its batch's window: a day, or a third of the time for
which the lane keeps results, where that is less than three. So long every gateway may be down after
the window's end, and no line that was paid for is lost before it stands in the output."""


class BatchOutline(Struct, frozen=True):
    """The fields of a batch's record that say when its window is over."""

    created_at_s: Seconds
    window_s: Seconds

    @property
    def deadline_at_s(self) -> float:
        """Unix time when its window is over."""
        return self.created_at_s + self.window_s


def is_needed_longer(*, stored_at_s: float, age_s: float, deadline_at_s: float) -> bool:
    """Say whether a line's record may be needed when its stream, which keeps it `age_s`, drops it.

    `age_s` 0: the stream drops nothing.
    """
    if not age_s:
        return False
    grace_s = min(RESULTS_GRACE_S, RESULTS_GRACE_RATIO * age_s)
    return stored_at_s + age_s < deadline_at_s + grace_s
