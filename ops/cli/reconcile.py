"""`inferlane reconcile`: compare the broker's ledger with the workers and the streams, now."""

import asyncio
from typing import Annotated

import cyclopts
from cyclopts import Parameter

from broker.service.snapshot import ReconcileView
from ops.cli.connection import HERE, Cluster, ask, connected

app = cyclopts.App(name="reconcile")

RECONCILE_S_MAX = 120.0
"""A pass asks the server for each queue; thousands of queues take a minute."""

HEADS = ("DIFFERENCE", "JOB", "WORKER", "DETAIL")


@app.default
def reconcile(
    *, json: Annotated[bool, Parameter(negative="")] = False, cluster: Cluster = HERE
) -> None:
    """Do now what the broker does every minute: find differences, and repair them.

    Differences are jobs that the broker, the workers' own lists and the streams tell differently:
    a lost message leaves one, and a few after a crash are normal. Found differences are repaired,
    so the exit code is 0 whether there were any or not.

    Args:
        json: Print JSON.
        cluster: Where the cluster is.
    """
    data = asyncio.run(_fetch(cluster))
    show(data, as_json=json)


async def _fetch(cluster: Cluster) -> bytes:
    async with connected(cluster) as bus:
        return await ask(bus, "reconcile", timeout_s=RECONCILE_S_MAX)


def show(data: bytes, *, as_json: bool) -> None:
    """Print the broker's answer."""
    import msgspec

    from ops.cli.output import console, json_text, say, table

    if as_json:
        json_text(data)
        return
    report = msgspec.json.decode(data, type=ReconcileView)
    jobs = f"{report.checked_jobs:,} job{'' if report.checked_jobs == 1 else 's'}"
    if not report.differences:
        say(f"Checked {jobs}: no differences.")
        return
    rows = ((one.kind, one.key, one.worker, one.detail) for one in report.differences)
    console().print(table("", HEADS, rows))
    count = len(report.differences)
    found = f"{count} difference{'' if count == 1 else 's'}"
    say(f"Checked {jobs}: {found}, {report.repaired} repaired.")
