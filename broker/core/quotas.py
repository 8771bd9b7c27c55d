"""Quota rows: step one of a dispatch. A job must pass every row that matches it, all or nothing.

A row's usage is the sum over the live leases that match it, moved by `take` and `give_back` alone,
which only the ledger calls; nothing here has a timer that could forget a running job. The one
exception is the token bucket: it fills with time, starts empty (after a takeover nobody knows what
the last minute started), and a bucket never holds more than a minute's worth. Rows may lend seats
to each other: `lending`.
"""

import math
from collections.abc import Iterable, Mapping

from broker.core.events import JobSpec
from broker.core.lending import form_cohorts
from broker.core.policy import QuotaRow
from broker.core.rows import BUCKET_S, Borrow, Refusal, RowUsage


class Quotas:
    """All rows of a policy."""

    def __init__(self, rows: Iterable[QuotaRow], *, before: "Quotas | None" = None) -> None:
        """Make all rows unused; a bucket that `before` had too keeps what is in it."""
        self.rows = tuple(RowUsage(row) for row in rows)
        self._of_all_lanes = tuple(usage for usage in self.rows if usage.row.lane is None)
        self._of_lane = _by_lane(self.rows)
        known_rows = before.rows if before else ()
        buckets = {one.row.name: one for one in known_rows if one.row.tokens_per_min is not None}
        for usage in self.rows:
            bucket, per_min = buckets.get(usage.row.name), usage.row.tokens_per_min
            if bucket is not None and per_min is not None:
                # More a minute must not stop a lane that had some left, nor less let it go on.
                usage.bucket_tokens = min(bucket.bucket_tokens, float(per_min))
                usage.bucket_at_s = bucket.bucket_at_s
        stored = {one.row.lane: one for one in before.rows if one.bounds_results} if before else {}
        for usage in self.rows:
            known = stored.get(usage.row.lane) if usage.bounds_results else None
            if known is not None:
                usage.results_stand(
                    known.stored_bytes,
                    mean_bytes=known.result_bytes_mean,
                    bytes_max=known.stored_bytes_max,
                )
        form_cohorts(self.rows)
        self.released: dict[str, None] = {}
        """Models whose jobs may pass again since this was last cleared."""

    def matching(self, *, lane: str, band: int, model: str) -> tuple[RowUsage, ...]:
        """Find the rows that a job must pass."""
        return tuple(
            usage
            for usage in self._of_lane.get(lane, self._of_all_lanes)
            if usage.row.band in (None, band) and usage.row.model in (None, model)
        )

    def fleet_changed(self, live_workers: Mapping[str, int], *, live_workers_all: int) -> None:
        """Let the rows that follow the fleet do so. `live_workers` counts them by model."""
        for usage in self.rows:
            row = usage.row
            fixed = math.inf if row.inflight_jobs_max is None else float(row.inflight_jobs_max)
            limit = fixed
            if row.inflight_jobs_max_per_worker is not None:
                live = live_workers_all if row.model is None else live_workers.get(row.model, 0)
                limit = min(fixed, float(math.floor(row.inflight_jobs_max_per_worker * live)))
            is_more = limit > usage.jobs_limit
            usage.jobs_limit = limit
            if usage.cohort is not None:
                usage.cohort.resize(usage)
            else:
                usage.jobs_ceiling = limit
            if is_more:
                self._gave_way(usage)
        for usage in self.rows:
            if usage.cohort is not None:
                usage.cohort.settle(usage)  # Others have their new seats only now.

    def take(self, rows: Iterable[RowUsage], cost_tokens: float, *, starts: bool) -> None:
        """Count a lease. `starts` is False for one that was found running."""
        for usage in rows:
            usage.inflight_jobs += 1
            usage.inflight_tokens += cost_tokens
            if starts and usage.row.tokens_per_min is not None:
                usage.bucket_tokens -= cost_tokens
            if usage.cohort is not None:
                usage.cohort.settle(usage)

    def give_back(self, rows: Iterable[RowUsage], cost_tokens: float, *, unstarted: bool) -> None:
        """Uncount a lease. `unstarted`: no worker ran it, so that its tokens never started."""
        for usage in rows:
            usage.inflight_jobs -= 1
            usage.inflight_tokens -= cost_tokens
            if usage.row.result_bytes_max is not None and not unstarted:
                usage.stored_bytes += usage.result_bytes_mean  # Until the next word of the lane's.
            if usage.cohort is not None:
                usage.cohort.settle(usage)
            per_min = usage.row.tokens_per_min
            if unstarted and per_min is not None:
                usage.bucket_tokens = min(float(per_min), usage.bucket_tokens + cost_tokens)
            self._gave_way(usage)

    def correct(self, rows: Iterable[RowUsage], delta_tokens: float) -> None:
        """Correct a live lease's cost."""
        for usage in rows:
            usage.inflight_tokens += delta_tokens
            if delta_tokens < 0:
                self._gave_way(usage)

    def results_stand(
        self, lane: str, *, stored_bytes: float, mean_bytes: float, bytes_max: float
    ) -> None:
        """Take how much a lane's results take, how much one of them does, and how much all may."""
        for usage in self._of_lane.get(lane, ()):
            if usage.row.lane == lane and usage.row.result_bytes_max is not None:
                lacked = usage.lacks_result_room
                usage.results_stand(stored_bytes, mean_bytes=mean_bytes, bytes_max=bytes_max)
                if lacked and not usage.lacks_result_room:
                    self._gave_way(usage)

    def unclaim(self, usage: RowUsage) -> None:
        """Give up what a row keeps for a job."""
        usage.claim = None
        self._gave_way(usage)

    def refused(self, usage: RowUsage, model: str) -> None:
        """Note that a row holds a model's jobs back, so that they are looked at when it gives way.

        A row that lends or borrows gives way when any of its cohort does.
        """
        usage.refused_models[model] = None
        if usage.cohort is not None:
            usage.cohort.refused_models[model] = None

    def _gave_way(self, usage: RowUsage) -> None:
        cohort = usage.cohort
        if usage.refused_models:
            self.released.update(usage.refused_models)
            usage.refused_models.clear()
        if cohort is not None and cohort.refused_models:
            self.released.update(cohort.refused_models)
            cohort.refused_models.clear()


