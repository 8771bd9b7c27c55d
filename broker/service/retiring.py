"""Queues that the configuration has no more: no message is left where no consumer delivers it.

A model or lane that is taken out leaves first the lane's offer, then the stream's subjects, so that
nothing more comes in. What was accepted before is delivered as ever: the door refuses what waits,
with a record, and what runs ends. Only when the last message is gone the consumer goes, then a
stream without queues, then the offer of a lane without streams. Results and dead letters stay until
their own time is over.

Nothing is remembered for this: a message on a subject that is not configured is a queue on its way
out, whoever leads, and the offer of a lane that is not configured says that such a lane was there.
But only a reload says that they shall go. A broker that was started with another file than the last
leader's, by mistake as like as not, refuses nobody's jobs: what it lacks is an alarm, and waits.
"""

import asyncio
from collections.abc import Iterable

import structlog
from msgspec.structs import replace

from broker.bus import topology
from broker.bus.base import Bus, BusError, ConsumerSpec, NotFound
from broker.core.policy import LanePolicy
from broker.service.config import Config
from broker.service.offer import read_offer
from broker.service.pulls import Pulls
from broker.service.queues import bounds_of, models_of, queue_addresses
from broker.wire import subjects
from broker.wire.ids import BATCH_BAND, MalformedName, is_token
from broker.wire.messages import LaneOffer
from broker.wire.subjects import CONFIG_BUCKET, JobAddress, lane_offer_key

LOOK_S = 1.0
"""How often queues on their way out are counted."""

STREAMS_AT_ONCE_MAX = 16
"""Streams looked into at the same time: fifty take a few hundredths of a second at a start."""

WINDOW_JOBS = 256
"""Jobs pulled of such a queue at once: enough to end some thousand a second."""

_LANE_KEY = lane_offer_key("")
STREAM_BANDS = (0, BATCH_BAND)
"""A band of each of a lane's two streams."""

_log = structlog.get_logger(__name__)


async def former_lanes(bus: Bus, config: Config) -> tuple[str, ...]:
    """List lanes that were offered and are not configured. Raises BusError."""
    configured = {lane.name for lane in config.policy.lanes}
    keys = await bus.kv_keys(CONFIG_BUCKET)
    names = (key.removeprefix(_LANE_KEY) for key in keys if key.startswith(_LANE_KEY))
    return tuple(name for name in names if is_token(name) and name not in configured)


async def former_queues(bus: Bus, config: Config) -> dict[JobAddress, ConsumerSpec]:
    """Find queues that hold messages and are not configured. Raises BusError."""
    lanes = [lane.name for lane in config.policy.lanes]
    configured = frozenset(queue_addresses(config.policy))
    lanes += await former_lanes(bus, config)
    streams = [subjects.jobs_stream(lane, band) for lane in lanes for band in STREAM_BANDS]
    return {
        address: _spec(config, address)
        for held in await _held_in_all(bus, streams)
        for address in held
        if address not in configured
    }


async def _held_in_all(bus: Bus, streams: list[str]) -> list[list[JobAddress]]:
    room = asyncio.Semaphore(STREAMS_AT_ONCE_MAX)

    async def one(stream: str) -> list[JobAddress]:
        async with room:
            return await _held_in(bus, stream)

    try:
        async with asyncio.TaskGroup() as group:
            looks = [group.create_task(one(stream)) for stream in streams]
    except BaseExceptionGroup as errors:
        # Callers know BusError; the first trouble is as good as any.
        raise errors.exceptions[0] from errors
    return [look.result() for look in looks]


async def _held_in(bus: Bus, stream: str) -> list[JobAddress]:
    try:
        counts = await bus.subject_counts(stream)
    except NotFound:
        return []
    found: list[JobAddress] = []
    for subject in counts:
        try:
            found.append(subjects.parse_jobs(subject))
        except MalformedName as error:
            _log.warning("retiring.not_a_queue", stream=stream, subject=subject, error=str(error))
    return found


async def with_offered(bus: Bus, config: Config) -> Config:
    """Add to a configuration's lanes what they were offered with and lack now. Raises BusError.

    To declare this takes nothing away that clients were told of.
    """
    lanes: list[LanePolicy] = []
    for lane in config.policy.lanes:
        offer = await read_offer(bus, lane.name)
        models = models_of(config.policy, lane)
        lanes.append(lane if offer is None else _widened(lane, models, offer))
    return replace(config, policy=replace(config.policy, lanes=tuple(lanes)))


