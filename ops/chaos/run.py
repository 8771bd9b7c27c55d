"""A chaos run: a cluster under load, one fault after another, quiet, and the judgement."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path

import orjson
import structlog

from broker.bus.base import BusError
from ops.chaos import faults, history
from ops.chaos.bounds import timed
from ops.chaos.checker import Remains, Strike, check
from ops.chaos.crowd import Crowd
from ops.chaos.joined import JoinedStage
from ops.chaos.local import LocalStage
from ops.chaos.plan import Kind, kinds_of, plan
from ops.chaos.plants import Plant
from ops.chaos.remains import queued, remains
from ops.chaos.report import Judgement, report
from ops.chaos.setting import ROWS, Hit, Load, Setting, has_room
from ops.chaos.stage import Stage

INFLIGHT_JOBS_MIN = 50
"""Jobs that are to run when a fault comes."""

BUSY_S_MAX = 60.0
"""Longest wait for them; then the fault comes all the same, and the report says so."""

CALM_S_MAX = 60.0
"""Longest wait after a fault until all workers take jobs again and jobs have ended."""

PATIENCE_S = 75.0
"""At the end, jobs that are left are stuck when none has ended for so long: a message whose keeper
died comes again after `ack_wait_s`, 60 s."""

LOOK_S = 0.5

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
    url: str = ""
    """Where a cluster is that is joined; empty: one of our own is started."""
    load: Load = field(default_factory=Load)
    hits: tuple[Hit, ...] = ()
    """What else is done there, by commands of its owner."""


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
    stage = _stage(options)
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
        outcome.remains = await remains(stage)
    return outcome


def _stage(options: Options) -> Stage:
    if options.url:
        return JoinedStage(options.folder, url=options.url, load=options.load, hits=options.hits)
    return LocalStage(
        options.folder,
        brokers=options.brokers,
        workers=options.workers,
        nats_nodes=options.nats_nodes,
        plant=options.plant,
    )


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
        least = INFLIGHT_JOBS_MIN if stage.is_own else 1  # Others may have fewer slots.
        await stage.heard.until(
            partial(_is_busy, stage, progress, show, least), timeout_s=BUSY_S_MAX
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


def _is_busy(stage: Stage, progress: Progress, show: Show, least: int) -> bool:
    return _shown(stage, progress, show) >= least


def _shown(stage: Stage, progress: Progress, show: Show) -> int:
    progress.ends, progress.inflight = stage.heard.ends, stage.heard.inflight()
    show(progress)
    return progress.inflight


async def _calm(stage: Stage, struck: Strike, *, ends_min: int) -> bool:
    """Wait until all workers take orders and jobs have ended, both since the fault was over.

    One end may have been on its way for long; as many as were in flight may not.
    """
    ends = stage.heard.ends
    return await stage.heard.until(
        lambda: (
            stage.has_recovered(since_s=struck.over_at_s) and stage.heard.ends >= ends + ends_min
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
            # What others have in their queues is not waited for.
            left = await queued(stage.bus, stage.load) if stage.is_own else frozenset[str]()
        except BusError as error:  # An election: look again.
            _log.warning("streams can't be read now", error=str(error))
            left = frozenset[str]({"?"})
        if not left and not any(stage.member(name).running for name in stage.producers):
            return
        if (len(left), stage.heard.ends) != seen:
            seen, seen_at_s = (len(left), stage.heard.ends), time.monotonic()
        await asyncio.sleep(LOOK_S)


def judge(options: Options, outcome: Outcome) -> tuple[Judgement, dict[str, object]]:
    """Read the histories, judge them, and put the report together."""
    events = history.read(options.folder)
    rows = () if options.url else ROWS
    verdict = check(events, outcome.strikes, outcome.remains, rows=rows)
    times = timed(
        events,
        outcome.strikes,
        setting=Setting.of(options.nats_nodes),
        loaded_until_s=outcome.loaded_until_s,
        has_room=has_room(options.workers),
        crowd=outcome.crowd.share,
    )
    judgement = Judgement(
        verdict, times, tuple(outcome.not_calm), outcome.interrupted, is_others=bool(options.url)
    )
    return judgement, report(options, outcome, judgement, events)


def write(path: Path, figures: dict[str, object]) -> None:
    """Write a report. Raises OSError."""
    path.write_bytes(orjson.dumps(figures, option=orjson.OPT_INDENT_2) + b"\n")
