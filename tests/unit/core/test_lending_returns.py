"""A lent seat comes back within one job's residual, whatever runs and waits when its owner asks."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.core.decisions import Dispatch
from broker.core.order import Order
from broker.core.policy import QuotaRow
from broker.core.queues import Pool
from broker.core.rows import Borrow
from tests.unit.core.cluster import Cluster, a_policy, a_spec, keys, of

LANES = ("owner", "one", "two")
SLOTS = 64
"""Room for all: only rows hold anybody."""

seats = st.integers(1, 4)
rows = st.tuples(seats, st.sampled_from((0.5, 1.0)), st.sampled_from((1.0, 2.0, 4.0)))


def check_returns(seed: int, drawn: list[tuple[int, float, float]], bands: list[int]) -> None:
    """Let two lanes take what they can, also from a third, and then let that one ask for a seat.

    Only jobs that ran when it asked end; each end calls up the next of the borrowers' many. Raises
    AssertionError where all of them ended, and its job did not go.
    """
    rng = random.Random(seed)
    quotas = (
        QuotaRow(lane=lane, inflight_jobs_max=nominal, lendable_share=share, ceiling_ratio=ratio)
        for lane, (nominal, share, ratio) in zip(LANES, drawn, strict=True)
    )
    cluster = Cluster(a_policy(*quotas, lanes=LANES))
    cluster.join("w1", slots=SLOTS)
    for lane, band in zip(LANES[1:], bands, strict=True):
        cluster.hold_many(30, lane=lane, band=band, prefix=lane)
    given_ = {one.key: one for one in of(Dispatch, cluster.decisions)}
    running = list(given_)
    new = cluster.hold(a_spec("asks", lane="owner", enqueued_at_s=cluster.at_s + 1))
    rng.shuffle(running)
    while running and "owner.asks" not in keys(Dispatch, new):
        new = cluster.end(given_[running.pop()])
    assert "owner.asks" in keys(Dispatch, new), "a lent seat did not come back"


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    drawn=st.lists(rows, min_size=3, max_size=3),
    bands=st.lists(st.integers(0, 3), min_size=2, max_size=2),
)
def test_a_lender_waits_for_no_job_that_was_given_after_it_asked(
    seed: int, drawn: list[tuple[int, float, float]], bands: list[int]
) -> None:
    """The borrowers have jobs without end, of any urgency: it is one residual at most."""
    check_returns(seed, drawn, bands)


def test_borrowers_that_go_first_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a borrower's next job competes for the seat that its last one leaves."""

    def choose(self: Order, pool: Pool) -> object:
        return self._choose_by_band(pool, Borrow.ANY)

    monkeypatch.setattr(Order, "_choose", choose)
    with pytest.raises(AssertionError, match="did not come back"):
        check_returns(1, [(2, 1.0, 1.0), (2, 1.0, 4.0), (2, 1.0, 4.0)], [0, 0])
