"""Stages for reports: one job running, and what differs."""

from broker.core.decisions import (
    Decision,
    Difference,
    DifferenceKind,
    Dispatch,
)
from broker.wire.messages import (
    Answer,
    Attempt,
)
from tests.unit.core.cluster import (
    EPOCH,
    Cluster,
    a_spec,
    of,
    only,
)

OLD = Attempt(EPOCH - 1, 5)


def differences(decisions: list[Decision]) -> list[tuple[DifferenceKind, str, str]]:
    """Each difference told: kind, job, worker."""
    return [(one.kind, one.key, one.worker) for one in of(Difference, decisions)]


def one_job() -> tuple[Cluster, Dispatch]:
    """A job on w1, accepted; w2 is free."""
    cluster = Cluster()
    cluster.join("w1")
    dispatch = only(Dispatch, cluster.hold(a_spec()))
    cluster.answer(dispatch, Answer.ACCEPTED)
    cluster.join("w2")
    return cluster, dispatch
