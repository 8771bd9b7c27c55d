"""What follows an attempt that came to nothing."""

import random
from itertools import pairwise
from typing import Any

import pytest

from broker.core.decisions import (
    Cancel,
    DeadLetter,
    Decision,
    Dispatch,
    Expire,
    FailStream,
    HeldBy,
    Queued,
    Requeue,
)
from broker.core.events import ProbeAnswered, Unanswered
from broker.core.policy import LeasePolicy, QuotaRow
from broker.core.retries import backoff_s
from broker.wire.messages import Failure, Kind, Reason
from tests.builders import an_attempt
from tests.unit.core.cluster import Cluster, a_policy, a_spec, keys, of, only
from tests.unit.core.invariants import check_sums

POLICY = LeasePolicy()


def the_failure(decisions: list[Decision]) -> Failure:
    """The failure that the one Requeue tells."""
    failure = only(Requeue, decisions).failure
    assert failure is not None
    return failure


# ---- back-off -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failures", "jitter", "wait_s"),
    [
        (1, 0.0, 0.5),
        (2, 0.0, 1.0),
        (3, 0.0, 2.0),
        (6, 0.0, 16.0),
        (7, 0.0, 30.0),
        (10_000, 0.0, 30.0),
        (0, 0.0, 0.5),
        (1, 1.0, 0.625),
        (1, -1.0, 0.375),
        (7, -1.0, 24.0),
        (7, 1.0, 30.0),
    ],
)
def test_backoff_doubles_up_to_its_cap_with_jitter(
    failures: int, jitter: float, wait_s: float
) -> None:
    """The wait is base · 2^(n-1), 25 % either way, at most the cap, for any number of failures."""
    assert backoff_s(failures, POLICY, jitter=jitter) == wait_s


def test_case_26_attempts_follow_the_curve_and_fresh_work_is_not_delayed() -> None:
    """A failing job rests out its back-off while fresh jobs run, then goes before later ones."""
    policy = a_policy(leases=LeasePolicy(failures_max=100))
    cluster = Cluster(policy)
    cluster.join("w1", slots=1)
    started_s: list[float] = []
    dispatch = only(Dispatch, cluster.hold(a_spec("bad")))
    for n in range(6):
        started_s.append(cluster.at_s)
        decisions = cluster.fail(dispatch)
        requeue = only(Requeue, decisions)
        base_s = 0.5 * 2**n
        assert 0.75 * base_s <= requeue.not_before_s - cluster.at_s <= 1.25 * base_s
        fresh = only(Dispatch, cluster.hold(a_spec(f"fresh{n}", enqueued_at_s=cluster.at_s)))
        assert fresh.key == f"acme.fresh{n}"
        cluster.end(fresh)
        cluster.wait(requeue.not_before_s - cluster.at_s - 0.01)
        assert not cluster.scheduler.is_leased("acme.bad")
        dispatch = only(Dispatch, cluster.tick(0.02))
    gaps_s = [b - a for a, b in pairwise(started_s)]
    assert gaps_s == sorted(gaps_s)


def test_a_job_in_backoff_says_so() -> None:
    """It stands in no line and has no receipt of a place."""
    cluster = Cluster()
    cluster.join("w1")
    decisions = cluster.fail(only(Dispatch, cluster.hold(a_spec())))
    assert not of(Queued, decisions)
    why = cluster.scheduler.views.why("acme.j1")
    assert why is not None
    assert why.held_by is HeldBy.BACK_OFF
    assert why.not_before_s == only(Requeue, decisions).not_before_s
    assert cluster.scheduler.views.pools()[0].waiting_jobs == 0
    assert cluster.scheduler.views.queues()[0].waiting_jobs == 1
    dispatch = only(Dispatch, cluster.wait(1.0))
    assert dispatch.explanation.held_by is HeldBy.BACK_OFF


def test_jitter_comes_from_the_seed() -> None:
    """The same seed waits the same; different seeds spread."""
    waits = []
    for seed in (1, 1, 2):
        cluster = Cluster(seed=seed)
        cluster.join("w1")
        decisions = cluster.fail(only(Dispatch, cluster.hold(a_spec())))
        waits.append(only(Requeue, decisions).not_before_s)
    assert waits[0] == waits[1] != waits[2]
    jitter = 2.0 * random.Random(1).random() - 1.0
    assert waits[0] == 1000.0 + backoff_s(1, POLICY, jitter=jitter)


# ---- failures -----------------------------------------------------------------------------------


