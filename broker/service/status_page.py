"""The status page: one HTML text without scripts, pictures or other files."""

import time
from collections.abc import Iterable, Iterator
from html import escape
from operator import attrgetter

from broker.service.row_columns import Bounded, columns_of
from broker.service.snapshot import (
    GoneView,
    LaneView,
    PoolView,
    QueueView,
    RowView,
    SnapshotSource,
    StatusView,
    WorkerView,
    sliced,
)

REFRESH_S = 2
"""How often an open page asks again."""

ROWS_MAX = 200
"""Lines shown of each table; the command line and /metrics have all."""

NOTICES_MAX = 10
"""Workers' notices shown: where more have one, it is the same."""

LINES_AT_ONCE_MAX = 25
"""Lines made before the loop gets its turn: some 0.2 ms."""

BATCH_UNDER_PRESSURE = {
    "none": "runs",
    "borrow": "lends its seats",
    "hold_batch": "its share only",
    "refuse_batch": "new batch refused",
}
"""What each step of the pressure means for batch, in words."""

_STYLE = """
:root{color-scheme:light dark}
body{font:14px/1.45 system-ui,sans-serif;margin:1.5rem;max-width:75rem}
h1{font-size:1.25rem}h2{font-size:1rem;margin:1.5rem 0 .3rem}
table{border-collapse:collapse;width:100%}
th,td{padding:.2rem .7rem .2rem 0;text-align:right;white-space:nowrap}
th{font-weight:600;border-bottom:1px solid #8886}
th.t,td.t{text-align:left}
.bad{color:#c22}.dim{opacity:.65}
meter{width:6rem;vertical-align:middle}
"""


async def page(source: SnapshotSource, *, role: str, reason: str) -> str:
    """Write the page, giving the loop its turn as it goes."""
    status = source.status()
    lanes = [lane async for lane in sliced(source.lanes())]
    workers = [worker async for worker in sliced(source.workers())]
    parts = [_head(status, role, reason), *_alarms(status), *_problems(workers, role)]
    for table in (
        _pools(status),
        _workers(workers),
        _gone(source.gone()),
        _queues(lanes),
        _rows(lanes),
    ):
        parts += [part async for part in sliced(table, at_once_max=LINES_AT_ONCE_MAX)]
    return "\n".join([*parts, "</body></html>\n"])


def _head(status: StatusView, role: str, reason: str) -> str:
    why = f" ({escape(reason)})" if reason else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="refresh" content="{REFRESH_S}">'
        f"<title>inferlane: {escape(role)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>inferlane broker: {escape(role)}{why}</h1>"
        f"<p>epoch {status.epoch}, for {_duration(status.since_s)} ·"
        f" {status.inflight_jobs:,} jobs running · {status.held_jobs:,} held"
        f" ({_size(status.held_bytes)}) · {time.strftime('%H:%M:%S')}"
        ' <span class="dim">· <a href="/metrics">metrics</a></span></p>'
    )


def _alarms(status: StatusView) -> Iterator[str]:
    for watch in status.watches:
        if watch.trouble:
            yield f'<p class="bad">{escape(watch.name)}: {escape(watch.trouble)}</p>'


def _problems(workers: list[WorkerView], role: str) -> list[str]:
    if role != "leader":
        note = "This broker stands by: the leader's page has workers and queues."
        return [f"<p>{note}</p>"]
    if not any(worker.phase == "live" and worker.ready for worker in workers):
        note = "No worker is ready: jobs wait. Start one with <code>inferlane worker</code>."
        return [f'<p class="bad">{note}</p>']
    told = [worker for worker in workers if worker.notice][:NOTICES_MAX]
    return [
        f'<p class="bad">{escape(worker.worker)}: {escape(worker.notice)}</p>' for worker in told
    ]


def _pools(status: StatusView) -> Iterator[str]:
    if not status.pools:
        return
    heads = (
        *("model!", "workers", "running", "of", "online wait", "estimates off"),
        *("batch!", "fairness gap", "of"),
    )
    yield from _table("Models", heads, map(_pool, status.pools[:ROWS_MAX]), len(status.pools))


def _pool(pool: PoolView) -> str:
    batch = BATCH_UNDER_PRESSURE[pool.pressure]
    alarmed = "t" if pool.pressure == "none" else "t bad"
    return (
        f'<td class="t">{escape(pool.model)}</td><td>{pool.workers}</td>'
        f"<td>{pool.inflight_jobs:,}</td><td>{pool.slots:,}</td>"
        f"<td>{_duration(pool.online_wait_s)}</td><td>{_off(pool)}</td>"
        f'<td class="{alarmed}">{batch}</td>'
        f"<td>{pool.fairness_gap:,.0f}</td><td>{pool.fairness_bound:,.0f}</td>"
    )


def _off(pool: PoolView) -> str:
    """Tell the worst band's error of long waits' estimates."""
    ratios = [ratio for _, ratio, _ in pool.wait_errors]
    return f"{max(ratios):.0%}" if ratios else "–"


def _workers(workers: list[WorkerView]) -> Iterator[str]:
    if not workers:
        return
    ordered = sorted(workers[:ROWS_MAX], key=attrgetter("worker"))
    heads = ("worker!", "state!", "models!", "jobs", "of", "to prefill", "KV", "cached", "seen")
    yield from _table("Workers", heads, map(_worker, ordered), len(workers))


