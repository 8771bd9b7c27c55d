"""The first word on how long a new batch takes."""

import pytest

from producers.batches.outlook import lines_before
from producers.batches.records import Batch, Counts, Lease, Place, Status
from tests.stored_batches import a_batch

NOW_S = 5000.0
NEW = a_batch(id="batch_new", lines=100)


def another(*, total: int, ended: int = 0, inflight: int = 0, runs: bool = True) -> Batch:
    """A batch of the same lane."""
    until_s = NOW_S + 5 if runs else NOW_S - 5
    return a_batch(
        id=f"batch_{total}",
        lines=total,
        counts=Counts(total=total, completed=ended),
        place=Place(jobs_inflight=inflight),
        lease=Lease(runner="r1", until_s=until_s, number=1),
    )


@pytest.mark.parametrize(
    ("others", "before"),
    [
        ([], 0),
        # A long one gets no more of the lane than the new one does.
        ([another(total=100_000, ended=500, inflight=50)], 100),
        # What it has in the queue stands there first.
        ([another(total=100_000, inflight=1000)], 1000),
        # A short one has less left.
        ([another(total=60, ended=40, inflight=20)], 20),
        # One that waits for a runner goes first; it and the new one both stand beside what runs.
        ([another(total=30, runs=False)], 30),
        ([another(total=30, runs=False), another(total=9000, inflight=50)], 30 + 130),
        ([another(total=500), another(total=70)], 100 + 70),
    ],
)
def test_what_ends_before_a_new_batch(others: list[Batch], before: int) -> None:
    """Of other batches counts what they take of the lane until the new one ends."""
    assert lines_before(NEW, [NEW, *others], now_s=NOW_S) == before


def test_batches_that_ended_take_nothing() -> None:
    """Nor does one that was not looked over yet, and has no lines."""
    ended = a_batch(id="batch_old", lines=9, status=Status.CANCELLED)
    empty = a_batch(id="batch_empty", lines=0)
    assert lines_before(NEW, [ended, empty], now_s=NOW_S) == 0
