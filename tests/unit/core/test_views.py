"""What the mind shows of itself."""

import pytest

from broker.core.decisions import Dispatch, HeldBy
from broker.core.events import DispatchAllowed, QueueDepth
from broker.core.policy import QuotaRow
from broker.core.views import RowView
from broker.wire.messages import Answer, Attempt, Load
from tests.unit.core.cluster import EPOCH, LANE, MODEL, Cluster, a_policy, a_spec, in_flight, only


def test_a_queue_shows_what_waits_runs_and_bounds_it() -> None:
    """Held, pending, in flight, the least bound, the oldest wait."""
    rows = (QuotaRow(queued_jobs_max=9), QuotaRow(lane=LANE, queued_jobs_max=5))
    cluster = Cluster(a_policy(*rows))
    cluster.join("w1", slots=1)
    cluster.hold_many(3)
    cluster.step(QueueDepth(cluster.at_s, LANE, 2, MODEL, 7))
    cluster.at_s += 2.0
    cluster.tick()
    (view,) = cluster.scheduler.views.queues()
    assert (view.lane, view.band, view.model) == (LANE, 2, MODEL)
    assert (view.waiting_jobs, view.pending_jobs, view.inflight_jobs) == (2, 7, 1)
    assert view.queued_jobs_max == 5
    assert view.oldest_wait_s == pytest.approx(1.999)
    assert view.wait_s > 0
    assert cluster.scheduler.views.queue(lane=LANE, band=2, model=MODEL) == view


def test_batch_and_unbounded_queues_show_no_bound() -> None:
    """Batch is bounded by its stream."""
    cluster = Cluster(a_policy(QuotaRow(queued_jobs_max=9)))
    assert cluster.scheduler.views.queue(lane=LANE, band=3, model=MODEL).queued_jobs_max is None
    free = Cluster().scheduler.views.queue(lane=LANE, band=1, model=MODEL)
    assert (free.queued_jobs_max, free.oldest_wait_s, free.wait_s) == (None, 0.0, 60.0)


def test_the_oldest_wait_looks_at_aged_jobs_too() -> None:
    """They stand in a line of their own."""
    cluster = Cluster()
    cluster.hold(a_spec("old", enqueued_at_s=900.0), a_spec("new", enqueued_at_s=990.0))
    (view,) = cluster.scheduler.views.queues()
    assert view.oldest_wait_s == 100.0


def test_a_row_shows_use_and_limits() -> None:
    """As far as it has them."""
    rows = (
        QuotaRow(inflight_jobs_max=4, inflight_tokens_max=900, queued_jobs_max=3),
        QuotaRow(lane="beta", tokens_per_min=600),
    )
    cluster = Cluster(a_policy(*rows))
    cluster.join("w1", slots=1)
    cluster.hold_many(2)
    cluster.scheduler.views.rows()
    cluster.tick(2.0)
    assert cluster.scheduler.views.rows() == (
        RowView("all", None, 1, 4.0, 0, 0, 200.0, 900, 1, 3, 0.0, None, 1500.0, None),
        RowView("lane=beta", "beta", 0, None, 0, 0, 0.0, None, 0, None, 20.0, 600, 0.0, None),
    )


def test_a_worker_shows_what_it_said_and_was_given() -> None:
    """Phase, flags, rates, sums, and how old its last word is."""
    cluster = Cluster()
    load = Load(kv_tokens_max=5000, prefill_tokens_s=8000.0, decode_tokens_s=40.0)
    cluster.join("w1", load=load)
    cluster.hold_many(2)
    cluster.tick(1.5)
    (view,) = cluster.scheduler.views.workers()
    assert (view.worker, view.phase, view.signal_age_s) == ("w1", "live", 1.5)
    assert (view.inflight_jobs, view.backlog_tokens, view.kv_tokens) == (2, 200, 300)
    assert (view.drained, view.held_off, view.trust, view.incarnation) == (False, False, 1.0, 1)
    cluster.tick(1.5)
    assert cluster.scheduler.views.workers()[0].phase == "suspect"


def test_a_pool_shows_its_workers_lines_and_fairness() -> None:
    """The gap of lanes that wait, and what it may be."""
    cluster = Cluster()
    cluster.join("w1", slots=2)
    cluster.hold_many(3)
    cluster.hold_many(2, lane="beta")
    (view,) = cluster.scheduler.views.pools()
    assert (view.model, view.workers, view.slots) == (MODEL, 1, 2)
    assert (view.waiting_jobs, view.inflight_jobs) == (3, 2)
    assert view.fairness_gap == 0.0
    assert view.fairness_bound == 200.0


def test_why_tells_of_a_running_job() -> None:
    """Where, which attempt, how far."""
    cluster = Cluster()
    cluster.join("w1")
    dispatch = only(Dispatch, cluster.hold(a_spec()))
    cluster.answer(dispatch, Answer.ACCEPTED)
    listed = in_flight(a_spec(), dispatch.attempt, output_tokens=9, prefilled=True)
    cluster.beat("w1", inflight=(listed,))
    why = cluster.scheduler.views.why("acme.j1")
    assert why is not None
    assert (why.leased, why.worker, why.attempt) == (True, "w1", Attempt(EPOCH, 1))
    assert (why.accepted, why.output_tokens, why.held_by) == (True, 9, HeldBy.NOTHING)
    assert (why.position, why.wait_s) == (0, 0.0)


def test_why_tells_of_a_waiting_job() -> None:
    """Its place, its wait, and what held it when it was last looked at."""
    cluster = Cluster()
    cluster.join("w1", slots=1)
    cluster.hold_many(3)
    why = cluster.scheduler.views.why("acme.j2")
    assert why is not None
    assert (why.leased, why.position, why.held_by) == (False, 1, HeldBy.ROOM)
    assert (why.worker, why.attempt, why.row, why.output_tokens) == ("", None, "", 0)
    assert why.wait_s > 0.0


def test_why_of_a_job_behind_others_says_order() -> None:
    """It was not looked at yet, because others are before it; a back-off that is over is over."""
    cluster = Cluster(started=False)
    cluster.join("w1", slots=1)
    cluster.hold_many(3)
    cluster.step(DispatchAllowed(cluster.at_s))
    why = cluster.scheduler.views.why("acme.j2")
    assert why is not None
    assert why.held_by is HeldBy.ORDER
    cluster.scheduler._mind.queues.waiting["acme.j2"].held_by = HeldBy.BACK_OFF
    why = cluster.scheduler.views.why("acme.j2")
    assert why is not None
    assert why.held_by is HeldBy.ORDER


def test_why_of_an_unknown_job_is_nothing() -> None:
    """Neither waiting nor leased here."""
    cluster = Cluster()
    assert cluster.scheduler.views.why("acme.j9") is None
    assert not cluster.scheduler.is_known("acme.j9")
    assert not cluster.scheduler.is_leased("acme.j9")


def test_known_is_waiting_or_leased() -> None:
    """And leased is leased."""
    cluster = Cluster()
    cluster.hold(a_spec())
    assert cluster.scheduler.is_known("acme.j1")
    assert not cluster.scheduler.is_leased("acme.j1")
    cluster.join("w1")
    assert cluster.scheduler.is_known("acme.j1")
    assert cluster.scheduler.is_leased("acme.j1")
    assert [lease.job.key for lease in cluster.scheduler.leases()] == ["acme.j1"]
