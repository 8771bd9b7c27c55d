"""`inferlane cancel`: a job, or all of a lane, a band or a model; queued and running."""

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import cyclopts
from cyclopts import Parameter

from ops.cli.connection import HERE, Cluster
from ops.cli.errors import CommandError, ExitCode, Misused
from ops.cli.lane_jobs import lane_client, split_job
from ops.cli.producing import ConfigFlag, LaneFlag

if TYPE_CHECKING:
    from broker.wire.control import LaneCancelStep
    from producers.client import Client

app = cyclopts.App(name="cancel")


@app.default
def cancel(
    job: Annotated[str | None, Parameter(help="The job's id, or LANE.JOB.")] = None,
    /,
    *,
    lane: LaneFlag = None,
    band: Annotated[tuple[int, ...], Parameter(negative="", show_default=False)] = (),
    model: str = "",
    yes: Annotated[bool, Parameter(name=("--yes", "-y"), negative="")] = False,
    config: ConfigFlag = None,
    cluster: Cluster = HERE,
) -> int:
    """Cancel one job; or, without a job, all of a lane that wait or run.

        inferlane cancel acme.8Jk2dX
        inferlane cancel --lane acme --band 3

    A lane's jobs are counted first, and you are asked; --yes answers. Each gets a record of kind
    "cancelled", and its caller hears of it; running ones are stopped in their engines. Jobs that
    come meanwhile stay. Interrupted and run again, it goes on with what is left.

    Args:
        job: The job's id, or LANE.JOB.
        lane: The lane whose jobs are meant.
        band: Only this band; may be given again.
        model: Only this model.
        yes: Don't ask.
        config: TOML file with [nats] and [producer] tables.
        cluster: Where the cluster is.
    """
    if job is not None:
        if band or model:
            message = "name a job, or a lane with --band and --model, not both"
            raise Misused(message)
        lane, job = split_job(job, lane)
        asyncio.run(_cancel_job(job, lane, config, cluster))
        return ExitCode.OK
    if lane is None:
        message = "name a job (JOB or LANE.JOB), or a --lane to cancel all of it"
        raise Misused(message)
    which: dict[str, Any] = {"bands": band, "model": model}
    return asyncio.run(_cancel_lane(lane, which, config, cluster, sure=yes))


async def _cancel_job(job: str, lane: str | None, config: Path | None, cluster: Cluster) -> None:
    from ops.cli.output import say

    async with lane_client(config, cluster, lane) as client:
        if await client.cancel_job(job):
            say(f"{client.lane}.{job} is being cancelled")
            return
        record = await client.find_record(job)
        ended = f"it has ended ({record.kind})" if record else "none waits or runs"
        message = f"nothing to cancel of job {job} in lane {client.lane}: {ended}"
        raise CommandError(message)


async def _cancel_lane(
    lane: str, which: dict[str, Any], config: Path | None, cluster: Cluster, *, sure: bool
) -> int:
    from ops.cli.output import note, say

    async with lane_client(config, cluster, lane) as client:
        _check(client, which)
        meant = await client.count_jobs(**which)
        hit = f"{meant.jobs:,} jobs of lane {lane}{_narrowed(which)}, {meant.running:,} running"
        if not meant.jobs:
            say(f"No jobs of lane {lane}{_narrowed(which)} wait or run.")
            return ExitCode.OK
        if not sure and not await asyncio.to_thread(agreed, hit):
            note("nothing was cancelled")
            return ExitCode.FAILED

        def progress(step: "LaneCancelStep") -> None:
            if sys.stderr.isatty():
                note(f"{step.jobs:,} of {meant.jobs:,}")

        done = await client.cancel_jobs(**which, progress=progress)
    say(f"{done.jobs:,} jobs cancelled, {done.running:,} of them told to stop while they ran")
    return ExitCode.OK


def agreed(hit: str) -> bool:
    """Ask whoever sits at the terminal. Raises Misused where nobody does."""
    if not sys.stdin.isatty():
        message = f"this would cancel {hit}; give --yes"
        raise Misused(message)
    sys.stderr.write(f"Cancel {hit}? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _check(client: "Client", which: dict[str, Any]) -> None:
    """Tell a typing error as one: it would else be a lane without such jobs."""
    from broker.wire.settings import nearest

    offer = client.offer
    if offer is None:
        return
    model = which["model"]
    if model and model not in offer.models:
        hint = nearest(model, list(offer.models))
        message = f"lane {client.lane} has no model {model!r}.{hint} It has: "
        raise Misused(message + ", ".join(offer.models))
    for band in which["bands"]:
        if band not in offer.bands:
            bands = ", ".join(map(str, offer.bands))
            message = f"lane {client.lane} has no band {band}; it has: {bands}"
            raise Misused(message)


def _narrowed(which: dict[str, Any]) -> str:
    bands = ", ".join(map(str, which["bands"]))
    band = f", band {bands}" if bands else ""
    return f"{band}, model {which['model']}" if which["model"] else band
