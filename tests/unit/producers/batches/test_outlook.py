"""The first word on how long a new batch takes."""

from typing import Any

import pytest

from producers.batches.outlook import BATCHES_AGE_S_MAX, outlook, pace_of_last
from producers.batches.records import Batch, Counts, Forecast, Status
from tests.stored_batches import ENDPOINT, Place, a_batch, a_place

NOW_S = 50_000.0
NEW = a_batch(id="batch_new", lines=100)


def ended(name: str, *, began_s: float, ended_s: float, lines: int, **fields: Any) -> Batch:
    """A batch that completed."""
    return a_batch(
        id=name,
        status=Status.COMPLETED,
        counts=Counts(total=lines, completed=lines),
        in_progress_at_s=began_s,
        finalizing_at_s=ended_s,
        completed_at_s=ended_s + 1,
        **fields,
    )


def running(now_s: float, *, total: int, lane_lines_s: float = 0.0, ended: int = 0) -> Batch:
    """A batch that runs, and tells its lane's pace."""
    told = Forecast(at_s=now_s, takes_s=1.0, miss_ratio=0.0, lane_lines_s=lane_lines_s)
    return a_batch(
        id=f"batch_{total}",
        status=Status.IN_PROGRESS,
        counts=Counts(total=total, completed=ended),
        in_progress_at_s=now_s - 10,
        forecast=told if lane_lines_s else None,
    )


async def takes_s(place: Place, others: list[Batch], **fields: Any) -> float | None:
    """What is told of a new batch of a hundred lines."""
    client = _Quiet(**fields)
    found = await outlook(NEW, [NEW, *others], client, place.files)  # pyright: ignore[reportArgumentType]
    return None if found is None else found.takes_s


class _Quiet:
    """A client whose lane's queue has this pace."""

    def __init__(self, *, pace_s: float = 0.0) -> None:
        self._pace_s = pace_s

    def queue_pace_s(self, band: int, model: str) -> float:
        """Jobs a second."""
        del band, model
        return self._pace_s


async def test_a_batch_that_runs_tells_the_lanes_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten lines a second for both, and as many of the other as of this; the queue isn't asked."""
    monkeypatch.setattr("producers.batches.outlook.time.time", lambda: NOW_S)
    async with a_place() as place:
        other = running(NOW_S, total=9000, ended=10, lane_lines_s=10.0)
        assert await takes_s(place, [other], pace_s=77.0) == 20.0
        nearly_done = running(NOW_S, total=9000, ended=8950, lane_lines_s=10.0)
        assert await takes_s(place, [nearly_done]) == 15.0
        old = running(NOW_S - 61, total=9000, lane_lines_s=10.0)
        assert await takes_s(place, [old], pace_s=5.0) == 40.0


async def test_else_its_queue_and_then_the_last_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing, where nobody knows."""
    monkeypatch.setattr("producers.batches.outlook.time.time", lambda: NOW_S)
    last = ended("last", began_s=NOW_S - 200, ended_s=NOW_S - 100, lines=400)
    async with a_place() as place:
        assert await takes_s(place, [last], pace_s=2.0) == 50.0
        assert await takes_s(place, [last]) == 25.0
        assert await takes_s(place, [last, running(NOW_S, total=30)]) == 130 / 4
        assert await takes_s(place, []) is None


def test_the_pace_of_the_last_is_its_lanes() -> None:
    """What ran beside it counts, for the time that both ran."""
    last = ended("last", began_s=1000, ended_s=1100, lines=100)
    beside = ended("beside", began_s=1050, ended_s=1090, lines=100)
    before = ended("before", began_s=900, ended_s=1000, lines=5000)
    half = ended("half", began_s=950, ended_s=1050, lines=200)
    assert pace_of_last([last], ENDPOINT, now_s=NOW_S) == 1.0
    assert pace_of_last([before, beside, last], ENDPOINT, now_s=NOW_S) == 2.0
    assert pace_of_last([before, half, last], ENDPOINT, now_s=NOW_S) == 2.0
    endless = a_batch(id="runs", in_progress_at_s=1000.0, counts=Counts(total=9999, completed=980))
    assert pace_of_last([last, endless], ENDPOINT, now_s=1980.0) == 2.0


def test_old_ones_and_those_of_another_endpoint_say_nothing() -> None:
    """Capacity is today's, and an embedding is no chat."""
    last = ended("last", began_s=1000, ended_s=1100, lines=100)
    assert pace_of_last([last], ENDPOINT, now_s=1101 + BATCHES_AGE_S_MAX) == 0.0
    assert pace_of_last([last], "/v1/embeddings", now_s=NOW_S) == 0.0
    assert pace_of_last([], ENDPOINT, now_s=NOW_S) == 0.0
