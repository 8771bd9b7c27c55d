"""What must hold in the core after every step, whatever happened."""

import math
from collections.abc import Iterable

from broker.core.blame import is_suspect
from broker.core.decisions import HeldBy
from broker.core.events import JobSpec
from broker.core.mind import Mind
from broker.core.placement import Router
from broker.core.policy import QuotaRow
from broker.core.pressure_step import Step
from broker.core.queues import Pool
from broker.core.quotas import jobs_refusal, refusal
from broker.core.rows import Borrow, RowUsage
from broker.core.scheduler import Scheduler
from broker.core.state import Lease
from broker.wire.ids import BANDS, BATCH_BAND, ONLINE_BANDS

ROUNDING = 1e-6
"""Counters are sums of floats: two orders of adding differ by less."""


def matches(row: QuotaRow, job: JobSpec) -> bool:
    """Say whether a row bounds a job."""
    return (
        row.lane in (None, job.lane)
        and row.band in (None, job.band)
        and row.model in (None, job.model)
    )


def check_sums(scheduler: Scheduler) -> None:
    """Every sum equals what it is a sum of: the live leases, and the waiting jobs."""
    mind = scheduler._mind
    leases = list(mind.ledger)
    _check_workers(mind, leases)
    for usage in mind.quotas.rows:
        matching = [lease for lease in leases if matches(usage.row, lease.job)]
        assert usage.inflight_jobs == len(matching)
        assert usage.inflight_tokens == sum(lease.cost_tokens for lease in matching)
        assert usage.queued_jobs == sum(
            1
            for one in mind.queues.waiting.values()
            if one.job.band != BATCH_BAND and matches(usage.row, one.job)
        )
    check_lending(mind.quotas.rows)
    for pool in mind.queues.pools.values():
        assert pool.busy_slots == _busy_slots(pool)
        pending = [0 for _ in BANDS]
        for (_, band), queue in pool.queues.items():
            pending[band] += queue.pending_jobs
        assert pool.pending_jobs == pending
        batch = [
            one for one in leases if one.job.model == pool.model and one.job.band == BATCH_BAND
        ]
        assert pool.inflight_batch_jobs == len(batch)
        online = sum(one.job.model == pool.model and one.job.band in ONLINE_BANDS for one in leases)
        assert pool.inflight_online_jobs == online
        assert pool.inflight_jobs == sum(lease.job.model == pool.model for lease in leases)
        assert pool.slots == sum(one.slots_for_new for one in pool.workers.values())
        _check_lines(mind, pool)
        _check_fairness(mind, pool)


def _check_fairness(mind: Mind, pool: Pool) -> None:
    """Lanes in line in the same band are within the published bound, however estimates erred."""
    counters, slack_tokens = pool.counters, mind.policy.order.lane_slack_tokens
    assert counters.gap <= counters.bound(slack_tokens=slack_tokens) + ROUNDING
    for (lane, band), queue in pool.queues.items():
        in_line = bool(queue.fresh or queue.aged)
        assert counters.is_awake(lane, band=band) == in_line
        for ranking in (pool.fresh[band], pool.aged[band]):
            if lane in ranking:
                assert (counters.place(lane, band=band), lane) in list(ranking)


def check_lending(rows: Iterable[RowUsage]) -> None:
    """Seats lent equal seats borrowed; who has its own seat free has none of another's."""
    cohorts = {id(usage.cohort): usage.cohort for usage in rows if usage.cohort is not None}
    for cohort in cohorts.values():
        members = cohort.rows
        assert sum(one.lent_jobs for one in members) == sum(one.borrowed_jobs for one in members)
        offered = sum(one.offered_jobs for one in members)
        assert cohort.lends(Borrow.ANY) == (offered >= 1)
        for usage in members:
            lenders = cohort._lenders[usage]
            assert usage.borrowed_jobs == len(lenders)
            assert usage not in lenders
            assert usage.lent_jobs == sum(cohort._lenders[one].count(usage) for one in members)
            assert not usage.borrowed_jobs or usage.seats_used >= usage.jobs_limit
            assert 0 <= usage.borrowed_jobs <= usage.inflight_jobs


def _check_workers(mind: Mind, leases: list[Lease]) -> None:
    for worker in mind.fleet.workers.values():
        mine = [lease for lease in leases if lease.worker == worker.id]
        assert set(map(id, worker.leases.values())) == set(map(id, mine))
        assert worker.kv_tokens == sum(lease.kv_tokens for lease in mine)
        assert worker.decoding_jobs == sum(lease.prefilled for lease in mine)
        assert worker.backlog_tokens == sum(
            lease.uncached_tokens for lease in mine if not lease.prefilled
        )
        for model in worker.models:
            in_pool = worker.id in mind.queues.pool(model).workers
            assert in_pool == mind.fleet.serves_now(worker)


