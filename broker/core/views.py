"""The mind as others may see it: read-only records, made when asked for."""

from dataclasses import dataclass

from broker.core.bands import Way
from broker.core.breaker import BreakerState
from broker.core.decisions import HeldBy
from broker.core.estimates import Estimates
from broker.core.mind import Mind
from broker.core.pressure_step import Step
from broker.core.queues import Pool, Queue
from broker.core.rows import RowUsage
from broker.core.scaling import Scaling, scaling_of
from broker.core.state import Worker
from broker.wire.ids import BATCH_BAND
from broker.wire.messages import Attempt, Failure


@dataclass(frozen=True, slots=True)
class QueueView:
    """One queue now."""

    lane: str
    band: int
    model: str
    waiting_jobs: int
    """Held by the broker."""
    pending_jobs: int
    """Still in the stream."""
    queued_jobs_max: int | None
    """Least bound of the rows that match; None: the stream's own."""
    inflight_jobs: int
    wait_s: float
    """Estimate for a job that comes now."""
    oldest_wait_s: float


@dataclass(frozen=True, slots=True)
class RowView:
    """One quota row now; a limit of None is none."""

    name: str
    lane: str | None
    inflight_jobs: int
    inflight_jobs_max: float | None
    """Its own seats."""
    lent_jobs: int
    """Own seats that other rows use now."""
    borrowed_jobs: int
    """Other rows' seats that it uses now."""
    inflight_tokens: float
    inflight_tokens_max: int | None
    queued_jobs: int
    queued_jobs_max: int | None
    bucket_tokens: float
    tokens_per_min: int | None
    result_bytes: float
    """That stand, and that the jobs in flight will add."""
    result_bytes_max: int | None


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker now."""

    worker: str
    phase: str
    ready: bool
    draining: bool
    drained: bool
    held_off: bool
    models: tuple[str, ...]
    slots: int
    inflight_jobs: int
    backlog_tokens: int
    decoding_jobs: int
    kv_tokens: int
    kv_base_tokens: int
    """KV cache used beyond what its jobs add to it."""
    kv_tokens_max: int
    prefill_tokens_s: float
    decode_tokens_s: float
    trust: float
    signal_age_s: float
    incarnation: int
    slots_for_new: int = 0
    """Those that its breaker leaves to new jobs."""
    breaker: str = BreakerState.CLOSED
    """`closed`, `open` or `half_open`."""
    breaker_openings: int = 0
    """Since it joined."""


@dataclass(frozen=True, slots=True)
class PoolView:
    """One model's pool now."""

    model: str
    workers: int
    slots: int
    waiting_jobs: int
    """In line; those in back-off are not."""
    inflight_jobs: int
    fairness_gap: float
    """Greatest difference between the counters of lanes that wait in the same band (weighted tokens
    ÷ weight)."""
    fairness_bound: float
    """What it may be at most: U + Q + P + K·E, see `lanes`."""
    work_tokens: tuple[tuple[int, Way, float], ...]
    """Weighted tokens dispatched, by band and by right: how much each exception took."""
    pressure: Step
    """How far batch gives way."""
    online_wait_s: float
    """Expected wait of bands 0-1 that this follows."""
    wait_errors: tuple[tuple[int, float, int], ...]
    """By band: the median error of long waits' estimates, as a share of the wait, and of how many
    in all."""
    scaling: Scaling
    """What its work calls for."""


@dataclass(frozen=True, slots=True)
class Why:
    """What a job does, and what holds it."""

    key: str
    leased: bool
    held_by: HeldBy
    row: str
    """The quota row that holds it, if one does."""
    position: int
    wait_s: float
    not_before_s: float
    worker: str
    attempt: Attempt | None
    accepted: bool
    output_tokens: int
    failures: tuple[Failure, ...]
    excluded: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ClaimView:
    """Room that is kept for a waiting job now."""

    key: str
    worker: str
    """Kept from others; empty where it is a row's tokens, or a seat."""


