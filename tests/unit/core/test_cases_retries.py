"""Cases of other systems about retries: the curve, its cap, and who is charged."""

from itertools import pairwise

from broker.core.decisions import DeadLetter, Dispatch, Requeue
from broker.core.policy import LeasePolicy
from broker.core.retries import FAILURES_KEPT_MAX, JITTER_RATIO, failure_rest_s, remembered
from broker.wire.messages import Attempt, Failure, Reason
from tests.unit.core.cluster import Cluster, a_spec, keys, of, only

CURVE = LeasePolicy()


def a_failure(
    number: int = 1, *, reason: Reason = Reason.ENGINE_FAILED, charged: bool = True
) -> Failure:
    """One attempt that came to nothing."""
    return Failure(Attempt(1, number), "w1", reason, 1000.0 + number, charged=charged)


def next_dispatch(cluster: Cluster, *, within_s: float = 100.0) -> Dispatch:
    """Let time pass until a job goes out; all workers report each second."""
    for turn in range(int(within_s / 0.05)):
        found = cluster.tick(0.05)
        for name in cluster.beats if turn % 20 == 0 else ():
            found += cluster.beat(name)
        if dispatches := of(Dispatch, found):
            return dispatches[0]
    message = "nothing was dispatched"
    raise AssertionError(message)


def test_charged_attempts_follow_the_curve_and_end() -> None:
    """Case 26: base, twice as long each time, within the jitter; then it is a dead letter."""
    cluster = Cluster()
    cluster.join("w1", "w2", "w3", "w4")
    dispatch = only(Dispatch, cluster.hold(a_spec()))
    for number in range(1, CURVE.failures_max):
        failed_at_s = cluster.at_s
        assert not of(Dispatch, cluster.fail(dispatch, detail="HTTP 500"))
        dispatch = next_dispatch(cluster)
        rest_s = CURVE.retry_base_s * 2 ** (number - 1)
        waited_s = cluster.at_s - failed_at_s
        assert rest_s * (1 - JITTER_RATIO) <= waited_s <= rest_s * (1 + JITTER_RATIO) + 0.051
    assert keys(DeadLetter, cluster.fail(dispatch)) == ["acme.j1"]


def test_an_engine_without_room_is_asked_by_the_curve_too_and_charges_nobody() -> None:
    """Case 26: 429 for a minute makes a handful of attempts, on more than one worker."""
    cluster = Cluster()
    cluster.join("w1", "w2")
    dispatch = only(Dispatch, cluster.hold(a_spec()))
    times, workers = [cluster.at_s], {dispatch.worker}
    while cluster.at_s < 1060.0:
        decisions = cluster.fail(dispatch, charged=False, detail="HTTP 429")
        assert not of(Dispatch, decisions)
        assert only(Requeue, decisions).not_before_s > cluster.at_s
        dispatch = next_dispatch(cluster)
        times.append(cluster.at_s)
        workers.add(dispatch.worker)
    rests_s = [later - earlier for earlier, later in pairwise(times)]
    assert len(rests_s) <= 8
    assert rests_s == sorted(rests_s)
    assert workers == {"w1", "w2"}
    assert not of(DeadLetter, cluster.decisions)


def test_fresh_work_is_not_delayed_by_jobs_that_rest() -> None:
    """Case 26: retries wait out their back-off; what comes meanwhile goes at once."""
    cluster = Cluster()
    cluster.join("w1", slots=1)
    dispatch = only(Dispatch, cluster.hold(a_spec("old")))
    cluster.fail(dispatch)
    fresh = only(Dispatch, cluster.hold(a_spec("fresh", enqueued_at_s=cluster.at_s)))
    assert fresh.key == "acme.fresh"


def test_a_job_handed_back_goes_again_at_once() -> None:
    """A worker that leaves in good order, or died beside others, says nothing against a new try."""
    for reason in (Reason.HANDED_BACK, Reason.WORKER_LOST):
        failures = (a_failure(charged=True), a_failure(reason=reason, charged=False))
        assert failure_rest_s(failures, CURVE, jitter=0.0) == 0.0


def test_the_two_curves_are_counted_apart() -> None:
    """Ten times "no room" don't make the first real failure wait for half a minute."""
    busy = tuple(a_failure(number, charged=False) for number in range(10))
    assert failure_rest_s(busy, CURVE, jitter=0.0) == CURVE.retry_s_max
    assert failure_rest_s((*busy, a_failure()), CURVE, jitter=0.0) == CURVE.retry_base_s
    lost = a_failure(reason=Reason.WORKER_LOST, charged=False)
    one_busy = (lost, lost, a_failure(charged=False))
    assert failure_rest_s(one_busy, CURVE, jitter=0.0) == CURVE.retry_base_s


def test_failures_remembered_are_bounded_and_those_that_count_stay() -> None:
    """A day of "no room" neither grows a dispatch without end nor forgives a real failure."""
    counted = (a_failure(1), a_failure(2, reason=Reason.WORKER_LOST, charged=False))
    busy = tuple(a_failure(number, charged=False) for number in range(3, 100))
    kept = remembered((*counted, *busy))
    assert len(kept) == FAILURES_KEPT_MAX
    assert kept[:2] == counted
    assert kept[-1] == busy[-1]
    assert remembered(counted) == counted


def test_a_retry_keeps_its_place() -> None:
    """It is as old as it was: it goes before those that came while it ran and rested."""
    cluster = Cluster()
    cluster.join("w1", slots=1)
    dispatch = only(Dispatch, cluster.hold(a_spec("old", enqueued_at_s=cluster.at_s)))
    cluster.wait(5.0)
    cluster.fail(dispatch)
    cluster.hold_many(3, prefix="new")
    cluster.wait(2.0)
    running = of(Dispatch, cluster.decisions)[-1]
    assert running.key == "acme.new0"
    again = only(Dispatch, cluster.end(running))
    assert (again.key, again.enqueued_at_s) == ("acme.old", 1000.0)
