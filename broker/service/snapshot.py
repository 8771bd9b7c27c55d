"""The cluster as operators see it: one set of records for /metrics, status page and control.

A control reply's `data` is one of these as JSON (`encode`), so that the page, the metrics and
`inferlane workers` can't tell different stories. Readers ignore fields they don't know.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import Protocol, TypeVar

import msgspec
from msgspec import Struct

SLICE_RECORDS_MAX = 100
"""Records read before the loop gets its turn: some 0.3 ms."""

SLICE_S = 0.0005
"""Or fewer, where making one takes long."""

_T = TypeVar("_T")


class WatchView(Struct, frozen=True, kw_only=True):
    """What one watchdog sees."""

    name: str
    trouble: str = ""
    """What is wrong, or was within the last minute; empty: nothing."""
    alarms: int = 0
    """Times that something began to be wrong."""


class StatusView(Struct, frozen=True, kw_only=True):
    """The broker itself."""

    epoch: int
    """Of the leader; 0 before the first."""
    leader: bool
    since_s: float
    """How long it has been what it is, leader or standby."""
    held_jobs: int
    """Pulled from their streams and not yet dispatched."""
    held_bytes: int
    inflight_jobs: int
    held_bytes_max: int = 0
    index_entries: int = 0
    """Pairs (block, worker) in the prefix index; at its bound caches hold more than is known."""
    index_entries_max: int = 0
    pools: tuple["PoolView", ...] = ()
    watches: tuple[WatchView, ...] = ()


class PoolView(Struct, frozen=True, kw_only=True):
    """One model: the workers that serve it, and how its jobs share them."""

    model: str
    workers: int
    slots: int
    inflight_jobs: int
    pressure: str
    """How far batch gives way: `none`, `borrow`, `hold_batch`, `refuse_batch`."""
    backlog_s: float
    """All that waits, at the rate that its workers work at."""
    oldest_wait_s: float
    desired_workers: int
    """What its work, running and waiting, calls for."""
    online_wait_s: float
    """Expected wait of bands 0-1 that `pressure` follows."""
    fairness_gap: float
    """Greatest difference between lanes that wait in the same band, in weighted tokens ÷ weight."""
    fairness_bound: float
    """What the gap may be at most."""
    work_tokens: tuple[tuple[int, str, float], ...] = ()
    """Weighted tokens dispatched, by band and by right (`priority`, `share`, `aged`, `claim`)."""
    wait_errors: tuple[tuple[int, float, int], ...] = ()
    """By band: by which share of the wait estimates of waits over 5 s are off (median of the
    latest), and how many such waits there were."""


class QueueView(Struct, frozen=True, kw_only=True):
    """One queue (band, model) of a lane."""

    band: int
    model: str
    queued_jobs: int
    """All that wait: held by the broker, and still in the stream."""
    queued_jobs_max: int
    """0: bounded by its stream only."""
    inflight_jobs: int
    wait_s: float
    """Estimate for a job that comes now."""
    pending_jobs: int
    """Of those queued, the ones the broker has not pulled yet."""


class RowView(Struct, frozen=True, kw_only=True):
    """One quota row, whole: a row over several lanes is told under each of them."""

    row: str
    inflight_jobs: int
    inflight_jobs_max: int | None = None
    lent_jobs: int = 0
    """Of those it may have, in use by other rows."""
    borrowed_jobs: int = 0
    """Of those in flight, beyond what it may have, with seats of other rows."""
    inflight_tokens: float = 0.0
    inflight_tokens_max: int | None = None
    queued_jobs: int = 0
    """Online jobs that wait under it."""
    queued_jobs_max: int | None = None
    bucket_tokens: float = 0.0
    """What may be started at once of `tokens_per_min`; below 0 after a job that cost more than was
    expected."""
    tokens_per_min: int | None = None
    result_bytes: float = 0.0
    """Of the lane's results, with those to come of the jobs in flight."""
    result_bytes_max: int | None = None


