"""What a simulation saw of each request, kept in flat columns: a million of them are 60 MB."""

from array import array

NOT_YET = -1.0


def _column(kind: str, rows: int, value: float) -> "array[float]":
    return array(kind, [value]) * rows


class Records:
    """One row for each request, by its index. Times are seconds of the simulation."""

    def __init__(self, rows: int) -> None:
        self.arrived_s = _column("d", rows, NOT_YET)
        self.given_s = _column("d", rows, NOT_YET)
        """When it was given to a worker, the last time."""
        self.first_token_s = _column("d", rows, NOT_YET)
        self.ended_s = _column("d", rows, NOT_YET)
        self.cached_tokens = array("l", [0]) * rows
        self.host = array("l", [-1]) * rows
        """The worker that answered."""
        self.attempts = array("l", [0]) * rows
        self.refused = array("b", [0]) * rows
        """1: ended without an answer."""

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.arrived_s)
