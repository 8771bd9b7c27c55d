"""What batch gives way for online jobs: the floor, and three steps by their expected wait."""

from typing import Any

import pytest

from broker.core.decisions import Dispatch, HeldBy, Reject
from broker.core.events import QueueDepth
from broker.core.policy import OrderPolicy, PressurePolicy, QuotaRow
from broker.core.pressure import LANES_MAX, step_of
from broker.core.pressure_step import Step
from broker.wire.messages import Answer, Reason
from tests.unit.core.cluster import LANE, MODEL, Cluster, a_policy, a_spec, keys, of, only

FREE_FLOOR = PressurePolicy(online_floor_share=0.0)


def a_cluster(
    *quotas: QuotaRow, slots: int = 4, lanes: tuple[str, ...] = (LANE, "beta"), **pressure: Any
) -> Cluster:
    """One worker; without a floor unless the case says."""
    fields = {"online_floor_share": 0.0, **pressure}
    cluster = Cluster(a_policy(*quotas, lanes=lanes, pressure=PressurePolicy(**fields)))
    cluster.join("w1", slots=slots)
    return cluster


def online_wait_s(cluster: Cluster) -> float:
    """Expected of a job of bands 0-1, as it was last looked at."""
    return cluster.scheduler._mind.queues.pool(MODEL).online_wait_s


def step(cluster: Cluster) -> Step:
    """Step that the pool is at."""
    return cluster.scheduler._mind.queues.pool(MODEL).pressure


def press(cluster: Cluster, wait_s: float) -> None:
    """Let interactive jobs come until a job that comes now must expect to wait so long."""
    batch = 0
    while online_wait_s(cluster) < wait_s:
        cluster.hold_many(10, band=1, prefix=f"p{batch}-")
        cluster.tick(0.25)
        batch += 1
        assert batch < 400


def relieve(cluster: Cluster) -> None:
    """Let all interactive jobs that wait be cancelled."""
    waiting = list(cluster.scheduler._mind.queues.waiting.values())
    for one in waiting:
        if one.job.band == 1:
            cluster.cancel(one.job.key)
    cluster.tick(0.25)


@pytest.mark.parametrize(
    ("slots", "share", "most"),
    [(1, 0.1, 1), (2, 0.1, 1), (4, 0.1, 3), (20, 0.1, 18), (20, 0.0, 20), (4, 1.0, 1)],
)
def test_batch_never_gets_the_floor(slots: int, share: float, most: int) -> None:
    """However idle the fleet, some slots are for those who come in seconds; one is left to
    batch.
    """
    cluster = a_cluster(slots=slots, online_floor_share=share)
    went = keys(Dispatch, cluster.hold_many(30, band=3))
    assert len(went) == most
    held = [one.held_by for one in cluster.scheduler._mind.queues.waiting.values()]
    assert HeldBy.FLOOR in held or most == slots
    assert len(keys(Dispatch, cluster.hold_many(30, band=2, prefix="s"))) == slots - most


def test_case_12_urgent_work_finds_the_floor_free() -> None:
    """All that batch may have is taken, for minutes: an urgent job goes at once."""
    cluster = a_cluster(online_floor_share=0.1)
    cluster.hold_many(30, band=3)
    assert keys(Dispatch, cluster.hold(a_spec("urgent", band=0))) == ["acme.urgent"]


def test_a_batch_job_that_ends_lets_the_next_one_in() -> None:
    """The floor is counted in live leases: nothing is forgotten, nothing banked."""
    cluster = a_cluster(online_floor_share=0.5)
    first, _ = of(Dispatch, cluster.hold_many(9, band=3))
    assert keys(Dispatch, cluster.end(first)) == ["acme.j2"]


def test_a_share_that_is_owed_does_not_lend_batch_the_floor() -> None:
    """A line that runs for hours has all that batch may have: what it is owed meanwhile waits."""
    cluster = a_cluster(slots=2, online_floor_share=0.1)
    cluster.hold(a_spec("hours", band=3))
    (dispatch,) = of(Dispatch, cluster.hold(a_spec("first", band=1)))
    cluster.hold_many(60, band=3, prefix="b")
    cluster.hold_many(60, band=1, prefix="p")
    assert batch_taken(cluster, dispatch, count=60) == 0


