"""How loaded a point is."""

import pytest

from broker.sim.load import Load, load_of, offered_tokens_s
from broker.sim.request import Workload
from tests.comparisons import a_workload, some_figures


def load(workload: Workload, *, speed: float, ttft_s: float = 0.3) -> Load:
    """Measure the load where round robin can do 1,000 tokens/s."""
    return load_of(
        workload,
        speed=speed,
        at_point=some_figures(ttft_s, throughput_tokens_s=500.0),
        all_at_once=some_figures(throughput_tokens_s=1000.0),
    )


def test_offered_rate_follows_speed() -> None:
    """10 requests of 110 tokens in 9 s; three times as many a second at speed 3."""
    assert offered_tokens_s(a_workload(), speed=1) == pytest.approx(1100 / 9)
    assert offered_tokens_s(a_workload(), speed=3) == pytest.approx(1100 / 3)


def test_load_is_offered_by_capacity() -> None:
    """Inter-token latency is comparable below 80 % of what round robin can do."""
    assert load(a_workload(), speed=1).load_ratio == pytest.approx(1.1 / 9)
    assert load(a_workload(), speed=6.5).itl_comparable
    assert not load(a_workload(), speed=6.6).itl_comparable


@pytest.mark.parametrize(
    ("speed", "ttft_s", "overloaded"),
    [(9.0, 30.0, True), (9.0, 9.0, False), (8.0, 30.0, False)],
    ids=["backlog grows", "over before it counts", "within capacity"],
)
def test_overload_needs_rate_and_backlog(speed: float, ttft_s: float, overloaded: bool) -> None:
    """More than capacity for so long that requests wait 10 s on average."""
    assert load(a_workload(), speed=speed, ttft_s=ttft_s).overloaded is overloaded


def test_sessions_offer_what_was_served() -> None:
    """Turns wait for answers, so they can't overload anything."""
    found = load(a_workload(after=True), speed=100, ttft_s=30.0)
    assert found.offered_tokens_s == 500
    assert not found.overloaded


def test_all_at_once_offers_what_was_served() -> None:
    """A burst at one instant has no rate."""
    assert load(a_workload(gap_s=0.0), speed=1).load_ratio == 0.5
