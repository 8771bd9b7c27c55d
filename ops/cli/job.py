"""`inferlane job`: where a job stands, and how it ended."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import cyclopts
from cyclopts import Parameter

from ops.cli.connection import HERE, Cluster
from ops.cli.errors import CommandError
from ops.cli.lane_jobs import lane_client, split_job
from ops.cli.producing import ConfigFlag, LaneFlag

if TYPE_CHECKING:
    from producers.looking import JobLook

app = cyclopts.App(name="job")


@app.default
def job(
    job: Annotated[str, Parameter(help="The job's id, or LANE.JOB.")],
    /,
    *,
    lane: LaneFlag = None,
    json: Annotated[bool, Parameter(negative="")] = False,
    config: ConfigFlag = None,
    cluster: Cluster = HERE,
) -> None:
    """Show any job of a lane: queued (position, wait), started (worker) or ended (its result).

    A wait is the broker's estimate, from now on. A job that no broker holds is searched in its
    stream. Results stand as long as their lane keeps them.

    Args:
        job: The job's id, or LANE.JOB.
        lane: The job's lane.
        json: Print one line of JSON, the answer included.
        config: TOML file with [nats] and [producer] tables.
        cluster: Where the cluster is.
    """
    lane, job = split_job(job, lane)
    asyncio.run(_show(job, lane, config, cluster, as_json=json))


async def _show(
    job: str, lane: str | None, config: Path | None, cluster: Cluster, *, as_json: bool
) -> None:
    from ops.cli.output import json_line, say

    async with lane_client(config, cluster, lane) as client:
        look = await client.look(job)
        named = client.lane
    if look is None:
        message = f"no job {job} in lane {named}: none waits or runs, and no result stands"
        raise CommandError(message)
    if as_json:
        json_line(as_builtins(look, named))
    else:
        say(as_text(look, named))


def as_text(look: "JobLook", lane: str) -> str:
    """Tell it to people, a fact a line."""
    from ops.cli.output import duration, printable
    from producers.answer import answer_text, error_text

    lines = [f"{lane}.{look.job_id}: {look.state}"]
    if look.position is not None and look.wait_s is not None:
        lines.append(f"{look.position:,} jobs before it, about {duration(look.wait_s)} to wait")
    if look.held_by not in ("", "nothing"):
        lines.append(f"waits for: {look.held_by}")
    if look.worker:
        lines.append(f"worker: {look.worker}")
    record = look.record
    if record is not None:
        reason = f" ({record.reason})" if record.reason else ""
        used = record.usage
        lines.append(f"{record.kind}{reason}")
        lines.append(
            f"tokens: {used.prompt_tokens:,} in ({used.cached_tokens:,} cached), "
            f"{used.output_tokens:,} out"
        )
        said = record.message or error_text(record.body) or answer_text(record.body)
        if said:
            lines.append(said)
    return "\n".join(printable(line) for line in "\n".join(lines).split("\n"))


def as_builtins(look: "JobLook", lane: str) -> dict[str, Any]:
    """Tell it to scripts; the engine's answer as the JSON it is, or as text where it is none."""
    import msgspec
    import orjson

    told: dict[str, Any] = {
        "job": look.job_id,
        "lane": lane,
        "state": look.state.value,
        "position": look.position,
        "wait_s": look.wait_s,
        "held_by": look.held_by,
        "worker": look.worker,
    }
    if look.record is not None:
        record = msgspec.to_builtins(look.record, builtin_types=(bytes,))
        try:
            record["body"] = orjson.loads(look.record.body) if look.record.body else None
        except orjson.JSONDecodeError:
            record["body"] = look.record.body.decode(errors="replace")
        record["usage"] = {
            name: getattr(look.record.usage, name) for name in look.record.usage.__struct_fields__
        }
        told["record"] = record
    return told
