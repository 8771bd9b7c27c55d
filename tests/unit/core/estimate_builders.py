"""A pool that has learned, and what is asked of its wait estimates."""

from broker.core.decisions import Dispatch
from broker.core.paces import PACE_JOBS, PACE_S_MIN, Pace
from broker.core.policy import PressurePolicy, QuotaRow
from broker.core.queues import Queue
from tests.unit.core.cluster import LANE, MODEL, Cluster, a_policy, a_spec, only


def a_pool(
    *,
    slots: int = 2,
    run_s: float = 4.0,
    jobs: int = 300,
    rows: tuple[QuotaRow, ...] = (),
    floor_share: float = 0.0,
) -> Cluster:
    """A pool that has learned: jobs of cost 200 take `run_s` a slot; all slots are taken."""
    cluster = Cluster(a_policy(*rows, pressure=PressurePolicy(online_floor_share=floor_share)))
    cluster.join("w1", slots=slots)
    for _ in range(jobs):
        pass_a_job_s(cluster)
        cluster.end(only(Dispatch, cluster.hold(a_spec("warm", lane="beta", band=0))), run_s=run_s)
    forget_arrivals(cluster)
    cluster.hold_many(slots, prefix="busy", lane="beta", band=0)
    forget_arrivals(cluster)
    return cluster


def pass_a_job_s(cluster: Cluster) -> None:
    """Let so much time pass that means remember as many jobs by the minute as by their number."""
    cluster.at_s += PACE_S_MIN / PACE_JOBS
    cluster.beat("w1")


def forget_arrivals(cluster: Cluster) -> None:
    """Let nothing be expected to come, as long after the last arrival."""
    pace = pace_of(cluster)
    for flow in (*pace.flows.values(), *pace.bands):
        flow.recent_tokens_s = flow.usual_tokens_s = 0.0


def pace_of(cluster: Cluster) -> Pace:
    """What was learned of the pool."""
    return cluster.scheduler._estimates._pace(cluster.scheduler._mind.queues.pool(MODEL))


def wait_s(cluster: Cluster, *, lane: str = LANE, band: int = 2, model: str = MODEL) -> float:
    """Estimate for a job that comes now."""
    return cluster.scheduler.views.queue(lane=lane, band=band, model=model).wait_s


def a_queue(cluster: Cluster) -> Queue:
    """The queue of LANE in band 2."""
    return cluster.scheduler._mind.queues.queue(lane=LANE, band=2, model=MODEL)
