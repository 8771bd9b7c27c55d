"""How long a batch takes, and how likely it is too long."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.batches.forecast import (
    AGED_RATIO,
    AGED_S,
    SAMPLE_S,
    SAMPLES_MAX,
    SPREAD_MIN,
    SPREAD_UNKNOWN,
    Pace,
    Rate,
    aged,
    duration,
    forecast,
    miss_ratio,
    rate_of,
    shared,
    told,
)
from producers.batches.records import Forecast

TIMES = st.floats(0.1, 1e7)


def paced(*ended: int) -> Pace:
    """A pace with a sample each SAMPLE_S."""
    pace = Pace()
    for number, count in enumerate(ended):
        pace.note(count, at_s=number * SAMPLE_S)
    return pace


def test_a_steady_pace_is_trusted() -> None:
    """Lines over time; little doubt is left, and some always is."""
    pace = paced(*range(0, 1000, 50))
    assert pace.rate == Rate(50 / SAMPLE_S, SPREAD_MIN)


def test_an_unsteady_pace_is_doubted() -> None:
    """More than a steady one of the same mean."""
    unsteady, steady = paced(0, 100, 100, 200, 200).rate, paced(0, 50, 100, 150, 200).rate
    assert unsteady is not None
    assert steady is not None
    assert unsteady.spread > steady.spread


def test_the_beginning_is_not_counted() -> None:
    """Nothing ends while a run begins; the pace is that of the lines from then on.

    Measured on a batch of 48 s: at a tenth of its lines 3 times as long was told as it then took.
    """
    for pace in (paced(0, 0, 0, 50, 100, 150), paced(700, 700, 750, 800)):
        assert pace.rate is not None
        assert pace.rate.a_second == 50 / SAMPLE_S


@pytest.mark.parametrize("ended", [[], [5], [5, 5], [0, 5]])
def test_nothing_is_known_at_first(ended: list[int]) -> None:
    """No pace, no forecast; and of the first two samples all the doubt."""
    assert paced(*ended).rate is None
    assert forecast(5, paced(*ended).rate, left_s=9.0, at_s=0.0) is None
    assert told(None) == {}
    assert paced(0, 5, 10).rate == Rate(5 / SAMPLE_S, SPREAD_UNKNOWN)


@pytest.mark.parametrize("points", [[], [(0.0, 1.0)], [(0.0, 1.0), (5.0, 1.0)], [(5.0, 1.0)] * 2])
def test_what_stands_still_has_no_rate(points: list[tuple[float, float]]) -> None:
    """Nor has what is seen at one time alone."""
    assert rate_of(points) is None


def test_others_count_as_far_as_they_share() -> None:
    """Of each as much is done as of this one, or all that it has."""
    assert shared(100, []) == 100
    assert shared(100, [10_000, 30, 0]) == 100 + 100 + 30


def test_samples_are_bounded_and_spaced() -> None:
    """Old ones go, so the pace is today's; too fresh ones are not taken."""
    pace = Pace()
    pace.note(0, at_s=-1.0)
    pace.note(1, at_s=0.0)
    pace.note(1000, at_s=SAMPLE_S / 2)
    assert pace.rate is None
    for number in range(1, 3 * SAMPLES_MAX):
        pace.note(number * 10 if number > SAMPLES_MAX else 1, at_s=number * SAMPLE_S)
    assert pace.rate is not None
    assert pace.rate.a_second == 10 / SAMPLE_S


@given(TIMES, TIMES, st.floats(0.1, 2.0))
def test_the_chance_is_one_and_grows_with_the_work(
    takes_s: float, left_s: float, spread: float
) -> None:
    """Between 0 and 1, half at the window's very end, more for what takes longer."""
    ratio = miss_ratio(takes_s, left_s, spread)
    assert 0.0 <= ratio <= 1.0
    assert miss_ratio(left_s, left_s, spread) == 0.5
    assert miss_ratio(takes_s * 2, left_s, spread) >= ratio
    assert miss_ratio(takes_s, left_s * 2, spread) <= ratio


def test_the_ends_of_the_chance() -> None:
    """Nothing left can't miss; a window that is over is missed."""
    assert (miss_ratio(0.0, 0.0, 0.5), miss_ratio(1.0, 0.0, 0.5)) == (0.0, 1.0)
    one_sigma = miss_ratio(10.0, 10.0 * math.exp(0.5), 0.5)
    assert one_sigma == pytest.approx(0.1587, abs=1e-4)


def test_a_forecast_ages_by_steps() -> None:
    """Of a batch that waits: less is left as time passes, and some always is."""
    first = Forecast(at_s=0.0, takes_s=7200.0, miss_ratio=0.0)
    assert aged(first, left_s=9000.0, at_s=7200.0 * AGED_RATIO - 1) is first
    later = aged(first, left_s=3600.0, at_s=3600.0)
    assert (later.at_s, later.takes_s, later.miss_ratio) == (3600.0, 3600.0, 0.5)
    assert aged(first, left_s=9.0, at_s=8000.0).takes_s == AGED_S
    short = Forecast(at_s=0.0, takes_s=10.0, miss_ratio=0.0)
    assert aged(short, left_s=9000.0, at_s=AGED_S - 1) is short


def test_it_is_told_in_words_and_numbers() -> None:
    """For people and for scripts."""
    ahead = forecast(7200, Rate(1.0, 0.5), left_s=7200.0, at_s=0.0)
    assert told(ahead) == {
        "inferlane_takes": "at today's capacity this takes 2 h 0 min",
        "inferlane_takes_s": "7200",
        "inferlane_miss_chance": "0.50",
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (119, "119 s"),
        (130, "2 min"),
        (7000, "117 min"),
        (8000, "2 h 13 min"),
        (200_000, "2 d 7 h"),
    ],
)
def test_durations_are_rough(seconds: float, text: str) -> None:
    """Nobody needs the seconds of a day."""
    assert duration(seconds) == text
