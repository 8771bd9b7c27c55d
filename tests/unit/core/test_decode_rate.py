"""A worker's decode step learned from what it reports: a + b · KV tokens."""

import random

import pytest

from broker.core.decode_rate import (
    APART_RATIO_MIN,
    APART_REPORTS_MIN,
    KIN_REPORTS,
    KINDS_MAX,
    MEMORY_REPORTS,
    STEP_S_MAX,
    VARIATION_MIN,
    DecodeRate,
    Kinds,
    KvOverTime,
)


def a_rate(*reports: tuple[float, float]) -> DecodeRate:
    """A line learned from (KV tokens, step seconds), in order."""
    rate = DecodeRate()
    for kv_tokens, step_s in reports:
        rate.learn(kv_tokens=kv_tokens, step_s=step_s)
    return rate


def on_a_line(kv_tokens: float) -> float:
    """A step of 20 ms, and a microsecond more for each KV token."""
    return 0.020 + 1e-6 * kv_tokens


def test_nothing_is_known_before_any_report() -> None:
    """No step, no slope: the configured rate holds."""
    rate = DecodeRate()
    assert (rate.step_s(10_000), rate.slope_s) == (0.0, 0.0)


def test_a_first_report_is_taken_as_it_is() -> None:
    """One report gives a step at any KV, and no slope."""
    rate = a_rate((5_000, 0.03))
    assert (rate.step_s(0), rate.step_s(50_000)) == (0.03, 0.03)
    assert rate.slope_s == 0.0


def test_a_line_is_found() -> None:
    """Steps on a line give its slope, and steps at KV not seen."""
    rate = a_rate(*((kv, on_a_line(kv)) for kv in (8_000, 12_000, 9_000, 11_000, 10_000)))
    assert rate.slope_s == pytest.approx(1e-6)
    for kv_tokens in (0, 10_000, 100_000):
        assert rate.step_s(kv_tokens) == pytest.approx(on_a_line(kv_tokens))


@pytest.mark.parametrize("steps_s", [(0.02, 0.02), (0.02, 0.04)])
def test_kv_that_never_varied_tells_no_slope(steps_s: tuple[float, float]) -> None:
    """At constant KV, and at none, a step is the mean whatever else made it longer."""
    for kv_tokens in (0, 10_000):
        rate = a_rate(*((kv_tokens, step_s) for step_s in steps_s * 20))
        assert rate.slope_s == 0.0
        assert rate.step_s(99_000) == pytest.approx(sum(steps_s) / 2, rel=0.05)


@pytest.mark.parametrize(("spread", "believed"), [(0.9, False), (1.1, True)])
def test_a_slope_is_believed_from_some_spread_on(spread: float, believed: bool) -> None:
    """KV within `VARIATION_MIN` of its mean is noise."""
    off = 10_000 * VARIATION_MIN * spread
    rate = a_rate(*((kv, on_a_line(kv)) for kv in (10_000 - off, 10_000 + off) * 32))
    assert (rate.slope_s > 0) is believed


def test_noise_moves_the_line_little() -> None:
    """Steps with a tenth of noise give the slope to a fifth, over many reports."""
    rng = random.Random(3)
    rate = DecodeRate()
    for _ in range(200):
        kv_tokens = rng.uniform(5_000, 50_000)
        rate.learn(kv_tokens=kv_tokens, step_s=on_a_line(kv_tokens) * rng.uniform(0.9, 1.1))
    assert rate.slope_s == pytest.approx(1e-6, rel=0.2)
    assert rate.step_s(30_000) == pytest.approx(on_a_line(30_000), rel=0.05)


def test_steps_that_get_shorter_with_more_kv_have_no_slope() -> None:
    """More KV never makes a step shorter: what looks so has another cause."""
    rate = a_rate(*((kv, 0.05 - 1e-6 * kv) for kv in (5_000, 15_000) * 10))
    assert rate.slope_s == 0.0
    assert rate.step_s(1_000_000) == pytest.approx(rate.step_s(0))


def test_a_step_is_never_under_half_the_mean() -> None:
    """Far left of all that was seen the line is not believed."""
    rate = a_rate(*((kv, 1e-6 * kv) for kv in (80_000, 100_000, 120_000)))
    assert rate.step_s(60_000) == pytest.approx(0.06)
    assert rate.step_s(0) == pytest.approx(0.05)


def test_older_reports_fade() -> None:
    """An engine that became slower is believed so within a few times `MEMORY_REPORTS`."""
    rate = a_rate(*((10_000, 0.02),) * 1_000)
    assert rate.weight == MEMORY_REPORTS
    for _ in range(round(MEMORY_REPORTS)):
        rate.learn(kv_tokens=10_000, step_s=0.08)
    assert 0.05 < rate.step_s(10_000) < 0.07
    for _ in range(round(4 * MEMORY_REPORTS)):
        rate.learn(kv_tokens=10_000, step_s=0.08)
    assert rate.step_s(10_000) == pytest.approx(0.08, rel=0.02)


