"""`inferlane batch submit|list|status|watch|cancel|results`: batches that the cluster runs."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from cyclopts import Parameter

from ops.cli.connection import HERE, Cluster
from ops.cli.errors import CommandError, ExitCode, Misused, Unreachable
from ops.cli.producing import ConfigFlag, LaneFlag, lane_of, seconds, settings
from ops.cli.result_files import require_writable

if TYPE_CHECKING:
    from producers.batches.desk import Desk
    from producers.batches.records import Batch
    from producers.config import ProducerConfig

BatchArgument = Annotated[str, Parameter(help="The batch's id, as `batch submit` told it.")]
EndpointFlag = Annotated[
    str, Parameter(help="The batch's endpoint; default: the url of its first good line.")
]
KeyFlag = Annotated[
    str,
    Parameter(help="Name of the API key in whose accounts its jobs stand (`inferlane usage`)."),
]
JsonFlag = Annotated[bool, Parameter(negative="", help="Print JSON, as the Batch API has it.")]
QuietFlag = Annotated[
    bool, Parameter(name=("--quiet", "-q"), negative="", help="Show no progress.")
]

HEADS = ("BATCH", "STATUS", "LINES>", "COMPLETED>", "FAILED>", "TIME LEFT", "WINDOW")

WINDOW = "24h"
"""Time for a batch, where none is named: what the hosted services give."""

UNTAKEN_S = 10.0
"""A free gateway takes a batch at once; after so long its owner is told that none did."""

_R = TypeVar("_R")


def submit(
    input_file: Annotated[
        str,
        Parameter(
            help="JSONL file of requests, plain, .gz or .zst; - reads standard input.",
            allow_leading_hyphen=True,
        ),
    ],
    /,
    *,
    endpoint: EndpointFlag = "",
    window: Annotated[str, Parameter(help="Time for the whole batch: 90m, 24h, 7d.")] = WINDOW,
    key: KeyFlag = "",
    lane: LaneFlag = None,
    json: JsonFlag = False,
    config: ConfigFlag = None,
    cluster: Cluster = HERE,
) -> int:
    """Hand a batch in and leave: the cluster's gateways run it, whatever becomes of this machine.

    The file is stored in the cluster over NATS, and need not stay here. No gateway need be up for
    that; one must be for the batch to run. Prints the batch's id. (`batch run --detach` is the
    same.)

        ID=$(inferlane batch submit in.jsonl --lane acme)
        inferlane batch watch $ID --lane acme
        inferlane batch results $ID --lane acme --output out.jsonl
    """
    found = settings(config, cluster, lane=lane)
    _show(hand_in(input_file, found, endpoint=endpoint, window=window, key=key), as_json=json)
    return ExitCode.OK


def hand_in(
    input_file: str, found: "ProducerConfig", *, endpoint: str, window: str, key: str
) -> "Batch":
    """Store an input and create its batch. Raises Unreachable, Misused, CommandError."""
    from producers.batches.config import BatchesConfig

    seconds(window, what="--window")
    named = api_key_name(key)
    return _at_desk(
        found,
        lambda desk: desk.hand_in(
            input_file,
            endpoint=endpoint,
            window=window,
            file_bytes_max=BatchesConfig().file_bytes_max,
            api_key_name=named,
        ),
    )


def require_endpoint(endpoint: str) -> None:
    """Check the endpoint of a batch; empty for that of its first good line. Raises Misused."""
    from producers.request import ENDPOINTS

    if endpoint and endpoint not in ENDPOINTS:
        message = f"--endpoint {endpoint!r} is none of {', '.join(ENDPOINTS)}"
        raise Misused(message)


def api_key_name(key: str) -> str:
    """Check the name of an API key; empty for none. Raises Misused."""
    from broker.wire.ids import MalformedName, require_token

    try:
        return require_token(key, what="key") if key else ""
    except MalformedName as error:
        raise Misused(str(error)) from error


def list_batches(
    *,
    lane: LaneFlag = None,
    json: JsonFlag = False,
    config: ConfigFlag = None,
    cluster: Cluster = HERE,
) -> int:
    """List a lane's batches, newest first."""
    from ops.cli.output import console, json_line, table
    from producers.batches.view import batch_object

    found = _at_desk(settings(config, cluster, lane=lane), lambda desk: desk.shelf.all())
    if json:
        json_line([batch_object(batch) for batch in found])
    else:
        console().print(table("", HEADS, map(_row, found)))
    return ExitCode.OK


