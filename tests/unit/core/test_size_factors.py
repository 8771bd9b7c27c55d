"""By how much small jobs wait less than the mean, and large ones more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.core.size_factors import FACTOR_MAX, FACTOR_MIN, SizeFactors


def learned(*lessons: tuple[float, float, float], times: int = 200) -> SizeFactors:
    """Factors that learned (tokens, estimated, had) many times over."""
    factors = SizeFactors()
    for _ in range(times):
        for tokens, estimated_s, had_s in lessons:
            factors.learn(tokens, estimated_s=estimated_s, had_s=had_s)
    return factors


def test_nothing_learned_is_no_factor() -> None:
    """1, for any size."""
    assert [SizeFactors().of(tokens) for tokens in (0.0, 1.0, 1e6)] == [1.0, 1.0, 1.0]


def test_a_size_waits_as_it_did() -> None:
    """Small ones half of the estimate, large ones twice, and those between in between."""
    factors = learned((512, 100.0, 50.0), (8192, 100.0, 200.0))
    assert factors.of(512) == pytest.approx(0.5, abs=0.05)
    assert factors.of(8192) == pytest.approx(2.0, abs=0.1)
    assert factors.of(100_000) == 1.0


def test_sizes_near_share_a_factor() -> None:
    """Between two steps the factor is on the straight line between theirs."""
    factors = learned((512, 100.0, 50.0), (512 * 2 ** (1 / 3), 100.0, 150.0))
    low, high = factors.of(512), factors.of(512 * 2 ** (1 / 3))
    assert factors.of(512 * 2 ** (1 / 6)) == pytest.approx((low + high) / 2, rel=1e-6)


def test_what_was_hardly_seen_is_hardly_believed() -> None:
    """One job that waited ten times as long is a tenth of 100 s of doubt, no more."""
    assert learned((512, 10.0, 100.0), times=1).of(512) < 2.0


def test_short_waits_teach_nothing() -> None:
    """Single residuals say nothing of sizes."""
    assert learned((512, 0.1, 0.9)).of(512) == 1.0


def test_it_forgets() -> None:
    """After some hundred jobs that wait as estimated, what was before is gone."""
    factors = learned((512, 100.0, 300.0))
    for _ in range(200):
        factors.learn(512, estimated_s=100.0, had_s=100.0)
    assert factors.of(512) == pytest.approx(1.0, abs=0.01)


@given(st.lists(st.tuples(st.floats(0, 1e7), st.floats(0, 1e6), st.floats(0, 1e6)), max_size=30))
def test_factors_have_bounds(lessons: list[tuple[float, float, float]]) -> None:
    """Whatever was learned."""
    factors = learned(*lessons, times=1)
    for tokens, _, _ in lessons:
        assert FACTOR_MIN <= factors.of(tokens) <= FACTOR_MAX


@pytest.mark.parametrize(("had_s", "factor"), [(1e6, FACTOR_MAX), (0.0, FACTOR_MIN)])
def test_the_bounds_are_reached(had_s: float, factor: float) -> None:
    """A size that never, or always, goes at once."""
    assert learned((512, 1e4, had_s)).of(512) == factor