class Views:
    """Makes the views."""

    def __init__(self, mind: Mind, estimates: Estimates) -> None:
        self._mind = mind
        self._estimates = estimates

    def queues(self) -> tuple[QueueView, ...]:
        """Show each queue that was ever used."""
        pools = self._mind.queues.pools.values()
        return tuple(self._queue(queue) for pool in pools for queue in pool.queues.values())

    def queue(self, *, lane: str, band: int, model: str) -> QueueView:
        """Show one queue."""
        return self._queue(self._mind.queues.queue(lane=lane, band=band, model=model))

    def wait_s(self, *, lane: str, band: int, model: str, position: int) -> float:
        """Estimate the wait at a position of a queue, also one beyond what is held."""
        queue = self._mind.queues.queue(lane=lane, band=band, model=model)
        return self._estimates.wait_s(queue, position=position)

    def rows(self) -> tuple[RowView, ...]:
        """Show each quota row."""
        return tuple(self._row(usage) for usage in self._mind.quotas.rows)

    def workers(self) -> tuple[WorkerView, ...]:
        """Show each known worker."""
        return tuple(self._worker(worker) for worker in self._mind.fleet.workers.values())

    def knows_worker(self, worker_id: str) -> bool:
        """Say whether a worker of this name is there."""
        return worker_id in self._mind.fleet.workers

    def pools(self) -> tuple[PoolView, ...]:
        """Show each model's pool."""
        return tuple(self._pool(pool) for pool in self._mind.queues.pools.values())

    @property
    def index_entries(self) -> int:
        """Tell how many pairs (block, worker) the prefix index holds."""
        return self._mind.router.index_entries_count

    def claims(self) -> tuple[ClaimView, ...]:
        """Show for whom room is kept, one job of each model at most."""
        claims = self._mind.claims
        shown: list[ClaimView] = []
        for model in self._mind.queues.pools if claims else ():
            waiting, worker = claims.of(model), claims.worker_of(model)
            if waiting is not None:
                shown.append(ClaimView(waiting.job.key, "" if worker is None else worker.id))
        return tuple(shown)

    def why(self, key: str) -> Why | None:
        """Say what holds a job; None when it is not known here."""
        lease = self._mind.ledger.get(key)
        if lease is not None:
            return Why(
                key,
                leased=True,
                held_by=HeldBy.NOTHING,
                row="",
                position=0,
                wait_s=0.0,
                not_before_s=0.0,
                worker=lease.worker,
                attempt=lease.attempt,
                accepted=lease.accepted,
                output_tokens=lease.output_tokens,
                failures=lease.failures,
                excluded=lease.excluded,
            )
        waiting = self._mind.queues.waiting.get(key)
        if waiting is None:
            return None
        position = waiting.queue.ahead_of(waiting)
        held_by = waiting.held_by
        if not self._mind.dispatching:
            held_by = HeldBy.START
        elif waiting.resting:
            held_by = HeldBy.BACK_OFF
        elif held_by in (HeldBy.NOTHING, HeldBy.BACK_OFF):
            held_by = HeldBy.ORDER
        return Why(
            key,
            leased=False,
            held_by=held_by,
            row=waiting.row,
            position=position,
            wait_s=self._estimates.wait_s(waiting.queue, position=position, job=waiting.job),
            not_before_s=waiting.not_before_s,
            worker="",
            attempt=None,
            accepted=False,
            output_tokens=0,
            failures=waiting.failures,
            excluded=waiting.excluded,
        )

    def _queue(self, queue: Queue) -> QueueView:
        limits = [usage.row.queued_jobs_max for usage in queue.rows]
        online = [] if queue.band == BATCH_BAND else [one for one in limits if one is not None]
        oldest = queue.oldest_enqueued_at_s
        return QueueView(
            queue.lane,
            queue.band,
            queue.pool.model,
            queue.waiting_jobs,
            queue.pending_jobs,
            min(online, default=None),
            queue.inflight_jobs,
            self._estimates.wait_s(queue, position=queue.waiting_jobs + queue.pending_jobs),
            0.0 if oldest is None else max(0.0, self._mind.at_s - oldest),
        )

    def _row(self, usage: RowUsage) -> RowView:
        row = usage.row
        usage.refill(self._mind.at_s)
        bounded = row.inflight_jobs_max is not None or row.inflight_jobs_max_per_worker is not None
        return RowView(
            row.name,
            row.lane,
            usage.inflight_jobs,
            usage.jobs_limit if bounded else None,
            usage.lent_jobs,
            usage.borrowed_jobs,
            usage.inflight_tokens,
            row.inflight_tokens_max,
            usage.queued_jobs,
            row.queued_jobs_max,
            usage.bucket_tokens,
            row.tokens_per_min,
            usage.result_bytes,
            None if row.result_bytes_max is None else int(usage.result_bytes_limit),
        )

    def _worker(self, worker: Worker) -> WorkerView:
        return WorkerView(
            worker.id,
            worker.phase.name.lower(),
            worker.ready,
            worker.draining,
            worker.drained,
            worker.held_off,
            worker.models,
            worker.slots,
            len(worker.leases),
            worker.backlog_tokens,
            worker.decoding_jobs,
            worker.kv_tokens,
            worker.kv_base_tokens,
            worker.kv_tokens_max,
            worker.prefill_tokens_s,
            worker.decode_tokens_s,
            worker.trust,
            self._mind.at_s - worker.reported_at_s,
            worker.incarnation,
            worker.slots_for_new,
            worker.breaker.state.value,
            worker.breaker.openings_all,
        )

    def _pool(self, pool: Pool) -> PoolView:
        counters = pool.counters
        slack = self._mind.policy.order.lane_slack_tokens
        work = sorted((band, way, tokens) for (band, way), tokens in pool.shares.work.items())
        return PoolView(
            pool.model,
            len(pool.workers),
            pool.slots,
            sum(pool.in_line),
            pool.inflight_jobs,
            counters.gap,
            counters.bound(slack_tokens=slack),
            tuple(work),
            pool.pressure,
            pool.online_wait_s,
            tuple(self._estimates.errors(pool)),
            scaling_of(
                pool, rate_tokens_s=self._estimates.rate_tokens_s(pool), at_s=self._mind.at_s
            ),
        )