def test_a_failed_job_is_tried_on_another_worker() -> None:
    """The worker where it failed is passed over, and the failure goes with the job."""
    cluster = Cluster()
    cluster.join("w1", "w2")
    first = only(Dispatch, cluster.hold(a_spec()))
    decisions = cluster.fail(first, Reason.ENGINE_TIMEOUT, detail="504")
    failure = the_failure(decisions)
    assert failure == Failure(
        first.attempt, first.worker, Reason.ENGINE_TIMEOUT, cluster.at_s, "504", charged=True
    )
    second = only(Dispatch, cluster.wait(1.0))
    assert second.worker != first.worker
    assert second.attempt > first.attempt
    assert second.failures == (failure,)
    why = cluster.scheduler.views.why("acme.j1")
    assert why is not None
    assert why.excluded == (first.worker,)


def test_the_only_worker_is_tried_again() -> None:
    """Exclusion leaves nobody: it is void."""
    cluster = Cluster()
    cluster.join("w1")
    cluster.fail(only(Dispatch, cluster.hold(a_spec())))
    assert only(Dispatch, cluster.wait(1.0)).worker == "w1"
    cluster.fail(of(Dispatch, cluster.decisions)[-1])
    cluster.wait(2.0)
    why = cluster.scheduler.views.why("acme.j1")
    assert why is not None
    assert why.excluded == ("w1",)


def test_after_three_charged_failures_a_job_is_dead_lettered() -> None:
    """With its whole history; nothing of it is left."""
    cluster = Cluster()
    cluster.join("w1")
    dispatch = only(Dispatch, cluster.hold(a_spec()))
    for _ in range(2):
        cluster.fail(dispatch)
        dispatch = only(Dispatch, cluster.wait(3.0))
    decisions = cluster.fail(dispatch, Reason.ENGINE_GARBAGE)
    dead = only(DeadLetter, decisions)
    assert dead.key == "acme.j1"
    assert [one.reason for one in dead.failures] == [
        Reason.ENGINE_FAILED,
        Reason.ENGINE_FAILED,
        Reason.ENGINE_GARBAGE,
    ]
    assert not of(Requeue, decisions)
    assert not cluster.scheduler.is_known("acme.j1")
    check_sums(cluster.scheduler)


def test_failures_of_earlier_epochs_count() -> None:
    """What ATTEMPTS held goes on: two before and one now make three."""
    earlier = tuple(Failure(an_attempt(n), "w1", Reason.ENGINE_FAILED, 900.0 + n) for n in (1, 2))
    cluster = Cluster()
    cluster.join("w1")
    dispatch = only(Dispatch, cluster.hold(a_spec(failures=earlier)))
    assert dispatch.failures == earlier
    dead = only(DeadLetter, cluster.fail(dispatch))
    assert dead.failures[:2] == earlier
    assert len(dead.failures) == 3


def test_a_job_handed_back_is_not_charged() -> None:
    """A draining worker gives it back: noted, no back-off, no exclusion, any number of times."""
    cluster = Cluster()
    cluster.join("w1")
    dispatch = only(Dispatch, cluster.hold(a_spec()))
    for n in range(5):
        decisions = cluster.fail(dispatch, Reason.HANDED_BACK, charged=False)
        requeue = only(Requeue, decisions)
        assert requeue.not_before_s == 0.0
        assert requeue.failure is not None
        assert not requeue.failure.charged
        dispatch = only(Dispatch, decisions)
        assert len(dispatch.failures) == n + 1


def test_uncharged_failures_do_not_lengthen_the_backoff() -> None:
    """The curve counts charged failures only."""
    cluster = Cluster()
    cluster.join("w1")
    dispatch = only(Dispatch, cluster.hold(a_spec()))
    for _ in range(3):
        dispatch = only(Dispatch, cluster.fail(dispatch, Reason.HANDED_BACK, charged=False))
    wait_s = only(Requeue, cluster.fail(dispatch)).not_before_s - cluster.at_s
    assert wait_s <= 0.625


def test_case_15_a_thousand_random_retries_leave_usage_at_zero() -> None:
    """Failures, refusals and cancels in any order: every row is even at the end."""
    rng = random.Random(3)
    rows = (QuotaRow(inflight_jobs_max=12), QuotaRow(lane="acme", inflight_tokens_max=4000))
    policy = a_policy(*rows, leases=LeasePolicy(retry_base_s=0.01, failures_max=50))
    cluster = Cluster(policy)
    cluster.join("w1", "w2", slots=8)
    cluster.hold_many(60)
    running = of(Dispatch, cluster.decisions)
    for _ in range(1000):
        if not running:
            break
        dispatch = running.pop(rng.randrange(len(running)))
        answer = rng.choice((None, Unanswered.NO_RESPONDERS, Unanswered.UNSENT))
        if answer is None:
            decisions = cluster.fail(dispatch, charged=rng.random() < 0.5)
        else:
            decisions = cluster.answer(dispatch, answer)
        decisions += cluster.beat("w1") + cluster.beat("w2") + cluster.tick(0.05)
        running += of(Dispatch, decisions)
        check_sums(cluster.scheduler)
    for n in range(60):
        cluster.cancel(f"acme.j{n}")
    for dispatch in running:
        cluster.end(dispatch, kind=Kind.CANCELLED)
    assert not cluster.scheduler.leases()
    assert cluster.usage == {"all": (0, 0.0), "lane=acme": (0, 0.0)}


