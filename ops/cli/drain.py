"""`inferlane drain`: empty a worker before it is taken away, and take it back."""

import asyncio
from typing import TYPE_CHECKING, Annotated

import cyclopts
from cyclopts import Parameter

from broker.service.snapshot import WorkersView, WorkerView
from ops.cli.connection import HERE, Cluster, ask, connected
from ops.cli.errors import CommandError, Misused

if TYPE_CHECKING:
    from broker.bus.base import Bus

app = cyclopts.App(name="drain")

POLL_S = 0.5
"""How often a waiting drain looks; a job takes seconds to minutes to finish."""


@app.default
def drain(
    worker: str,
    /,
    *,
    undo: Annotated[bool, Parameter(negative="")] = False,
    wait: Annotated[bool, Parameter(negative="")] = False,
    wait_s_max: float = 3600.0,
    cluster: Cluster = HERE,
) -> None:
    """Tell a worker to take nothing new and finish what runs; no job is lost or run twice.

    The worker's process goes on until you stop it. Draining holds until `--undo` or until the
    agent is started again.

        inferlane drain gpu-7 --wait && ssh gpu-7 systemctl stop inferlane-worker

    Args:
        worker: Name, as `inferlane workers` shows it.
        undo: Take it back to work.
        wait: Return when it has finished everything; exit code 1 if it is lost before.
        wait_s_max: With --wait: give up after this long (exit code 1); it goes on draining.
        cluster: Where the cluster is.
    """
    if undo and wait:
        message = "--undo is done at once: leave out --wait"
        raise Misused(message)
    _require_name(worker)
    asyncio.run(_drain(worker, undo=undo, wait_s=wait_s_max if wait else None, cluster=cluster))


async def _drain(worker: str, *, undo: bool, wait_s: float | None, cluster: Cluster) -> None:
    async with connected(cluster) as bus:
        await order(bus, worker, draining=not undo)
        if wait_s is not None:
            await until_drained(bus, worker, wait_s=wait_s)


def _require_name(worker: str) -> None:
    from broker.wire.ids import MalformedName, require_token

    try:
        require_token(worker, what="worker")
    except MalformedName as error:
        raise Misused(str(error)) from error


async def order(bus: "Bus", worker: str, *, draining: bool) -> None:
    """Ask the broker to drain a worker, or to take it back."""
    from broker.wire.codec import encode
    from broker.wire.control import DrainRequest
    from ops.cli.output import say

    await ask(bus, "drain", encode(DrainRequest(worker=worker, draining=draining)))
    say(f"{worker} is draining" if draining else f"{worker} takes jobs again")


async def until_drained(bus: "Bus", worker: str, *, wait_s: float) -> None:
    """Wait until a worker has finished everything. Raises CommandError."""
    from ops.cli.output import note, say

    deadline_s = asyncio.get_running_loop().time() + wait_s
    left = -1
    while True:
        view = await _look(bus, worker)
        if view.drained:
            say(f"{worker} is drained")
            return
        if view.phase == "gone":
            message = f"{worker} was lost before it was drained; its jobs run elsewhere"
            raise CommandError(message)
        if not view.draining and left >= 0:
            message = f"{worker} was taken back to work by somebody else"
            raise CommandError(message)
        if asyncio.get_running_loop().time() >= deadline_s:
            message = (
                f"{worker} still runs {view.inflight_jobs} jobs after {wait_s:g} s and goes on"
                " draining; run the same command again to wait longer"
            )
            raise CommandError(message)
        if view.draining and view.inflight_jobs != left:
            left = view.inflight_jobs
            note(f"{left} job{'' if left == 1 else 's'} left")
        await asyncio.sleep(POLL_S)


async def _look(bus: "Bus", worker: str) -> WorkerView:
    import msgspec

    found = msgspec.json.decode(await ask(bus, "workers"), type=WorkersView).workers
    for view in found:
        if view.worker == worker:
            return view
    message = f"the broker knows no worker {worker} any more"
    raise CommandError(message)
