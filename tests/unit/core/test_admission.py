"""The door: who may wait here, and what is told to who may not."""

from typing import Any

import pytest
from msgspec import structs

from broker.core.decisions import DeadLetter, Decision, Dispatch, Expire, Queued, Reject
from broker.core.events import (
    DispatchAllowed,
    JobHeld,
    JobSpec,
    LinkChanged,
    PolicyChanged,
)
from broker.core.policy import LanePolicy, QuotaRow
from broker.wire.messages import Failure, Reason
from tests.builders import an_attempt
from tests.unit.core.cluster import LANE, MODEL, Cluster, a_policy, a_spec, keys, of, only
from tests.unit.core.invariants import check_sums


def the_reject(decisions: list[Decision]) -> Reject:
    """The one refusal, and nothing else."""
    (reject,) = decisions
    assert isinstance(reject, Reject)
    return reject


@pytest.mark.parametrize(
    ("fields", "reason", "row"),
    [
        ({"lane": "nobody"}, Reason.UNKNOWN_MODEL, "lane=nobody"),
        ({"lane": "narrow", "band": 2}, Reason.UNKNOWN_MODEL, "lane=narrow band=2"),
        ({"model": "absent"}, Reason.UNKNOWN_MODEL, "lane=acme model=absent"),
        ({"lane": "narrow", "model": MODEL}, Reason.UNKNOWN_MODEL, "lane=narrow model=tiny"),
        ({"lane": "paused"}, Reason.LANE_PAUSED, "lane=paused"),
    ],
)
def test_a_stranger_is_refused(fields: dict[str, Any], reason: Reason, row: str) -> None:
    """Unknown lane, band or model, or a paused lane: each has its own reason."""
    lanes = (
        LanePolicy(name=LANE),
        LanePolicy(name="narrow", bands=(1,), models=("other",)),
        LanePolicy(name="paused", paused=True),
    )
    cluster = Cluster(a_policy(lanes=()))
    cluster.step(PolicyChanged(cluster.at_s, structs.replace(a_policy(), lanes=lanes)))
    cluster.join("w1")
    told: dict[str, Any] = {"band": 1 if fields.get("lane") == "narrow" else 2, **fields}
    spec = a_spec(**told)
    reject = the_reject(cluster.hold(spec))
    assert (reject.key, reject.reason, reject.row) == (spec.key, reason, row)
    assert (reject.used, reject.limit) == (0.0, 0.0)
    assert reject.retry_after_s == (30.0 if reason is Reason.LANE_PAUSED else 1.0)
    assert not cluster.scheduler.is_known(spec.key)


def test_a_lane_with_its_own_models_may_use_them() -> None:
    """Models named for a lane are allowed to it; a lane that names none may use all."""
    lanes = (LanePolicy(name=LANE), LanePolicy(name="narrow", models=(MODEL,)))
    cluster = Cluster(structs.replace(a_policy(), lanes=lanes))
    assert of(Queued, cluster.hold(a_spec(lane="narrow"), a_spec("j2", model="other")))
    assert cluster.scheduler.is_known("narrow.j1")
    assert cluster.scheduler.is_known("acme.j2")


@pytest.mark.parametrize(
    ("deadline_at_s", "late"), [(999.0, True), (1000.0, True), (1000.1, False)]
)
def test_a_job_whose_deadline_passed_is_expired_at_the_door(
    deadline_at_s: float, *, late: bool
) -> None:
    """At its deadline a job is late."""
    cluster = Cluster()
    cluster.join("w1")
    decisions = cluster.hold(a_spec(deadline_at_s=deadline_at_s))
    assert of(Expire, decisions) == ([Expire("acme.j1", Reason.DEADLINE_EXPIRED)] if late else [])
    assert bool(of(Dispatch, decisions)) is not late


@pytest.mark.parametrize(
    ("adapters", "refused"),
    [({}, False), ({MODEL: ("de",)}, False), ({MODEL: ("fr",)}, True), ({"other": ("de",)}, True)],
)
def test_an_adapter_that_the_configuration_does_not_list_is_refused(
    adapters: dict[str, tuple[str, ...]], *, refused: bool
) -> None:
    """Where it lists any; else the job waits for a worker that has it."""
    cluster = Cluster(a_policy(adapters=adapters))
    cluster.join("w1")
    decisions = cluster.hold(a_spec(adapter="de"), a_spec("plain"))
    rejects = of(Reject, decisions)
    assert [(one.key, one.reason) for one in rejects] == (
        [("acme.j1", Reason.UNKNOWN_MODEL)] if refused else []
    )
    assert [one.row for one in rejects] == (["lane=acme model=tiny adapter=de"] if refused else [])


