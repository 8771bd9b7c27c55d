"""Stages for leases: silence, probes, phases."""

from broker.core.decisions import Decision, Dispatch
from broker.core.events import ProbeAnswered, Unanswered
from broker.core.state import Phase
from broker.wire.messages import Answer
from tests.unit.core.cluster import Cluster, a_spec, only


def phase_of(cluster: Cluster, name: str) -> Phase:
    """What the mind thinks of a worker."""
    worker = cluster.scheduler._mind.fleet.workers.get(name)
    return Phase.GONE if worker is None else worker.phase


def answer_probe(
    cluster: Cluster,
    name: str,
    *,
    incarnation: int | None = None,
    missed: Unanswered | None = None,
) -> list[Decision]:
    """Answer a probe."""
    return cluster.step(ProbeAnswered(cluster.at_s, name, incarnation, missed))


def silence(cluster: Cluster, seconds: float, *, but: tuple[str, ...] = ()) -> list[Decision]:
    """Let time pass in which only some workers report."""
    decisions: list[Decision] = []
    for _ in range(int(seconds)):
        decisions += cluster.tick(1.0)
        for name in but:
            decisions += cluster.beat(name)
    return decisions


def running(cluster: Cluster) -> Dispatch:
    """One accepted job on w1."""
    cluster.join("w1", "w2")
    dispatch = only(Dispatch, cluster.hold(a_spec("j1")))
    cluster.answer(dispatch, Answer.ACCEPTED)
    return dispatch
