"""Which job of a lane is next, and what passes it over."""

import pytest

from broker.core.bands import CREDIT_TOKENS_MAX
from broker.core.decisions import Abort, Dispatch, HeldBy, Queued, Requeue
from broker.core.events import DispatchAllowed
from broker.core.gate import HOLD_LOOK_S
from broker.core.order import PASSES
from broker.core.policy import (
    OrderPolicy,
    QuotaRow,
)
from broker.wire.messages import Load
from tests.unit.core.cluster import LANE, MODEL, Cluster, a_policy, a_spec, keys, of, only
from tests.unit.core.invariants import check_sums
from tests.unit.core.one_slot import (
    AdapterRouter,
    ChoosyRouter,
    HoldingRouter,
    ShortOfPrefillRouter,
    one_slot,
    run_all,
)


@pytest.mark.parametrize(("waits_s", "first"), [(1.9, "acme.new"), (2.1, "acme.old")])
def test_nobody_is_overtaken_for_longer_than_its_prefill_over_alpha(
    waits_s: float, first: str
) -> None:
    """A job of 0.4 s more prefill is overtaken by jobs that came up to 2 s later (α = 0.2)."""
    cluster, dispatch = one_slot()
    cluster.hold(a_spec("old", prompt_tokens=3300, enqueued_at_s=1000.0))
    cluster.hold(a_spec("new", prompt_tokens=100, enqueued_at_s=1000.0 + waits_s))
    assert run_all(cluster, dispatch)[0] == first


@pytest.mark.parametrize(("waits_s", "first"), [(3.9, "acme.new"), (4.1, "acme.old")])
def test_jobs_of_one_deadline_still_wait_each_for_itself(waits_s: float, first: str) -> None:
    """Lines of a batch are all due at its end: a long one is passed for twice as long, not always.

    With all of the deadline counted as waited, short lines that kept coming passed it for ever.
    """
    cluster, dispatch = one_slot()
    due_at_s = 1500.0
    cluster.hold(
        a_spec("old", prompt_tokens=3300, enqueued_at_s=1000.0, deadline_at_s=due_at_s),
        a_spec("new", prompt_tokens=100, enqueued_at_s=1000.0 + waits_s, deadline_at_s=due_at_s),
    )
    assert run_all(cluster, dispatch)[0] == first


def test_a_nearer_deadline_goes_before() -> None:
    """Of equal jobs the one due sooner; without deadline the longest wait counts."""
    cluster, dispatch = one_slot()
    cluster.hold(
        a_spec("none"),
        a_spec("far", deadline_at_s=1900.0),
        a_spec("near", deadline_at_s=1100.0),
        a_spec("nearest", deadline_at_s=1050.0),
    )
    went = run_all(cluster, dispatch)
    assert went == ["acme.nearest", "acme.near", "acme.far", "acme.none"]


def test_equal_jobs_go_in_the_order_of_the_stream() -> None:
    """Same size, same time: by stream sequence, whatever the order in which they were pulled."""
    cluster, dispatch = one_slot()
    cluster.hold(
        a_spec("b", stream_sequence=2),
        a_spec("c", stream_sequence=3),
        a_spec("a", stream_sequence=1),
    )
    assert run_all(cluster, dispatch) == ["acme.a", "acme.b", "acme.c"]


def test_only_the_first_candidates_of_a_lane_are_looked_at() -> None:
    """With a window of 4 the short fifth job waits until it is among the first four."""
    policy = a_policy(order=OrderPolicy(lane_slack_tokens=0.0, candidates_max=4))
    cluster, dispatch = one_slot(policy)
    sizes = (4000, 3900, 3800, 3700, 10)
    cluster.hold(
        *(a_spec(f"j{n}", prompt_tokens=size, stream_sequence=n) for n, size in enumerate(sizes))
    )
    assert run_all(cluster, dispatch) == ["acme.j3", "acme.j4", "acme.j2", "acme.j1", "acme.j0"]


def test_the_window_is_shared_by_the_lanes_of_the_fair_set() -> None:
    """However many lanes are equal, a dispatch asks for a bounded number of placements."""
    lanes = tuple(f"lane{n}" for n in range(40))
    policy = a_policy(lanes=(*lanes, "beta"), order=OrderPolicy(lane_slack_tokens=1e9))
    cluster, dispatch = one_slot(policy)
    for lane in lanes:
        cluster.hold_many(20, lane=lane, prompt_tokens=4000)
    before = cluster.router.placed
    cluster.end(dispatch)
    assert cluster.router.placed - before <= 64 + 3