def test_a_known_job_changes_nothing() -> None:
    """A redelivered message of a job that waits or runs is silent."""
    cluster = Cluster()
    cluster.join("w1", slots=1)
    cluster.hold(a_spec("j1"), a_spec("j2"))
    assert cluster.hold(a_spec("j1"), a_spec("j2")) == []
    check_sums(cluster.scheduler)


@pytest.mark.parametrize(
    ("row", "limit"),
    [(QuotaRow(inflight_tokens_max=199), 199), (QuotaRow(lane=LANE, tokens_per_min=150), 150)],
)
def test_a_job_that_can_never_fit_is_refused_at_once(row: QuotaRow, limit: int) -> None:
    """A cost of 200 over a row's tokens would wait for ever, so it is told."""
    cluster = Cluster(a_policy(row))
    cluster.join("w1")
    reject = the_reject(cluster.hold(a_spec()))
    assert reject.reason is Reason.QUOTA_EXCEEDED
    assert (reject.row, reject.used, reject.limit) == (row.name, 200.0, limit)
    assert reject.retry_after_s == 300.0


def test_a_job_that_just_fits_is_let_in() -> None:
    """A cost of 200 fits a row of 200."""
    cluster = Cluster(a_policy(QuotaRow(inflight_tokens_max=200)))
    cluster.join("w1")
    assert keys(Dispatch, cluster.hold(a_spec())) == ["acme.j1"]


def test_a_full_queue_refuses_with_row_use_limit_and_retry_after() -> None:
    """The job after `queued_jobs_max` waiting ones is refused, and nothing changes by it."""
    row = QuotaRow(lane=LANE, queued_jobs_max=2)
    cluster = Cluster(a_policy(row))
    cluster.join("w1", slots=1)
    cluster.hold_many(3)
    before = cluster.scheduler.views.queues(), cluster.scheduler.views.pools()
    reject = the_reject(cluster.hold(a_spec("j9")))
    assert reject.reason is Reason.QUEUE_FULL
    assert (reject.row, reject.used, reject.limit) == ("lane=acme", 2.0, 2.0)
    assert 1.0 <= reject.retry_after_s <= 300.0
    assert (cluster.scheduler.views.queues(), cluster.scheduler.views.pools()) == before
    assert of(Queued, cluster.hold(a_spec("j1", lane="beta")))


def test_a_full_queue_does_not_refuse_who_need_not_wait() -> None:
    """A bound of 0 means no waiting, not no work."""
    cluster = Cluster(a_policy(QuotaRow(queued_jobs_max=0)))
    cluster.join("w1", slots=1)
    assert keys(Dispatch, cluster.hold(a_spec("j1"))) == ["acme.j1"]
    assert the_reject(cluster.hold(a_spec("j2"))).reason is Reason.QUEUE_FULL


def test_a_full_queue_refuses_who_would_wait_for_its_quota() -> None:
    """A free worker is no help to a job that its own row holds back."""
    cluster = Cluster(
        a_policy(QuotaRow(lane=LANE, queued_jobs_max=0), QuotaRow(lane=LANE, inflight_jobs_max=1))
    )
    cluster.join("w1")
    cluster.hold(a_spec("j1"))
    assert the_reject(cluster.hold(a_spec("j2"))).row == "lane=acme"
    tokens = Cluster(
        a_policy(QuotaRow(queued_jobs_max=0), QuotaRow(band=2, inflight_tokens_max=399))
    )
    tokens.join("w1")
    tokens.hold(a_spec("j1"))
    assert the_reject(tokens.hold(a_spec("j2"))).reason is Reason.QUEUE_FULL


def hold_together(cluster: Cluster, *specs: JobSpec) -> list[Decision]:
    """Pull jobs that are settled as one, as the service does with all that comes in a moment."""
    decisions: list[Decision] = []
    for spec in specs:
        decisions += cluster.scheduler.step(JobHeld(cluster.at_s, spec), settles=False)
    return decisions + cluster.scheduler.settle()


