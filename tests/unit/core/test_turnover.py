"""How soon caches are filled anew, and what a token computed there costs, against the mean."""

from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.core.turnover import (
    FILLS_REMEMBERED,
    JOBS_REMEMBERED,
    RATIO_MAX,
    REUSE_FILLS,
    REUSE_MAX,
    REUSE_MIN,
    Turnover,
    Written,
)

JOB = 0.005
"""Caches' worth that a job computes: 5,000 tokens of a million."""


def served(
    turnover: Turnover,
    order: list[Written],
    *,
    turns: int,
    found: float = JOB,
    workers: int | None = None,
) -> list[float]:
    """Give jobs in this order, so many times over; return what each of it is worth then."""
    for _ in range(turns):
        for worker in order:
            turnover.note(worker, found=found, computed=JOB, workers=workers or len(order))
    return [turnover.excess(worker) for worker in order]


def fleet(count: int = 4) -> tuple[Turnover, list[Written]]:
    """So many workers that were given nothing."""
    return Turnover(), [Written() for _ in range(count)]


def test_before_anything_was_written_all_are_equal() -> None:
    """A broker that starts prefers nobody."""
    turnover, workers = fleet()
    assert turnover.excess(workers[0]) == 0.0


def test_workers_that_are_written_to_alike_are_worth_the_same() -> None:
    """Within what the last few jobs are of all that is remembered."""
    turnover, workers = fleet()
    for excess in served(turnover, workers, turns=200):
        assert abs(excess) < JOB / FILLS_REMEMBERED


def test_who_is_written_to_more_costs_more() -> None:
    """The one that was given twice as much, by its share beyond the mean."""
    turnover, workers = fleet()
    served(turnover, [*workers, workers[0]], turns=200, workers=4)
    often, *others = [turnover.excess(worker) for worker in workers]
    assert often > 0.0 > max(others)


def test_a_worker_that_comes_from_another_model_has_written_nothing() -> None:
    """The clocks of two models have nothing to do with each other: what is beyond the range of
    numbers for one that is a hundred caches behind is merely wrong for one that is ten behind.
    """
    busy, workers = fleet()
    served(busy, workers, turns=20_000, workers=1)
    assert busy.fills > 300.0
    fresh, others = fleet()
    served(fresh, others, turns=200)
    assert fresh.excess(workers[0]) == fresh.excess(Written())
    fresh.note(workers[0], found=JOB, computed=JOB, workers=4)
    assert 0.0 < fresh._left_of(workers[0]) <= JOB
    assert busy.excess(workers[0]) == busy.excess(Written())


def test_the_clock_is_what_is_written_not_time() -> None:
    """What was written once is forgotten as others are written to, and only so."""
    turnover, workers = fleet()
    served(turnover, workers, turns=200)
    burst = workers[0]
    for _ in range(10):
        turnover.note(burst, found=JOB, computed=JOB, workers=4)
    after = turnover.excess(burst)
    assert turnover.excess(burst) == after
    served(turnover, workers[1:], turns=100, workers=4)
    assert turnover.excess(burst) < 0.0 < after


def test_where_little_is_found_nothing_is_lost() -> None:
    """Under REUSE_MIN tokens found for each computed, caches are all the same."""
    turnover, workers = fleet()
    turns = round(8 * REUSE_FILLS / JOB)
    less = 0.9 * REUSE_MIN * JOB
    served(turnover, [*workers, workers[0]], turns=turns, found=less, workers=4)
    assert [turnover.excess(worker) for worker in workers] == [0.0] * 4


def test_reuse_counts_up_to_its_bound() -> None:
    """Beyond REUSE_MAX found for each computed, more count no more."""
    bound = REUSE_MAX - REUSE_MIN
    for found in (3.0, 30.0):
        turnover, workers = fleet()
        turns = round(12 * REUSE_FILLS / JOB)
        served(turnover, workers[:3], turns=turns, found=found * JOB, workers=4)
        assert isclose(turnover.excess(workers[3]), -bound)


def test_a_ratio_counts_up_to_its_bound() -> None:
    """All jobs of a hundred workers on one: it counts as RATIO_MAX times as fast, no more."""
    turnover, workers = fleet(100)
    for _ in range(3000):
        turnover.note(workers[0], found=JOB, computed=JOB, workers=100)
    assert isclose(turnover.excess(workers[0]), (1.0 - REUSE_MIN) * (RATIO_MAX - 1.0))


def test_of_small_caches_so_many_jobs_are_remembered() -> None:
    """Where a job takes a tenth of a cache, the last one alone says little."""
    turnover, workers = fleet()
    for _ in range(50):
        for worker in workers:
            turnover.note(worker, found=0.1, computed=0.1, workers=4)
    excess = [turnover.excess(worker) for worker in workers]
    assert max(excess) - min(excess) < 2.0 / JOBS_REMEMBERED


@given(
    jobs=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.floats(0.0, 4.0, allow_nan=False),
            st.floats(0.0, 4.0, allow_nan=False),
        ),
        max_size=60,
    )
)
def test_it_is_bounded_whatever_is_written(jobs: list[tuple[int, float, float]]) -> None:
    """Finite, and within what its docstring says, after any jobs: those of nothing, too."""
    turnover, workers = fleet()
    for index, found, computed in jobs:
        turnover.note(workers[index], found=found, computed=computed, workers=4)
        for worker in workers:
            excess = turnover.excess(worker)
            assert -REUSE_MAX <= excess <= REUSE_MAX * (RATIO_MAX - 1.0)


@pytest.mark.parametrize("workers_count", [1, 8, 1000])
def test_the_size_of_a_fleet_does_not_matter(workers_count: int) -> None:
    """Each was given as much of late: nobody stands out, however many they are."""
    turnover, workers = fleet(workers_count)
    for excess in served(turnover, workers, turns=60):
        assert abs(excess) < 2.0 * JOB / FILLS_REMEMBERED