class LaneView(Struct, frozen=True, kw_only=True):
    """One tenant."""

    lane: str
    paused: bool
    queues: tuple[QueueView, ...] = ()
    rows: tuple[RowView, ...] = ()


class WorkerView(Struct, frozen=True, kw_only=True):
    """One worker, as last reported and as given work since."""

    worker: str
    phase: str
    """`live`, `suspect` (silent past its lease) or `gone`."""
    ready: bool
    draining: bool
    drained: bool
    models: tuple[str, ...]
    slots: int
    inflight_jobs: int
    backlog_tokens: int
    """Prompt tokens given to it that it must still prefill."""
    kv_tokens: int
    kv_tokens_max: int
    """0: not known."""
    prefill_tokens_s: float
    """0: not known yet."""
    decode_tokens_s: float
    cached_token_ratio: float
    """Share of the prompt tokens of its finished jobs that came from its cache."""
    trust: float = 1.0
    """By how much its credit for cached prefixes counts: as its engine found what was predicted."""
    signal_age_s: float
    """Since its last heartbeat."""
    incarnation: int
    breaker: str = "closed"
    """`open`: its last jobs failed, nothing new goes there; `half_open`: one job is tried."""
    breaker_openings: int = 0
    """Since it joined."""
    notice: str = ""
    """What keeps it from ending jobs, in its own words."""


class GoneView(Struct, frozen=True, kw_only=True):
    """A worker that went of late."""

    worker: str
    how: str
    """The last time: `lost`, `left` (it was draining), or `restarted` under its name."""
    cause: str
    ago_s: float
    times: int
    """That it went, of late."""
    jobs: int
    """It had as it went, all times."""
    requeued_jobs: int
    """Of these, put back; the others ended with it."""
    back: bool
    """A worker of its name is there."""


class DifferenceView(Struct, frozen=True, kw_only=True):
    """One disagreement that a reconcile found."""

    kind: str
    key: str
    worker: str
    detail: str


class WorkersView(Struct, frozen=True, kw_only=True):
    """Answer to `workers`."""

    workers: tuple[WorkerView, ...]
    gone: tuple[GoneView, ...] = ()
    """The latest first."""


class LanesView(Struct, frozen=True, kw_only=True):
    """Answer to `lanes`."""

    lanes: tuple[LaneView, ...]


class ReconcileView(Struct, frozen=True, kw_only=True):
    """Answer to `reconcile`."""

    checked_jobs: int
    differences: tuple[DifferenceView, ...]
    repaired: int


class SnapshotSource(Protocol):
    """Who can tell the cluster's state now; called on the broker's loop.

    `lanes` and `workers` may be generators. They are read some at a time with the loop running in
    between, so they must walk over a copy of the keys and skip what has gone meanwhile.
    """

    def status(self) -> StatusView:
        """Tell the broker's own state."""
        ...

    def lanes(self) -> Iterable[LaneView]:
        """Tell each lane's queues and rows."""
        ...

    def lane(self, name: str) -> LaneView | None:
        """Tell one lane's queues and rows; None when there is none of that name."""
        ...

    def workers(self) -> Iterable[WorkerView]:
        """Tell each known worker."""
        ...

    def gone(self) -> tuple[GoneView, ...]:
        """Tell who went of late, the latest first."""
        ...


def encode(view: Struct) -> bytes:
    """Encode a view as JSON."""
    return msgspec.json.encode(view)


async def sliced(
    records: Iterable[_T], *, at_once_max: int = SLICE_RECORDS_MAX
) -> AsyncIterator[_T]:
    """Walk over records, giving the loop its turn as it goes."""
    turn_ends_s = 0.0
    for index, record in enumerate(records):
        if index % at_once_max == 0 or time.perf_counter() >= turn_ends_s:
            await asyncio.sleep(0)
            turn_ends_s = time.perf_counter() + SLICE_S
        yield record
