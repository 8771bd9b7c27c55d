"""Lanes that wait in different bands: what one does in a band is owed to nobody in another."""

from typing import Any

import pytest

from broker.core.decisions import Dispatch
from broker.core.events import PolicyChanged
from broker.core.policy import DEFAULT_BANDS, BandPolicy, Policy, QuotaRow
from tests.unit.core.cluster import LANE, Cluster, a_policy, a_spec, of, only
from tests.unit.core.one_slot import one_slot, run_all, work_of

LANES = (LANE, "beta", "crawl")


def strict(*quotas: QuotaRow, **fields: Any) -> Policy:
    """Three lanes, and bands without guaranteed shares: strictly by priority."""
    bands = tuple(BandPolicy(guaranteed_share=0.0) for _ in DEFAULT_BANDS)
    return a_policy(*quotas, lanes=LANES, bands=bands, **fields)


def lanes_of(went: list[str]) -> dict[str, int]:
    """Count jobs by lane."""
    lanes = [key.split(".")[0] for key in went]
    return {lane: lanes.count(lane) for lane in sorted(set(lanes))}


def test_a_lane_that_wakes_in_a_higher_band_starts_level_there() -> None:
    """One lane had band 1 alone for 200 jobs while another waited in band 2 only: a third that
    comes to band 1 gets half of it, not all of it.
    """
    cluster, dispatch = one_slot(strict())
    cluster.hold_many(300, prefix="a", band=1)
    cluster.hold_many(10, prefix="b", band=2, lane="beta")
    for _ in range(200):
        dispatch = only(Dispatch, cluster.end(dispatch))
    cluster.hold_many(100, prefix="c", band=1, lane="crawl")
    work = work_of(cluster, dispatch, count=50)
    assert work.get(LANE) == pytest.approx(work.get("crawl"), abs=400.0)


def test_what_a_lane_had_alone_in_a_higher_band_is_not_owed_in_a_lower() -> None:
    """It had band 1 alone for 200 jobs, and then stands in band 2 beside a lane that waited there:
    both get half of it.
    """
    cluster, dispatch = one_slot(strict())
    cluster.hold_many(200, prefix="a", band=1)
    cluster.hold_many(100, prefix="x", band=2)
    cluster.hold_many(100, prefix="b", band=2, lane="beta")
    for _ in range(200):
        dispatch = only(Dispatch, cluster.end(dispatch))
    work = work_of(cluster, dispatch, count=50)
    assert work.get(LANE) == pytest.approx(work.get("beta"), abs=400.0)


def test_a_job_in_a_higher_band_costs_a_lane_no_place_in_a_lower() -> None:
    """It wakes in band 1, where all got much already, and keeps its place in band 2."""
    cluster, dispatch = one_slot(strict())
    cluster.hold_many(300, prefix="a", band=1)
    cluster.hold_many(50, prefix="b", band=2, lane="beta")
    cluster.hold_many(50, prefix="c", band=2, lane="crawl")
    for _ in range(298):
        dispatch = only(Dispatch, cluster.end(dispatch))
    cluster.hold(a_spec("urgent", band=1, lane="crawl", enqueued_at_s=cluster.at_s + 9))
    went = run_all(cluster, dispatch, count=43)
    assert sorted(went[:3]) == ["acme.a298", "acme.a299", "crawl.urgent"]
    assert lanes_of(went[3:]) == {"beta": 20, "crawl": 20}


def test_a_lane_banks_nothing_while_others_jobs_go_as_they_come() -> None:
    """Kept at its row while another's jobs come one by one and go at once: when the row opens it
    gets half, but for the little that whoever finds no room may fall behind.
    """
    row = QuotaRow(lane="beta", inflight_jobs_max=0)
    cluster = Cluster(strict(row))
    cluster.join("w1", slots=1)
    cluster.hold_many(300, prefix="b", lane="beta", prompt_tokens=1000, output_tokens_max=0)
    for n in range(300):
        spec = a_spec(f"a{n}", prompt_tokens=1000, output_tokens_max=0, enqueued_at_s=cluster.at_s)
        cluster.end(only(Dispatch, cluster.hold(spec)))
    last = a_spec("last", prompt_tokens=1000, output_tokens_max=0, enqueued_at_s=cluster.at_s)
    dispatch = only(Dispatch, cluster.hold(last))
    cluster.step(PolicyChanged(cluster.at_s, strict()))
    cluster.hold_many(200, prefix="x", prompt_tokens=1000, output_tokens_max=0)
    work = work_of(cluster, dispatch, count=200)
    assert work.get(LANE, 0.0) > 50_000.0


def test_a_lane_banks_nothing_while_its_jobs_rest() -> None:
    """Its one job waits for its next try while another lane is served: then it gets half."""
    cluster = Cluster(strict())
    cluster.join("w1", slots=1)
    first = only(Dispatch, cluster.hold(a_spec("first", lane="beta")))
    cluster.hold_many(300, prefix="a")
    cluster.fail(first)
    dispatch = of(Dispatch, cluster.decisions)[-1]
    for _ in range(200):
        dispatch = only(Dispatch, cluster.end(dispatch))
    cluster.hold_many(100, prefix="b", lane="beta")
    work = work_of(cluster, dispatch, count=50)
    assert work[LANE] == pytest.approx(work["beta"], abs=400.0)


def test_a_reload_moves_no_lane() -> None:
    """All are lined up anew under other rows: who is behind stays so."""
    cluster, dispatch = one_slot(strict())
    cluster.hold_many(50, prefix="b", lane="beta", prompt_tokens=10_000)
    cluster.hold_many(50, prefix="a")
    went = run_all(cluster, dispatch, count=4)
    dispatch = of(Dispatch, cluster.decisions)[-1]
    before = cluster.scheduler.views.pools()
    cluster.step(PolicyChanged(cluster.at_s, strict(QuotaRow(lane="crawl", inflight_jobs_max=9))))
    assert cluster.scheduler.views.pools() == before
    assert lanes_of(went + run_all(cluster, dispatch, count=47)) == {LANE: 50, "beta": 1}


def test_jobs_in_back_off_make_those_of_their_band_no_larger() -> None:
    """Fifteen of a band rest after a failure, one is in line: it is owed its turn at its own size,
    not at the size of all sixteen.
    """
    bands = tuple(BandPolicy(guaranteed_share=share) for share in (0.0, 0.0, 0.5, 0.0))
    cluster = Cluster(a_policy(lanes=LANES, bands=bands))
    cluster.join(*(f"w{n}" for n in range(16)), slots=1)
    sent = of(Dispatch, cluster.hold_many(16, prefix="r", band=2))
    assert not of(Dispatch, cluster.fail(sent[0]))
    cluster.hold_many(40, prefix="p", band=1, lane="beta")
    running = [one for dispatch in sent[1:] for one in of(Dispatch, cluster.fail(dispatch))]
    cluster.hold(a_spec("mine", band=2, lane="crawl"))
    went: list[str] = []
    for dispatch in running[:4]:
        went += [one.key for one in of(Dispatch, cluster.end(dispatch))]
    assert "crawl.mine" in went