def test_the_floor_follows_the_fleet() -> None:
    """Twice the slots, twice the batch."""
    cluster = a_cluster(online_floor_share=0.5)
    assert len(keys(Dispatch, cluster.hold_many(9, band=3))) == 2
    assert len(keys(Dispatch, cluster.join("w2", slots=4))) == 2


def test_jobs_of_a_worker_that_drains_take_no_slot_of_the_others() -> None:
    """One of two workers drains for minutes: batch has the other's free slots meanwhile."""
    cluster = a_cluster(online_floor_share=0.25)
    cluster.join("w2", slots=4)
    cluster.hold_many(6, band=2, prefix="s")
    cluster.beat("w2", draining=True)
    free = 4 - len(cluster.listed("w1"))
    assert len(keys(Dispatch, cluster.hold_many(9, band=3))) == free - 1


def test_a_slot_that_frees_where_none_is_given_lets_batch_in_elsewhere() -> None:
    """The floor is over all slots: a job's end at a worker that said busy leaves more of them."""
    cluster = a_cluster(slots=2, online_floor_share=0.4)
    cluster.join("w2", slots=3)
    lines = {one.key: one for one in of(Dispatch, cluster.hold_many(5, band=3))}
    assert [one.worker for one in lines.values()] == ["w1", "w2", "w1"]
    again = only(Dispatch, cluster.answer(lines["acme.j0"], Answer.BUSY))
    assert again.worker == "w2"
    assert keys(Dispatch, cluster.end(lines["acme.j2"])) == ["acme.j3"]


def test_people_s_last_job_elsewhere_frees_what_was_kept_for_them() -> None:
    """Standard jobs leave slots to people while such run, if only at a worker that drains."""
    cluster = a_cluster(online_floor_share=0.25)
    online = only(Dispatch, cluster.hold(a_spec("online", band=1)))
    cluster.join("w2", slots=4)
    cluster.beat("w1", draining=True)
    assert len(keys(Dispatch, cluster.hold_many(4, band=2))) == 3
    assert keys(Dispatch, cluster.end(online)) == ["acme.j3"]


@pytest.mark.parametrize(
    ("wait_s", "before", "after"),
    [
        (0.0, Step.NONE, Step.NONE),
        (1.9, Step.NONE, Step.NONE),
        (2.0, Step.NONE, Step.BORROW),
        (4.9, Step.BORROW, Step.BORROW),
        (5.0, Step.NONE, Step.HOLD_BATCH),
        (20.0, Step.NONE, Step.REFUSE_BATCH),
        (10.0, Step.REFUSE_BATCH, Step.REFUSE_BATCH),
        (9.9, Step.REFUSE_BATCH, Step.HOLD_BATCH),
        (2.5, Step.REFUSE_BATCH, Step.HOLD_BATCH),
        (2.4, Step.REFUSE_BATCH, Step.BORROW),
        (1.0, Step.BORROW, Step.BORROW),
        (0.9, Step.REFUSE_BATCH, Step.NONE),
    ],
)
def test_steps_begin_at_their_thresholds_and_end_at_half(
    wait_s: float, before: Step, after: Step
) -> None:
    """By rule both ways, so that a wait near a threshold doesn't toggle it."""
    assert step_of(PressurePolicy(), wait_s, before=before) is after


def test_a_release_ratio_of_zero_ends_at_no_wait() -> None:
    """No wait is no pressure, whatever the ratio."""
    assert step_of(PressurePolicy(release_ratio=0.0), 0.0, before=Step.REFUSE_BATCH) is Step.NONE
    assert step_of(PressurePolicy(release_ratio=0.0), 0.1, before=Step.BORROW) is Step.BORROW


def test_step_one_lets_online_jobs_borrow_batch_s_seats_first() -> None:
    """Without pressure the lender's own job goes first; under it the borrower's."""
    rows = (
        QuotaRow(band=1, inflight_jobs_max=2, ceiling_ratio=2.0),
        QuotaRow(band=3, inflight_jobs_max=2, lendable_share=1.0),
    )
    for borrow_wait_s, went in ((1e6, "acme.c0"), (0.5, "acme.p0-2")):
        cluster = a_cluster(
            *rows, borrow_wait_s=borrow_wait_s, hold_batch_wait_s=1e6, refuse_batch_wait_s=1e6
        )
        _, second = of(Dispatch, cluster.hold_many(2, band=3, prefix="b"))
        cluster.hold_many(4, band=3, prefix="c", enqueued_at_s=999.0)
        press(cluster, 0.5)
        assert step(cluster) is (Step.BORROW if borrow_wait_s == 0.5 else Step.NONE)
        assert keys(Dispatch, cluster.end(second)) == [went]


