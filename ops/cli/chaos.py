"""`inferlane chaos`: a cluster under load is broken on purpose; did anything get lost?"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import cyclopts
from cyclopts import Parameter

from ops.cli.chaos_joined import NOT_YOURS, Joining, Yours, announced, joining
from ops.cli.errors import CommandError, ExitCode, Misused

if TYPE_CHECKING:
    from ops.chaos.plan import Kind
    from ops.chaos.run import Options, Outcome, Progress

app = cyclopts.App(name="chaos", help="Break a cluster under load on purpose; is anything lost?")

PlantChoice = Literal["lose", "double", "stuck", "overshoot", "fence", "rerun", "miscount"]

LINE_S = 5.0
"""Between two lines of progress."""


@app.default
def chaos(  # noqa: PLR0913 - one parameter is one flag.
    *,
    faults: Annotated[int, Parameter(help="Faults, one after another.")] = 200,
    seed: Annotated[int, Parameter(help="Makes the plan; the same seed, the same plan.")] = 1,
    jobs: Annotated[int, Parameter(help="Least number of jobs.")] = 20_000,
    brokers: Annotated[int, Parameter(help="One leads, the others stand by.")] = 2,
    workers: Annotated[int, Parameter(help="Each with a modelled engine.")] = 4,
    kind: Annotated[
        list[str] | None,
        Parameter(help="Only faults of this kind; repeat for more. Default: all.", negative=""),
    ] = None,
    nats_nodes: Annotated[
        Literal[1, 3], Parameter(help="Message servers; three are one cluster.")
    ] = 1,
    report: Annotated[Path | None, Parameter(help="Write the figures to this JSON file.")] = None,
    plant: Annotated[
        PlantChoice | None,
        Parameter(help="Break the product itself in this way: the checker must find it."),
    ] = None,
    patience_s: Annotated[
        float, Parameter(help="At the end: what has not ended is stuck when nothing ends so long.")
    ] = 75.0,
    folder: Annotated[
        Path | None, Parameter(help="Keep histories and logs here; else in a temporary folder.")
    ] = None,
    yours: Yours = NOT_YOURS,
) -> int:
    """Start a cluster of real processes, load it in two lanes, and break it as a seed says.

    Processes are killed, stopped and restarted, also in the midst of each step of a job's life;
    links are cut and delayed, engines hang and crash, streams are full, messages are garbage. Then
    the histories of all processes are compared: no accepted job may be lost, have two results, be
    stuck, or run again without a reason, no quota may be overshot, and work must go on in time.

        inferlane chaos --faults 20 --jobs 2000 --report chaos.json

    With --url the load goes to a cluster of yours, and only what this command starts itself is
    killed, stopped and cut off: its producers. What is to be done to yours you say, as commands:

        inferlane chaos --url nats://10.0.0.1 --faults 20 --yes --hit gpu1="ssh gpu1 pkill agent"

    Exit codes: 0 nothing found, 1 something found, or the cluster could not be started, 2 wrong
    usage, 3 the cluster of --url can't be reached, 130 stopped (what was found until then is told).
    """
    from ops.chaos.plants import Plant
    from ops.chaos.run import Options

    if min(faults, jobs) < 0 or min(brokers, workers) < 1:
        message = "--faults and --jobs can't be negative, --brokers and --workers are at least 1"
        raise Misused(message)
    joined = joining(yours, is_planted=plant is not None)
    options = Options(
        folder=folder or Path(tempfile.mkdtemp(prefix="inferlane-chaos-")),
        brokers=brokers,
        workers=workers,
        nats_nodes=nats_nodes,
        faults=faults,
        seed=seed,
        jobs=jobs,
        plant=None if plant is None else Plant(plant),
        kinds=_kinds(kind, nats_nodes, joined),
        patience_s=patience_s,
    )
    if joined is not None:
        options = replace(options, url=yours.url, load=joined.load, hits=joined.hits)
        sys.stderr.write(f"{announced(options)}\n")
    return _tell(options, _run(options), report)


def _kinds(names: list[str] | None, nats_nodes: int, joined: Joining | None) -> "tuple[Kind, ...]":
    from ops.chaos.plan import Kind, kinds_of

    unknown = sorted(set(names or ()) - set(Kind))
    if unknown:
        message = f"no fault is called {unknown[0]!r}; there are: {', '.join(Kind)}"
        raise Misused(message)
    possible = kinds_of(nats_nodes) if joined is None else joined.kinds
    kinds = tuple(map(Kind, names or ()))
    impossible = [kind.value for kind in kinds if kind not in possible]
    if impossible and joined is not None:
        message = (
            f"{impossible[0]!r} is done to processes that chaos has started, and with --url those "
            f"are its producers: {', '.join(possible)}. What is to be done to yours say with --hit"
        )
        raise Misused(message)
    if impossible:
        needs = "--url and --hit" if impossible[0] == Kind.HIT_YOURS else "--nats-nodes 3"
        message = f"{impossible[0]!r} needs {needs}"
        raise Misused(message)
    return kinds or possible


def _run(options: "Options") -> "Outcome":
    import uvloop

    from broker.bus.base import BusError
    from ops.chaos.run import run
    from ops.cli.demo import leaves
    from ops.cluster import ClusterError
    from ops.nats.server import ServerUnavailable

    async def until_done() -> "Outcome":
        work = asyncio.ensure_future(run(options, show=_showing()))
        asyncio.get_running_loop().add_signal_handler(2, work.cancel)
        return await work

    try:
        return uvloop.run(until_done())
    except* (ClusterError, BusError, ServerUnavailable) as errors:
        why = "; ".join(str(error) for error in leaves(errors))
        message = f"the cluster could not be run: {why}. Logs are in {options.folder}"
        raise CommandError(message) from errors
    except* asyncio.CancelledError:
        pass
    raise KeyboardInterrupt


def _showing() -> Callable[["Progress"], None]:
    said_at_s, said = 0.0, ""

    def show(progress: "Progress") -> None:
        nonlocal said_at_s, said
        if time.monotonic() < said_at_s + LINE_S and progress.stage == said:
            return
        said_at_s, said = time.monotonic(), progress.stage
        sys.stderr.write(
            f"chaos: {progress.struck} of {progress.faults} faults, {progress.ends} jobs ended, "
            f"{progress.inflight} in flight; {progress.stage}\n"
        )

    return show


def _tell(options: "Options", outcome: "Outcome", path: Path | None) -> int:
    from ops.chaos.report import told
    from ops.chaos.run import judge, write
    from ops.cli.output import say

    judgement, figures = judge(options, outcome)
    if path is not None:
        write(path, figures)
        say(f"Figures: {path}")
    if outcome.interrupted:
        say("Stopped before its end: jobs that were under way count as stuck, their lines as lost.")
    for line in told(judgement, figures["recovery_s"]):
        say(line)
    say(f"Histories and logs: {options.folder}")
    if outcome.interrupted:
        return ExitCode.INTERRUPTED
    return ExitCode.OK if judgement.is_ok else ExitCode.FAILED
