"""`inferlane demo`: a whole cluster on this machine for under a minute."""

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import cyclopts
import orjson
from cyclopts import Parameter

app = cyclopts.App(name="demo", help="Run a whole cluster on this machine for under a minute.")

PolicyChoice = Literal["first_token", "weighted", "round_robin"]
EngineChoice = Literal["llama", "fake"]


@app.default
def demo(
    *,
    report: Annotated[Path | None, Parameter(help="Write the figures to this JSON file.")] = None,
    engine: Annotated[
        EngineChoice,
        Parameter(help="`llama`: real llama.cpp servers on a tiny model; `fake`: modelled GPUs."),
    ] = "llama",
    policy: Annotated[PolicyChoice, Parameter(help="How a worker is chosen.")] = "first_token",
    folder: Annotated[
        Path | None, Parameter(help="Keep all files here; else in a new temporary folder.")
    ] = None,
) -> None:
    """Run NATS, a broker, four workers, chats and a batch; then say what came of it.

    Everything listens on loopback and on free ports, and ends with the demo. The exit code is 0
    only if every accepted job ended exactly once.
    """
    from rich.console import Console

    from ops.demo.show import summary

    place = folder or Path(tempfile.mkdtemp(prefix="inferlane-demo-"))
    figures = run_once(place, engine=engine, policy=policy)
    if report is not None:
        report.write_bytes(orjson.dumps(figures, option=orjson.OPT_INDENT_2) + b"\n")
    summary(figures, Console())
    sys.stdout.write(
        f"Files: {place / 'batch-results.jsonl'} (the batch's answers), {place / 'state'} "
        f"(decision log), {place}/*.log\n"
    )
    if report is not None:
        sys.stdout.write(f"Figures: {report}\n")
    sys.exit(0 if went_well(figures) else 1)


def run_once(folder: Path, *, engine: str, policy: str) -> dict[str, Any]:
    """Run the scenario once, showing it; exit with a sentence when it can't be run."""
    from broker.bus.base import BusError
    from ops.cluster import ClusterError
    from ops.demo.run import DemoError, DemoOptions, run_demo
    from ops.demo.show import showing
    from ops.nats.server import ServerUnavailable

    options = DemoOptions(folder, engine=engine, policy=policy)
    try:
        with showing(title=f"inferlane demo ({engine}, {policy})") as show:
            return asyncio.run(run_demo(options, show=show))
    except* (DemoError, ClusterError, BusError, ServerUnavailable) as errors:
        for error in leaves(errors):
            sys.stderr.write(f"The demo could not run: {error}\n")
        sys.stderr.write(f"Logs are in {folder}.\n")
        sys.exit(1)


def went_well(figures: dict[str, Any]) -> bool:
    """Say whether every accepted job ended exactly once."""
    return not (figures["jobs_lost"] or figures["results_duplicate"] or figures["jobs_left_queued"])


def leaves(error: BaseException) -> list[BaseException]:
    """Return the errors inside groups of errors."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    inside = cast("tuple[BaseException, ...]", error.exceptions)
    return [leaf for one in inside for leaf in leaves(one)]
