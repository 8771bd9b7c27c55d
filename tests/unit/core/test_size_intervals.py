"""Which stretch of the workers' line the jobs of one size belong to."""

from itertools import pairwise
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.core.size_intervals import (
    ANYWHERE,
    JOBS_MIN,
    MEMORY_JOBS,
    NO_PULL,
    OCTAVES,
    THERE_S_MAX,
    Pull,
    SizeIntervals,
)


def sizes_of(*jobs: tuple[int, float, float], times: int = 20) -> SizeIntervals:
    """What is known after so many of each (prompt tokens, seconds there, burden in seconds)."""
    sizes = SizeIntervals()
    for _ in range(times):
        for prompt_tokens, there_s, burden_s in jobs:
            sizes.note(prompt_tokens, there_s=there_s, burden_s=burden_s)
    return sizes


def test_nothing_is_known_at_first() -> None:
    """Until enough ran, every worker suits every size."""
    sizes = SizeIntervals()
    assert sizes.mean_burden_s == 0.0
    for _ in range(int(JOBS_MIN) - 1):
        sizes.note(100, there_s=1.0, burden_s=0.1)
        assert sizes.stretch(100) == ANYWHERE
        assert sizes.stretch(100_000) == ANYWHERE
    sizes.note(100, there_s=1.0, burden_s=0.1)
    assert sizes.stretch(100) == ANYWHERE
    assert sizes.stretch(100_000) == (1.0, 1.0)


def test_jobs_that_bring_nothing_belong_anywhere() -> None:
    """No burden, no reason to stand apart."""
    assert sizes_of((100, 1.0, 0.0), (9_000, 1.0, 0.0)).stretch(100) == ANYWHERE


def test_equal_sizes_have_the_whole_line() -> None:
    """Within a factor of two nothing is set apart."""
    sizes = sizes_of((1_100, 4.0, 0.02), (1_900, 6.0, 0.03))
    assert sizes.stretch(1_024) == sizes.stretch(2_047) == ANYWHERE


def test_shares_are_as_the_root_of_time_times_burden() -> None:
    """The least sum of jobs x burden over the line, by Lagrange's multipliers."""
    sizes = sizes_of((1_000, 3.0, 0.02), (30_000, 5.0, 0.60))
    short, long = sqrt(3.0 * 0.02), sqrt(5.0 * 0.60)
    edge = pytest.approx(short / (short + long))
    assert sizes.stretch(1_000) == (0.0, edge)
    assert sizes.stretch(30_000) == (edge, pytest.approx(1.0))
    # A size in between that never ran has the point between them.
    assert sizes.stretch(8_000) == (edge, edge)
    assert sizes.mean_burden_s == pytest.approx(0.31)


def test_the_least_sum_is_there() -> None:
    """Any other edge between the two makes the sum of jobs x burden per worker larger."""
    short_there_s, short_burden_s, long_there_s, long_burden_s = 3.0, 0.02, 5.0, 0.60
    sizes = sizes_of((1_000, short_there_s, short_burden_s), (30_000, long_there_s, long_burden_s))

    def total(edge: float) -> float:
        short = short_there_s * short_burden_s / edge
        return short + long_there_s * long_burden_s / (1.0 - edge)

    best = sizes.stretch(1_000)[1]
    for step in (-0.05, -0.01, 0.01, 0.05):
        assert total(best) < total(best + step)


def test_old_loads_fade() -> None:
    """What was seen long ago counts half, again and again."""
    sizes = sizes_of((1_000, 1.0, 0.1), times=int(MEMORY_JOBS))
    for _ in range(int(20 * MEMORY_JOBS)):
        sizes.note(64_000, there_s=1.0, burden_s=0.1)
        assert sizes.jobs <= MEMORY_JOBS
    assert sizes.stretch(1_000)[1] < 0.001


def test_one_report_of_garbage_places_nobody_for_long() -> None:
    """What an agent tells of one job is believed up to an hour, whatever it says."""
    sizes = sizes_of((1_000, 3.0, 0.02), (30_000, 5.0, 0.60), times=1_000)
    sizes.note(1_000, there_s=1e12, burden_s=1e16)
    assert sizes.mean_burden_s < (620 + THERE_S_MAX + 1) / 2_001
    assert sizes.stretch(1_000)[1] < 1.0


@given(
    st.lists(
        st.tuples(st.integers(0, 2 ** (OCTAVES + 4)), st.floats(0, 1e6), st.floats(0, 1e6)),
        max_size=60,
    )
)
def test_stretches_are_in_order_and_cover_the_line(jobs: list[tuple[int, float, float]]) -> None:
    """Whatever ran: each stretch is in 0..1, and a longer size's begins where the last ended."""
    sizes = sizes_of(*jobs, times=1)
    stretches = [sizes.stretch(2**octave) for octave in range(OCTAVES + 4)]
    for low, high in stretches:
        assert 0.0 <= low <= high <= 1.0
    if len(set(stretches)) > 1:
        for (_, before), (low, _) in pairwise(stretches[: OCTAVES - 1]):
            assert low == pytest.approx(before, abs=1e-9)


def test_a_pull_costs_by_the_way() -> None:
    """Nothing within the stretch, and the whole of its seconds at the other end of the line."""
    pull = Pull((0.5, 0.75), 0.2)
    assert [pull.cost_s(place) for place in (0.5, 0.6, 0.75)] == [0.0, 0.0, 0.0]
    assert pull.cost_s(0.0) == pytest.approx(0.1)
    assert pull.cost_s(1.0) == pytest.approx(0.05)
    assert NO_PULL.cost_s(0.9) == 0.0
