"""Which queues a configuration has, how deep each is pulled, and the topology behind them."""

from dataclasses import replace

from broker.bus import topology
from broker.bus.base import ConsumerSpec
from broker.bus.topology import Bounds, LanePlan, Topology
from broker.core.policy import LanePolicy, Policy, QuotaRow
from broker.service.config import Config
from broker.service.config_records import LaneRetention
from broker.wire.ids import BATCH_BAND
from broker.wire.subjects import JobAddress


def bounds_of(config: Config) -> Bounds:
    """Say what the server keeps for each lane."""
    streams = config.streams
    return Bounds(
        jobs_per_subject_max=streams.jobs_per_subject_max,
        batch_per_subject_max=streams.batch_per_subject_max,
        lane_bytes_max=streams.lane_bytes_max,
        batch_bytes_max=streams.batch_bytes_max,
        results_bytes_max=streams.results_bytes_max,
        results_age_s_max=streams.results_age_s_max,
        dead_letters_bytes_max=streams.dead_letters_bytes_max,
        dead_letters_age_s_max=streams.dead_letters_age_s_max,
        files_bytes_max=streams.files_bytes_max,
        files_age_s_max=streams.files_age_s_max,
        batches_age_s_max=streams.batches_age_s_max,
        usage_age_s_max=streams.usage_age_s_max,
        duplicate_window_s=streams.duplicate_window_s,
        ack_wait_s=streams.ack_wait_s,
        ack_pending_jobs_max=streams.ack_pending_jobs_max,
        replicas=config.nats.replicas,
    )


def bounds_by_lane(config: Config) -> dict[str, Bounds]:
    """Say what the server keeps for each lane, its own retention included."""
    common = bounds_of(config)
    own = {kept.lane: kept for kept in config.retention}
    return {lane.name: _kept(common, own.get(lane.name)) for lane in config.policy.lanes}


def _kept(common: Bounds, own: LaneRetention | None) -> Bounds:
    if own is None:
        return common
    asked = {name: getattr(own, name) for name in own.__struct_fields__ if name != "lane"}
    return replace(common, **{name: value for name, value in asked.items() if value is not None})


def results_ages_s(config: Config) -> dict[str, float]:
    """Say how long each lane keeps its terminal records."""
    return {lane: bounds.results_age_s_max for lane, bounds in bounds_by_lane(config).items()}


def topology_of(config: Config) -> Topology:
    """Lay out all streams, buckets and consumers of a configuration. Raises MalformedName."""
    policy = config.policy
    bounds = bounds_by_lane(config)
    plans = [
        LanePlan(lane.name, models_of(policy, lane), lane.bands, bounds[lane.name])
        for lane in policy.lanes
    ]
    return topology.of(plans, bounds_of(config))


def queue_consumers(config: Config) -> dict[JobAddress, ConsumerSpec]:
    """Specify the consumer of every queue (lane, band, model), most urgent band first."""
    bounds = bounds_of(config)
    return {
        at: topology.consumer_spec(at.lane, at.band, at.model, bounds)
        for at in queue_addresses(config.policy)
    }


def models_of(policy: Policy, lane: LanePolicy) -> tuple[str, ...]:
    """Models a lane may use: its own list, or all."""
    return lane.models or policy.models


def queue_addresses(policy: Policy) -> tuple[JobAddress, ...]:
    """Every queue (lane, band, model), most urgent band first."""
    found = [
        JobAddress(lane.name, band, model)
        for lane in policy.lanes
        for band in lane.bands
        for model in models_of(policy, lane)
    ]
    return tuple(sorted(found, key=lambda at: (at.band, at.lane, at.model)))


def window_of(config: Config, address: JobAddress) -> int:
    """How many jobs of a queue are pulled and not yet dispatched, at most.

    Online queues are pulled one deeper than their bound, so that every job is seen and one too many
    is refused
    at once; batch waits in its stream.
    """
    ceiling = config.streams.ack_pending_jobs_max // 2
    if address.band == BATCH_BAND:
        return min(config.broker.window_batch_jobs, ceiling)
    bounds = [row.queued_jobs_max for row in config.policy.quotas if _matches(row, address)]
    deepest = max((bound + 1 for bound in bounds if bound is not None), default=0)
    return min(max(config.broker.window_online_jobs, deepest), ceiling)


def _matches(row: QuotaRow, address: JobAddress) -> bool:
    return (
        row.model in (None, address.model)
        and row.lane in (None, address.lane)
        and row.band in (None, address.band)
    )
