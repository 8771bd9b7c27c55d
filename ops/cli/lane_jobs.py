"""What commands about the jobs of one lane share: which job, which lane, and a client of it."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ops.cli.connection import Cluster
from ops.cli.errors import CommandError, Misused, Unreachable
from ops.cli.producing import lane_of, settings

if TYPE_CHECKING:
    from producers.client import Client


def split_job(job: str, lane: str | None) -> tuple[str | None, str]:
    """Read `JOB` or `LANE.JOB`: (lane, where one is named, and job id). Raises Misused."""
    from broker.wire.ids import is_token, split_job_key

    if "." in job:
        named, job = split_job_key(job)
        if lane not in (None, named):
            message = f"the job names lane {named!r}, and --lane {lane!r}: name one"
            raise Misused(message)
        lane = named
    if not is_token(job) or (lane is not None and not is_token(lane)):
        message = f"{job!r} is no job id, nor LANE.JOB"
        raise Misused(message)
    return lane, job


@asynccontextmanager
async def lane_client(
    config: Path | None, cluster: Cluster, lane: str | None
) -> AsyncGenerator["Client"]:
    """Open a client of the lane that is named, or of the only one. Raises CommandError."""
    from producers import errors
    from producers.client import Client
    from producers.connecting import connect_bus
    from producers.door import lanes_of

    found = settings(config, cluster, lane=lane)
    try:
        async with connect_bus(found.nats, name="inferlane-cli") as bus:
            known = await lanes_of(bus)
            named = lane_of(found) if found.lane else only_lane(known)
            check_lane(named, known)
            async with Client(bus, lane=named, config=found.client) as client:
                yield client
    except errors.BadLink as error:
        raise Misused(str(error)) from error
    except errors.Unreachable as error:
        raise Unreachable(str(error)) from error
    except errors.ProducerError as error:
        raise CommandError(str(error)) from error


def check_lane(lane: str, lanes: list[str]) -> None:
    """See that the cluster has a lane, as far as its lanes are known. Raises CommandError."""
    if lanes and lane not in lanes:
        message = f"no such lane: {lane}. Known: {', '.join(lanes)}"
        raise CommandError(message)


def only_lane(lanes: list[str]) -> str:
    """Name the cluster's only lane: then it needs no naming. Raises Misused."""
    if len(lanes) == 1:
        return lanes[0]
    known = ", ".join(lanes[:20])
    message = f"name a --lane; the cluster has {known}" if lanes else "name a --lane"
    raise Misused(message)