@pytest.mark.parametrize("step_s", [0.0, 1e-12, STEP_S_MAX, 1e300, float("inf")])
@pytest.mark.parametrize("kv_tokens", [0.0, 2.0**53])
def test_garbage_does_no_lasting_harm(step_s: float, kv_tokens: float) -> None:
    """A rate that can't be is bounded: all stays finite, and a minute of true reports mends it."""
    rate = a_rate(*((kv, on_a_line(kv)) for kv in (8_000, 12_000) * 32))
    rate.learn(kv_tokens=kv_tokens, step_s=step_s)
    for asked in (0.0, 10_000.0, 2.0**53):
        assert 0.0 <= rate.step_s(asked) < 1e12
    assert 0.0 <= rate.slope_s < 1.0
    for kv in (8_000, 12_000) * 200:
        rate.learn(kv_tokens=kv, step_s=on_a_line(kv))
    assert rate.step_s(10_000) == pytest.approx(on_a_line(10_000), rel=0.05)


def test_kv_over_time_weighs_each_answers_seconds_alike() -> None:
    """Two answers for a second beside one for three: KV while nothing grew counts nothing."""
    kv = KvOverTime()
    kv.passes(kv_tokens=9_999, answers=0, at_s=100.0)
    kv.passes(kv_tokens=1_000, answers=2, at_s=101.0)
    kv.passes(kv_tokens=500, answers=1, at_s=104.0)
    kv.passes(kv_tokens=9_999, answers=0, at_s=110.0)
    assert kv.read() == (2 * 1 * 1_000 + 1 * 3 * 500) / 5


def test_kv_over_time_begins_anew_at_each_reading() -> None:
    """And says when there was nothing to read."""
    kv = KvOverTime()
    assert kv.read() is None
    kv.passes(kv_tokens=0, answers=0, at_s=1.0)
    kv.passes(kv_tokens=100, answers=1, at_s=2.0)
    assert kv.read() == 100
    assert kv.read() is None
    kv.passes(kv_tokens=300, answers=1, at_s=3.0)
    assert kv.read() == 300


def of_kin(*reports: tuple[float, float]) -> Kinds:
    """What workers of one kind, `gpu`, reported together."""
    kinds = Kinds()
    for kv_tokens, step_s in reports:
        kinds.learn("gpu", kv_tokens=kv_tokens, step_s=step_s)
    return kinds


LINE = tuple((kv, on_a_line(kv)) for kv in (8_000, 12_000, 9_000, 11_000, 10_000))


def test_a_worker_that_never_reported_is_as_its_kin() -> None:
    """Its own kind's, not another's."""
    kinds = of_kin(*LINE)
    new = DecodeRate()
    assert kinds.line("gpu", new).step_s(9_500) == pytest.approx(on_a_line(9_500))
    assert kinds.line("other", new) is new


@pytest.mark.parametrize(
    ("ratio", "is_apart"), [(1.2, False), (0.85, False), (1.3, True), (0.7, True)]
)
def test_a_worker_stands_apart_where_that_is_plain(ratio: float, is_apart: bool) -> None:
    """APART_RATIO_MIN either way, by its own reports at its own KV; slope and step alike."""
    assert 1.2 < APART_RATIO_MIN < 1.3
    kinds = of_kin(*LINE)
    own = a_rate(*[(20_000, ratio * on_a_line(20_000))] * int(APART_REPORTS_MIN))
    line = kinds.line("gpu", own)
    factor = ratio if is_apart else 1.0
    assert line.step_s(9_000) == pytest.approx(factor * on_a_line(9_000))
    assert line.slope_s == pytest.approx(factor * 1e-6)


def test_a_few_reports_set_nobody_apart() -> None:
    """APART_REPORTS_MIN: the first ones are noise."""
    own = a_rate(*[(10_000, 3 * on_a_line(10_000))] * (int(APART_REPORTS_MIN) - 1))
    assert of_kin(*LINE).line("gpu", own).step_s(10_000) == pytest.approx(on_a_line(10_000))


def test_kin_remember_longer_and_their_kinds_are_bounded() -> None:
    """KIN_REPORTS weigh; beyond KINDS_MAX a kind stands for itself."""
    kinds = of_kin(*[(10_000, 0.03)] * (int(KIN_REPORTS) + 10))
    assert kinds.line("gpu", DecodeRate()).weight == KIN_REPORTS
    for number in range(KINDS_MAX):
        kinds.learn(number, kv_tokens=1.0, step_s=0.01)
    own = DecodeRate()
    assert kinds.line(KINDS_MAX - 2, own) is not own
    assert kinds.line(KINDS_MAX - 1, own) is own
