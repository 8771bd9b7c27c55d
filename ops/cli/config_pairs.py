"""What must agree between the tables of several programs in one file.

Each program judges its own table; only who reads all of them can see that they contradict.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from broker.wire.settings import Settings, nearest
from broker.wire.toml_lines import KeyPath

if TYPE_CHECKING:
    from broker.service.config import Config
    from producers.config import ProducerConfig
    from producers.gateway.config import GatewayConfig
    from worker_agent.config import WorkerConfig

Finding = tuple[KeyPath, str]


def check_pairs(
    document: Settings,
    config: "Config",
    *,
    worker: "WorkerConfig | None",
    producer: "ProducerConfig | None",
    gateway: "GatewayConfig | None",
) -> None:
    """Raise SettingsError when the tables contradict; a file without lanes has one program's."""
    found: list[Finding] = []
    if config.policy.lanes:
        if worker is not None:
            found += _worker(config, worker)
        if producer is not None and producer.lane:
            found += _lane(config, ("producer", "lane"), producer.lane)
        if gateway is not None:
            found += _gateway(config, gateway)
    if found:
        raise document.error(*(document.problem(path, message) for path, message in found))


def _worker(config: "Config", worker: "WorkerConfig") -> Iterator[Finding]:
    policy, leases = config.policy, config.policy.leases
    if worker.heartbeat_s >= leases.lease_s:
        message = (
            f"{worker.heartbeat_s:g} s must be shorter than policy.leases.lease_s"
            f" ({leases.lease_s:g} s): the worker would be taken for silent between any two"
        )
        yield ("worker", "heartbeat_s"), message
    if worker.renew_s > config.streams.ack_wait_s / 2:
        message = (
            f"{worker.renew_s:g} s must be at most half of streams.ack_wait_s"
            f" ({config.streams.ack_wait_s:g} s), or running jobs are delivered again"
        )
        yield ("worker", "renew_s"), message
    adapters = [name for names in policy.adapters.values() for name in names]
    if worker.models and not set(worker.models) & set(policy.models):
        name = next(iter(worker.models))
        message = (
            f'it serves no model of policy.models, so no job would come: "{name}".'
            f"{nearest(name, list(policy.models))} Known: {', '.join((*policy.models, *adapters))}"
        )
        yield ("worker", "models"), message


def _gateway(config: "Config", gateway: "GatewayConfig") -> Iterator[Finding]:
    broker = config.broker
    bands = {lane.name: lane.bands for lane in config.policy.lanes}
    for name, entry in gateway.keys.items():
        path = ("gateway", "keys", name)
        yield from _lane(config, (*path, "lane"), entry.lane)
        if entry.band not in bands.get(entry.lane, (entry.band,)):
            allowed = ", ".join(map(str, sorted(bands[entry.lane])))
            message = f'lane "{entry.lane}" may not use band {entry.band}; it has {allowed}'
            yield (*path, "band"), message
    if gateway.port and (gateway.host, gateway.port) == (broker.http_host, broker.http_port):
        message = f"{gateway.port} is broker.http_port, too; one of the two can't listen there"
        yield ("gateway", "port"), message
    if gateway.bodies_bytes_max < gateway.body_bytes_max:
        message = (
            f"must be at least body_bytes_max ({gateway.body_bytes_max:,}), or the largest request"
            " is told 503 for ever"
        )
        yield ("gateway", "bodies_bytes_max"), message


def _lane(config: "Config", path: KeyPath, name: str) -> Iterator[Finding]:
    lanes = [lane.name for lane in config.policy.lanes]
    if name not in lanes:
        yield path, f'no such lane: "{name}".{nearest(name, lanes)} Known: {", ".join(lanes)}'
