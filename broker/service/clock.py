"""The one clock of the broker: Unix seconds that never go back."""

import time


class WallClock:
    """Wall time taken once, carried on by the monotonic clock: clock steps change nothing here."""

    def __init__(self) -> None:
        """Take the wall time of now as the origin."""
        self._offset_s = time.time() - time.monotonic()

    def __call__(self) -> float:
        """Return Unix seconds, never less than before."""
        return self._offset_s + time.monotonic()
