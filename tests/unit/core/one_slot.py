"""A cluster with one slot, so that the order of dispatch is the order of choice."""

from typing import Any

from broker.core.decisions import Dispatch
from broker.core.events import JobSpec
from broker.core.placement import Placement
from broker.core.policy import (
    DEFAULT_BANDS,
    BandPolicy,
    OrderPolicy,
    Policy,
)
from tests.unit.core.cluster import Cluster, a_policy, a_spec, of, only
from tests.unit.core.least_loaded import LeastLoadedRouter


def one_slot(policy: Policy | None = None) -> tuple[Cluster, Dispatch]:
    """A cluster with one slot, which is taken."""
    cluster = Cluster(policy)
    cluster.join("w1", slots=1)
    return cluster, only(Dispatch, cluster.hold(a_spec("first", lane="beta", band=0)))


def run_all(cluster: Cluster, dispatch: Dispatch, *, count: int | None = None) -> list[str]:
    """End job after job in the one slot; name the jobs in the order in which they went."""
    went: list[str] = []
    while count is None or len(went) < count:
        following = of(Dispatch, cluster.end(dispatch))
        if not following:
            return went
        (dispatch,) = following
        went.append(dispatch.key)
    return went


def shares_of(cluster: Cluster, dispatch: Dispatch, *, count: int) -> dict[int, float]:
    """Share of work by band, of `count` jobs in one slot."""
    work = dict.fromkeys(range(4), 0.0)
    for _ in range(count):
        dispatch = only(Dispatch, cluster.end(dispatch))
        lease = cluster.scheduler._mind.ledger.get(dispatch.key)
        assert lease is not None
        work[lease.job.band] += lease.cost_tokens
    total = sum(work.values())
    return {band: tokens / total for band, tokens in work.items()}


def aging_policy() -> Policy:
    """No guaranteed share for band 2, so that only age lifts it."""
    standard = BandPolicy(guaranteed_share=0.0, aging_s=60.0, wait_s_max=600.0)
    bands = (DEFAULT_BANDS[0], DEFAULT_BANDS[1], standard, DEFAULT_BANDS[3])
    return a_policy(bands=bands, order=OrderPolicy(lane_slack_tokens=0.0))


def work_of(cluster: Cluster, dispatch: Dispatch, *, count: int) -> dict[str, float]:
    """Work by lane of `count` jobs in one slot."""
    work: dict[str, float] = {}
    for _ in range(count):
        dispatch = only(Dispatch, cluster.end(dispatch))
        lease = cluster.scheduler._mind.ledger.get(dispatch.key)
        assert lease is not None
        work[lease.job.lane] = work.get(lease.job.lane, 0.0) + lease.cost_tokens
    return work


class HoldingRouter(LeastLoadedRouter):
    """Holds jobs whose name begins with `held` for a worker that is never free, until released."""

    released = False

    def place(self, job: JobSpec, **fields: Any) -> Placement:
        if job.key.startswith("acme.held") and not self.released:
            return Placement(None, 0, 0, 0.0, held_for="w9")
        return super().place(job, **fields)


class ChoosyRouter(LeastLoadedRouter):
    """Holds all but the jobs named `goes` for a better worker, and tells large ones of no room."""

    def place(self, job: JobSpec, **fields: Any) -> Placement:
        if job.key.startswith("acme.large"):
            return Placement(None, 0, 0, 0.0, full=True)
        if not job.key.startswith("acme.goes"):
            return Placement(None, 0, 0, 0.0, held_for="w9")
        return super().place(job, **fields)


class ShortOfPrefillRouter(LeastLoadedRouter):
    """Has no prefill room for jobs named `cold`, which others may not need."""

    def place(self, job: JobSpec, **fields: Any) -> Placement:
        if job.key.startswith("acme.cold"):
            return Placement(None, 0, 0, 0.0)
        return super().place(job, **fields)


class AdapterRouter(LeastLoadedRouter):
    """No worker has any adapter."""

    def place(self, job: JobSpec, **fields: Any) -> Placement:
        if job.adapter:
            return Placement(None, 0, 0, 0.0, servable=False)
        return super().place(job, **fields)