def test_case_16_nothing_that_runs_is_ever_taken_back_for_another() -> None:
    """Two lanes over each other's work for long: no abort, no requeue, so no cycles."""
    cluster = Cluster(a_policy(QuotaRow(lane=LANE, inflight_jobs_max=1)))
    cluster.join("w1", slots=2)
    cluster.hold_many(100, prefix="a", band=2)
    cluster.hold_many(100, prefix="b", band=1, lane="beta")
    running = of(Dispatch, cluster.decisions)
    while running:
        running += of(Dispatch, cluster.end(running.pop(0)))
    assert not of(Abort, cluster.decisions)
    assert not of(Requeue, cluster.decisions)
    assert len(of(Dispatch, cluster.decisions)) == 200


def test_case_17_a_queue_that_was_idle_for_long_still_serves() -> None:
    """Nothing sweeps queues: one that sleeps costs nothing, and a job in it is never lost."""
    cluster = Cluster()
    cluster.join("w1")
    for _ in range(3):
        cluster.end(only(Dispatch, cluster.hold(a_spec(band=3))))
        cluster.wait(100.0)


def test_case_19_a_batch_backlog_costs_people_its_share_and_no_more() -> None:
    """Before 3,000 batch lines each chat goes next, but for the twentieth part that is batch's."""
    cluster, dispatch = one_slot()
    cluster.hold_many(3000, band=3, prefix="line")
    batch = 0
    for n in range(400):
        cluster.hold(a_spec(f"chat{n}", band=1, enqueued_at_s=cluster.at_s))
        dispatch = only(Dispatch, cluster.end(dispatch))
        if dispatch.key.startswith("acme.line"):
            batch += 1
            dispatch = only(Dispatch, cluster.end(dispatch))
        assert dispatch.key == f"acme.chat{n}"
    assert batch == pytest.approx(0.05 * 400, abs=2)


def test_a_job_that_waits_for_room_blocks_no_other_model() -> None:
    """A model without workers holds its own jobs only."""
    cluster = Cluster()
    cluster.join("w1")
    cluster.hold(a_spec("j1", model="other"))
    assert keys(Dispatch, cluster.hold(a_spec("j2"))) == ["acme.j2"]
    why = cluster.scheduler.views.why("acme.j1")
    assert why is not None
    assert why.held_by is HeldBy.NO_WORKERS


def test_a_job_too_large_for_the_room_blocks_no_smaller_one() -> None:
    """Jobs behind one that does not fit the KV cache left go past it, in its lane as well."""
    cluster = Cluster()
    cluster.join("w1", load=Load(kv_tokens_max=1000))
    cluster.hold(a_spec("big", prompt_tokens=800))
    cluster.hold(a_spec("too", prompt_tokens=200))
    assert keys(Dispatch, cluster.hold(a_spec("too2", prompt_tokens=300))) == []
    assert keys(Dispatch, cluster.hold(a_spec("ok", prompt_tokens=1))) == []
    running = of(Dispatch, cluster.decisions)
    assert [one.key for one in running] == ["acme.big"]
    assert keys(Dispatch, cluster.end(running[0])) == ["acme.ok", "acme.too", "acme.too2"]


def test_a_lane_that_finds_no_room_blocks_no_lane_behind_it() -> None:
    """The least served lane has only a job that is too large: the next one's goes."""
    cluster = Cluster()
    cluster.hold(
        a_spec("large", prompt_tokens=500),
        a_spec("big", lane="beta", prompt_tokens=700, band=1),
        a_spec("fits", lane="beta", prompt_tokens=120),
        a_spec("fits2", lane="beta", prompt_tokens=120),
    )
    decisions = cluster.join("w1", load=Load(kv_tokens_max=1200))
    assert keys(Dispatch, decisions) == ["beta.big", "beta.fits"]


def test_a_lane_at_its_quota_blocks_no_other_lane() -> None:
    """Its row holds its own jobs only, and says so."""
    cluster = Cluster(a_policy(QuotaRow(lane=LANE, inflight_jobs_max=1)))
    cluster.join("w1")
    cluster.hold(a_spec("j1"), a_spec("j2"))
    assert keys(Dispatch, cluster.hold(a_spec("j1", lane="beta"))) == ["beta.j1"]
    why = cluster.scheduler.views.why("acme.j2")
    assert why is not None
    assert (why.held_by, why.row) == (HeldBy.QUOTA, "lane=acme")


def test_a_row_that_gives_way_lets_its_jobs_go_in_every_model() -> None:
    """A lane's row over all models: an end in one lets a job of another go at once."""
    cluster = Cluster(a_policy(QuotaRow(lane=LANE, inflight_jobs_max=1)))
    cluster.join("w1")
    cluster.join("w2", models=("other",))
    first = only(Dispatch, cluster.hold(a_spec("j1")))
    cluster.hold(a_spec("j2", model="other"))
    assert keys(Dispatch, cluster.end(first)) == ["acme.j2"]