def _widened(lane: LanePolicy, models: tuple[str, ...], offer: LaneOffer) -> LanePolicy:
    more = tuple(model for model in offer.models if model not in models)
    # An offer that was withdrawn names no model, and its bands say nothing.
    bands = {*lane.bands, *offer.bands} if offer.models else {*lane.bands}
    if not more and bands == {*lane.bands}:
        return lane
    return replace(lane, models=models + more, bands=tuple(sorted(bands)))


def _spec(config: Config, address: JobAddress) -> ConsumerSpec:
    bounds = bounds_of(config)
    return topology.consumer_spec(address.lane, address.band, address.model, bounds)


class Retiring:
    """The duty of emptying and removing them."""

    def __init__(self, bus: Bus, pulls: Pulls, config: Config) -> None:
        """Empty what `config` has no more."""
        self._bus = bus
        self._pulls = pulls
        self.config = config
        self._leaving: dict[JobAddress, None] = {}
        self._is_wanted = asyncio.Event()
        self.still = asyncio.Lock()
        """Held by whoever changes what is configured: nothing is removed meanwhile."""
        self.lacking: tuple[str, ...] = ()
        """Queues and lanes that stand at the server, and that nobody has said to remove: while
        there are some, all is left as it is."""

    @property
    def leaving(self) -> tuple[JobAddress, ...]:
        """Queues on their way out."""
        return tuple(self._leaving)

    async def take(self, queues: Iterable[JobAddress]) -> list[JobAddress]:
        """Begin to empty these; returns those that nobody pulled before. Raises BusError."""
        new: list[JobAddress] = []
        for address in queues:
            if address not in self._leaving:
                spec = _spec(self.config, address)
                if address not in self._pulls.queues:
                    await self._bus.ensure_consumer(spec)
                    new.append(address)
                await self._pulls.open(address, spec, window=WINDOW_JOBS)
                self._leaving[address] = None
        self._is_wanted.set()
        return new

    def stay(self, queues: Iterable[JobAddress]) -> None:
        """Leave these alone: they are configured again."""
        for address in queues:
            self._leaving.pop(address, None)

    async def find(self) -> list[JobAddress]:
        """Take up what nobody knew of: messages that no consumer would deliver. Raises BusError.

        While something is `lacking` they are only named.
        """
        former = await former_queues(self._bus, self.config)
        return list(former) if self.lacking else await self.take(former)

    async def leave_alone(self) -> None:
        """Remove nothing of what the configuration lacks, if it lacks anything. Raises BusError."""
        lanes = await former_lanes(self._bus, self.config)
        offered = await with_offered(self._bus, self.config)
        stand = {
            *(at for at in await former_queues(self._bus, self.config) if at.lane not in lanes),
            *queue_addresses(offered.policy),
        }
        lacking = stand.difference(queue_addresses(self.config.policy))
        names = sorted(f"{at.lane}.{at.band}.{at.model}" for at in lacking)
        self.lacking = (*lanes, *names)

    async def run(self) -> None:
        """Remove what is empty, until cancelled."""
        self._is_wanted.set()
        while True:
            await self._is_wanted.wait()
            try:
                async with self.still:
                    if await self.look():
                        self._is_wanted.clear()
            except BusError as error:
                _log.warning("retiring.failed", error=str(error))
            await asyncio.sleep(LOOK_S)

    async def look(self) -> bool:
        """Look once; True when nothing is left to remove. Raises BusError."""
        if self.lacking:
            return True
        for address in self.leaving:
            spec = _spec(self.config, address)
            counts = await self._bus.subject_counts(spec.stream, subject=spec.filter_subject)
            if not counts.get(spec.filter_subject) and address in self._leaving:
                await self._pulls.close(address)
                await self._bus.delete_consumer(spec.stream, spec.name)
                self._leaving.pop(address, None)
                _log.info("retiring.queue_removed", subject=spec.filter_subject)
        if self._leaving:
            return False
        await self._remove_streams()
        return True

    async def _remove_streams(self) -> None:
        """Delete streams that have no queue any more, and offers of lanes that have no stream."""
        wanted = {subjects.jobs_stream(at.lane, at.band) for at in self._pulls.queues}
        former = await former_lanes(self._bus, self.config)
        for lane in (*(lane.name for lane in self.config.policy.lanes), *former):
            for band in STREAM_BANDS:
                name = subjects.jobs_stream(lane, band)
                if name not in wanted and await self._is_empty(name):
                    await self._bus.delete_stream(name)
                    _log.info("retiring.stream_removed", stream=name)
        for lane in former:
            await self._bus.kv_delete(CONFIG_BUCKET, lane_offer_key(lane))
            _log.info("retiring.lane_removed", lane=lane)

    async def _is_empty(self, stream: str) -> bool:
        try:
            return not (await self._bus.stream_state(stream)).messages
        except NotFound:
            return False