def _worker(worker: WorkerView) -> str:
    kv = _meter(worker.kv_tokens, worker.kv_tokens_max) if worker.kv_tokens_max else "–"
    state = _state(worker)
    bad = "" if state in ("ready", "draining", "drained") else ' class="t bad"'
    return (
        f'<td class="t">{escape(worker.worker)}</td><td{bad or " class=t"}>{escape(state)}</td>'
        f'<td class="t">{escape(", ".join(worker.models))}</td>'
        f"<td>{worker.inflight_jobs}</td><td>{worker.slots}</td>"
        f"<td>{worker.backlog_tokens:,} tokens</td><td>{kv}</td>"
        f"<td>{worker.cached_token_ratio:.0%}</td><td>{worker.signal_age_s:.1f} s ago</td>"
    )


def _gone(gone: tuple[GoneView, ...]) -> Iterator[str]:
    if not gone:
        return
    heads = ("worker!", "went!", "last", "times", "jobs", "put back", "cause!")
    yield from _table("Went of late", heads, map(_gone_row, gone[:ROWS_MAX]), len(gone))


def _gone_row(gone: GoneView) -> str:
    is_missed = gone.how == "lost" and not gone.back
    how = f"{gone.how}, back" if gone.back and gone.how != "restarted" else gone.how
    return (
        f'<td class="t">{escape(gone.worker)}</td><td class="t{" bad" if is_missed else ""}">'
        f"{escape(how)}</td><td>{_duration(gone.ago_s)} ago</td><td>{gone.times:,}</td>"
        f"<td>{gone.jobs:,}</td><td>{gone.requeued_jobs:,}</td>"
        f'<td class="t">{escape(gone.cause)}</td>'
    )


def _state(worker: WorkerView) -> str:
    if worker.phase != "live":
        return worker.phase
    if worker.draining:
        return "drained" if worker.drained else "draining"
    if not worker.ready:
        return "not ready"
    turn = worker.breaker.replace("_", "-")
    return "ready" if turn == "closed" else f"breaker {turn}"


def _queues(lanes: list[LaneView]) -> Iterator[str]:
    """Tell the fullest queues first: those are why people look."""
    queues = [(lane, queue) for lane in lanes for queue in lane.queues]
    if not queues:
        return
    queues.sort(key=lambda pair: (-pair[1].queued_jobs, pair[0].lane, pair[1].band))
    heads = ("lane!", "band", "model!", "waiting", "of at most", "running", "wait of a new job")
    lines = (_queue(lane, queue) for lane, queue in queues[:ROWS_MAX])
    yield from _table("Queues", heads, lines, len(queues))


def _queue(lane: LaneView, queue: QueueView) -> str:
    paused = ' <span class="bad">paused</span>' if lane.paused else ""
    bound = f"{queue.queued_jobs_max:,}" if queue.queued_jobs_max else "–"
    return (
        f'<td class="t">{escape(lane.lane)}{paused}</td><td>{queue.band}</td>'
        f'<td class="t">{escape(queue.model)}</td>'
        f"<td>{queue.queued_jobs:,}</td><td>{bound}</td><td>{queue.inflight_jobs:,}</td>"
        f"<td>{_duration(queue.wait_s)}</td>"
    )


def _rows(lanes: list[LaneView]) -> Iterator[str]:
    rows = list({row.row: row for lane in lanes for row in lane.rows}.values())
    if not rows:
        return
    columns = columns_of(rows)
    more = tuple(head for one in columns for head in (one.head, one.limit_head))
    lines = (_row(row, columns) for row in rows[:ROWS_MAX])
    heads = ("row!", "jobs", "of", "lent", "borrowed", *more)
    yield from _table("Quotas", heads, lines, len(rows))


def _row(row: RowView, columns: list[Bounded]) -> str:
    jobs_max = "–" if row.inflight_jobs_max is None else f"{row.inflight_jobs_max:,}"
    cells = (cell for one in columns for cell in one.cells(row, size=_size))
    return (
        f'<td class="t">{escape(row.row)}</td><td>{row.inflight_jobs:,}</td><td>{jobs_max}</td>'
        f"<td>{row.lent_jobs or '–'}</td><td>{row.borrowed_jobs or '–'}</td>"
        f"{''.join(f'<td>{cell}</td>' for cell in cells)}"
    )


def _table(title: str, heads: tuple[str, ...], lines: Iterable[str], count: int) -> Iterator[str]:
    """Make a table; a head that ends in `!` is of a column of text, aligned left."""
    cells = "".join(
        f'<th class="t">{head[:-1]}</th>' if head.endswith("!") else f"<th>{head}</th>"
        for head in heads
    )
    yield f"<h2>{title}</h2><table><tr>{cells}</tr>"
    for line in lines:
        yield f"<tr>{line}</tr>"
    yield "</table>"
    if count > ROWS_MAX:
        yield f'<p class="dim">and {count - ROWS_MAX:,} more</p>'


def _meter(value: float, limit: float) -> str:
    share = min(value / limit, 1.0)
    return f'<meter value="{share:.2f}"></meter> {share:.0%}'


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:  # noqa: PLR2004 - seconds of a minute
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _size(amount: int) -> str:
    return f"{amount / 1024 / 1024:.1f} MiB"
