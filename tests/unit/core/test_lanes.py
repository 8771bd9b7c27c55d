"""Virtual token counters: fair in work, nothing banked, each band apart."""

import pytest

from broker.core.lanes import DEBT_TOKENS_MAX, LaneCounters, Ranking, _Books

STANDARD, BATCH = 2, 3


def sent(counters: LaneCounters, lane: str, cost: float, *, slack_tokens: float = 0.0) -> None:
    """Let a standard job of a lane go."""
    counters.dispatched(lane, cost, band=STANDARD, slack_tokens=slack_tokens)


def in_line(*lanes: str) -> LaneCounters:
    """Lanes with a standard job each in line."""
    counters = LaneCounters()
    for lane in lanes:
        counters.lined_up(lane, band=STANDARD)
    return counters


def test_a_ranking_keeps_lanes_by_counter_then_name() -> None:
    """Lanes move with their counters; equal ones go by name; dropping is idempotent."""
    ranking = Ranking()
    for lane, counter in (("c", 5.0), ("a", 7.0), ("b", 5.0)):
        ranking.put(lane, counter)
    assert list(ranking) == [(5.0, "b"), (5.0, "c"), (7.0, "a")]
    assert (ranking.first, ranking.least, ranking.greatest) == ("b", 5.0, 7.0)
    ranking.put("b", 9.0)
    assert list(ranking) == [(5.0, "c"), (7.0, "a"), (9.0, "b")]
    ranking.drop("c")
    ranking.drop("c")
    assert len(ranking) == 2
    assert "c" not in ranking
    assert "a" in ranking


def test_an_empty_ranking_has_no_least_and_no_greatest() -> None:
    """Nobody waits: nothing to compare."""
    ranking = Ranking()
    assert (ranking.least, ranking.greatest) == (None, None)
    assert not ranking
    assert LaneCounters().gap == 0.0


def test_work_is_charged_and_corrected() -> None:
    """The counter rises with work given and falls with work not used, in its own band only."""
    counters = in_line("a")
    sent(counters, "a", 100.0)
    counters.correct("a", -30.0, band=STANDARD)
    assert counters.counter("a", band=STANDARD) == counters.place("a", band=STANDARD) == 70.0
    assert [counters.counter("a", band=band) for band in (0, 1, BATCH)] == [0.0] * 3


def test_a_lane_that_wakes_is_lifted_to_the_least_of_those_awake() -> None:
    """Idleness is not banked: it starts level with the least served, not with its own past."""
    counters = in_line("a", "b")
    sent(counters, "a", 500.0)
    sent(counters, "b", 300.0)
    counters.lined_up("c", band=STANDARD)
    counters.lined_up("c", band=BATCH)
    assert counters.counter("c", band=STANDARD) == 300.0
    assert counters.counter("c", band=BATCH) == 0.0


def test_a_lane_that_is_ahead_keeps_its_counter_when_it_wakes() -> None:
    """Lifting never lowers: sleeping for a moment doesn't wash off what one got."""
    counters = in_line("a")
    sent(counters, "a", 500.0)
    counters.left("a", band=STANDARD)
    counters.lined_up("b", band=STANDARD)
    counters.correct("b", -450.0, band=STANDARD)
    counters.lined_up("a", band=STANDARD)
    assert counters.counter("a", band=STANDARD) == 500.0


def test_a_lane_that_wakes_alone_is_lifted_to_the_last_that_slept() -> None:
    """With nobody awake the last one's counter is the level."""
    counters = in_line("a")
    sent(counters, "a", 400.0)
    counters.left("a", band=STANDARD)
    counters.lined_up("b", band=STANDARD)
    assert counters.counter("b", band=STANDARD) == 400.0


def test_a_charge_after_the_last_job_left_counts_for_the_level() -> None:
    """A job leaves its line before it is charged: who wakes next starts from after the charge."""
    counters = in_line("a")
    counters.left("a", band=STANDARD)
    sent(counters, "a", 250.0)
    counters.lined_up("b", band=STANDARD)
    assert counters.counter("b", band=STANDARD) == 250.0


def test_a_refund_after_the_last_job_left_lowers_the_level_again() -> None:
    """A lane whose only job is refused and comes back a hundred times is where it was."""
    counters = LaneCounters()
    for _ in range(100):
        counters.lined_up("a", band=STANDARD)
        counters.left("a", band=STANDARD)
        sent(counters, "a", 200.0)
        counters.correct("a", -200.0, band=STANDARD)
    assert counters.counter("a", band=STANDARD) == 0.0