def test_step_two_leaves_batch_its_guaranteed_share() -> None:
    """No idle capacity, and still one job in twenty by work."""
    cluster = a_cluster(slots=1, refuse_batch_wait_s=1e6)
    (dispatch,) = of(Dispatch, cluster.hold(a_spec("first", band=1)))
    cluster.hold_many(100, band=3, prefix="b")
    cluster.hold_many(100, band=1, prefix="p")
    cluster.tick(0.25)
    assert step(cluster) is Step.HOLD_BATCH
    # Earned first and taken then: the third is due with the next job.
    assert batch_taken(cluster, dispatch, count=61) == 3


def test_step_two_keeps_batch_from_a_slot_that_frees_and_says_so() -> None:
    """Until the step is released: by a look at the waits, not by a slot that happens to be free."""
    cluster = a_cluster(slots=1)
    (dispatch,) = of(Dispatch, cluster.hold(a_spec("first", band=1)))
    cluster.hold_many(100, band=1, prefix="p")
    cluster.tick(0.25)
    cluster.hold(a_spec("b", band=3))
    for n in range(100):
        cluster.cancel(f"acme.p{n}")
    assert keys(Dispatch, cluster.end(dispatch)) == []
    why = cluster.scheduler.views.why("acme.b")
    assert why is not None
    assert why.held_by is HeldBy.PRESSURE
    assert keys(Dispatch, cluster.tick(0.25)) == ["acme.b"]


def test_tokens_that_a_quota_keeps_press_nobody() -> None:
    """Slots are free, and the lane's own row of tokens holds its jobs: batch may have the slots."""
    row = QuotaRow(lane="beta", inflight_tokens_max=250)
    cluster = a_cluster(row, borrow_wait_s=0.1, hold_batch_wait_s=0.2)
    cluster.hold_many(100, lane="beta", band=1)
    cluster.tick(0.25)
    assert step(cluster) is Step.NONE
    assert keys(Dispatch, cluster.hold(a_spec("b", band=3))) == ["acme.b"]


def test_step_three_refuses_batch_that_is_submitted_now() -> None:
    """What was submitted before stays; what comes now is told when to come again; after the release
    it may.
    """
    cluster = a_cluster(refuse_batch_wait_s=10.0)
    press(cluster, 10.5)
    assert step(cluster) is Step.REFUSE_BATCH
    assert cluster.hold(a_spec("old", band=3, enqueued_at_s=cluster.at_s - 60)) != []
    refused = only(Reject, cluster.hold(a_spec("new", band=3, enqueued_at_s=cluster.at_s + 0.1)))
    assert (refused.key, refused.reason, refused.row) == ("acme.new", Reason.QUEUE_FULL, "pressure")
    assert (refused.used, refused.limit) == (online_wait_s(cluster), 10.0)
    assert refused.retry_after_s >= 10.0
    relieve(cluster)
    assert of(Reject, cluster.hold(a_spec("again", band=3, enqueued_at_s=cluster.at_s))) == []


def test_a_lane_that_its_own_quota_holds_presses_nobody() -> None:
    """A thousand jobs behind a row of one seat are that lane's own affair."""
    cluster = a_cluster(QuotaRow(lane="beta", inflight_jobs_max=1))
    cluster.hold_many(1000, lane="beta", band=1)
    cluster.tick(1.0)
    assert (online_wait_s(cluster), step(cluster)) == (0.0, Step.NONE)


