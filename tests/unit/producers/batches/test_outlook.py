"""The first word on how long a new batch takes."""

import pytest

from producers.batches.census import UNTAKEN_S
from producers.batches.outlook import lines_before
from producers.batches.records import Batch, Counts, Lease, Place, Status
from tests.stored_batches import a_batch

NOW_S = 5000.0
NEW = a_batch(id="batch_new", lines=100)


def another(
    *, total: int, ended: int = 0, inflight: int = 0, window_s: float, runs: bool = True
) -> Batch:
    """A batch of the same lane, as old as the new one's lane."""
    until_s = NOW_S + 5 if runs else NOW_S - UNTAKEN_S - 5
    return a_batch(
        id=f"batch_{total}",
        lines=total,
        counts=Counts(total=total, completed=ended),
        place=Place(jobs_inflight=inflight),
        created_at_s=NEW.created_at_s,
        window_s=window_s,
        lease=Lease(runner="r1", until_s=until_s, number=1),
    )


@pytest.mark.parametrize(
    ("others", "before"),
    [
        ([], 0),
        # A window that ends first, or at the same time, goes first.
        ([another(total=900, ended=500, window_s=10.0)], 400),
        ([another(total=900, ended=500, window_s=NEW.window_s)], 400),
        # One that ends later stands back, ...
        ([another(total=900, ended=500, window_s=NEW.window_s + 1)], 0),
        # ... but for what the broker's window has no room for, ...
        ([another(total=9000, inflight=1000, window_s=NEW.window_s + 1)], 1000 - 512),
        # ... unless no runner has room: it is taken up first, and the new one waits for it.
        ([another(total=30, window_s=NEW.window_s + 1, runs=False)], 30),
        ([another(total=30, window_s=1.0), another(total=7, window_s=1e6)], 30),
    ],
)
def test_what_ends_before_a_new_batch(others: list[Batch], before: int) -> None:
    """Of other batches counts what goes before it."""
    assert lines_before(NEW, [NEW, *others], now_s=NOW_S) == before


def test_batches_that_ended_take_nothing() -> None:
    """Nor does one that was not looked over yet, and has no lines."""
    ended = a_batch(id="batch_old", lines=9, status=Status.CANCELLED)
    empty = a_batch(id="batch_empty", lines=0)
    assert lines_before(NEW, [ended, empty], now_s=NOW_S) == 0