def _check_lines(mind: Mind, pool: Pool) -> None:
    for (lane, band), queue in pool.queues.items():
        mine = [one for one in mind.queues.waiting.values() if one.queue is queue]
        assert queue.inflight_jobs == sum(mind.ledger.queue_of(one) is queue for one in mind.ledger)
        assert queue.waiting_jobs == len(mine)
        assert queue.work_tokens == sum(one.work_tokens for one in mine)
        lined = sorted(one.place for one in mine if not one.resting)
        assert lined == sorted(entry[:3] for entry in (*queue.fresh, *queue.aged))
        assert queue.fresh == sorted(queue.fresh, key=lambda entry: entry[:3])
        assert (lane in pool.fresh[band]) == bool(queue.fresh)
        assert (lane in pool.aged[band]) == bool(queue.aged)
    for band in BANDS:
        queues = [queue for (_, other), queue in pool.queues.items() if other == band]
        assert pool.in_line[band] == sum(len(queue.fresh) + len(queue.aged) for queue in queues)
        assert pool.waiting_jobs[band] == sum(queue.waiting_jobs for queue in queues)
        assert pool.work_tokens[band] == sum(queue.work_tokens for queue in queues)


def check_rows(scheduler: Scheduler, dispatched: Iterable[JobSpec]) -> None:
    """No row is overshot by what was just dispatched."""
    jobs = list(dispatched)
    for usage in scheduler._mind.quotas.rows:
        row = usage.row
        if any(matches(row, job) for job in jobs):
            assert usage.inflight_jobs <= usage.jobs_ceiling
            assert usage.seats_used <= usage.jobs_limit
            assert row.inflight_tokens_max is None or (
                usage.inflight_tokens <= row.inflight_tokens_max
            )
            assert row.tokens_per_min is None or usage.bucket_tokens >= 0


def _busy_slots(pool: Pool) -> int:
    """Count the slots that new jobs might use and can't, of whatever model their jobs are."""
    return sum(min(one.slots_for_new, len(one.leases)) for one in pool.workers.values())


def _keeps_back(mind: Mind, pool: Pool, band: int) -> bool:
    """Say whether a low band may take no slot but those that are kept for online jobs."""
    leases = [one for one in mind.ledger if one.job.model == pool.model]
    free = pool.slots - _busy_slots(pool)
    floor = min(
        math.ceil(mind.policy.pressure.online_floor_share * pool.slots), max(0, pool.slots - 1)
    )
    online = sum(one.job.band in ONLINE_BANDS for one in leases)
    if band == BATCH_BAND:
        return free <= floor or pool.pressure >= Step.HOLD_BATCH
    return band not in ONLINE_BANDS and online > 0 and free <= min(floor, online)


def check_work_conservation(scheduler: Scheduler, router: Router) -> None:
    """Nobody waits who may go: past back-off, within its rows, with room somewhere."""
    mind = scheduler._mind
    for waiting in mind.queues.waiting.values():
        if waiting.resting or is_suspect(waiting.failures, mind.policy.leases):
            continue
        if waiting.held_by is HeldBy.AFFINITY and waiting.queue.pool.holding:
            continue  # Its worker may have become worse since: the next tick looks again.
        placement = router.place(
            waiting.job,
            excluded=waiting.excluded,
            at_s=mind.at_s,
            output_tokens=waiting.output_tokens_expected,
        )
        if placement.worker is None:
            continue
        pool = waiting.queue.pool
        if _keeps_back(mind, pool, waiting.queue.band):
            continue
        cost_tokens = placement.uncached_tokens + 2.0 * waiting.output_tokens_expected
        blocked = refusal(waiting.queue.rows, waiting.job, cost_tokens, at_s=mind.at_s)
        assert blocked is not None, f"{waiting.job.key} may go to {placement.worker.id}"


def check_estimates(scheduler: Scheduler, router: Router) -> None:
    """Estimates are finite, never fall with the place, and are 0 for who may go at once."""
    mind, estimates = scheduler._mind, scheduler._estimates
    for pool in mind.queues.pools.values():
        probe = JobSpec("x.probe", "x", 0, pool.model, prompt_tokens=1, output_tokens_max=1)
        placement = router.place(probe, excluded=(), at_s=mind.at_s, output_tokens=1)
        has_room = placement.worker is not None
        for (_, band), queue in pool.queues.items():
            waits = [estimates.wait_s(queue, position=place) for place in (0, 1, 7)]
            assert all(0.0 <= one <= queue.wait_s_max for one in waits)
            assert waits == sorted(waits)
            is_free = (
                has_room
                and not any(pool.in_line[: band + 1])
                and not _keeps_back(mind, pool, band)
                and jobs_refusal(queue.rows) is None
            )
            assert not is_free or waits[0] == 0.0, f"{waits[0]} s told beside a free slot"


def accounts_of(scheduler: Scheduler) -> tuple[object, ...]:
    """Return all that is counted, owed or lent, to be compared."""
    views, pools = scheduler.views, scheduler._mind.queues.pools.values()
    lanes = [
        (pool.model, lane, band, pool.counters.counter(lane, band=band))
        for pool in pools
        for (lane, band), queue in pool.queues.items()
        if queue.waiting_jobs or queue.inflight_jobs
    ]
    owed = [
        (pool.model, band, tokens)
        for pool in pools
        for band in BANDS
        if (tokens := pool.shares.owed_tokens(band))
    ]
    return views.rows(), views.workers(), lanes, owed, sorted(scheduler._mind.queues.waiting)
