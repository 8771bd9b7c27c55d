"""`inferlane workers`: who is out there, and how busy."""

import asyncio
from typing import Annotated

import cyclopts
from cyclopts import Parameter

from broker.service.snapshot import GoneView, WorkersView, WorkerView
from ops.cli.connection import HERE, Cluster, ask, connected

app = cyclopts.App(name="workers")

HEADS = (
    *("WORKER", "STATE", "MODELS", "JOBS>", "TO PREFILL>", "KV>", "CACHED>", "PREFILL>", "DECODE>"),
    "SEEN>",
)

GONE_HEADS = ("WORKER", "WENT", "LAST>", "TIMES>", "JOBS>", "PUT BACK>", "CAUSE")


@app.default
def workers(
    *, json: Annotated[bool, Parameter(negative="")] = False, cluster: Cluster = HERE
) -> None:
    """Show the workers that the leading broker knows.

    JOBS are running jobs of all slots. TO PREFILL is prompt text that it was given and has not
    computed yet, in tokens. CACHED is the share of prompt tokens that its cache spared it. PREFILL
    and DECODE are its measured rates in tokens a second. SEEN is the age of its last heartbeat.
    STATE breaker open: its last jobs failed, and it gets nothing new for a while; half-open: one
    job is tried there, and its end decides.

    Below stand those that went within the last hour, as seen by the broker that leads now (256 at
    most): lost, left (drained or stopped), or restarted under their name. JOBS is what they had as
    they went; PUT BACK of those wait or run elsewhere, the others ended with them.

    Args:
        json: Print JSON.
        cluster: Where the cluster is.
    """
    data = asyncio.run(_fetch(cluster))
    show(data, as_json=json)


async def _fetch(cluster: Cluster) -> bytes:
    async with connected(cluster) as bus:
        return await ask(bus, "workers")


def show(data: bytes, *, as_json: bool) -> None:
    """Print the broker's answer."""
    import msgspec

    from ops.cli.output import console, json_text, table

    if as_json:
        json_text(data)
        return
    view = msgspec.json.decode(data, type=WorkersView)
    _show_live(view.workers)
    if view.gone:
        console().print(table("Went of late", GONE_HEADS, map(_gone_row, view.gone)))


def _show_live(found: tuple[WorkerView, ...]) -> None:
    from ops.cli.output import console, say, table

    if not found:
        say("No workers. Start one beside each engine: inferlane worker --help")
        return
    ordered = sorted(found, key=lambda worker: worker.worker)
    console().print(table("", HEADS, map(_row, ordered)))
    ready = sum(state(worker) == "ready" for worker in found)
    slots = sum(worker.slots for worker in found)
    running = sum(worker.inflight_jobs for worker in found)
    say(f"{ready} of {len(found)} ready, {running} jobs on {slots} slots")


def state(worker: WorkerView) -> str:
    """Say in a word or two what a worker is up to."""
    if worker.phase != "live":
        return worker.phase
    if worker.draining:
        return "drained" if worker.drained else "draining"
    if not worker.ready:
        return "not ready"
    turn = worker.breaker.replace("_", "-")
    return "ready" if turn == "closed" else f"breaker {turn}"


def _row(worker: WorkerView) -> tuple[str, ...]:
    from ops.cli.output import duration

    kv = f"{worker.kv_tokens / worker.kv_tokens_max:.0%}" if worker.kv_tokens_max else "?"
    return (
        worker.worker,
        state(worker),
        ", ".join(worker.models),
        f"{worker.inflight_jobs}/{worker.slots}",
        f"{worker.backlog_tokens:,}",
        kv,
        f"{worker.cached_token_ratio:.0%}",
        _rate(worker.prefill_tokens_s),
        _rate(worker.decode_tokens_s),
        f"{duration(worker.signal_age_s)} ago",
    )


def _gone_row(gone: GoneView) -> tuple[str, ...]:
    from ops.cli.output import duration

    return (
        gone.worker,
        f"{gone.how}, back" if gone.back and gone.how != "restarted" else gone.how,
        f"{duration(gone.ago_s)} ago",
        f"{gone.times}",
        f"{gone.jobs}",
        f"{gone.requeued_jobs}",
        gone.cause,
    )


def _rate(tokens_s: float) -> str:
    return f"{tokens_s:,.0f}/s" if tokens_s else "?"
