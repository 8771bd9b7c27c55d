"""A lane's results take no more room than a row gives them."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from broker.core.decisions import Dispatch, HeldBy, Reject
from broker.core.events import PolicyChanged, ResultsStand
from broker.core.policy import QuotaRow
from broker.wire.messages import Reason
from tests.unit.core.cluster import LANE, Cluster, a_policy, a_spec, keys, of, only

MEAN_BYTES = 1000.0
ROW = QuotaRow(lane=LANE, result_bytes_max=10_000)


def a_cluster(row: QuotaRow = ROW, *, stored_bytes: int = 0, **fields: Any) -> Cluster:
    """One worker of 20 slots, and a lane with so many bytes of results."""
    cluster = Cluster(a_policy(row, **fields))
    cluster.join("w1", slots=20)
    stand(cluster, stored_bytes)
    return cluster


def stand(cluster: Cluster, stored_bytes: int, *, lane: str = LANE) -> list[Any]:
    """Tell how much a lane's results take."""
    return cluster.step(ResultsStand(cluster.at_s, lane, stored_bytes, MEAN_BYTES))


def test_a_stream_that_holds_less_than_the_row_allows_counts_for_itself() -> None:
    """Its bound was lowered at the server, say; raised again, all go on."""
    cluster = a_cluster(stored_bytes=7000)
    cluster.step(ResultsStand(cluster.at_s, LANE, 7000, MEAN_BYTES, bytes_max=7500.0))
    (refused,) = of(Reject, cluster.hold(a_spec("j1")))
    assert (refused.reason, refused.limit) == (Reason.RESULTS_FULL, 7500.0)
    assert cluster.scheduler.views.rows()[0].result_bytes_max == 7500
    cluster.step(PolicyChanged(cluster.at_s, a_policy(ROW, QuotaRow(band=3, inflight_jobs_max=1))))
    assert of(Reject, cluster.hold(a_spec("j2")))
    stand(cluster, 7000)
    assert keys(Dispatch, cluster.hold(a_spec("j3"))) == [f"{LANE}.j3"]


def test_jobs_in_flight_count_with_what_they_will_add() -> None:
    """Seven thousand bytes stand: three jobs may run, a fourth online one is turned away."""
    cluster = a_cluster(stored_bytes=7000)
    went = cluster.hold_many(5)
    assert len(of(Dispatch, went)) == 3
    refused = of(Reject, went)
    assert [one.reason for one in refused] == [Reason.RESULTS_FULL] * 2
    assert (refused[0].row, refused[0].used, refused[0].limit) == (
        f"lane={LANE} result_bytes",
        10_000,
        10_000,
    )
    assert refused[0].retry_after_s == 30.0


def test_batch_waits_and_goes_on_when_results_are_taken_out() -> None:
    """It is held by the row, told as such, and goes as soon as there is room."""
    cluster = a_cluster(stored_bytes=9500)
    assert keys(Dispatch, cluster.hold(a_spec("line", band=3))) == []
    why = cluster.scheduler.views.why(f"{LANE}.line")
    assert why is not None
    assert (why.held_by, why.row) == (HeldBy.QUOTA, f"lane={LANE} result_bytes")
    assert keys(Dispatch, stand(cluster, 8000)) == [f"{LANE}.line"]


def test_other_lanes_go_on() -> None:
    """A lane's results are its own."""
    cluster = a_cluster(stored_bytes=20_000)
    assert keys(Dispatch, cluster.hold(a_spec("j1", lane="beta"))) == ["beta.j1"]
    stand(cluster, 0, lane="beta")
    assert of(Reject, cluster.hold(a_spec("j1")))


def test_an_end_counts_until_the_next_word() -> None:
    """Between two words of the stream, what ended has its result there."""
    cluster = a_cluster(stored_bytes=8000)
    first = only(Dispatch, cluster.hold(a_spec("j1")))
    cluster.end(first)
    only(Dispatch, cluster.hold(a_spec("j2")))
    assert of(Reject, cluster.hold(a_spec("j3")))
    stand(cluster, 8000)
    assert keys(Dispatch, cluster.hold(a_spec("j4"))) == [f"{LANE}.j4"]


def test_a_result_is_as_large_as_the_lane_s_are() -> None:
    """A lane of long answers has room for fewer."""
    cluster = a_cluster()
    cluster.step(ResultsStand(cluster.at_s, LANE, 0, 6000.0))
    assert len(of(Dispatch, cluster.hold_many(3))) == 1


def test_a_new_policy_keeps_what_is_known() -> None:
    """Reloaded with a higher bound: what stands is not forgotten, what waits may go."""
    cluster = a_cluster(stored_bytes=9500)
    cluster.hold(a_spec("line", band=3))
    higher = a_policy(QuotaRow(lane=LANE, result_bytes_max=10_500, tokens_per_min=10**9))
    cluster.step(PolicyChanged(cluster.at_s, higher))
    cluster.tick(1.0)
    assert cluster.scheduler.views.rows()[0].result_bytes == 10_500
    assert f"{LANE}.line" in keys(Dispatch, cluster.decisions)
    assert of(Reject, cluster.hold(a_spec("j2")))


@settings(max_examples=100, deadline=None)
@given(
    stored=st.lists(st.integers(0, 15_000), min_size=1, max_size=6),
    acts=st.lists(st.integers(0, 3), max_size=40),
)
def test_no_dispatch_overshoots_what_is_known(stored: list[int], acts: list[int]) -> None:
    """Whatever comes, ends, fails or is told: at each dispatch its own result had room."""
    cluster = a_cluster(stored_bytes=stored[0])
    running: list[Dispatch] = []
    for number, act in enumerate(acts):
        if act == 0:
            decisions = cluster.hold(a_spec(f"j{number}", band=number % 4))
        elif act == 1:
            decisions = stand(cluster, stored[number % len(stored)])
        elif running:
            first = running.pop(0)
            decisions = cluster.end(first) if act == 2 else cluster.fail(first)
        else:
            decisions = cluster.tick(0.1)
        (row,) = cluster.scheduler.views.rows()
        went = of(Dispatch, decisions)
        running += went
        assert not went or row.result_bytes <= 10_000
        assert row.inflight_jobs == len(running)