@pytest.mark.parametrize(("slots", "queued_jobs_max"), [(1, 2), (4, 0), (4, 2)])
def test_jobs_of_one_moment_do_not_all_pass_a_full_queue_for_one_free_slot(
    slots: int, queued_jobs_max: int
) -> None:
    """As many are let in as start or may wait; each of them saw the slots free."""
    cluster = Cluster(a_policy(QuotaRow(queued_jobs_max=queued_jobs_max)))
    cluster.join("w1", slots=slots)
    decisions = hold_together(cluster, *(a_spec(f"j{n}", stream_sequence=n + 1) for n in range(50)))
    assert len(of(Dispatch, decisions)) == slots
    assert len(of(Queued, decisions)) == queued_jobs_max
    assert {one.reason for one in of(Reject, decisions)} == {Reason.QUEUE_FULL}
    check_sums(cluster.scheduler)


def one_that_takes_ten_seconds() -> Cluster:
    """One free slot, where each of the jobs before took so long."""
    cluster = Cluster()
    cluster.join("w1", slots=1)
    for _ in range(20):
        dispatch = only(Dispatch, cluster.hold(a_spec("warm")))
        cluster.wait(10.0)
        cluster.end(dispatch, run_s=10.0)
    return cluster


def test_jobs_of_one_moment_are_told_that_their_deadlines_cannot_be_met() -> None:
    """One free slot is no reason to let fifty wait for it until they expire."""
    cluster = one_that_takes_ten_seconds()
    specs = [
        a_spec(f"j{n}", enqueued_at_s=cluster.at_s, deadline_at_s=cluster.at_s + 7.0 + n / 1000)
        for n in range(50)
    ]
    decisions = hold_together(cluster, *specs)
    assert len(of(Dispatch, decisions)) == 1
    assert of(Queued, decisions) == []
    assert {one.reason for one in of(Reject, decisions)} == {Reason.DEADLINE_INFEASIBLE}


def test_jobs_with_one_deadline_stand_behind_each_other() -> None:
    """Who comes later goes later: not all of those that want an answer by noon can be first."""
    cluster = one_that_takes_ten_seconds()
    decisions = cluster.hold_many(50, deadline_at_s=cluster.at_s + 25.0)
    assert len(of(Dispatch, decisions)) == 1
    assert 1 <= len(of(Queued, decisions)) <= 3
    assert {one.reason for one in of(Reject, decisions)} == {Reason.DEADLINE_INFEASIBLE}


def test_a_slot_that_is_kept_for_people_lets_nobody_else_past_a_full_queue() -> None:
    """Standard jobs don't get the floor while people's jobs run: they would wait, without bound."""
    cluster = Cluster(a_policy(QuotaRow(band=2, queued_jobs_max=2)))
    cluster.join("w1", slots=4)
    cluster.hold_many(3, band=1, prefix="p")
    assert len(of(Dispatch, cluster.decisions)) == 3
    decisions = cluster.hold_many(50)
    assert keys(Queued, decisions) == ["acme.j0", "acme.j1"]
    assert {one.reason for one in of(Reject, decisions)} == {Reason.QUEUE_FULL}
    assert len(of(Reject, decisions)) == 48
    assert keys(Dispatch, cluster.hold(a_spec("person", band=1))) == ["acme.person"]


def test_nobody_passes_a_full_queue_while_our_link_is_down() -> None:
    """Nothing can be sent then, however idle the workers are."""
    cluster = Cluster(a_policy(QuotaRow(queued_jobs_max=2)))
    cluster.join("w1")
    cluster.step(LinkChanged(cluster.at_s, up=False))
    decisions = cluster.hold_many(5)
    assert len(of(Reject, decisions)) == 3
    assert len(of(Dispatch, cluster.step(LinkChanged(cluster.at_s, up=True)))) == 2


def test_batch_is_never_queue_full() -> None:
    """Its stream is its bound: the broker pulls what it can hold."""
    cluster = Cluster(a_policy(QuotaRow(queued_jobs_max=1)))
    cluster.hold_many(5, band=3)
    assert len(of(Queued, cluster.decisions)) == 5
    assert not of(Reject, cluster.decisions)
    assert of(Queued, cluster.hold(a_spec("x1")))
    assert the_reject(cluster.hold(a_spec("x2"))).reason is Reason.QUEUE_FULL


