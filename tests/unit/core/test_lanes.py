"""Virtual token counters: fair in work, nothing banked."""

from broker.core.lanes import BATCH, ONLINE, LaneCounters, Ranking, group_of


def test_bands_0_to_2_share_a_counter_and_batch_has_its_own() -> None:
    """A night of batch doesn't cost a lane its day."""
    assert [group_of(band) for band in (0, 1, 2, 3)] == [ONLINE, ONLINE, ONLINE, BATCH]


def test_a_ranking_keeps_lanes_by_counter_then_name() -> None:
    """Lanes move with their counters; equal ones go by name; dropping is idempotent."""
    ranking = Ranking()
    for lane, counter in (("c", 5.0), ("a", 7.0), ("b", 5.0)):
        ranking.put(lane, counter)
    assert list(ranking) == [(5.0, "b"), (5.0, "c"), (7.0, "a")]
    assert (ranking.first, ranking.least, ranking.spread) == ("b", 5.0, 2.0)
    ranking.put("b", 9.0)
    assert list(ranking) == [(5.0, "c"), (7.0, "a"), (9.0, "b")]
    ranking.drop("c")
    ranking.drop("c")
    assert len(ranking) == 2
    assert "c" not in ranking
    assert "a" in ranking


def test_an_empty_ranking_has_no_least_and_no_spread() -> None:
    """Nobody waits: nothing to compare."""
    ranking = Ranking()
    assert ranking.least is None
    assert ranking.spread == 0.0
    assert not ranking


def test_work_is_charged_and_refunded() -> None:
    """The counter rises with work given and falls with work not used."""
    counters = LaneCounters()
    counters.job_waits("a", group=ONLINE)
    assert counters.charge("a", 100.0, group=ONLINE) == 100.0
    assert counters.charge("a", -30.0, group=ONLINE) == 70.0
    assert counters.counter("a", group=ONLINE) == 70.0
    assert counters.counter("a", group=BATCH) == 0.0
    assert list(counters.awake[ONLINE]) == [(70.0, "a")]


def test_a_lane_that_wakes_is_lifted_to_the_least_of_those_awake() -> None:
    """Idleness is not banked: it starts level with the least served, not with its own past."""
    counters = LaneCounters()
    counters.job_waits("a", group=ONLINE)
    counters.job_waits("b", group=ONLINE)
    counters.charge("a", 500.0, group=ONLINE)
    counters.charge("b", 300.0, group=ONLINE)
    counters.job_waits("c", group=ONLINE)
    assert counters.counter("c", group=ONLINE) == 300.0


def test_a_lane_that_is_ahead_keeps_its_counter_when_it_wakes() -> None:
    """Lifting never lowers: sleeping for a moment doesn't wash off what one got."""
    counters = LaneCounters()
    counters.job_waits("a", group=ONLINE)
    counters.charge("a", 500.0, group=ONLINE)
    counters.job_left("a", group=ONLINE)
    counters.job_waits("b", group=ONLINE)
    counters.charge("b", -450.0, group=ONLINE)
    counters.job_waits("a", group=ONLINE)
    assert counters.counter("a", group=ONLINE) == 500.0


def test_a_lane_that_wakes_alone_is_lifted_to_the_last_that_slept() -> None:
    """With nobody awake the last one's counter is the level."""
    counters = LaneCounters()
    counters.job_waits("a", group=ONLINE)
    counters.charge("a", 400.0, group=ONLINE)
    counters.job_left("a", group=ONLINE)
    counters.job_waits("b", group=ONLINE)
    assert counters.counter("b", group=ONLINE) == 400.0


def test_a_charge_after_the_last_job_left_counts_for_the_level() -> None:
    """A job leaves its line before it is charged: who wakes next starts from after the charge."""
    counters = LaneCounters()
    counters.job_waits("a", group=ONLINE)
    counters.job_left("a", group=ONLINE)
    counters.charge("a", 250.0, group=ONLINE)
    counters.job_waits("b", group=ONLINE)
    assert counters.counter("b", group=ONLINE) == 250.0


def test_a_refund_after_the_last_job_left_lowers_the_level_again() -> None:
    """A lane whose only job is refused and comes back a hundred times is where it was."""
    counters = LaneCounters()
    for _ in range(100):
        counters.job_waits("a", group=ONLINE)
        counters.job_left("a", group=ONLINE)
        counters.charge("a", 200.0, group=ONLINE)
        counters.charge("a", -200.0, group=ONLINE)
    assert counters.counter("a", group=ONLINE) == 0.0


def test_a_lane_wakes_with_its_first_job_only() -> None:
    """More jobs of a lane that waits already lift nothing, and it sleeps with its last."""
    counters = LaneCounters()
    counters.job_waits("a", group=ONLINE)
    counters.job_waits("b", group=ONLINE)
    counters.charge("b", 100.0, group=ONLINE)
    counters.job_waits("a", group=ONLINE)
    counters.job_left("a", group=ONLINE)
    assert counters.is_awake("a", group=ONLINE)
    assert counters.counter("a", group=ONLINE) == 0.0
    counters.job_left("a", group=ONLINE)
    assert not counters.is_awake("a", group=ONLINE)
    assert [lane for _, lane in counters.awake[ONLINE]] == ["b"]
    assert not counters.is_awake("b", group=BATCH)
