"""The books: every sum that the mind keeps equals what it is a sum of, and no bound is overshot.

Usage is the set of live leases (`core/ledger`); whatever path a lease came or went by, the views of
workers, rows, queues and pools must agree with it.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from broker.core.decisions import Dispatch
from broker.core.events import JobSpec
from broker.core.policy import Policy, QuotaRow
from broker.core.scheduler import Scheduler
from broker.core.state import Lease
from broker.core.views import RowView, WorkerView
from broker.sim.violation import require

WAIT_S_MAX = 86_400.0
"""No estimate may be longer than a day: it is told to people."""

ROUNDING = 1e-3
"""Sums of weighted tokens are floats: two orders of adding differ by less."""


def check_books(
    scheduler: Scheduler, policy: Policy, waiting_jobs: int, dispatched: Sequence[Dispatch]
) -> None:
    """Check all sums, and the bounds of what was just dispatched.

    Raises Violation.
    """
    leases = {lease.job.key: lease for lease in scheduler.leases()}
    workers = {view.worker: view for view in scheduler.views.workers()}
    by_worker: dict[str, list[Lease]] = {name: [] for name in workers}
    for lease in leases.values():
        require(lease.worker in workers, f"{lease.job.key} is leased to {lease.worker}, not known")
        by_worker[lease.worker].append(lease)
    for name, view in workers.items():
        _check_worker(view, by_worker[name])
    new_jobs = _check_dispatched(dispatched, leases, workers, policy)
    rows = scheduler.views.rows()
    for row, view in zip(policy.quotas, rows, strict=True):
        _check_row(row, view, list(leases.values()), new_jobs)
    lent, borrowed = sum(row.lent_jobs for row in rows), sum(row.borrowed_jobs for row in rows)
    require(lent == borrowed, f"{lent} seats are lent, {borrowed} borrowed")
    _check_pools(scheduler, list(leases.values()), workers)
    _check_queues(scheduler, list(leases.values()), waiting_jobs)


def _check_worker(view: WorkerView, leases: Sequence[Lease]) -> None:
    prefilling = [lease for lease in leases if not lease.prefilled]
    said = (view.inflight_jobs, view.kv_tokens, view.backlog_tokens, view.decoding_jobs)
    true = (
        len(leases),
        sum(lease.kv_tokens for lease in leases),
        sum(lease.uncached_tokens for lease in prefilling),
        len(leases) - len(prefilling),
    )
    require(
        said == true,
        f"{view.worker} counts jobs, KV, backlog, decoding as {said}, its leases are {true}",
    )


def _check_dispatched(
    dispatched: Sequence[Dispatch],
    leases: Mapping[str, Lease],
    workers: Mapping[str, WorkerView],
    policy: Policy,
) -> list[JobSpec]:
    """Check where the jobs of one settling went; returns them."""
    jobs: list[JobSpec] = []
    held = {name: view.kv_tokens for name, view in workers.items()}
    for order in dispatched:
        if order.key in leases and order.worker in held:
            held[order.worker] -= leases[order.key].kv_tokens
    for order in dispatched:
        lease, view = leases.get(order.key), workers.get(order.worker)
        require(
            lease is not None and (lease.worker, lease.attempt) == (order.worker, order.attempt),
            f"{order.key} was dispatched without its lease",
        )
        require(view is not None, f"{order.key} was dispatched to {order.worker}, which is gone")
        assert view is not None
        assert lease is not None
        jobs.append(lease.job)
        name = f"{order.key} was dispatched to {order.worker}, which "
        require(view.phase == "live", name + f"is {view.phase}")
        require(not view.draining, name + "is draining")
        require(view.ready and not view.held_off, name + "is not ready or said busy")
        require(view.breaker != "open", name + "failed its last jobs")
        needed = {lease.job.model, lease.job.adapter or lease.job.model}
        require(needed <= set(view.models), name + "does not serve its model or adapter")
        require(view.inflight_jobs <= view.slots, name + f"has {view.slots} slots")
        bound = view.kv_tokens_max * policy.routing.kv_fill_ratio_max
        knows_kv = policy.routing.policy != "round_robin" and view.kv_tokens_max
        tokens = view.kv_base_tokens + held[order.worker] + lease.kv_tokens
        fits = not knows_kv or not held[order.worker] or tokens <= bound + ROUNDING
        require(fits, name + f"would use {tokens:g} of {bound:g} KV tokens")
        held[order.worker] += lease.kv_tokens
    return jobs


def matches(row: QuotaRow, job: JobSpec) -> bool:
    """Say whether a row bounds a job."""
    return (
        row.lane in (None, job.lane)
        and row.band in (None, job.band)
        and row.model in (None, job.model)
    )


def _check_row(
    row: QuotaRow, view: RowView, leases: Sequence[Lease], new_jobs: Sequence[JobSpec]
) -> None:
    mine = [lease for lease in leases if matches(row, lease.job)]
    tokens = sum(lease.cost_tokens for lease in mine)
    require(
        view.inflight_jobs == len(mine) and abs(view.inflight_tokens - tokens) < ROUNDING,
        f"row {row.name} counts {view.inflight_jobs} jobs of {view.inflight_tokens:g} tokens, "
        f"its leases are {len(mine)} of {tokens:g}",
    )
    require(view.queued_jobs >= 0, f"row {row.name} counts {view.queued_jobs} waiting jobs")
    if row.inflight_jobs_max is not None:
        lendable_jobs = math.floor(row.lendable_share * row.inflight_jobs_max)
        lends = f"row {row.name} lends {view.lent_jobs} seats of {lendable_jobs}"
        require(view.lent_jobs <= lendable_jobs, lends)
    if not any(matches(row, job) for job in new_jobs):
        return  # Adopted and corrected jobs may stand above a bound; nothing new goes then.
    jobs_max, tokens_max = view.inflight_jobs_max, row.inflight_tokens_max
    seats = view.inflight_jobs - view.borrowed_jobs + view.lent_jobs
    require(
        jobs_max is None or seats <= jobs_max,
        f"row {row.name} has {view.inflight_jobs} jobs, borrows {view.borrowed_jobs} seats, lends "
        f"{view.lent_jobs}, and owns {jobs_max}",
    )
    ceiling_jobs = math.inf if jobs_max is None else row.ceiling_ratio * jobs_max
    require(
        view.inflight_jobs <= ceiling_jobs,
        f"row {row.name} has {view.inflight_jobs} jobs, and {ceiling_jobs:g} at most with all lent",
    )
    require(
        tokens_max is None or view.inflight_tokens <= tokens_max + ROUNDING,
        f"row {row.name} has {view.inflight_tokens:g} tokens of {tokens_max}",
    )
    require(
        row.tokens_per_min is None or view.bucket_tokens >= -ROUNDING,
        f"row {row.name} has spent {-view.bucket_tokens:g} tokens too many",
    )


def _check_pools(
    scheduler: Scheduler, leases: Sequence[Lease], workers: Mapping[str, WorkerView]
) -> None:
    for pool in scheduler.views.pools():
        serving = [
            view
            for view in workers.values()
            if view.phase == "live"
            and view.ready
            and not view.draining
            and pool.model in view.models
        ]
        said = (pool.workers, pool.slots, pool.inflight_jobs)
        true = (
            len(serving),
            sum(view.slots_for_new for view in serving),
            sum(lease.job.model == pool.model for lease in leases),
        )
        require(said == true, f"pool {pool.model} counts workers, slots, jobs {said}, true {true}")
        gap, bound = pool.fairness_gap, pool.fairness_bound
        fair = gap <= bound + ROUNDING
        require(
            fair, f"lanes of pool {pool.model} are {gap:g} tokens apart, by the bound {bound:g}"
        )


def _check_queues(scheduler: Scheduler, leases: Sequence[Lease], waiting_jobs: int) -> None:
    running = Counter((lease.job.lane, lease.job.band, lease.job.model) for lease in leases)
    waiting = 0
    for queue in scheduler.views.queues():
        waiting += queue.waiting_jobs
        name = f"queue {queue.lane}/{queue.band}"
        true = running[queue.lane, queue.band, queue.model]
        require(
            queue.inflight_jobs == true,
            f"{name} counts {queue.inflight_jobs} jobs in flight of {true}",
        )
        require(
            math.isfinite(queue.wait_s) and 0 <= queue.wait_s <= WAIT_S_MAX,
            f"{name} estimates a wait of {queue.wait_s} s",
        )
    require(waiting == waiting_jobs, f"{waiting} jobs stand in queues, {waiting_jobs} wait")
