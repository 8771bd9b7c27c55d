"""`inferlane erase`: delete what a lane stored, of a job or of a time."""

import asyncio
import sys
import time
from typing import TYPE_CHECKING, Annotated, Literal

import cyclopts
from cyclopts import Parameter

from ops.cli.connection import HERE, Cluster, connected
from ops.cli.errors import CommandError, ExitCode, Misused
from ops.cli.lane_jobs import split_job
from ops.cli.producing import seconds

if TYPE_CHECKING:
    from producers.batches.erasing import ErasedFiles
    from producers.erasing import Erased

app = cyclopts.App(name="erase")


@app.default
def erase(
    job: str | None = None,
    /,
    *,
    lane: str | None = None,
    older: str = "",
    all: Annotated[bool, Parameter(negative="")] = False,  # noqa: A002 - it is the flag's name.
    only: Literal["results", "dead-letters", "files"] | None = None,
    yes: Annotated[bool, Parameter(name=("--yes", "-y"), negative="")] = False,
    cluster: Cluster = HERE,
) -> int:
    """Delete what a lane stored: answers, prompts of jobs given up, and batches with their files.

        inferlane erase acme.8Jk2dX
        inferlane erase --lane acme --older 7d

    What is deleted is overwritten in the message server's files. What stays: backups and snapshots
    of these files; accounts (`inferlane usage`), which have no text; the broker's decision log,
    which has hashes; and prompts of ended jobs, names of files and records of batches where the
    server has not dropped them yet (see ops/docs/retention.md). A result stays while its job's
    message is in its stream, for without it the job would run again, and until it is counted. Files
    stay while a batch that has not ended uses them: cancel it first (`inferlane batch cancel`).

    Args:
        job: LANE.JOB.
        lane: With --older or --all: the lane.
        older: Only what was stored so long ago: 1h, 7d.
        all: Whatever its age.
        only: Only results, only dead letters, or only files (with the batches that have ended).
        yes: Don't ask.
        cluster: Where the cluster is.
    """
    if job is not None:
        if older or all or only:
            message = "name a job, or a --lane with --older or --all, not both"
            raise Misused(message)
        lane, job = split_job(job, lane)
    if lane is None or (job is None and bool(older) == all):
        message = "name a job (LANE.JOB), or --lane LANE with either --older TIME or --all"
        raise Misused(message)
    before_s = time.time() - (seconds(older, what="--older") if older else 0.0)
    what = only or "results, dead letters, files and ended batches"
    age = f" older than {older}" if older else ""
    if job is None and not yes and not _agreed(f"all {what} of lane {lane}{age}"):
        return ExitCode.FAILED
    done, files = asyncio.run(_erase(job, lane, before_s, only, cluster))
    return _tell(done, files, f"{lane}.{job}" if job is not None else "")


def _agreed(what: str) -> bool:
    if not sys.stdin.isatty():
        message = f"this would delete {what} for good; give --yes"
        raise Misused(message)
    sys.stderr.write(f"Delete {what} for good? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


async def _erase(
    job: str | None, lane: str, before_s: float, only: str | None, cluster: Cluster
) -> "tuple[Erased, ErasedFiles]":
    from broker.wire.settings import nearest
    from ops.cli.letters import known_lanes
    from producers.batches.erasing import ErasedFiles, erase_files
    from producers.erasing import Eraser

    async with connected(cluster) as bus:
        known = await known_lanes(bus)
        if lane not in known:
            message = f"no such lane: {lane}.{nearest(lane, known)} Known: {', '.join(known)}"
            raise CommandError(message)
        eraser = Eraser(bus, lane)
        if job is not None:
            return await eraser.erase_job(job), ErasedFiles()
        done = await eraser.erase_before(
            before_s,
            results=only in (None, "results"),
            dead_letters=only in (None, "dead-letters"),
        )
        if only in (None, "files"):
            return done, await erase_files(bus, lane, before_s=before_s)
        return done, ErasedFiles()


def _tell(done: "Erased", files: "ErasedFiles", job: str) -> int:
    """Say what is gone and what is not; raises CommandError for a job of which nothing was."""
    from ops.cli.output import note, say

    stays = ""
    if done.uncounted:
        stays += f"{done.uncounted:,} results are not in the accounts yet, and stay until then\n"
    if done.unsettled:
        stays += f"{done.unsettled:,} results stay: their jobs' messages are in their streams yet\n"
    if files.in_use:
        stays += f"{files.in_use:,} files stay: batches that have not ended use them\n"
    if job and not done.results and not done.dead_letters:
        message = stays.strip() or f"nothing is stored of {job}: no result, no dead letter"
        raise CommandError(message)
    told = f"{done.results:,} results and {done.dead_letters:,} dead letters"
    if not job:
        told += f", {files.files:,} files and {files.batches:,} batches"
    say(f"{told} deleted")
    if stays:
        note(f"{stays.strip()}; try again in a while")
        return ExitCode.FAILED
    return ExitCode.OK