def test_a_row_over_a_whole_band_holds_it_without_a_walk() -> None:
    """With a band's row full, no lane's jobs are looked at one by one."""
    cluster = Cluster(a_policy(QuotaRow(band=2, inflight_jobs_max=1)))
    cluster.join("w1")
    cluster.hold_many(50)
    cluster.hold_many(50, lane="beta")
    before = cluster.router.placed
    cluster.beat("w1", slots=5)
    assert cluster.router.placed == before
    assert keys(Dispatch, cluster.hold(a_spec("x", band=1))) == ["acme.x"]


def test_a_token_row_holds_large_jobs_and_lets_small_ones_pass() -> None:
    """A job over the tokens left is passed over; one that fits goes."""
    cluster = Cluster(a_policy(QuotaRow(inflight_tokens_max=300)))
    cluster.join("w1")
    cluster.hold(a_spec("j1"))
    cluster.hold(a_spec("j2"))
    small = a_spec("j3", prompt_tokens=60, output_tokens_max=20)
    assert keys(Dispatch, cluster.hold(small)) == ["acme.j3"]
    assert cluster.usage["all"] == (2, 300.0)


def test_a_bucket_lets_a_job_go_when_it_has_filled() -> None:
    """200 of 600 a minute: a job goes after 20 s, the next 20 s later, by the clock."""
    cluster = Cluster(a_policy(QuotaRow(tokens_per_min=600)))
    cluster.join("w1")
    cluster.hold(a_spec("j1"), a_spec("j2"))
    assert not of(Dispatch, cluster.decisions)
    assert not of(Dispatch, cluster.wait(19.5))
    assert keys(Dispatch, cluster.tick(0.5)) == ["acme.j1"]
    assert not of(Dispatch, cluster.wait(19.5))
    assert keys(Dispatch, cluster.tick(0.5)) == ["acme.j2"]


def test_case_12_a_row_keeps_slots_free_for_urgent_work() -> None:
    """Batch under a row of 3 of 4 slots: a critical job goes at once."""
    cluster = Cluster(a_policy(QuotaRow(band=3, inflight_jobs_max=3)))
    cluster.join("w1", slots=4)
    cluster.hold_many(10, band=3)
    assert len(of(Dispatch, cluster.decisions)) == 3
    assert keys(Dispatch, cluster.hold(a_spec("urgent", band=0))) == ["acme.urgent"]


def test_rows_per_worker_follow_the_fleet() -> None:
    """Two jobs a worker: a second worker lets two more go, in the step in which it reports."""
    cluster = Cluster(a_policy(QuotaRow(model=MODEL, inflight_jobs_max_per_worker=2.0)))
    cluster.join("w1")
    cluster.hold_many(6)
    assert len(of(Dispatch, cluster.decisions)) == 2
    assert len(of(Dispatch, cluster.join("w2"))) == 2


def test_a_job_held_for_its_worker_blocks_nobody_and_is_looked_at_again() -> None:
    """A hold is passed over; it ends by time, without any other event."""
    router = HoldingRouter()
    cluster = Cluster(router=router)
    cluster.join("w1")
    cluster.hold(a_spec("held"))
    assert keys(Dispatch, cluster.hold(a_spec("j2"))) == ["acme.j2"]
    why = cluster.scheduler.views.why("acme.held")
    assert why is not None
    assert why.held_by is HeldBy.AFFINITY
    cluster.tick()
    router.released = True
    assert not of(Dispatch, cluster.tick(HOLD_LOOK_S / 2))
    dispatch = only(Dispatch, cluster.tick(HOLD_LOOK_S / 2))
    assert dispatch.explanation.held_by is HeldBy.AFFINITY
    assert dispatch.explanation.queue_s == pytest.approx(HOLD_LOOK_S)


def test_held_jobs_do_not_hide_those_behind_them() -> None:
    """A line is walked PASSES times as far as there are candidates, and no further."""
    policy = a_policy(order=OrderPolicy(lane_slack_tokens=0.0, candidates_max=4))
    cluster = Cluster(policy, started=False, router=HoldingRouter())
    cluster.join("w1")
    cluster.hold_many(4 * PASSES - 1, prefix="held")
    cluster.hold(a_spec("seen", enqueued_at_s=1000.1))
    cluster.hold(a_spec("behind", enqueued_at_s=1000.2))
    assert keys(Dispatch, cluster.step(DispatchAllowed(cluster.at_s))) == [
        "acme.seen",
        "acme.behind",
    ]
    cluster = Cluster(policy, started=False, router=HoldingRouter())
    cluster.join("w1")
    cluster.hold_many(4 * PASSES, prefix="held")
    cluster.hold(a_spec("hidden", enqueued_at_s=1000.1))
    assert not of(Dispatch, cluster.step(DispatchAllowed(cluster.at_s)))


