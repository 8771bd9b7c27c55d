"""Rows that lend seats: nominal, lendable, ceiling; who goes first, and how a seat comes back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.core.decisions import Dispatch, HeldBy
from broker.core.policy import QuotaRow
from broker.core.quotas import Quotas, jobs_refusal
from broker.core.rows import Borrow, RowUsage
from tests.unit.core.cluster import LANE, MODEL, Cluster, a_policy, a_spec, keys
from tests.unit.core.invariants import check_lending


def a_cohort(*rows: QuotaRow) -> Quotas:
    """Rows on a fleet of four workers."""
    quotas = Quotas(rows)
    quotas.fleet_changed({MODEL: 4}, live_workers_all=4)
    return quotas


def a_row(lane: str = LANE, **fields: float) -> QuotaRow:
    """A lane's row: four seats, all lendable, and up to eight."""
    defaults: dict[str, float] = {
        "inflight_jobs_max": 4,
        "lendable_share": 1.0,
        "ceiling_ratio": 2.0,
    }
    return QuotaRow(lane=lane, **{**defaults, **fields})  # pyright: ignore[reportArgumentType]


def seats_of(quotas: Quotas, lane: str, *, borrow: Borrow = Borrow.ANY) -> int:
    """Give a lane jobs until its row refuses one; returns how many."""
    (usage,) = quotas.matching(lane=lane, band=1, model=MODEL)
    before = usage.inflight_jobs
    while jobs_refusal((usage,), borrow=borrow) is None:
        quotas.take((usage,), 1.0, starts=True)
    check_lending(quotas.rows)
    return usage.inflight_jobs - before


def end_one(quotas: Quotas, lane: str) -> None:
    """End one of a lane's jobs."""
    quotas.give_back(quotas.matching(lane=lane, band=1, model=MODEL), 1.0, unstarted=False)
    check_lending(quotas.rows)


@pytest.mark.parametrize(
    ("lender", "borrower", "most"),
    [
        ({}, {}, 8),
        ({"lendable_share": 0.5}, {}, 6),
        ({"lendable_share": 0.0}, {"lendable_share": 1.0}, 4),
        ({}, {"ceiling_ratio": 1.25}, 5),
        ({}, {"ceiling_ratio": 1.0}, 4),
        ({"inflight_jobs_max": 0}, {}, 4),
        ({"inflight_jobs_max": 20}, {"ceiling_ratio": 3.0}, 12),
    ],
)
def test_a_row_uses_what_others_leave_idle_and_may_lend(
    lender: dict[str, float], borrower: dict[str, float], most: int
) -> None:
    """Its own seats, what the lender offers, and no more than its ceiling; none unless it asks."""
    quotas = a_cohort(a_row("idle", **lender), a_row(LANE, **borrower))
    assert seats_of(quotas, LANE, borrow=Borrow.NOTHING) == 4
    assert seats_of(quotas, LANE) == most - 4


def test_a_lender_gets_its_seat_when_any_job_of_the_borrower_ends() -> None:
    """All eight are taken by one lane; each that ends is the lender's again, and no other's."""
    quotas = a_cohort(a_row("idle"), a_row())
    assert seats_of(quotas, LANE) == 8
    assert seats_of(quotas, "idle") == 0
    for _ in range(4):
        end_one(quotas, LANE)
        assert seats_of(quotas, "idle", borrow=Borrow.NOTHING) == 1
    assert seats_of(quotas, LANE) == 0
    end_one(quotas, LANE)
    assert seats_of(quotas, LANE, borrow=Borrow.NOTHING) == 1


def test_what_is_not_lendable_is_always_there() -> None:
    """Another lender's seats may all be lent: half of this one's are its own at any time."""
    quotas = a_cohort(a_row("half", lendable_share=0.5), a_row("whole"), a_row(ceiling_ratio=10.0))
    assert seats_of(quotas, LANE) == 10
    assert seats_of(quotas, "whole") == 0
    assert seats_of(quotas, "half") == 2


def test_a_seat_is_given_back_to_who_waits_for_it() -> None:
    """Of two lenders the one that holds jobs back comes first."""
    quotas = a_cohort(a_row("calm"), a_row("busy"), a_row(ceiling_ratio=3.0))
    assert seats_of(quotas, LANE) == 12
    (busy,) = quotas.matching(lane="busy", band=1, model=MODEL)
    quotas.refused(busy, MODEL)
    end_one(quotas, LANE)
    assert (busy.lent_jobs, seats_of(quotas, "calm", borrow=Borrow.NOTHING)) == (3, 0)
    assert list(quotas.released) == [MODEL]


def test_rows_of_other_kinds_lend_nothing_to_each_other() -> None:
    """A job may match both: lanes lend to lanes, bands to bands, and each model for itself."""
    quotas = a_cohort(
        a_row(), QuotaRow(band=3, inflight_jobs_max=4, lendable_share=1.0, ceiling_ratio=2.0)
    )
    (lane,) = quotas.matching(lane=LANE, band=1, model=MODEL)
    assert seats_of(quotas, LANE) == 4
    assert lane.borrowed_jobs == 0


def test_rows_that_follow_the_fleet_lend_what_they_have_now() -> None:
    """Workers that leave take seats with them: nothing new until the jobs that run are fewer."""
    quotas = Quotas(
        QuotaRow(lane=lane, inflight_jobs_max_per_worker=1.0, lendable_share=1.0, ceiling_ratio=2.0)
        for lane in ("idle", LANE)
    )
    quotas.fleet_changed({MODEL: 4}, live_workers_all=4)
    assert seats_of(quotas, LANE) == 8
    quotas.fleet_changed({MODEL: 2}, live_workers_all=2)
    check_lending(quotas.rows)
    for _ in range(4):
        end_one(quotas, LANE)
        assert seats_of(quotas, LANE) == 0
    assert seats_of(quotas, "idle") == 0
    end_one(quotas, LANE)
    assert seats_of(quotas, "idle") == 1


