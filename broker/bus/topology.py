"""What streams, consumers and buckets a deployment has: declared here once, from plain inputs.

Two work-queue streams a lane, so that batch can't fill the door for people, and a lane's bound,
purge and isolation are the server's own. One consumer for each queue (band, model), so that a stuck
model or a huge batch blocks nobody else. Terminal records, dead letters and the files of batches
have a stream each; copies of lines' records stand with the files, which outlive every window.

Ceilings on messages are the server's last line, above the core's own bounds: a running job stays in
its stream until acknowledged, so a ceiling must hold the largest queue and all that is in flight. A
ceiling that stands is never lowered (`Bus.ensure_stream`), because the server would delete the
oldest.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from broker.bus.base import BucketSpec, Bus, ConsumerSpec, NoRoom, NotFound, NotTaken, StreamSpec
from broker.bus.key_value import bucket_stream
from broker.wire import subjects
from broker.wire.ids import BANDS, BATCH_BAND, require_token

_Spec = TypeVar("_Spec")

GIB = 1024**3
DAY_S = 86_400.0

FILES_BYTES_LEAST = GIB // 4
"""What a lane's files get at the least: the server sets a stream's bound aside, and a small disk
must not keep a cluster from starting."""

FILES_BYTES_FIRST = 4 * GIB
"""What each lane's files get before any gets more, where there is room: a million lines of 2 KB."""

USED_RATIO = 1.25
"""Files that give room back keep what they hold, and a quarter more."""

ENSURE_AT_ONCE_MAX = 16
"""Streams and consumers set up at the same time: 25 lanes take a second at a start, not ten."""


TAKEN_TRIES_MAX = 3
"""Two brokers that start at once change the same streams, and one may read back what the other set:
it looks again. What an old server ignores it ignores each time."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the server keeps for each lane. Names as in the configuration's `[streams]`."""

    jobs_per_subject_max: int = 20_000
    """Messages of one online queue, running jobs included: above the largest bound + in-flight."""
    batch_per_subject_max: int = 2_000_000
    lane_bytes_max: int = GIB
    """All online jobs of a lane."""
    batch_bytes_max: int = 4 * GIB
    results_bytes_max: int = 4 * GIB
    results_age_s_max: float = 3 * DAY_S
    """How long a terminal record is kept: the usual batch window (24 h), and time to fetch it. Of a
    line whose window is longer a copy is kept."""
    dead_letters_bytes_max: int = GIB // 4
    dead_letters_age_s_max: float = 30 * DAY_S
    files_bytes_max: int = 20 * GIB
    """All files of a lane: the inputs of its batches and their results. Room for an input of 8 GB
    and as much again for its output; less where the server has not so much (FILES_BYTES_LEAST)."""
    files_age_s_max: float = 60 * DAY_S
    """What outlives its own expiry by so much is dropped by the server itself, though no program of
    ours should run; twice the longest life of a file."""
    batches_age_s_max: float = 60 * DAY_S
    """How long a batch that nothing happens to any more is remembered; longer than its files."""
    attempts_age_s_max: float = 7 * DAY_S
    """How long a job's failures are remembered; longer than any job lives."""
    usage_age_s_max: float = 400 * DAY_S
    """How long a lane's accounts are kept: a year, and a month to write its bill."""
    duplicate_window_s: float = 120.0
    """How long a message id is known. A client that hears nothing tries again well within it."""
    ack_wait_s: float = 60.0
    """A delivery comes again after this: three renewals (every 20 s) must fail before it does."""
    ack_pending_jobs_max: int = 10_000
    """Jobs of one queue delivered and not ended: window and in-flight together."""
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class LanePlan:
    """Which queues one lane has."""

    lane: str
    models: tuple[str, ...]
    bands: tuple[int, ...] = BANDS
    """Bands it may publish in; 3 is batch."""
    bounds: Bounds | None = None
    """What the server keeps for this one; None: as for all."""


DEFAULTS = Bounds()


@dataclass(frozen=True, slots=True)
class Topology:
    """Everything that must stand before the first job."""

    streams: tuple[StreamSpec, ...]
    buckets: tuple[BucketSpec, ...]
    consumers: tuple[ConsumerSpec, ...] = ()
    """Of all queues. Leave them out to make each by `ensure_queue` when it first holds a job."""