def status(
    batch_id: BatchArgument,
    /,
    *,
    lane: LaneFlag = None,
    json: JsonFlag = False,
    config: ConfigFlag = None,
    cluster: Cluster = HERE,
) -> int:
    """Tell how far a batch is, in a line."""
    batch = _at_desk(settings(config, cluster, lane=lane), lambda desk: desk.shelf.get(batch_id))
    _show(batch, as_json=json, line=told(batch))
    return ExitCode.OK


def cancel(
    batch_id: BatchArgument,
    /,
    *,
    lane: LaneFlag = None,
    json: JsonFlag = False,
    config: ConfigFlag = None,
    cluster: Cluster = HERE,
) -> int:
    """Ask for a batch's end: what is finished stays, the rest stands as cancelled in its errors."""
    batch = _at_desk(settings(config, cluster, lane=lane), lambda desk: desk.shelf.cancel(batch_id))
    _show(batch, as_json=json, line=told(batch))
    return ExitCode.OK


def watch(
    batch_id: BatchArgument,
    /,
    *,
    lane: LaneFlag = None,
    quiet: QuietFlag = False,
    config: ConfigFlag = None,
    cluster: Cluster = HERE,
) -> int:
    """Show a batch's progress until its end; Ctrl-C ends the watching, not the batch.

    Exit codes: 0 all its lines completed, 1 some didn't (or it failed, expired, was cancelled), 3
    the cluster can't be reached, 130 stopped watching.
    """
    from ops.cli.output import say

    found = settings(config, cluster, lane=lane)
    batch = _at_desk(found, lambda desk: _watch(desk, batch_id, quiet=quiet))
    say(told(batch))
    return _exit_code(batch)


def results(
    batch_id: BatchArgument,
    /,
    *,
    output: Annotated[Path, Parameter(help="Where its results go (JSONL).")],
    errors: Annotated[
        Path | None, Parameter(help="Where its failed lines go; default: OUT.errors.jsonl.")
    ] = None,
    lane: LaneFlag = None,
    config: ConfigFlag = None,
    cluster: Cluster = HERE,
) -> int:
    """Fetch a batch's results; of one that still runs, what stands now.

    What was fetched of it before is replaced, and nothing else is: another --output is to be named
    where something stands.

    Exit codes as of `watch`, and 1 too while it runs.
    """
    from ops.cli.output import note, say
    from producers.batch.plan import default_errors
    from producers.batches.place import require_own

    require_writable(output)
    places = (output.resolve(), (errors or default_errors(output)).resolve())
    require_writable(*places)

    async def fetch(desk: "Desk") -> "Batch":
        batch = await desk.shelf.get(batch_id)
        for path in places:  # Also where there is no file for it: it would be taken for one.
            require_own(path, batch_id=batch_id)
        for file_id, path in zip((batch.output_file_id, batch.error_file_id), places, strict=True):
            if file_id:
                await desk.fetch(file_id, path, batch_id=batch_id)
        return batch

    batch = _at_desk(settings(config, cluster, lane=lane), fetch)
    files = [
        ("results", batch.output_file_id, places[0]),
        ("errors", batch.error_file_id, places[1]),
    ]
    say("; ".join([told(batch), *(f"{what}: {path}" for what, there, path in files if there)]))
    if not batch.has_ended:
        note("it still runs; the same command again fetches what has come by then")
        return ExitCode.FAILED
    return _exit_code(batch)


