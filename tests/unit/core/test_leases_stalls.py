"""Stalls, cancels and what else ends a lease but silence."""

import pytest

from broker.core.decisions import Abort, Dispatch, Requeue
from broker.core.events import LinkChanged
from broker.core.policy import LeasePolicy
from broker.wire.messages import Answer, Reason
from tests.unit.core.cluster import Cluster, a_policy, a_spec, in_flight, of, only
from tests.unit.core.silences import running, silence


def test_case_21_22_23_a_listed_job_is_never_dropped_for_its_age() -> None:
    """An hour with a token now and then is an hour of work: one attempt, no requeue."""
    cluster = Cluster()
    dispatch = running(cluster)
    for minute in range(60):
        cluster.wait(59.0)
        job = a_spec("j1")
        listed = in_flight(job, dispatch.attempt, output_tokens=minute + 1, prefilled=True)
        cluster.tick(1.0)
        cluster.beat(dispatch.worker, inflight=(listed,))
    assert not of(Abort, cluster.decisions)
    assert not of(Requeue, cluster.decisions)
    assert len(of(Dispatch, cluster.decisions)) == 1


def test_a_job_without_a_new_token_for_stall_s_is_aborted_once() -> None:
    """It stays leased until its worker confirms, then it is charged and tried elsewhere."""
    cluster = Cluster()
    dispatch = running(cluster)
    cluster.wait(119.0)
    assert not of(Abort, cluster.decisions)
    abort = only(Abort, cluster.tick(1.0))
    assert (abort.key, abort.worker, abort.attempt) == (
        "acme.j1",
        dispatch.worker,
        dispatch.attempt,
    )
    assert abort.reason is Reason.STALLED
    assert cluster.scheduler.is_leased("acme.j1")
    ended = cluster.fail(dispatch, Reason.STALLED)
    failure = only(Requeue, ended).failure
    assert failure is not None
    assert (failure.reason, failure.charged) == (Reason.STALLED, True)


def test_progress_puts_a_stall_off() -> None:
    """A first token and each new token count; a report without one does not."""
    cluster = Cluster(a_policy(leases=LeasePolicy(stall_s=10.0)))
    dispatch = running(cluster)
    cluster.wait(9.0)
    cluster.first_token(dispatch)
    cluster.wait(9.0)
    listed = in_flight(a_spec("j1"), dispatch.attempt, output_tokens=1, prefilled=True)
    cluster.beat(dispatch.worker, inflight=(listed,))
    assert not of(Abort, cluster.decisions)
    for _ in range(9):
        cluster.tick(1.0)
        for name in ("w1", "w2"):
            cluster.beat(name, inflight=(listed,) if name == dispatch.worker else ())
    assert not of(Abort, cluster.decisions)
    assert of(Abort, cluster.tick(1.0))


@pytest.mark.parametrize("heard_by", ["answer", "list"])
def test_a_stall_is_counted_from_when_the_worker_took_the_job(heard_by: str) -> None:
    """An order that waited for its body, or on its way, for stall_s is not one that stalled."""
    cluster = Cluster(a_policy(leases=LeasePolicy(stall_s=5.0)))
    cluster.join("w1")
    dispatch = only(Dispatch, cluster.hold(a_spec("j1")))
    for _ in range(7):
        cluster.tick(1.0)
        cluster.beat("w1", echo=0, inflight=())
    if heard_by == "answer":
        cluster.answer(dispatch, Answer.ACCEPTED)
    listed = in_flight(a_spec("j1"), dispatch.attempt)
    for _ in range(4):
        cluster.beat("w1", inflight=(listed,))
        assert not of(Abort, cluster.tick(1.0))
    cluster.beat("w1", inflight=(listed,))
    assert only(Abort, cluster.tick(1.0)).reason is Reason.STALLED


def test_a_job_that_was_never_accepted_is_not_stalled() -> None:
    """Whether it runs at all is the echo's question."""
    cluster = Cluster(a_policy(leases=LeasePolicy(stall_s=5.0)))
    cluster.join("w1")
    cluster.hold(a_spec("j1"))
    for _ in range(12):
        cluster.tick(1.0)
        cluster.beat("w1", echo=0, inflight=())
    assert not of(Abort, cluster.decisions)


def test_a_suspects_jobs_are_not_stalled() -> None:
    """Its silence is judged, not theirs; when it speaks again they are looked at anew."""
    cluster = Cluster(a_policy(leases=LeasePolicy(stall_s=4.0, revoke_s=1000.0)))
    dispatch = running(cluster)
    other = "w2" if dispatch.worker == "w1" else "w1"
    assert not of(Abort, silence(cluster, 10, but=(other,)))
    cluster.beat(dispatch.worker)
    assert of(Abort, silence(cluster, 6, but=("w1", "w2")))


def test_nothing_stalls_while_the_clock_stands() -> None:
    """No news of tokens can come through a link that is down."""
    cluster = Cluster(a_policy(leases=LeasePolicy(stall_s=5.0)))
    dispatch = running(cluster)
    cluster.step(LinkChanged(cluster.at_s, up=False))
    silence(cluster, 30)
    cluster.step(LinkChanged(cluster.at_s, up=True))
    listed = in_flight(a_spec("j1"), dispatch.attempt, output_tokens=5, prefilled=True)
    cluster.beat(dispatch.worker, inflight=(listed,))
    silence(cluster, 4)
    assert not of(Abort, cluster.decisions)


@pytest.mark.parametrize("unheard", ["unlisted", "failed"])
def test_a_stalled_job_that_its_worker_dropped_is_charged(unheard: str) -> None:
    """Whether the worker says so or just lists it no more."""
    cluster = Cluster(a_policy(leases=LeasePolicy(stall_s=5.0)))
    dispatch = running(cluster)
    cluster.wait(5.0)
    if unheard == "unlisted":
        decisions = cluster.beat(dispatch.worker, inflight=())
    else:
        decisions = cluster.fail(dispatch, Reason.STALLED)
    failure = only(Requeue, decisions).failure
    assert failure is not None
    assert failure.charged
    assert failure.worker == dispatch.worker