def of(lanes: Iterable[LanePlan], bounds: Bounds = DEFAULTS) -> Topology:
    """Lay out a deployment. Raises MalformedName on a lane or model that can't be a token."""
    plans = tuple(lanes)
    for plan in plans:
        require_token(plan.lane, what="lane")
    return Topology(
        streams=tuple(spec for plan in plans for spec in lane_streams(plan, bounds)),
        buckets=buckets(bounds),
        consumers=tuple(
            consumer_spec(plan.lane, band, model, bounds)
            for plan in plans
            for band in sorted(plan.bands)
            for model in plan.models
        ),
    )


def buckets(bounds: Bounds = DEFAULTS) -> tuple[BucketSpec, ...]:
    """Specify the buckets. A leader's key has a lifetime of its own, given when it is written."""
    return (
        BucketSpec(subjects.LEADER_BUCKET, replicas=bounds.replicas),
        BucketSpec(subjects.CONFIG_BUCKET, replicas=bounds.replicas),
        BucketSpec(
            subjects.ATTEMPTS_BUCKET, ttl_s=bounds.attempts_age_s_max, replicas=bounds.replicas
        ),
        BucketSpec(subjects.FILES_BUCKET, ttl_s=bounds.files_age_s_max, replicas=bounds.replicas),
        BucketSpec(
            subjects.BATCHES_BUCKET, ttl_s=bounds.batches_age_s_max, replicas=bounds.replicas
        ),
        BucketSpec(subjects.USAGE_BUCKET, ttl_s=bounds.usage_age_s_max, replicas=bounds.replicas),
    )


def lane_streams(plan: LanePlan, bounds: Bounds = DEFAULTS) -> list[StreamSpec]:
    """Specify a lane's streams."""
    bounds = plan.bounds or bounds
    online = [band for band in sorted(plan.bands) if band != BATCH_BAND]
    streams: list[StreamSpec] = []
    if online and plan.models:
        streams.append(_jobs(plan, online, bounds))
    if BATCH_BAND in plan.bands and plan.models:
        streams.append(_jobs(plan, [BATCH_BAND], bounds))
    streams += [_results(plan.lane, bounds), _dead_letters(plan.lane, bounds)]
    if BATCH_BAND in plan.bands and plan.models:
        streams.append(_files(plan.lane, bounds))
    return streams


def _jobs(plan: LanePlan, bands: list[int], bounds: Bounds) -> StreamSpec:
    batch = BATCH_BAND in bands
    return StreamSpec(
        name=subjects.jobs_stream(plan.lane, bands[0]),
        # Each allowed queue by name: a job of an unknown model or band finds no stream at all.
        subjects=tuple(
            subjects.jobs(plan.lane, band, model) for band in bands for model in plan.models
        ),
        work_queue=True,
        max_msgs_per_subject=(
            bounds.batch_per_subject_max if batch else bounds.jobs_per_subject_max
        ),
        max_bytes=bounds.batch_bytes_max if batch else bounds.lane_bytes_max,
        discard_new=True,
        discard_new_per_subject=True,
        duplicate_window_s=bounds.duplicate_window_s,
        allow_direct=True,
        allow_atomic=True,
        replicas=bounds.replicas,
    )


def closed_stream(lane: str, band: int, bounds: Bounds = DEFAULTS) -> StreamSpec:
    """Specify a stream of jobs whose queues are all on their way out: it takes no subject of them.

    A stream needs a subject, so it has one that nobody publishes on.
    """
    spec = _jobs(LanePlan(lane, (), (band,)), [band], bounds)
    return replace(spec, subjects=(f"closed.{spec.name}",))


def _results(lane: str, bounds: Bounds) -> StreamSpec:
    return StreamSpec(
        name=subjects.results_stream(lane),
        subjects=(subjects.result(lane, "*"),),
        max_msgs_per_subject=1,
        max_bytes=bounds.results_bytes_max,
        max_age_s=bounds.results_age_s_max,
        discard_new=True,
        # Without it, a writer that forgets to name the expected sequence replaces the record.
        discard_new_per_subject=True,
        duplicate_window_s=min(bounds.duplicate_window_s, bounds.results_age_s_max),
        allow_direct=True,
        allow_msg_ttl=True,
        replicas=bounds.replicas,
    )


def _dead_letters(lane: str, bounds: Bounds) -> StreamSpec:
    return StreamSpec(
        name=subjects.dead_letters_stream(lane),
        subjects=(subjects.dead_letter(lane, "*"),),
        max_bytes=bounds.dead_letters_bytes_max,
        max_age_s=bounds.dead_letters_age_s_max,
        # A full shelf loses its oldest letters, not the newest.
        discard_new=False,
        duplicate_window_s=min(bounds.duplicate_window_s, bounds.dead_letters_age_s_max),
        allow_direct=True,
        replicas=bounds.replicas,
    )