def _by_lane(rows: tuple[RowUsage, ...]) -> dict[str, tuple[RowUsage, ...]]:
    """Sort rows by lane, each with those of all lanes, in their order: every lane has a row."""
    found: dict[str, list[RowUsage]] = {
        usage.row.lane: [] for usage in rows if usage.row.lane is not None
    }
    for usage in rows:
        for lane in found if usage.row.lane is None else (usage.row.lane,):
            found[lane].append(usage)
    return {lane: tuple(usages) for lane, usages in found.items()}


def jobs_refusal(rows: Iterable[RowUsage], *, borrow: Borrow = Borrow.ANY) -> Refusal | None:
    """Find a row that has no seat for one more job, whatever its size."""
    for usage in rows:
        if usage.lacks_seat(borrow):
            return Refusal(usage, usage.seats_used, usage.jobs_limit)
    return results_refusal(rows)


def results_refusal(rows: Iterable[RowUsage]) -> Refusal | None:
    """Find a row whose lane has as many bytes of results as it may."""
    for usage in rows:
        if usage.lacks_result_room:
            limit = usage.result_bytes_limit
            return Refusal(usage, usage.result_bytes, limit, of_results=True)
    return None


def refusal(
    rows: Iterable[RowUsage],
    job: JobSpec,
    cost_tokens: float,
    *,
    at_s: float,
    borrow: Borrow = Borrow.ANY,
) -> Refusal | None:
    """Find the first row that one more job of this cost would overshoot. Changes no usage.

    What is kept for another job counts as used, for those that it is kept from.
    """
    for usage in rows:
        if usage.lacks_seat(borrow) or usage.keeps_seat(job):
            return Refusal(usage, usage.seats_used, usage.jobs_limit)
        row = usage.row
        tokens_max = row.inflight_tokens_max
        need_tokens = cost_tokens + usage.claimed_tokens(job)
        if tokens_max is not None and usage.inflight_tokens + need_tokens > tokens_max:
            return Refusal(usage, usage.inflight_tokens, float(tokens_max))
        if row.tokens_per_min is not None:
            usage.refill(at_s)
            missing = need_tokens - usage.bucket_tokens
            if missing > 0:
                per_min = float(row.tokens_per_min)
                after_s = BUCKET_S * missing / per_min if per_min else math.inf
                used = per_min - usage.bucket_tokens
                return Refusal(usage, used, per_min, retry_at_s=at_s + after_s)
    return results_refusal(rows)


def never_fits(rows: Iterable[RowUsage], cost_tokens: float) -> Refusal | None:
    """Find a row that a job of this cost can't pass even when nothing else runs."""
    for usage in rows:
        for limit in (usage.row.inflight_tokens_max, usage.row.tokens_per_min):
            if limit is not None and cost_tokens > limit:
                return Refusal(usage, cost_tokens, float(limit))
    return None


def queue_refusal(rows: Iterable[RowUsage]) -> Refusal | None:
    """Find a row whose bound of waiting jobs is reached."""
    for usage in rows:
        limit = usage.row.queued_jobs_max
        if limit is not None and usage.queued_jobs >= limit:
            return Refusal(usage, usage.queued_jobs, float(limit))
    return None