def told(batch: "Batch") -> str:
    """A batch in a line."""
    counts = batch.counts
    parts = [f"{batch.id} is {batch.status.value}"]
    if counts.total:
        done = f"{counts.completed:,} completed, {counts.failed:,} failed"
        parts.append(f"{counts.total:,} lines: {done}")
    if batch.forecast:
        from producers.batches.forecast import duration

        miss = f"{batch.forecast.miss_ratio:.0%}"
        parts.append(
            f"at today's capacity it takes {duration(batch.forecast.takes_s)}; chance to miss its "
            f"window {miss}"
        )
    parts += [f"line {fault.line}: {fault.message}" for fault in batch.errors[:3] if fault.line]
    parts += [fault.message for fault in batch.errors[:1] if not fault.line]
    return "; ".join(parts)


def _row(batch: "Batch") -> tuple[str, ...]:
    from producers.batches.forecast import duration

    counts = batch.counts
    return (
        batch.id,
        batch.status.value,
        f"{counts.total or batch.lines:,}",
        f"{counts.completed:,}",
        f"{counts.failed:,}",
        duration(batch.forecast.takes_s) if batch.forecast else "",
        batch.completion_window,
    )


def _show(batch: "Batch", *, as_json: bool, line: str = "") -> None:
    """Print a batch: as JSON, or a line that says it (its id)."""
    from ops.cli.output import json_line, say
    from producers.batches.view import batch_object

    if as_json:
        json_line(batch_object(batch))
    else:
        say(line or batch.id)


async def _watch(desk: "Desk", batch_id: str, *, quiet: bool) -> "Batch":
    from ops.cli.output import note
    from producers.batch.progress import show
    from producers.batch.runner import Tally

    batch = await desk.shelf.get(batch_id)
    before = batch.counts
    untaken_at_s = batch.created_at_s + UNTAKEN_S
    tally = Tally(before=before.ended)
    async with asyncio.TaskGroup() as tasks:
        showing = tasks.create_task(show(tally, quiet=quiet))
        async for batch in desk.changes(batch_id):
            if batch.lease is None and time.time() > untaken_at_s and not batch.has_ended:
                untaken_at_s = math.inf
                note("no gateway has taken it yet; is one running (`inferlane gateway`), and free?")
            tally.lines = batch.counts.total or batch.lines
            tally.failed = batch.counts.failed - before.failed
            tally.completed = batch.counts.completed - before.completed
            tally.inflight = batch.place.jobs_inflight
        showing.cancel()
    return batch


def _exit_code(batch: "Batch") -> ExitCode:
    from producers.batches.records import Status

    whole = batch.status is Status.COMPLETED and not batch.counts.failed
    return ExitCode.OK if whole else ExitCode.FAILED


def _at_desk(found: "ProducerConfig", do: "Callable[[Desk], Awaitable[_R]]") -> _R:
    """Do something at a lane's desk. Raises Unreachable, Misused, CommandError."""
    import uvloop

    from producers import errors
    from producers.batch.errors import BatchError
    from producers.batches.errors import BadBatch

    lane = lane_of(found)
    try:
        return uvloop.run(_connected(found, lane, do))
    except errors.BadLink as error:
        raise Misused(str(error)) from error
    except errors.Unreachable as error:
        raise Unreachable(str(error)) from error
    except (BadBatch, BatchError, errors.UnknownLane) as error:
        raise Misused(str(error)) from error
    except errors.ProducerError as error:
        raise CommandError(str(error)) from error


async def _connected(
    found: "ProducerConfig", lane: str, do: "Callable[[Desk], Awaitable[_R]]"
) -> _R:
    from producers.batches.desk import Desk
    from producers.connecting import connect_bus

    async with connect_bus(found.nats, name="inferlane-batch") as bus:
        desk = Desk(bus, lane)
        async with desk.trouble_told():
            return await do(desk)
