"""The demo as a person sees it: a live table while it runs, a summary at the end."""

import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ops.demo.run import Progress

PLAIN_EVERY_S = 5.0
"""Where nobody watches a terminal, a line this often."""

BANDS = {0: "critical", 1: "interactive", 2: "standard", 3: "batch"}


@contextmanager
def showing(*, title: str) -> Generator[Callable[[Progress], None], None, None]:
    """Show progress on standard error: a live table on a terminal, else a line now and then."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain(title)
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        yield lambda progress: live.update(_table(progress, title))


def _plain(title: str) -> Callable[[Progress], None]:
    said_at_s = -PLAIN_EVERY_S

    def say(progress: Progress) -> None:
        nonlocal said_at_s
        if time.monotonic() - said_at_s >= PLAIN_EVERY_S:
            said_at_s = time.monotonic()
            line = f"{title}: {progress.stage}, {progress.done} of {progress.requests} requests"
            sys.stderr.write(line + "\n")

    return say


def _table(progress: Progress, title: str) -> Group:
    head = Text(f"{title}: {progress.stage}, {progress.done} of {progress.requests} requests done")
    workers = Table("worker", "in flight", "to prefill (tokens)", "cached share", "last word (s)")
    for worker in progress.workers:
        workers.add_row(
            str(worker["worker"]),
            f"{worker['inflight_jobs']}/{worker['slots']}",
            str(worker["backlog_tokens"]),
            f"{worker['cached_token_ratio']:.0%}",
            f"{worker['signal_age_s']:.1f}",
        )
    queues = Table("lane", "band", "queued", "in flight", "wait (s)")
    for lane in progress.lanes:
        for queue in _queues(lane):
            if queue["queued_jobs"] or queue["inflight_jobs"]:
                queues.add_row(
                    str(lane["lane"]),
                    BANDS[queue["band"]],
                    str(queue["queued_jobs"]),
                    str(queue["inflight_jobs"]),
                    f"{queue['wait_s']:.2f}",
                )
    return Group(head, workers, queues)


def _queues(lane: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(lane["queues"])


def summary(report: Mapping[str, Any], console: Console) -> None:
    """Print what came of it, for people."""
    lost, doubled = report["jobs_lost"], report["results_duplicate"]
    console.print(
        f"[bold]{report['jobs_submitted']} requests[/bold] in {report['span_s']:.0f} s under "
        f"policy {report['policy']} on {report['engine']} engines: "
        f"{report['jobs_completed']} completed, {report['jobs_failed']} failed, "
        f"{report['jobs_rejected']} rejected, {report['jobs_retried']} retried, "
        f"{lost} lost, {doubled} with a second result."
    )
    lanes = Table("lane", "band", "completed", "other ends", title="Jobs", title_justify="left")
    for row in report["by_lane_and_band"]:
        counts = {name: value for name, value in row.items() if name not in ("lane", "band")}
        completed = counts.pop("completed", 0)
        others = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "none"
        lanes.add_row(row["lane"], BANDS[row["band"]], str(completed), others)
    console.print(lanes)
    workers = Table(
        *("worker", "jobs", "prompt tokens", "of them cached"),
        title="Workers",
        title_justify="left",
    )
    for name, worker in report["per_worker"].items():
        share = worker["cached_tokens"] / max(1, worker["prompt_tokens"])
        workers.add_row(name, str(worker["jobs"]), f"{worker['prompt_tokens']:,}", f"{share:.0%}")
    console.print(workers)
    console.print(
        f"Chats waited {report['ttft_s']['p50'] * 1000:.0f} ms for their first token (p50; "
        f"p99 {report['ttft_s']['p99'] * 1000:.0f} ms). "
        f"{report['cached_token_ratio']:.0%} of all prompt tokens came from an engine's cache."
    )
