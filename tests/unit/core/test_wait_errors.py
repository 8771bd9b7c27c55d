"""How good a pool's wait estimates are."""

import random
import statistics

import pytest

from broker.core.wait_errors import MEMORY_JOBS, STEPS, WAIT_S_MIN, WaitErrors


def judged(*pairs: tuple[float, float]) -> WaitErrors:
    """Errors of (told, had)."""
    errors = WaitErrors()
    for told_s, had_s in pairs:
        errors.learn(told_s=told_s, had_s=had_s)
    return errors


def test_nothing_judged_is_no_error() -> None:
    """0, of no jobs."""
    assert (WaitErrors().ratio_p50, WaitErrors().jobs) == (0.0, 0)


def test_short_waits_are_not_judged() -> None:
    """A share of them matters to nobody; from 5 s on they count."""
    assert judged((50.0, WAIT_S_MIN - 0.01)).jobs == 0
    assert judged((50.0, WAIT_S_MIN)).jobs == 1


def test_the_median_of_many() -> None:
    """Within a step of the true one, whichever way the estimates were off."""
    rng = random.Random(3)
    ratios = [rng.expovariate(4.0) for _ in range(150)]
    pairs = [(10.0 * (1 + rng.choice((-1, 1)) * ratio), 10.0) for ratio in ratios]
    assert judged(*pairs).ratio_p50 == pytest.approx(statistics.median(ratios), abs=0.04)


def test_exact_estimates_are_in_the_first_step() -> None:
    """No error is less than 2 %."""
    assert judged(*[(10.0, 10.0)] * 9).ratio_p50 <= STEPS[1]


def test_errors_past_the_last_step_count_as_the_last() -> None:
    """A hundredfold estimate is off by 8 at most."""
    assert 4.0 < judged((1000.0, 10.0)).ratio_p50 <= STEPS[-1]


def test_it_follows_the_latest() -> None:
    """Good for long, then bad for as many as are remembered: bad."""
    errors = judged(*[(10.0, 10.0)] * 1000, *[(15.0, 10.0)] * round(MEMORY_JOBS))
    assert 0.4 <= errors.ratio_p50 <= 0.6
    assert errors.jobs == 1200