def test_a_lane_wakes_with_its_first_job_only() -> None:
    """More jobs of a lane in line already lift nothing, and it sleeps with its last."""
    counters = in_line("a", "b")
    sent(counters, "b", 100.0)
    counters.lined_up("a", band=STANDARD)
    counters.left("a", band=STANDARD)
    assert counters.is_awake("a", band=STANDARD)
    assert counters.counter("a", band=STANDARD) == 0.0
    counters.left("a", band=STANDARD)
    assert not counters.is_awake("a", band=STANDARD)
    assert counters.is_awake("b", band=STANDARD)
    assert not counters.is_awake("b", band=BATCH)


def test_a_lift_never_lowers() -> None:
    """Raised to what it is told, or left where it is."""
    counters = in_line("a")
    counters.lift("a", 40.0, band=STANDARD)
    counters.lift("a", 30.0, band=STANDARD)
    assert counters.counter("a", band=STANDARD) == 40.0


def test_who_goes_before_its_turn_leaves_others_a_bounded_debt() -> None:
    """Past lanes in line by any amount: they count as no more than the bound behind, in the order
    in which they were.
    """
    counters = in_line("a", "b", "c")
    sent(counters, "b", 10.0)
    for _ in range(200):
        counters.goes_first("c", band=STANDARD, slack_tokens=500.0)
        sent(counters, "c", 1000.0, slack_tokens=500.0)
    floor = 199_000.0 - 500.0 - DEBT_TOKENS_MAX
    assert counters.floor(band=STANDARD) == floor
    assert [counters.counter(lane, band=STANDARD) for lane in "ab"] == [floor, floor]
    assert [counters.place(lane, band=STANDARD) for lane in "ab"] == [0.0, 10.0]
    assert counters.period.passed_max == DEBT_TOKENS_MAX
    sent(counters, "a", 100.0)
    assert counters.counter("a", band=STANDARD) == floor + 100.0


def test_gap_and_bound_are_those_of_lanes_in_line_in_one_band() -> None:
    """The greatest difference in any band, beside U + Q + P + K·E."""
    counters = in_line("a", "b")
    counters.lined_up("c", band=BATCH)
    counters.dispatched("c", 9000.0, band=BATCH, slack_tokens=0.0)
    assert (counters.gap, counters.bound(slack_tokens=0.0)) == (0.0, 9000.0)
    sent(counters, "a", 700.0)
    sent(counters, "a", 300.0)
    assert (counters.gap, counters.period.passed_max) == (1000.0, 700.0)
    counters.inflight(3)
    for amount in (-20.0, 10.0):
        counters.erred(amount)
    assert counters.bound(slack_tokens=500.0) == 9000.0 + 500.0 + 700.0 + 3 * 20.0


def test_one_huge_failure_does_not_loosen_the_bound_for_ever() -> None:
    """Two periods later it is of the jobs of that time again; until then of how far lanes are."""
    counters = LaneCounters(period_jobs=10)
    for lane in "ab":
        counters.lined_up(lane, band=STANDARD)
    counters.inflight(1)
    sent(counters, "a", 50_000.0)
    counters.correct("a", -50_000.0, band=STANDARD)
    counters.erred(50_000.0)
    loose = counters.bound(slack_tokens=0.0)
    assert loose == 100_000.0
    for turn in range(20):
        sent(counters, "ab"[turn % 2], 100.0)
        assert counters.gap <= counters.bound(slack_tokens=0.0)
    assert counters.bound(slack_tokens=0.0) == 100.0


def test_a_period_that_begins_with_lanes_apart_knows_how_far() -> None:
    """What was given before it is no more than it was: the gap of then stands in for it."""
    counters = LaneCounters(period_jobs=3)
    for lane in "ab":
        counters.lined_up(lane, band=STANDARD)
    sent(counters, "a", 9000.0)
    for _ in range(80):
        sent(counters, "b", 100.0)
        assert counters.gap <= counters.bound(slack_tokens=0.0)
    assert counters.gap == 1000.0
    assert counters.bound(slack_tokens=0.0) < 2000.0


def test_a_lane_that_slept_is_part_of_how_far_lanes_are_apart() -> None:
    """It wakes with its counter; the period began while it slept."""
    counters = LaneCounters(period_jobs=2)
    for lane in "ab":
        counters.lined_up(lane, band=STANDARD)
    sent(counters, "a", 9000.0)
    counters.left("a", band=STANDARD)
    for _ in range(8):
        sent(counters, "b", 100.0)
    counters.lined_up("a", band=STANDARD)
    assert counters.gap == 8200.0
    assert counters.gap <= counters.bound(slack_tokens=0.0) < 9000.0


def test_a_period_that_forgets_how_far_lanes_were_apart_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without D the bound would be untrue until lanes have met."""
    monkeypatch.setattr(_Books, "apart", 0.0)
    with pytest.raises(AssertionError):
        test_a_period_that_begins_with_lanes_apart_knows_how_far()