def _files(lane: str, bounds: Bounds) -> StreamSpec:
    return StreamSpec(
        name=subjects.files_stream(lane),
        subjects=(subjects.file_chunks(lane, "*"), subjects.line_copy(lane, "*", "*")),
        max_bytes=bounds.files_bytes_max,
        max_bytes_least=min(bounds.files_bytes_max, FILES_BYTES_LEAST),
        max_age_s=bounds.files_age_s_max,
        discard_new=True,
        duplicate_window_s=min(bounds.duplicate_window_s, bounds.files_age_s_max),
        allow_direct=True,
        replicas=bounds.replicas,
    )


def consumer_spec(lane: str, band: int, model: str, bounds: Bounds = DEFAULTS) -> ConsumerSpec:
    """Specify the consumer of one queue."""
    return ConsumerSpec(
        stream=subjects.jobs_stream(lane, band),
        name=subjects.job_consumer(band, model),
        filter_subject=subjects.jobs(lane, band, model),
        ack_wait_s=bounds.ack_wait_s,
        max_ack_pending=bounds.ack_pending_jobs_max,
    )


async def apply(bus: Bus, topology: Topology) -> None:
    """Make what isn't there, bring the rest up to date, and read it back. Raises BusError.

    Streams that may be smaller (files) get what the others leave, and give back what these need.
    """
    fixed = [spec for spec in topology.streams if not spec.max_bytes_least]
    pliant = [spec for spec in topology.streams if spec.max_bytes_least]
    try:
        await _some_at_once(bus.ensure_stream, fixed)
    except NoRoom:
        await _some_at_once(partial(_give_back, bus), pliant)
        await _some_at_once(bus.ensure_stream, fixed)
    await _some_at_once(partial(_begin, bus), pliant)
    await _some_at_once(bus.ensure_stream, pliant)
    await _some_at_once(bus.ensure_bucket, topology.buckets)
    await _some_at_once(bus.ensure_consumer, topology.consumers)


async def absent(bus: Bus, topology: Topology) -> list[str]:
    """List its streams that are not there, those of its buckets included. Raises BusError."""
    found: list[str] = []

    async def look(name: str) -> None:
        try:
            await bus.stream_state(name)
        except NotFound:
            found.append(name)

    buckets = (bucket_stream(spec).name for spec in topology.buckets)
    await _some_at_once(look, (*(spec.name for spec in topology.streams), *buckets))
    return sorted(found)


async def _give_back(bus: Bus, spec: StreamSpec) -> None:
    """Make a stream that stands as small as it may be, with what it holds."""
    try:
        state = await bus.stream_state(spec.name)
    except NotFound:
        return
    bytes_max = max(spec.max_bytes_least, int(state.bytes * USED_RATIO))
    if bytes_max < state.bytes_max:
        await bus.ensure_stream(replace(spec, max_bytes=bytes_max, max_bytes_least=0))


async def _begin(bus: Bus, spec: StreamSpec) -> None:
    """Bring a stream to what all may have at first, where it isn't there or is smaller."""
    first = replace(spec, max_bytes=min(spec.max_bytes, FILES_BYTES_FIRST))
    try:
        state = await bus.stream_state(spec.name)
    except NotFound:
        await bus.ensure_stream(first)
    else:
        if 0 < state.bytes_max < first.max_bytes:
            await bus.ensure_stream(first)


async def _some_at_once(ensure: Callable[[_Spec], Awaitable[None]], specs: Iterable[_Spec]) -> None:
    room = asyncio.Semaphore(ENSURE_AT_ONCE_MAX)

    async def one(spec: _Spec) -> None:
        async with room:
            for _ in range(TAKEN_TRIES_MAX - 1):
                with suppress(NotTaken):
                    return await ensure(spec)
            return await ensure(spec)

    try:
        async with asyncio.TaskGroup() as group:
            for spec in specs:
                group.create_task(one(spec))
    except BaseExceptionGroup as errors:
        # Callers know BusError; the first trouble is as good as any.
        raise errors.exceptions[0] from errors


async def ensure_queue(
    bus: Bus, lane: str, band: int, model: str, bounds: Bounds = DEFAULTS
) -> ConsumerSpec:
    """Make the consumer of one queue, as when its subject first holds a message."""
    spec = consumer_spec(lane, band, model, bounds)
    await bus.ensure_consumer(spec)
    return spec
