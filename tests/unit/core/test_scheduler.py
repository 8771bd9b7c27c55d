"""The core's main way: hold, dispatch, end."""

from broker.core.decisions import Dispatch, HeldBy, Queued, Release
from broker.core.events import DispatchAllowed
from tests.unit.core.cluster import Cluster, a_spec, keys, of


def test_a_job_goes_to_a_free_worker_at_once() -> None:
    """A job that comes while a worker is free is dispatched in the same step, without a receipt."""
    cluster = Cluster()
    cluster.join("w1")
    decisions = cluster.hold(a_spec("j1", stream_sequence=9))
    assert keys(Dispatch, decisions) == ["acme.j1"]
    dispatch = of(Dispatch, decisions)[0]
    assert (dispatch.worker, dispatch.number, dispatch.stream_sequence) == ("w1", 1, 9)
    assert dispatch.attempt.epoch == cluster.epoch
    assert not of(Queued, decisions)


def test_a_job_waits_and_goes_when_a_slot_frees() -> None:
    """With all slots taken a job gets one receipt, and goes in the step in which a slot frees."""
    cluster = Cluster()
    cluster.join("w1", slots=1)
    first = of(Dispatch, cluster.hold(a_spec("j1")))[0]
    waits = cluster.hold(a_spec("j2"))
    assert [(one.key, one.position) for one in of(Queued, waits)] == [("acme.j2", 0)]
    ended = cluster.end(first)
    assert keys(Release, ended) == ["acme.j1"]
    assert keys(Dispatch, ended) == ["acme.j2"]
    assert of(Dispatch, ended)[0].explanation.held_by is HeldBy.ROOM


def test_nothing_is_dispatched_before_start_up_is_over() -> None:
    """Until DispatchAllowed jobs only collect; then they go."""
    cluster = Cluster(started=False)
    cluster.join("w1")
    assert cluster.hold(a_spec("j1")) == []
    assert keys(Dispatch, cluster.step(DispatchAllowed(cluster.at_s))) == ["acme.j1"]
