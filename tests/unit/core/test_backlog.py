"""When the work before a job will be done."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.core.backlog import Rival, Supply, served_after_s

ALONE = Supply(left_tokens_s=100.0, higher_tokens=0.0, floor_tokens_s=10.0)


@pytest.mark.parametrize(
    ("rivals", "after_s"),
    [
        ((), 10.0),
        ((Rival(500.0, 0.0, 1e9),), 15.0),
        ((Rival(5000.0, 0.0, 1000.0),), 20.0),
        ((Rival(0.0, 50.0, 1e9),), 20.0),
        ((Rival(0.0, 50.0, 500.0),), 15.0),
        ((Rival(5000.0, 0.0, 1e9, 50.0),), 20.0),
        ((Rival(500.0, 0.0, 1e9), Rival(0.0, 25.0, 1e9), Rival(1e9, 0.0, 0.0)), 20.0),
    ],
    ids=[
        "alone",
        "all it has",
        "up to mine",
        "arrivals",
        "arrivals up to mine",
        "quota",
        "several",
    ],
)
def test_lanes_are_served_up_to_my_counter(rivals: tuple[Rival, ...], after_s: float) -> None:
    """1,000 tokens at 100 a second, and what the others get meanwhile."""
    assert served_after_s(1000.0, rivals, ALONE) == pytest.approx(after_s)


@pytest.mark.parametrize(
    ("supply", "after_s"),
    [
        (Supply(100.0, 2000.0, 10.0), 30.0),
        (Supply(50.0, 0.0, 10.0), 20.0),
        (Supply(-40.0, 0.0, 10.0), 100.0),
        (Supply(100.0, 1e9, 10.0), 100.0),
        (Supply(-40.0, 0.0, 10.0, 60.0, 25.0), 76.0),
        (Supply(-40.0, 0.0, 30.0, 10.0, 25.0), 1000.0 / 30.0),
    ],
    ids=["backlog above", "arrivals above", "flooded", "drowned", "aged", "share above aging"],
)
def test_a_band_gets_what_is_left_and_its_share_at_least(supply: Supply, after_s: float) -> None:
    """1,000 tokens, at 100 a second in all."""
    assert served_after_s(1000.0, (), supply) == pytest.approx(after_s)


tokens = st.floats(0.0, 1e6)
rates = st.floats(0.0, 300.0)
rival = st.builds(Rival, tokens, rates, tokens, st.one_of(rates, st.just(math.inf)))
supplies = st.builds(
    Supply, st.floats(-300.0, 300.0), tokens, st.floats(0.1, 100.0), st.floats(0.0, 100.0), rates
)


@given(st.lists(rival, max_size=12), supplies, tokens, tokens)
def test_the_more_is_before_the_later(
    rivals: list[Rival], supply: Supply, one: float, other: float
) -> None:
    """Finite, not negative, and no sooner with more of my own before."""
    less, more = sorted((one, other))
    sooner, later = (served_after_s(own, rivals, supply) for own in (less, more))
    assert 0.0 <= sooner <= later * (1 + 1e-9) + 1e-9
    assert math.isfinite(later)


@given(st.lists(rival, max_size=12), supplies, tokens)
def test_by_then_all_of_it_was_given(rivals: list[Rival], supply: Supply, own: float) -> None:
    """What was given by then covers mine and theirs, and no much earlier time's would."""
    after_s = served_after_s(own, rivals, supply)

    def over(at_s: float) -> float:
        return supply.given(at_s)[0] - own - sum(one.served(at_s)[0] for one in rivals)

    size = 1.0 + own + sum(one.up_to_tokens for one in rivals) + supply.higher_tokens
    assert over(after_s) >= -1e-6 * size
    assert after_s < 1e-6 * size or over(after_s * 0.99 - 1e-6) <= 1e-6 * size