@pytest.mark.parametrize("longest", [0, LANES_MAX, 12 * LANES_MAX - 1])
def test_of_many_lanes_the_worst_is_asked(longest: int) -> None:
    """More wait than a look asks, each with a job, and one with twenty: whichever that is."""
    names = tuple(f"l{n:03}" for n in range(12 * LANES_MAX))
    cluster = a_cluster(slots=64, lanes=names)
    cluster.hold_many(64, lane=names[0], band=1)
    for n, name in enumerate(names):
        cluster.hold_many(20 if n == longest else 1, lane=name, band=1, prefix="p")
    cluster.tick(0.25)
    scheduler = cluster.scheduler
    pool = scheduler._mind.queues.pool(MODEL)
    waits_s = [
        scheduler._estimates.wait_s(queue, position=queue.waiting_jobs)
        for queue in pool.queues.values()
    ]
    assert len(waits_s) == len(names)
    assert scheduler._pressure._online_wait_s(pool) == max(waits_s) > 1.2 * min(waits_s)


def test_many_lanes_that_their_quotas_hold_hide_nobody() -> None:
    """They are first in line, for they get little; behind them others wait for room."""
    held = tuple(f"a{n:03}" for n in range(12 * LANES_MAX))
    rows = tuple(QuotaRow(lane=name, inflight_jobs_max=1) for name in held)
    cluster = a_cluster(*rows, slots=len(held) + 1, lanes=(*held, "beta"))
    for name in held:
        cluster.hold_many(2, lane=name, band=1)
    cluster.tick(0.25)
    assert (online_wait_s(cluster), step(cluster)) == (0.0, Step.NONE)
    cluster.hold_many(1000, lane="beta", band=1)
    cluster.tick(0.25)
    assert step(cluster) is Step.REFUSE_BATCH


def test_many_lanes_of_the_highest_band_hide_no_lower_one() -> None:
    """They go first and wait little; whoever is interactive waits for all of them."""
    urgent = tuple(f"a{n:03}" for n in range(12 * LANES_MAX))
    waits_s: list[float] = []
    for jobs in (0, 50):
        cluster = a_cluster(slots=16, lanes=(*urgent, "beta"))
        for name in urgent:
            cluster.hold_many(1, lane=name, band=0)
        cluster.hold_many(jobs, lane="beta", band=1)
        cluster.tick(0.25)
        waits_s.append(online_wait_s(cluster))
    assert waits_s[1] > 2 * waits_s[0] > 0


def test_no_workers_are_no_pressure() -> None:
    """Nothing runs: batch is not what people wait for."""
    cluster = Cluster(a_policy(pressure=FREE_FLOOR))
    cluster.hold_many(300, band=1)
    cluster.tick(1.0)
    assert step(cluster) is Step.NONE
    assert of(Reject, cluster.hold(a_spec("b", band=3, enqueued_at_s=cluster.at_s))) == []


def test_a_deadline_that_will_pass_in_the_queue_is_told_at_submit() -> None:
    """The wait is known, and longer than the job has: it is refused with both. A job that goes
    before the others is not.
    """
    cluster = a_cluster(refuse_batch_wait_s=1e6)
    press(cluster, 8.0)
    late = a_spec("late", band=2, deadline_at_s=cluster.at_s + 2.0)
    refused = only(Reject, cluster.hold(late))
    assert (refused.reason, refused.limit) == (Reason.DEADLINE_INFEASIBLE, 2.0)
    assert refused.used > refused.limit
    assert cluster.hold(a_spec("soon", band=0, deadline_at_s=cluster.at_s + 5.0)) != []
    assert "acme.soon" in cluster.scheduler._mind.queues.waiting


def test_a_deadline_is_no_reason_where_the_job_may_start() -> None:
    """A free slot, or no worker to know by: nobody is refused for a guess."""
    cluster = a_cluster()
    spec = a_spec("now", band=2, deadline_at_s=cluster.at_s + 0.001)
    assert keys(Dispatch, cluster.hold(spec)) == ["acme.now"]
    nobody = Cluster(a_policy(pressure=FREE_FLOOR))
    assert of(Reject, nobody.hold(a_spec("j", deadline_at_s=nobody.at_s + 0.001))) == []


def a_window_cluster(*quotas: QuotaRow, **pressure: Any) -> tuple[Cluster, Dispatch]:
    """One slot, taken; batch is not held unless the case says."""
    order = OrderPolicy(lane_slack_tokens=0.0, window_margin_ratio=1.25)
    steps = PressurePolicy(**{"hold_batch_wait_s": 1e6, "refuse_batch_wait_s": 1e6, **pressure})
    cluster = Cluster(a_policy(*quotas, order=order, pressure=steps))
    cluster.join("w1", slots=1)
    return cluster, only(Dispatch, cluster.hold(a_spec("first", lane="beta", band=0)))


