"""A chaos run: a cluster under load, one fault after another, quiet, and the judgement."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

import msgspec
import orjson
import structlog

from broker.bus.base import Bus, BusError
from broker.wire import codec, subjects
from broker.wire.ids import BANDS, job_key
from broker.wire.messages import Job
from ops.chaos import faults, history
from ops.chaos.bounds import timed
from ops.chaos.checker import Remains, Strike, check
from ops.chaos.crowd import Crowd
from ops.chaos.plan import Fault, Kind, kinds_of, plan
from ops.chaos.plants import Plant
from ops.chaos.producer import batches
from ops.chaos.report import Judgement, report
from ops.chaos.setting import OFFLINE_LANE, ONLINE_LANE, ROWS, Setting
from ops.chaos.stage import Stage
from producers.batch.errors import BatchError
from producers.batch.plan import Plan
from producers.batch.state import read_identity

INFLIGHT_JOBS_MIN = 50
"""Jobs that are to run when a fault comes."""

BUSY_S_MAX = 60.0
"""Longest wait for them; then the fault comes all the same, and the report says so."""

CALM_S_MAX = 60.0
"""Longest wait after a fault until all workers take jobs again and jobs have ended."""

PATIENCE_S = 75.0
"""At the end, jobs that are left are stuck when none has ended for so long: a message whose keeper
died comes again after `ack_wait_s`, 60 s."""

READ_S_MAX = 30.0
"""Longest wait until what remains can be read: three servers may have to elect leaders first."""

LOOK_S = 0.5

LANES = (ONLINE_LANE, OFFLINE_LANE)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a run is asked for."""

    folder: Path
    brokers: int = 2
    workers: int = 4
    nats_nodes: int = 1
    faults: int = 200
    seed: int = 1
    jobs: int = 20_000
    """Least number; the load goes on for as long as there are faults."""
    patience_s: float = PATIENCE_S
    plant: Plant | None = None
    kinds: tuple[Kind, ...] = kinds_of(1)


@dataclass(slots=True)
class Progress:
    """How far a run is."""

    faults: int
    stage: str = "starting"
    struck: int = 0
    fault: str = ""
    ends: int = 0
    inflight: int = 0


@dataclass(slots=True)
class Outcome:
    """What a run was and what came of it."""

    strikes: list[Strike] = field(default_factory=list[Strike])
    inflight: list[int] = field(default_factory=list[int])
    """Jobs in flight at each fault."""
    not_calm: list[int] = field(default_factory=list[int])
    """Faults after which the cluster did not come back in time."""
    loaded_until_s: float = inf
    """When the producers were told to stop."""
    crowd: Crowd = field(default_factory=Crowd)
    remains: Remains = field(default_factory=Remains)
    interrupted: bool = False


Show = Callable[[Progress], None]


async def run(options: Options, *, show: Show) -> Outcome:
    """Run the plan. Raises ClusterError, BusError when the cluster can't be started.

    When it is cancelled (Ctrl-C) it ends all processes and returns what was done until then.
    """
    progress = Progress(options.faults)
    outcome = Outcome()
    stage = Stage(
        options.folder,
        brokers=options.brokers,
        workers=options.workers,
        nats_nodes=options.nats_nodes,
        plant=options.plant,
    )
    outcome.crowd = stage.crowd
    show(progress)
    async with stage:
        await stage.start()
        try:
            await _strike_all(stage, options, outcome, progress, show)
            progress.stage, outcome.loaded_until_s = "ending", time.time()
            await _until_quiet(stage, options.patience_s, progress, show)
        except asyncio.CancelledError:
            outcome.interrupted = True
            _uncancel()
            await stage.restore_servers()
        outcome.remains = await _remains(stage, options)
    return outcome


def _uncancel() -> None:
    task = asyncio.current_task()
    while task is not None and task.cancelling():
        task.uncancel()


