"""What stands in the streams, and in the files of the batches, when a run is over."""

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from broker.bus.base import Bus, BusError
from broker.bus.usage import usage_days
from broker.wire import codec, subjects
from broker.wire.ids import BANDS, job_key
from broker.wire.messages import Job, Kind
from broker.wire.usage import CountedRecord, day_of, summed
from ops.chaos import history
from ops.chaos.checker import Remains
from ops.chaos.history import Submitted, Told
from ops.chaos.producer import batches
from ops.chaos.setting import Load
from ops.chaos.stage import Stage, place_of
from producers.batch.errors import BatchError
from producers.batch.plan import Plan
from producers.batch.state import read_identity

READ_S_MAX = 30.0
"""Longest wait until what remains can be read: three servers may have to elect leaders first."""

AGAIN_S = 0.5


async def queued(bus: Bus, load: Load) -> frozenset[str]:
    """Name the jobs whose message is in its stream; of garbage, its place. Raises BusError."""
    found: set[str] = set()
    for lane in (load.online, load.offline):
        for name in sorted({subjects.jobs_stream(lane, band) for band in BANDS}):
            async for stored in bus.messages(name):
                try:
                    found.add(job_key(lane, codec.decode(stored.data, Job).id))
                except codec.MalformedMessage:
                    found.add(place_of(name, stored.sequence))
    return frozenset(found)


async def remains(stage: Stage) -> Remains:
    """Read what stands, trying until the server answers. Raises BusError.

    In a cluster of others, only what this run brought, and what its producers were told counts as
    recorded: whoever has it may keep records for a shorter time than a run takes.
    """
    gives_up_at_s = time.monotonic() + READ_S_MAX
    while True:
        try:
            recorded, left = (
                await _recorded(stage.bus, stage.load),
                await queued(stage.bus, stage.load),
            )
            break
        except BusError:
            if time.monotonic() > gives_up_at_s:
                raise
            await asyncio.sleep(AGAIN_S)
    if not stage.is_own:
        events = history.read(stage.folder)
        ours = {event.job for event in events if isinstance(event, Submitted)} | stage.garbage
        told = {event.job: 1 for event in events if isinstance(event, Told)}
        recorded = told | {key: count for key, count in recorded.items() if key in ours}
        left &= ours
    lost, doubled = lines(batches(stage.folder, stage.load.offline), left)
    miscounted = await _miscounted_when_counted(stage) if stage.is_own else ()
    return Remains(recorded, left, lost, doubled, miscounted)


async def _miscounted_when_counted(stage: Stage) -> tuple[str, ...]:
    """Compare the accounts with the records, once a leader has had the time to count them."""
    gives_up_at_s = time.monotonic() + READ_S_MAX
    while True:
        found: tuple[str, ...] | None = None
        with suppress(BusError):
            lanes = (stage.load.online, stage.load.offline)
            found = tuple([one for lane in lanes for one in await miscounted(stage.bus, lane)])
        if not found or time.monotonic() > gives_up_at_s:
            return ("the accounts can't be read",) if found is None else found
        await asyncio.sleep(AGAIN_S)


async def miscounted(bus: Bus, lane: str) -> list[str]:
    """Name the rows of a lane's accounts that are not the sum of its records. Raises BusError."""
    records: dict[str, list[CountedRecord]] = {}
    async for stored in bus.messages(subjects.results_stream(lane)):
        try:
            record = codec.decode(stored.data, CountedRecord)
        except codec.MalformedMessage:
            record = CountedRecord(kind=Kind.FAILED)
        if record.counts:
            records.setdefault(day_of(stored.at_s), []).append(record)
    wanted = {(day, row) for day, found in records.items() for row in summed((), found)}
    counted = {(day.day, row) async for day in usage_days(bus, lanes=[lane]) for row in day.rows}
    return sorted(f"{lane} {day}: {row}" for day, row in wanted ^ counted)


async def _recorded(bus: Bus, load: Load) -> dict[str, int]:
    """Count terminal records by job."""
    recorded: Counter[str] = Counter()
    for lane in (load.online, load.offline):
        prefix = subjects.result(lane, "")
        async for stored in bus.messages(subjects.results_stream(lane)):
            recorded[job_key(lane, stored.subject.removeprefix(prefix))] += 1
    return dict(recorded)


class _Line(msgspec.Struct):
    custom_id: str


def lines(
    plans: Sequence[Plan], queued: Collection[str] = ()
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Compare batches' lines with their results: those without one, and those with several.

    A line whose job is still in `queued` is not lost: that job is stuck.
    """
    lost: list[str] = []
    doubled: list[str] = []
    for one in plans:
        had = Counter([*_ids(one.output), *_ids(one.errors)])
        doubled += sorted(name for name, count in had.items() if count > 1)
        keys = _keys(one)
        lost += [name for name in keys if name not in had and keys[name] not in queued]
    return tuple(lost), tuple(doubled)


def _keys(batch: Plan) -> dict[str, str]:
    """Name the job of each line; they have none when the batch was never begun."""
    names = _ids(Path(batch.input))
    try:
        identity = read_identity(batch.output)
    except BatchError:
        return dict.fromkeys(names, "")
    ids = (identity.job_id(number, 0) for number in range(1, len(names) + 1))
    return {name: job_key(batch.lane, job_id) for name, job_id in zip(names, ids, strict=True)}


def _ids(path: Path) -> list[str]:
    if not path.exists():
        return []
    return [
        msgspec.json.decode(line, type=_Line).custom_id for line in path.read_bytes().splitlines()
    ]