def test_a_lender_with_demand_goes_before_any_borrower() -> None:
    """The borrower's jobs are more urgent and older: the seat goes to whom it belongs."""
    policy = a_policy(a_row("beta", inflight_jobs_max=1), a_row(inflight_jobs_max=1))
    cluster = Cluster(policy)
    cluster.hold_many(3, band=0)
    cluster.hold(a_spec("own", lane="beta", band=2, enqueued_at_s=cluster.at_s + 1))
    went = keys(Dispatch, cluster.join("w1", slots=4))
    assert went == ["acme.j0", "beta.own"]


def test_a_borrower_uses_an_idle_lender_s_seat_at_once() -> None:
    """Work conservation: nobody waits for a seat that nobody else can use."""
    policy = a_policy(a_row("beta", inflight_jobs_max=1), a_row(inflight_jobs_max=1))
    cluster = Cluster(policy)
    cluster.join("w1", slots=4)
    assert keys(Dispatch, cluster.hold_many(3)) == ["acme.j0", "acme.j1"]
    why = cluster.scheduler.views.why("acme.j2")
    assert why is not None
    assert (why.held_by, why.row) == (HeldBy.QUOTA, "lane=acme")


def test_a_lender_waits_for_no_more_than_one_job_of_the_borrower() -> None:
    """Its job comes while all is lent: the first of the borrower's ends, and it goes."""
    policy = a_policy(a_row("beta", inflight_jobs_max=1), a_row(inflight_jobs_max=1))
    cluster = Cluster(policy)
    cluster.join("w1", slots=4)
    first, _ = (one for one in cluster.hold_many(9) if isinstance(one, Dispatch))
    assert keys(Dispatch, cluster.hold(a_spec("own", lane="beta"))) == []
    assert keys(Dispatch, cluster.end(first)) == ["beta.own"]


def test_a_reload_counts_who_borrowed_anew() -> None:
    """Under new rows the jobs that run borrow, or stand over the limit until they end."""
    quotas = a_cohort(a_row("idle"), a_row())
    seats_of(quotas, LANE)
    anew = Quotas([a_row("idle", inflight_jobs_max=2), a_row()], before=quotas)
    anew.fleet_changed({MODEL: 4}, live_workers_all=4)
    rows = anew.matching(lane=LANE, band=1, model=MODEL)
    for _ in range(8):
        anew.take(rows, 1.0, starts=False)
    check_lending(anew.rows)
    (usage,) = rows
    assert (usage.borrowed_jobs, usage.seats_used) == (2, 6)
    assert seats_of(anew, LANE) == seats_of(anew, "idle") == 0


shapes = st.tuples(st.integers(0, 5), st.sampled_from((0.0, 0.4, 1.0)), st.floats(1.0, 4.0))
moves = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(("come", "ask", "end", "fleet"))))


@given(st.lists(shapes, min_size=2, max_size=4), moves)
def test_no_row_is_overshot_whatever_comes_and_goes(
    rows: list[tuple[int, float, float]], what: list[tuple[int, str]]
) -> None:
    """Own and lent seats within the nominal, jobs within the ceiling, the cohort within its sum."""
    quotas = Quotas(
        QuotaRow(
            lane=f"l{n}",
            inflight_jobs_max_per_worker=max(seats, 0.1),
            lendable_share=share,
            ceiling_ratio=ratio,
        )
        for n, (seats, share, ratio) in enumerate(rows)
    )
    workers = 2
    quotas.fleet_changed({MODEL: workers}, live_workers_all=workers)
    for number, move in what:
        usage = quotas.rows[number % len(quotas.rows)]
        if move == "fleet":
            workers = 1 + number
            quotas.fleet_changed({MODEL: workers}, live_workers_all=workers)
        elif move == "end" and usage.inflight_jobs:
            quotas.give_back((usage,), 1.0, unstarted=False)
        elif move in ("come", "ask"):
            _take_if_it_may(quotas, usage, Borrow.ANY if move == "ask" else Borrow.NOTHING)
        check_lending(quotas.rows)


def _take_if_it_may(quotas: Quotas, usage: RowUsage, borrow: Borrow) -> None:
    before = [one.lent_jobs for one in quotas.rows]
    if jobs_refusal((usage,), borrow=borrow) is not None:
        return
    quotas.take((usage,), 1.0, starts=True)
    assert usage.seats_used <= usage.jobs_limit
    assert usage.inflight_jobs <= usage.jobs_ceiling
    for one, lent in zip(quotas.rows, before, strict=True):
        if one.lent_jobs > lent:
            assert borrow
            assert one.lent_jobs <= one.lendable_jobs
            assert one.seats_used <= one.jobs_limit


def test_a_row_that_shrinks_is_not_its_own_lender() -> None:
    """What it offered stood on seats that it no longer has: its jobs stand over the limit."""
    quotas = Quotas(
        [
            QuotaRow(lane="idle", inflight_jobs_max=0),
            QuotaRow(
                lane=LANE, inflight_jobs_max_per_worker=3.0, lendable_share=0.4, ceiling_ratio=2.0
            ),
        ]
    )
    quotas.fleet_changed({MODEL: 2}, live_workers_all=2)
    rows = quotas.matching(lane=LANE, band=1, model=MODEL)
    for _ in range(4):
        quotas.take(rows, 1.0, starts=True)
    quotas.fleet_changed({MODEL: 1}, live_workers_all=1)
    check_lending(quotas.rows)
    assert (rows[0].borrowed_jobs, rows[0].seats_used) == (0, 4)
    assert jobs_refusal(rows) is not None