async def _strike_all(
    stage: Stage, options: Options, outcome: Outcome, progress: Progress, show: Show
) -> None:
    in_midst = False
    for fault in plan(options.seed, options.faults, kinds=options.kinds):
        progress.stage = f"before {fault.kind}"
        show(progress)
        await stage.heard.until(
            lambda: _shown(stage, progress, show) >= INFLIGHT_JOBS_MIN, timeout_s=BUSY_S_MAX
        )
        outcome.inflight.append(stage.heard.inflight())
        progress.fault = progress.stage = fault.kind.value
        progress.struck += 1
        show(progress)
        struck = replace(await faults.strike(stage, fault), in_midst=in_midst)
        outcome.strikes.append(struck)
        if not await _calm(stage, struck, ends_min=1 if fault.soon else INFLIGHT_JOBS_MIN):
            outcome.not_calm.append(fault.number)
            _log.error("not calm after a fault", number=fault.number, kind=fault.kind.value)
        in_midst = fault.soon
    progress.stage = "all faults done"
    # The load may still have to bring its jobs.
    while stage.heard.ends < options.jobs:
        await stage.heard.until(
            lambda: _shown(stage, progress, show) < 0 or stage.heard.ends >= options.jobs,
            timeout_s=CALM_S_MAX,
        )


def _shown(stage: Stage, progress: Progress, show: Show) -> int:
    progress.ends, progress.inflight = stage.heard.ends, stage.heard.inflight()
    show(progress)
    return progress.inflight


async def _calm(stage: Stage, struck: Strike, *, ends_min: int) -> bool:
    """Wait until all workers take orders and jobs have ended, both since the fault was over.

    One end may have been on its way for long; as many as were in flight may not.
    """
    ends, workers = stage.heard.ends, len(stage.workers)
    return await stage.heard.until(
        lambda: (
            stage.heard.ready(since_s=struck.over_at_s) == workers
            and stage.heard.ends >= ends + ends_min
        ),
        timeout_s=CALM_S_MAX,
    )


async def _until_quiet(stage: Stage, patience_s: float, progress: Progress, show: Show) -> None:
    """Stop the load, wait for producers to end and for streams to be empty."""
    stage.stop_load()
    seen, seen_at_s = (0, 0), time.monotonic()
    while time.monotonic() < seen_at_s + patience_s:
        _shown(stage, progress, show)
        try:
            queued = await _queued(stage.bus)
        except BusError as error:  # An election: look again.
            _log.warning("streams can't be read now", error=str(error))
            queued = frozenset[str]({"?"})
        if not queued and not any(stage.member(name).running for name in stage.producers):
            return
        if (len(queued), stage.heard.ends) != seen:
            seen, seen_at_s = (len(queued), stage.heard.ends), time.monotonic()
        await asyncio.sleep(LOOK_S)


async def _queued(bus: Bus) -> frozenset[str]:
    """Name the jobs whose message is in its stream; of garbage, its place."""
    found: set[str] = set()
    for lane in LANES:
        for name in sorted({subjects.jobs_stream(lane, band) for band in BANDS}):
            async for stored in bus.messages(name):
                try:
                    found.add(job_key(lane, codec.decode(stored.data, Job).id))
                except codec.MalformedMessage:
                    found.add(f"{name}.{stored.sequence}")
    return frozenset(found)


async def _remains(stage: Stage, options: Options) -> Remains:
    """Read what stands, trying until the server answers. Raises BusError."""
    gives_up_at_s = time.monotonic() + READ_S_MAX
    while True:
        try:
            recorded, queued = await _recorded(stage.bus), await _queued(stage.bus)
        except BusError:
            if time.monotonic() > gives_up_at_s:
                raise
            await asyncio.sleep(LOOK_S)
        else:
            lost, doubled = lines(batches(options.folder), queued)
            return Remains(recorded, queued, lost, doubled)


async def _recorded(bus: Bus) -> dict[str, int]:
    """Count terminal records by job."""
    recorded: Counter[str] = Counter()
    for lane in LANES:
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


def judge(options: Options, outcome: Outcome) -> tuple[Judgement, dict[str, object]]:
    """Read the histories, judge them, and put the report together."""
    events = history.read(options.folder)
    verdict = check(events, outcome.strikes, outcome.remains, rows=ROWS)
    times = timed(
        events,
        outcome.strikes,
        setting=Setting.of(options.nats_nodes),
        loaded_until_s=outcome.loaded_until_s,
        crowd=outcome.crowd.share,
    )
    judgement = Judgement(verdict, times, tuple(outcome.not_calm), outcome.interrupted)
    return judgement, report(options, outcome, judgement, events)


def write(path: Path, figures: dict[str, object]) -> None:
    """Write a report. Raises OSError."""
    path.write_bytes(orjson.dumps(figures, option=orjson.OPT_INDENT_2) + b"\n")


__all__ = ["Fault", "Options", "Outcome", "Progress", "judge", "lines", "run", "write"]