def test_a_job_that_failed_before_is_not_refused_for_a_full_queue() -> None:
    """It was accepted once; only its record may end it."""
    cluster = Cluster(a_policy(QuotaRow(queued_jobs_max=1)))
    cluster.join("w1", slots=1)
    cluster.hold_many(2)
    dispatch = of(Dispatch, cluster.decisions)[0]
    cluster.fail(dispatch)
    assert of(Reject, cluster.decisions) == []
    assert cluster.scheduler.views.rows()[0].queued_jobs == 1


@pytest.mark.parametrize("seconds_of_work", [0.001, 1e6])
def test_retry_after_is_bounded(seconds_of_work: float) -> None:
    """However fast or slow the pool, a refusal says 1 to 300 seconds."""
    cluster = Cluster(a_policy(QuotaRow(queued_jobs_max=3)))
    cluster.join("w1", slots=1)
    for _ in range(400):
        dispatch = only(Dispatch, cluster.hold(a_spec("warm")))
        cluster.end(dispatch, run_s=seconds_of_work)
    cluster.hold_many(4)
    reject = the_reject(cluster.hold(a_spec("j9")))
    assert reject.retry_after_s == (1.0 if seconds_of_work < 1 else 300.0)


def test_the_door_is_asked_when_start_up_ends() -> None:
    """Jobs that can't be served are refused then; a full queue is no reason."""
    cluster = Cluster(
        a_policy(QuotaRow(queued_jobs_max=1), QuotaRow(lane="beta", inflight_tokens_max=100)),
        started=False,
    )
    assert (
        cluster.hold(
            a_spec("j1"), a_spec("j2"), a_spec("j3", model="absent"), a_spec("j4", lane="beta")
        )
        == []
    )
    decisions = cluster.step(DispatchAllowed(cluster.at_s))
    assert [(one.key, one.reason) for one in of(Reject, decisions)] == [
        ("acme.j3", Reason.UNKNOWN_MODEL),
        ("beta.j4", Reason.QUOTA_EXCEEDED),
    ]
    assert keys(Queued, decisions) == ["acme.j1", "acme.j2"]
    check_sums(cluster.scheduler)


def test_a_deadline_that_passed_before_start_up_ended_is_told() -> None:
    """A worker's time is not spent on an answer that nobody waits for (sim fuzz, seed 46)."""
    cluster = Cluster(started=False)
    cluster.join("w1")
    cluster.hold(a_spec("j1", deadline_at_s=cluster.at_s + 1.0))
    cluster.hold(a_spec("j2", deadline_at_s=cluster.at_s + 9.0))
    cluster.tick(2.0)
    decisions = cluster.step(DispatchAllowed(cluster.at_s))
    assert of(Expire, decisions) == [Expire("acme.j1", Reason.DEADLINE_EXPIRED)]
    assert keys(Dispatch, decisions) == ["acme.j2"]
    check_sums(cluster.scheduler)


@pytest.mark.parametrize("started", [True, False])
def test_a_job_that_failed_too_often_before_is_dead_lettered(*, started: bool) -> None:
    """The broker that noted its last failure died before it wrote the dead letter."""
    failures = tuple(
        Failure(an_attempt(n), "w1", Reason.ENGINE_FAILED, 900.0 + n) for n in range(3)
    )
    cluster = Cluster(started=started)
    cluster.join("w1")
    decisions = cluster.hold(a_spec(failures=failures))
    if not started:
        assert decisions == []
        decisions = cluster.step(DispatchAllowed(cluster.at_s))
    assert decisions == [DeadLetter("acme.j1", failures)]
    assert not cluster.scheduler.is_known("acme.j1")
    assert of(Dispatch, cluster.hold(a_spec("j2", failures=failures[:2])))


def test_new_limits_are_asked_of_those_who_wait() -> None:
    """A waiting job that could never run under a new policy is refused."""
    cluster = Cluster()
    cluster.hold(a_spec("j1"), a_spec("j2", prompt_tokens=1, output_tokens_max=1))
    decisions = cluster.step(
        PolicyChanged(cluster.at_s, a_policy(QuotaRow(inflight_tokens_max=50)))
    )
    assert [(one.key, one.reason) for one in of(Reject, decisions)] == [
        ("acme.j1", Reason.QUOTA_EXCEEDED)
    ]
    check_sums(cluster.scheduler)
