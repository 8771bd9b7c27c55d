"""What a runner knows of each lane's open batches."""

from typing import Any

import pytest

from broker.wire.messages import Usage
from producers.batches.config import BatchesConfig
from producers.batches.forecast import SAMPLE_S, SAMPLES_MAX, Rate
from producers.batches.lanes import (
    HEARD_MAX,
    LINES_WAITING_MIN,
    Lanes,
    line_cost,
    mean_cost,
    shared_work,
)
from producers.batches.records import Batch, Counts, Status
from tests.stored_batches import a_batch


def a_run(name: str, *, ended: int = 0, total: int = 1000, cost: int = 0, **fields: Any) -> Batch:
    """A batch of which so many lines have completed, at this many tokens each."""
    return a_batch(
        id=name,
        counts=Counts(total=total, completed=ended),
        usage=Usage(cost * ended, 0, 0),
        **{"status": Status.IN_PROGRESS, **fields},
    )


def seen(*looks: list[Batch]) -> Lanes:
    """Lanes after these looks, one each SAMPLE_S."""
    lanes = Lanes(BatchesConfig(lines_waiting_max=100))
    for number, batches in enumerate(looks):
        lanes.seen(batches, at_s=number * SAMPLE_S)
    return lanes


def test_a_line_costs_what_it_was_charged() -> None:
    """Output counts twice, what a cache had not at all; nothing is known before a line ended."""
    usage = Usage(prompt_tokens=1000, cached_tokens=400, output_tokens=50)
    counts = Counts(total=9, completed=2, failed=1)
    assert line_cost(a_batch(usage=usage, counts=counts)) == 350.0
    assert line_cost(a_run("a")) == 0.0
    assert mean_cost([0.0, 200.0, 400.0]) == 300.0
    assert mean_cost([0.0]) == 1.0


def test_what_shares_the_lane_counts_by_its_cost() -> None:
    """A large batch as far as this one goes; a short one of long lines with all it has."""
    batch = a_run("a", ended=10, total=110, cost=10)
    large, heavy = a_run("b", ended=1, cost=10), a_run("c", ended=5, total=8, cost=200)
    new = a_run("d", total=30)
    assert shared_work(batch, [large], cost=10.0) == 2000.0
    assert shared_work(batch, [heavy], cost=10.0) == 1600.0
    assert shared_work(batch, [new], cost=10.0) == 1300.0


def test_the_pace_is_all_batches_together() -> None:
    """It is the same, however they share it; one that ended meanwhile counts to its end."""
    alone = [a_run("a", ended=count) for count in (0, 50, 100, 150)]
    both = [[a_run("a", ended=50 + 25 * n), a_run("b", ended=25 * n)] for n in range(4)]
    for looks in ([[one] for one in alone], both):
        rate = seen(*looks).rate(looks[-1][0])
        assert rate is not None
        assert rate.a_second == 50 / SAMPLE_S
    done = a_run("b", ended=75, total=75, status=Status.COMPLETED)
    lanes = seen(*both[:3], [a_run("a", ended=125), done], [a_run("a", ended=175)])
    rate = lanes.rate(both[0][0])
    assert rate is not None
    assert rate.a_second == 50 / SAMPLE_S


def test_the_pace_is_in_tokens() -> None:
    """Lines of two costs: what a lane gets through does not hang on whose lines they were."""
    looks = [
        [a_run("a", ended=10 + 10 * n, cost=400), a_run("b", ended=40 + 40 * n, cost=100)]
        for n in range(4)
    ]
    rate = seen(*looks).rate(looks[-1][0])
    assert rate is not None
    assert rate.a_second == pytest.approx(8000 / SAMPLE_S)


def test_the_beginning_of_a_lane_is_not_counted() -> None:
    """Nothing ends while its first batch begins."""
    looks = [[a_run("a", ended=count)] for count in (0, 0, 0, 50, 100)]
    rate = seen(*looks).rate(looks[-1][0])
    assert rate is not None
    assert rate.a_second == 50 / SAMPLE_S


def test_a_lane_without_an_open_batch_begins_anew() -> None:
    """Its old pace was another day's; and too fresh looks are no samples."""
    done = a_run("a", ended=100, status=Status.COMPLETED)
    lanes = seen([a_run("a", ended=50)], [done], [done], [a_run("b", ended=7)])
    assert lanes.rate(a_run("b")) is None
    lanes.seen([a_run("b", ended=99)], at_s=3.5 * SAMPLE_S)
    assert lanes.rate(a_run("b")) is None
    assert Lanes(BatchesConfig()).rate(a_run("b")) is None


def test_samples_are_bounded() -> None:
    """The pace is that of the last ten minutes."""
    slow = [[a_run("a", ended=number)] for number in range(SAMPLES_MAX)]
    fast = [[a_run("a", ended=1000 + 50 * number)] for number in range(SAMPLES_MAX + 1)]
    rate = seen(*slow, *fast).rate(fast[-1][0])
    assert rate is not None
    assert rate.a_second == 50 / SAMPLE_S


def test_a_forecast_is_of_all_that_shares_the_lane() -> None:
    """A hundred lines beside a thousand take the time of two hundred."""
    looks = [
        [a_run("large", ended=25 * n, total=5000), a_run("small", ended=25 * n, total=200)]
        for n in range(5)
    ]
    lanes, small = seen(*looks), looks[-1][1]
    found = lanes.forecast(small, Rate(99.0, 0.1), at_s=20.0)
    assert found is not None
    assert found.takes_s == pytest.approx(200 / (50 / SAMPLE_S))
    assert found.lane_lines_s == pytest.approx(50 / SAMPLE_S)


def test_a_batch_that_is_alone_knows_its_pace_sooner() -> None:
    """Its own, until the lane's is known; beside others its own is not the lane's."""
    batch = a_run("a", ended=50, total=150)
    lanes = seen([batch])
    found = lanes.forecast(batch, Rate(10.0, 0.1), at_s=0.0)
    assert found is not None
    assert (found.takes_s, found.lane_lines_s) == (10.0, 10.0)
    assert lanes.forecast(batch, None, at_s=0.0) is None
    beside = seen([batch, a_run("b")])
    assert beside.forecast(batch, Rate(10.0, 0.1), at_s=0.0) is None


def test_those_that_wait_are_shared_out() -> None:
    """Among all open batches of the lane, those heard of and not yet seen too; never too few."""
    lanes = seen([a_run("a"), a_run("b"), a_run("x", lane="other")])
    assert [lanes.lines_waiting_max(lane) for lane in ("acme", "other", "none")] == [50, 100, 100]
    lanes.heard("acme", "b")
    assert lanes.lines_waiting_max("acme") == 50
    lanes.heard("acme", "c")
    assert lanes.lines_waiting_max("acme") == 33
    for number in range(HEARD_MAX + 9):
        lanes.heard("acme", f"more-{number}")
    assert len(lanes._heard["acme"]) == HEARD_MAX
    lanes.seen([a_run("a")], at_s=99.0)
    assert lanes.lines_waiting_max("acme") == 100
    lanes.seen([a_run(f"b{number}") for number in range(50)], at_s=199.0)
    assert lanes.lines_waiting_max("acme") == LINES_WAITING_MIN