def batch_taken(cluster: Cluster, dispatch: Dispatch, *, count: int) -> int:
    """Count the batch jobs of the next `count` in one slot."""
    taken = 0
    for _ in range(count):
        dispatch = only(Dispatch, cluster.end(dispatch))
        taken += ".b" in dispatch.key
    return taken


@pytest.mark.parametrize(("left_s", "is_promoted"), [(10.0, True), (1e6, False)])
def test_a_batch_whose_window_is_at_risk_competes_one_band_up(
    left_s: float, *, is_promoted: bool
) -> None:
    """Against standard work it gets what bands 2-3 may have by exception, not 5 % alone."""
    cluster, dispatch = a_window_cluster()
    cluster.hold_many(100, band=3, prefix="b", deadline_at_s=cluster.at_s + left_s)
    cluster.hold_many(100, band=2, prefix="s", enqueued_at_s=cluster.at_s - 1)
    cluster.tick(1.0)
    aged = len(cluster.scheduler._mind.queues.pool(MODEL).queues["acme", 3].aged)
    assert aged == (64 if is_promoted else 0)
    taken = batch_taken(cluster, dispatch, count=60)
    assert (taken >= 12) is is_promoted


@pytest.mark.parametrize(
    ("hold_batch_wait_s", "reached", "least", "most"),
    [(1e6, Step.BORROW, 12, 60), (5.0, Step.HOLD_BATCH, 1, 4)],
)
@pytest.mark.parametrize("people_in_line", [False, True])
def test_from_step_two_on_no_batch_competes_one_band_up(
    hold_batch_wait_s: float, reached: Step, least: int, most: int, *, people_in_line: bool
) -> None:
    """Its window at risk or not, it has its guaranteed share alone, until the step is released:
    also where those whom it gave way to have gone, or can't go, and standard jobs wait.
    """
    row = QuotaRow(lane="beta", band=1, inflight_jobs_max=1)
    cluster, dispatch = a_window_cluster(
        row, online_floor_share=0.0, hold_batch_wait_s=hold_batch_wait_s
    )
    cluster.join("w2", slots=1)
    cluster.hold_many(1 + people_in_line, lane="beta", band=1, prefix="q")
    cluster.hold_many(100, band=3, prefix="b", deadline_at_s=cluster.at_s + 10)
    cluster.hold_many(100, band=2, prefix="s")
    cluster.hold_many(100, band=1, prefix="p")
    cluster.tick(1.0)
    assert step(cluster) is reached
    assert len(cluster.scheduler._mind.queues.pool(MODEL).queues["acme", 3].aged) == 64
    for n in range(100):
        cluster.cancel(f"acme.p{n}")
    assert least <= batch_taken(cluster, dispatch, count=60) <= most


def test_the_lines_that_are_still_in_the_stream_count() -> None:
    """A window of a hundred is safe; with the fifty thousand behind it, it is not."""
    cluster, _ = a_window_cluster()
    cluster.hold_many(100, band=3, prefix="b", deadline_at_s=cluster.at_s + 3600)
    cluster.tick(1.0)
    queue = cluster.scheduler._mind.queues.pool(MODEL).queues["acme", 3]
    assert not queue.aged
    cluster.step(QueueDepth(cluster.at_s, "acme", 3, MODEL, 50_000))
    cluster.tick(1.0)
    assert len(queue.aged) == 64


def test_promoted_lines_are_refilled_and_never_more() -> None:
    """As some go, others rise; lines without a deadline never do."""
    cluster, dispatch = a_window_cluster()
    cluster.hold_many(100, band=3, prefix="b", deadline_at_s=cluster.at_s + 10)
    cluster.hold_many(5, band=3, prefix="x")
    cluster.tick(1.0)
    queue = cluster.scheduler._mind.queues.pool(MODEL).queues["acme", 3]
    for _ in range(5):
        dispatch = only(Dispatch, cluster.end(dispatch))
    assert len(queue.aged) == 59
    cluster.tick(1.0)
    assert len(queue.aged) == 64