# ---- what need not be tried again ----------------------------------------------------------------


def test_a_job_whose_deadline_passed_while_it_ran_expires_instead() -> None:
    """At the requeue, not after another wait."""
    cluster = Cluster()
    cluster.join("w1")
    dispatch = only(Dispatch, cluster.hold(a_spec(deadline_at_s=1010.0)))
    cluster.at_s = 1010.0
    decisions = cluster.fail(dispatch)
    assert of(Expire, decisions) == [Expire("acme.j1", Reason.DEADLINE_EXPIRED)]
    assert not of(Requeue, decisions)
    assert not cluster.scheduler.is_known("acme.j1")


def test_a_cancelled_job_is_not_tried_again() -> None:
    """Its worker was lost before it could confirm: the broker writes the record."""
    cluster = Cluster()
    cluster.join("w1")
    dispatch = only(Dispatch, cluster.hold(a_spec(streamed=True)))
    cluster.first_token(dispatch)
    cluster.cancel("acme.j1")
    decisions = cluster.beat("w1", incarnation=2, inflight=())
    assert keys(Cancel, decisions) == ["acme.j1"]
    assert not of(Requeue, decisions)
    assert not of(FailStream, decisions)


def test_a_cancelled_job_is_not_dead_lettered() -> None:
    """Also when that failure would have been its last."""
    cluster = Cluster(a_policy(leases=LeasePolicy(failures_max=1)))
    cluster.join("w1")
    dispatch = only(Dispatch, cluster.hold(a_spec()))
    cluster.cancel("acme.j1")
    decisions = cluster.fail(dispatch)
    assert keys(Cancel, decisions) == ["acme.j1"]
    assert not of(DeadLetter, decisions)


@pytest.mark.parametrize("how", ["worker lost", "engine failed", "handed back", "unlisted"])
def test_a_stream_is_not_restarted_after_its_first_token(how: str) -> None:
    """By whatever it was lost: the caller has seen tokens, and hears `worker_lost`."""
    cluster = Cluster()
    cluster.join("w1")
    dispatch = only(Dispatch, cluster.hold(a_spec(streamed=True)))
    cluster.first_token(dispatch)
    match how:
        case "worker lost":
            decisions = cluster.beat("w1", incarnation=2, inflight=())
        case "engine failed":
            decisions = cluster.fail(dispatch)
        case "handed back":
            decisions = cluster.fail(dispatch, Reason.HANDED_BACK, charged=False)
        case _:
            decisions = cluster.beat("w1", inflight=())
    failed = only(FailStream, decisions)
    assert failed.key == "acme.j1"
    assert len(failed.failures) == (0 if how == "unlisted" else 1)
    assert not of(Requeue, decisions)
    assert not cluster.scheduler.is_known("acme.j1")


@pytest.mark.parametrize(
    ("fields", "first_token"),
    [
        ({"streamed": True}, False),
        ({"streamed": True, "restart_visible": True}, True),
        ({"streamed": False}, True),
    ],
)
def test_a_rerun_that_nobody_sees_or_that_was_asked_for_is_made(
    fields: dict[str, Any], *, first_token: bool
) -> None:
    """Before the first token, without a stream, or with the caller's word."""
    cluster = Cluster()
    cluster.join("w1")
    dispatch = only(Dispatch, cluster.hold(a_spec(**fields)))
    if first_token:
        cluster.first_token(dispatch)
    assert keys(Requeue, cluster.fail(dispatch)) == ["acme.j1"]


# ---- a worker's death ---------------------------------------------------------------------------


def kill(cluster: Cluster, name: str) -> list[Decision]:
    """Let a worker die and be restarted, empty."""
    incarnation = cluster.beats[name].incarnation + 1
    return cluster.beat(name, incarnation=incarnation, inflight=())


