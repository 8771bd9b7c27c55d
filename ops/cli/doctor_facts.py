"""What `doctor` looks at: gathered once, without changing anything, judged elsewhere."""

import asyncio
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

import aiohttp
import msgspec
import orjson

from broker.bus import topology
from broker.bus.base import BusError, Message, StreamSpec
from broker.bus.nats import NatsBus, ServerInfo
from broker.service.config import Config
from broker.service.election import leader_now
from broker.service.file_marks import read_mark
from broker.service.queues import topology_of
from broker.service.snapshot import GoneView, StatusView, WorkersView, WorkerView
from broker.wire import subjects
from broker.wire.codec import MalformedMessage, decode
from broker.wire.file_mark import FileMark
from broker.wire.messages import Heartbeat, LaneOffer, LaneState
from ops.cli.connection import ask
from ops.cli.durability import Durability
from ops.cli.errors import CommandError
from ops.cli.letters import known_lanes
from producers.batches.records import Batch
from producers.batches.shelf import all_batches

_T = TypeVar("_T")

ASK_S_MAX = 5.0
PAGE_S_MAX = 2.0


@dataclass(frozen=True, slots=True)
class StreamFact:
    """A stream as the server tells it."""

    config: Mapping[str, Any]
    messages: int
    stored_bytes: int


@dataclass(slots=True)
class Facts:
    """All that was seen. None or empty: it could not be seen."""

    server: ServerInfo
    rtt_s: float
    durability: Durability
    config: Config | None
    offers: list[LaneOffer] = field(default_factory=list[LaneOffer])
    no_cluster: str = ""
    """Why there are no lanes."""
    streams: dict[str, StreamFact] = field(default_factory=dict[str, StreamFact])
    batches: list[Batch] = field(default_factory=list[Batch])
    seen_at_s: float = 0.0
    """When they were read."""
    status: StatusView | None = None
    no_leader: str = ""
    """Why there is no status."""
    key_of: str = ""
    """The broker whose leader's key stands though none answers."""
    workers: tuple[WorkerView, ...] = ()
    gone: tuple[GoneView, ...] = ()
    server_ahead_s: float | None = None
    """The server's clock less ours."""
    broker_ahead_s: float | None = None
    workers_ahead_s: dict[str, float] = field(default_factory=dict[str, float])
    disk_free_bytes: int | None = None
    file_mark: FileMark | None = None
    """Of the file that the leading broker runs with."""
    page: str = ""
    """What answered at the configured address of the status page."""


async def gather(
    bus: NatsBus, *, config: Config | None, durability: Durability, listen_s: float
) -> Facts:
    """Look at everything."""
    facts = Facts(
        server=await bus.server_info(),
        rtt_s=await bus.rtt_s(),
        durability=durability,
        config=config,
    )
    if facts.server.jetstream:
        await _lanes(bus, facts)
    await _broker(bus, facts)
    await _clocks(bus, facts, listen_s=listen_s)
    facts.disk_free_bytes = _disk_free(durability)
    if config is not None:
        facts.page = await _page(config.broker.http_host, config.broker.http_port)
    return facts


async def _lanes(bus: NatsBus, facts: Facts) -> None:
    try:
        lanes = await known_lanes(bus)
        for lane in lanes:
            entry = await bus.kv_get(subjects.CONFIG_BUCKET, subjects.lane_offer_key(lane))
            facts.offers.append(decode(entry.value, LaneOffer))
    except (CommandError, BusError, MalformedMessage) as error:
        facts.no_cluster = str(error)
    for spec in wanted_streams(facts):
        await _stream(bus, facts, spec.name)
    with suppress(BusError):  # An older cluster has no batches.
        facts.batches = await all_batches(bus)
    with suppress(BusError):
        facts.file_mark = await read_mark(bus)
    facts.seen_at_s = time.time()


def wanted_streams(facts: Facts) -> tuple[StreamSpec, ...]:
    """Lay out what should be there: as the file says, or as the lanes' own offers."""
    if facts.config is not None and facts.config.policy.lanes:
        return topology_of(facts.config).streams
    plans = [
        topology.LanePlan(offer.lane, tuple(offer.models), tuple(offer.bands))
        for offer in facts.offers
    ]
    return topology.of(plans).streams


async def _stream(bus: NatsBus, facts: Facts, name: str) -> None:
    """Read a stream's settings as they stand; the answer also tells the server's time."""
    sent_s = time.time()
    answer = await bus.request(f"$JS.API.STREAM.INFO.{name}", b"", timeout_s=ASK_S_MAX)
    got_s = time.time()
    told = orjson.loads(answer.data)
    if "error" in told:
        return
    state = told["state"]
    facts.streams[name] = StreamFact(told["config"], state["messages"], state["bytes"])
    if "ts" in told and facts.server_ahead_s is None:
        server_s = datetime.fromisoformat(told["ts"]).timestamp()
        facts.server_ahead_s = server_s - (sent_s + got_s) / 2


async def _broker(bus: NatsBus, facts: Facts) -> None:
    try:
        status = await ask(bus, "status", timeout_s=ASK_S_MAX)
        workers = await ask(bus, "workers", timeout_s=ASK_S_MAX)
        facts.status = msgspec.json.decode(status, type=StatusView)
        view = msgspec.json.decode(workers, type=WorkersView)
        facts.workers, facts.gone = view.workers, view.gone
    except (CommandError, msgspec.DecodeError) as error:
        facts.no_leader = str(error)
        with suppress(BusError):
            leader = await leader_now(bus)
            facts.key_of = leader[0].broker if leader is not None else ""


async def _clocks(bus: NatsBus, facts: Facts, *, listen_s: float) -> None:
    """Listen for a while to what carries its sender's time."""

    def heartbeat(message: Message) -> None:
        told = _decoded(message, Heartbeat)
        if told is not None:
            facts.workers_ahead_s[told.worker] = told.at_s - time.time()

    def queue_state(message: Message) -> None:
        told = _decoded(message, LaneState)
        if told is not None:
            facts.broker_ahead_s = told.at_s - time.time()

    subscriptions = [
        await bus.subscribe(subjects.HEARTBEATS, heartbeat),
        await bus.subscribe(subjects.QUEUE_STATES, queue_state),
    ]
    await asyncio.sleep(listen_s)
    for subscription in subscriptions:
        await subscription.unsubscribe()


def _decoded(message: Message, kind: type[_T]) -> _T | None:
    try:
        return decode(message.data, kind)
    except MalformedMessage:
        return None


def _disk_free(durability: Durability) -> int | None:
    """Room on the disk of the server's store, where that disk is ours too."""
    if durability.store_dir is None:
        return None
    try:
        return shutil.disk_usage(durability.store_dir).free
    except OSError:
        return None


async def _page(host: str, port: int) -> str:
    if port == 0:
        return ""
    limit = aiohttp.ClientTimeout(total=PAGE_S_MAX)
    try:
        async with aiohttp.ClientSession(timeout=limit) as session:
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}/readyz"
            async with session.get(url) as answer:
                told = orjson.loads(await answer.content.read(4096))
                return f"{told['role']}, {'ready' if told['ready'] else told['reason']}"
    except aiohttp.ClientConnectorError:
        return "nothing"
    except (TimeoutError, aiohttp.ClientError, ValueError, KeyError, TypeError):
        return "something else"
