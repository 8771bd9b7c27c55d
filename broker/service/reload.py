"""A new configuration on a running cluster, in an order in which no message is ever an orphan.

Subjects first, then consumers, then the mind's rules and the pulls, then the lanes' offers: what is
added works before anybody is told of it. What is removed loses its subject with the first step, so
that nothing more comes in, then its place in the rules, then the offer; its consumer goes last,
when its queue is empty (`retiring`). Each step may be repeated, and a leader that dies between two
of them leaves what the next one, with the same file, does at its start.
"""

from msgspec.structs import asdict, replace

from broker.bus import topology
from broker.bus.base import BucketSpec, Bus, NoStore, NotFound
from broker.service.config import Config
from broker.service.config_records import GIB
from broker.service.offer import publish_offers, told_bytes_per_token, withdraw_offer
from broker.service.queues import bounds_of, queue_addresses, topology_of
from broker.service.retiring import STREAM_BANDS, former_lanes
from broker.wire import subjects

RELOADED = ("policy", "streams", "retention")
"""Tables that a reload takes."""

RESTARTED = ("nats", "broker")
"""Tables whose changes need a restart."""


def merged(running: Config, given: Config) -> tuple[Config, tuple[str, ...]]:
    """Return what a reload makes of a new file, and the keys that would need a restart."""
    config = replace(running, **{table: getattr(given, table) for table in RELOADED})
    late = [
        f"{table}.{key}"
        for table in RESTARTED
        for key, value in asdict(getattr(given, table)).items()
        if value != getattr(getattr(running, table), key)
    ]
    return config, tuple(late)


async def make_first_buckets(bus: Bus, config: Config) -> None:
    """Make what must be there before anybody can lead, or read who was offered what.

    Raises BusError.
    """
    for bucket in (subjects.CONFIG_BUCKET, subjects.LEADER_BUCKET):
        await bus.ensure_bucket(BucketSpec(bucket, replicas=config.nats.replicas))


async def declare(bus: Bus, config: Config) -> None:
    """Bring streams, buckets and consumers to a configuration. Raises BusError."""
    wanted = topology_of(config)
    try:
        await topology.apply(bus, wanted)
    except NoStore as error:
        gib = sum(max(0, spec.max_bytes) for spec in wanted.streams) / GIB
        message = f"{error}. All streams of this configuration may grow to {gib:,.2f} GiB"
        raise NoStore(message) from error


async def close(bus: Bus, config: Config) -> None:
    """Let nothing more come into streams that a configuration has no more. Raises BusError.

    Only a leader may: a standby with another file would shut the door of lanes that are served.
    """
    wanted = {subjects.jobs_stream(at.lane, at.band) for at in queue_addresses(config.policy)}
    lanes = (*(lane.name for lane in config.policy.lanes), *await former_lanes(bus, config))
    for lane in lanes:
        for band in STREAM_BANDS:
            name = subjects.jobs_stream(lane, band)
            if name not in wanted and await _stands(bus, name):
                await bus.ensure_stream(topology.closed_stream(lane, band, bounds_of(config)))


async def offer(bus: Bus, config: Config) -> None:
    """Tell clients what they may ask for now. Raises BusError."""
    told = await told_bytes_per_token(bus, config)
    await publish_offers(bus, config, bytes_per_token=told)


async def withdraw(bus: Bus, config: Config) -> None:
    """Tell clients of lanes that are no more. Only a leader may. Raises BusError."""
    for lane in await former_lanes(bus, config):
        await withdraw_offer(bus, lane)


async def _stands(bus: Bus, stream: str) -> bool:
    try:
        await bus.stream_state(stream)
    except NotFound:
        return False
    return True
