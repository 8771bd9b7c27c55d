"""Paired differences: what may be claimed, and what not."""

import pytest

from broker.sim.paired import difference


def test_interval_of_a_worked_example() -> None:
    """Of the differences 1, 2, 3 the mean is 2, s is 1, and t with 2 degrees is 4.303."""
    found = difference([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert found.mean == 2
    assert found.interval == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5))


def test_pairs_count_not_the_spread_of_each() -> None:
    """Seeds far apart say nothing against a difference that is the same in each."""
    found = difference([1.0, 10.0, 100.0], [1.1, 10.1, 100.1])
    assert found.verdict(higher_is_better=False) == "better"
    assert found.verdict(higher_is_better=True) == "worse"


def test_interval_that_holds_zero_is_no_difference() -> None:
    """One seed for it and one against it: nothing is claimed either way."""
    found = difference([1.0, 2.0, 3.0], [2.0, 2.0, 2.0])
    assert found.verdict(higher_is_better=False) == "no difference"


def test_equal_runs_are_no_difference() -> None:
    """The interval of zeros is 0 to 0."""
    found = difference([1.0] * 3, [1.0] * 3)
    assert found.interval == (0, 0)
    assert found.verdict(higher_is_better=True) == "no difference"


@pytest.mark.parametrize("seeds", [1, 2])
def test_few_seeds_claim_nothing(seeds: int) -> None:
    """With fewer than three seeds there is no interval and no claim, however far apart."""
    found = difference([1.0] * seeds, [9.0] * seeds)
    assert found.mean == -8
    assert found.interval is None
    assert found.verdict(higher_is_better=False) == "no claim"


def test_many_seeds_use_the_last_row() -> None:
    """Beyond 31 seeds the quantile of 30 degrees stands in."""
    found = difference([0.0, 2.0] * 50, [0.0] * 100)
    assert found.interval is not None
    assert found.interval[1] - found.mean == pytest.approx(2.042 * 0.1005038, rel=1e-4)
