"""`inferlane lanes`: what waits and runs in each lane, and which quota row is full."""

import asyncio
from typing import Annotated

import cyclopts
from cyclopts import Parameter

from broker.service.row_columns import Bounded, columns_of
from broker.service.snapshot import LanesView, LaneView, QueueView, RowView
from ops.cli.connection import HERE, Cluster, ask, connected

app = cyclopts.App(name="lanes")

QUEUE_HEADS = ("LANE", "BAND", "MODEL", "WAITING>", "OF>", "RUNNING>", "WAIT OF A NEW JOB>")
ROW_HEADS = ("QUOTA", "JOBS>", "OF>", "LENT>", "BORROWED>")

BANDS = ("0 critical", "1 interactive", "2 standard", "3 batch")


@app.default
def lanes(
    lane: str | None = None,
    /,
    *,
    json: Annotated[bool, Parameter(negative="")] = False,
    cluster: Cluster = HERE,
) -> None:
    """Show each lane's queues, and the quota rows with what they hold now.

    WAITING counts jobs that the broker holds and jobs still in the lane's stream. WAIT OF A NEW JOB
    is the broker's estimate. A quota row that is full (JOBS + LENT - BORROWED = OF) holds jobs back
    even when workers are free, unless another row lends it a seat. WAITING is of online jobs; MAY
    START is what is left of the weighted tokens A MINUTE. Columns that no row bounds are left out.

    Args:
        lane: Only this lane.
        json: Print JSON, of all lanes.
        cluster: Where the cluster is.
    """
    data = asyncio.run(_fetch(cluster))
    show(data, lane=lane, as_json=json)


async def _fetch(cluster: Cluster) -> bytes:
    async with connected(cluster) as bus:
        return await ask(bus, "lanes")


def show(data: bytes, *, lane: str | None, as_json: bool) -> None:
    """Print the broker's answer. Raises CommandError when there is no such lane."""
    import msgspec

    from broker.wire.settings import nearest
    from ops.cli.errors import CommandError
    from ops.cli.output import console, json_text, table

    if as_json:
        json_text(data)
        return
    found = msgspec.json.decode(data, type=LanesView).lanes
    chosen = [one for one in found if lane in (None, one.lane)]
    if lane is not None and not chosen:
        names = [one.lane for one in found]
        message = f"no such lane: {lane}.{nearest(lane, names)} Known: {', '.join(names)}"
        raise CommandError(message)
    out = console()
    out.print(table("", QUEUE_HEADS, [row for one in chosen for row in _lane_rows(one)]))
    rows = {row.row: row for one in chosen for row in one.rows}
    if rows:
        columns = columns_of(rows.values())
        more = (f"{head.upper()}>" for one in columns for head in (one.head, one.limit_head))
        cells = (_row(row, columns) for row in rows.values())
        out.print(table("", (*ROW_HEADS, *more), cells))


def _lane_rows(lane: LaneView) -> list[tuple[str, ...]]:
    if not lane.queues:
        return [(_name(lane), "", "(no job yet)", "", "", "", "")]
    ordered = sorted(lane.queues, key=lambda queue: (queue.band, queue.model))
    return [_queue(lane, queue) for queue in ordered]


def _name(lane: LaneView) -> str:
    return f"{lane.lane} (paused)" if lane.paused else lane.lane


def _queue(lane: LaneView, queue: QueueView) -> tuple[str, ...]:
    from ops.cli.output import duration

    return (
        _name(lane),
        BANDS[queue.band],
        queue.model,
        f"{queue.queued_jobs:,}",
        f"{queue.queued_jobs_max:,}" if queue.queued_jobs_max else "-",
        f"{queue.inflight_jobs:,}",
        duration(queue.wait_s),
    )


def _row(row: RowView, columns: list[Bounded]) -> tuple[str, ...]:
    from ops.cli.output import size

    return (
        row.row,
        f"{row.inflight_jobs:,}",
        "-" if row.inflight_jobs_max is None else f"{row.inflight_jobs_max:,}",
        f"{row.lent_jobs:,}",
        f"{row.borrowed_jobs:,}",
        *(cell for one in columns for cell in one.cells(row, size=size, none="-")),
    )
