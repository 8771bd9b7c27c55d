"""What there is of batches and files, by lane."""

import time

from broker.bus.base import StreamState
from producers.batches.census import (
    LATE_S,
    UNTAKEN_S,
    LaneCensus,
    is_late,
    is_untaken,
    lane_census,
    take_census,
)
from producers.batches.records import Lease, Status
from tests.batches import lines
from tests.builders import LANE
from tests.stored_batches import a_batch, a_place

NOW_S = 5000.0


def a_lease(until_s: float) -> Lease:
    """A runner's."""
    return Lease(runner="r1", until_s=until_s, number=1)


def test_a_batch_that_nobody_runs() -> None:
    """New ones and those of dead runners get their time; what runs or has ended is none."""
    fresh = a_batch(created_at_s=NOW_S - UNTAKEN_S)
    old = a_batch(created_at_s=NOW_S - UNTAKEN_S - 1)
    assert not is_untaken(fresh, now_s=NOW_S)
    assert is_untaken(old, now_s=NOW_S)
    for until_s, untaken in (
        (NOW_S + 1, False),
        (NOW_S - UNTAKEN_S, False),
        (NOW_S - UNTAKEN_S - 1, True),
    ):
        left = a_batch(created_at_s=0.0, lease=a_lease(until_s))
        assert is_untaken(left, now_s=NOW_S) is untaken
    assert not is_untaken(a_batch(created_at_s=0.0, status=Status.COMPLETED), now_s=NOW_S)


def test_a_batch_that_should_have_ended() -> None:
    """Its window was over minutes ago."""
    for since_s, late in ((LATE_S, False), (LATE_S + 1, True)):
        batch = a_batch(created_at_s=NOW_S - since_s - 60.0, window_s=60.0)
        assert is_late(batch, now_s=NOW_S) is late
    ended = a_batch(created_at_s=0.0, window_s=60.0, status=Status.EXPIRED)
    assert not is_late(ended, now_s=NOW_S)


def test_one_lanes_census() -> None:
    """Ended batches aren't counted; a lane without files has none."""
    batches = [
        a_batch(created_at_s=NOW_S - 100.0),
        a_batch(created_at_s=NOW_S - 500.0, window_s=60.0, lease=a_lease(NOW_S + 9)),
        a_batch(created_at_s=0.0, status=Status.FAILED),
    ]
    files = StreamState(messages=3, bytes=77, first_sequence=1, last_sequence=3, bytes_max=100)
    assert lane_census(batches, files, now_s=NOW_S) == LaneCensus(
        open=2, untaken=1, late=1, oldest_s=500.0, files_bytes=77, files_bytes_max=100
    )
    assert lane_census([], None, now_s=NOW_S) == LaneCensus()


async def test_the_census_of_a_cluster() -> None:
    """Lanes with batches and with files are in it."""
    async with a_place() as place:
        await place.create(lines(3))
        found = await take_census(place.bus, now_s=time.time() + UNTAKEN_S + 5)
        assert list(found) == [LANE]
        census = found[LANE]
        assert (census.open, census.untaken, census.late) == (1, 1, 0)
        assert census.files_bytes > 300
        assert census.files_bytes_max > 0
        place.start_runner()
        await place.ended((await place.shelf.all())[0].id)
        assert (await take_census(place.bus, now_s=time.time()))[LANE].open == 0