def test_a_pool_whose_smallest_job_would_be_held_is_not_closed() -> None:
    """There is room, if none that is worth taking for the smallest: others may go."""
    cluster = Cluster(router=ChoosyRouter())
    cluster.join("w1")
    cluster.hold(a_spec("large", prompt_tokens=9000))
    assert keys(Dispatch, cluster.hold(a_spec("goes"))) == ["acme.goes"]


def test_a_job_without_prefill_room_hides_no_larger_one() -> None:
    """A prompt that is cached needs none: it is looked at though a shorter one found no room."""
    cluster = Cluster(router=ShortOfPrefillRouter())
    cluster.join("w1")
    cluster.hold(a_spec("cold", prompt_tokens=1000))
    assert keys(Dispatch, cluster.hold(a_spec("warm", prompt_tokens=9000))) == ["acme.warm"]


def test_a_newcomer_to_a_full_pool_costs_one_look_at_most() -> None:
    """With nobody free, a job that comes asks for no placement, however many wait."""
    cluster = Cluster()
    cluster.join("w1", slots=1)
    cluster.hold_many(200)
    before = cluster.router.placed
    (queued,) = cluster.hold(a_spec("x", enqueued_at_s=1001.0))
    assert isinstance(queued, Queued)
    assert cluster.router.placed == before


def test_a_closed_pool_costs_no_look_for_a_smaller_job_either() -> None:
    """Nobody has room even for the smallest job: size does not matter."""
    cluster = Cluster()
    cluster.join("w1", slots=1)
    cluster.hold_many(3)
    before = cluster.router.placed
    cluster.hold(a_spec("tiny", prompt_tokens=1, output_tokens_max=1))
    assert cluster.router.placed == before


def test_one_slot_freed_costs_a_window_not_a_queue() -> None:
    """A freed slot looks at `candidates_max` jobs, gives one, and finds no more room."""
    cluster, dispatch = one_slot()
    cluster.hold_many(500)
    before = cluster.router.placed
    assert len(of(Dispatch, cluster.end(dispatch))) == 1
    assert cluster.router.placed - before <= 64 + 2


def test_a_full_workers_news_cost_no_look() -> None:
    """A first token frees prefill room, but where no slot is free nobody can go there."""
    cluster, dispatch = one_slot()
    cluster.hold_many(20)
    before = cluster.router.placed
    cluster.first_token(dispatch)
    cluster.beat("w1", engine_incarnation=2)
    assert cluster.router.placed == before


def test_a_pool_without_workers_costs_no_walk() -> None:
    """One look finds that nobody serves the model; the others are told without one."""
    cluster = Cluster(started=False)
    cluster.hold_many(50)
    cluster.step(DispatchAllowed(cluster.at_s))
    assert cluster.router.placed == 1
    (queued,) = cluster.hold(a_spec("x"))
    assert isinstance(queued, Queued)
    why = cluster.scheduler.views.why("acme.x")
    assert why is not None
    assert why.held_by is HeldBy.NO_WORKERS


def test_an_adapter_that_nobody_has_does_not_close_the_model() -> None:
    """Its own jobs wait; those without it go."""
    cluster = Cluster(router=AdapterRouter())
    cluster.join("w1")
    cluster.hold(a_spec("tuned", adapter="lora"))
    assert keys(Dispatch, cluster.hold(a_spec("plain"))) == ["acme.plain"]


def test_a_dispatch_is_counted_for_ties() -> None:
    """How many, and when the last: ties go to the worker that waited longest."""
    cluster = Cluster()
    cluster.join("w1")
    cluster.at_s += 5.0
    cluster.hold_many(3)
    worker = cluster.scheduler._mind.fleet.workers["w1"]
    assert (worker.dispatched_count, worker.dispatched_at_s) == (3, 1005.0)


def test_owed_credit_stays_bounded_by_name() -> None:
    """The bound that keeps a burst after a block short is about four chat jobs."""
    assert CREDIT_TOKENS_MAX == 16_384.0


def test_an_explanation_says_what_held_the_job() -> None:
    """Never looked at until it went: others were before it. Else the last look's word."""
    cluster, dispatch = one_slot()
    cluster.hold(a_spec("j1"))
    cluster.hold(a_spec("j2", prompt_tokens=8000))
    second = only(Dispatch, cluster.end(dispatch))
    assert second.explanation.held_by is HeldBy.ROOM
    cluster.at_s += 3.0
    third = only(Dispatch, cluster.end(second))
    assert third.explanation.held_by is HeldBy.ROOM
    assert third.explanation.queue_s == 3.0
    check_sums(cluster.scheduler)