def test_case_25_a_job_that_kills_three_workers_is_dead_lettered_and_its_neighbours_are_not() -> (
    None
):
    """The killer ends after exactly three deaths; no neighbour is charged, and all complete."""
    cluster = Cluster()
    cluster.join("w1", "w2", "w3", slots=6)
    cluster.hold_many(17)
    cluster.hold(a_spec("killer"))
    deaths = 0
    while cluster.scheduler.is_known("acme.killer"):
        why = cluster.scheduler.views.why("acme.killer")
        assert why is not None
        if why.leased:
            deaths += 1
            kill(cluster, why.worker)
        else:
            cluster.wait(1.0)
        assert deaths <= 3
    dead = only(DeadLetter, cluster.decisions)
    assert dead.key == "acme.killer"
    assert deaths == 3
    assert [one.reason for one in dead.failures] == [Reason.WORKER_LOST] * 3
    charged = {
        one.key
        for one in of(Requeue, cluster.decisions)
        if one.failure is not None and one.failure.charged
    }
    assert charged <= {"acme.killer"}
    for _ in range(40):
        for lease in cluster.scheduler.leases():
            dispatch = next(
                one for one in of(Dispatch, cluster.decisions) if one.attempt == lease.attempt
            )
            cluster.end(dispatch)
        cluster.wait(1.0)
    assert not cluster.scheduler.leases()
    assert not cluster.scheduler._mind.queues.waiting


def test_a_job_alone_on_a_worker_that_dies_is_charged() -> None:
    """Nobody else can have done it: it backs off, and the reason says how the worker went."""
    cluster = Cluster()
    cluster.join("w1")
    cluster.hold(a_spec())
    failure = the_failure(kill(cluster, "w1"))
    assert (failure.reason, failure.charged, failure.detail) == (
        Reason.WORKER_LOST,
        True,
        "restarted",
    )


def test_suspects_run_apart() -> None:
    """Two jobs that one more death would end never share a worker; others may join either."""
    cluster = Cluster()
    cluster.join("w1", slots=4)
    cluster.hold(a_spec("a"), a_spec("b"))
    kill(cluster, "w1")
    decisions = kill(cluster, "w1")
    assert len(of(Dispatch, decisions)) == 1
    apart = "acme.a" if keys(Dispatch, decisions) == ["acme.b"] else "acme.b"
    why = cluster.scheduler.views.why(apart)
    assert why is not None
    assert why.held_by is HeldBy.ROOM
    assert keys(Dispatch, cluster.hold(a_spec("fresh"))) == ["acme.fresh"]
    assert keys(Dispatch, cluster.join("w2")) == [apart]
    assert cluster.scheduler.views.why(apart) is not None
    check_sums(cluster.scheduler)


def test_a_suspect_goes_when_the_other_has_ended() -> None:
    """Apart means after one another where there is one worker."""
    cluster = Cluster()
    cluster.join("w1", slots=4)
    cluster.hold(a_spec("a"), a_spec("b"))
    kill(cluster, "w1")
    dispatch = only(Dispatch, kill(cluster, "w1"))
    assert len(of(Dispatch, cluster.end(dispatch))) == 1
    assert not cluster.scheduler._mind.queues.waiting


def test_an_engine_that_died_under_its_agent_is_a_death_for_all_that_ran_there() -> None:
    """The first word of it settles the blame for all; the others' words of the same add nothing."""
    cluster = Cluster()
    cluster.join("w1")
    cluster.hold(a_spec("a"), a_spec("b"))
    one, two = of(Dispatch, cluster.decisions)
    decisions = cluster.fail(one, Reason.WORKER_LOST, detail="exit 139")
    failures = [one.failure for one in of(Requeue, decisions)]
    assert [(one.reason, one.charged, one.detail) for one in failures if one is not None] == [
        (Reason.WORKER_LOST, False, "exit 139")
    ] * 2
    assert keys(Dispatch, decisions) == ["acme.a", "acme.b"]
    assert not of(Requeue, cluster.fail(two, Reason.WORKER_LOST))
    alone = only(
        Dispatch, cluster.hold(a_spec("c", model="other")) + cluster.join("w2", models=("other",))
    )
    failure = the_failure(cluster.fail(alone, Reason.WORKER_LOST))
    assert (failure.charged, failure.detail) == (True, "engine died")


def test_a_worker_lost_by_silence_counts_as_dead() -> None:
    """By no responders or long silence, as by a restart."""
    cluster = Cluster()
    cluster.join("w1")
    cluster.hold(a_spec())
    cluster.tick(3.0)
    decisions = cluster.step(ProbeAnswered(cluster.at_s, "w1", None, Unanswered.NO_RESPONDERS))
    assert the_failure(decisions).detail == "no responders"
