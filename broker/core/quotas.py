"""Quota rows: step one of a dispatch. A job must pass every row that matches it, all or nothing.

A row's usage is the sum over the live leases that match it, moved by `take` and `give_back` alone,
which only the ledger calls; nothing here has a timer that could forget a running job. The one
exception is the token bucket: it fills with time, starts empty (after a takeover nobody knows what
the last minute started), and a bucket never holds more than a minute's worth.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from broker.core.policy import QuotaRow

BUCKET_S = 60.0
"""A `tokens_per_min` row may burst one minute's worth, and no more."""


@dataclass(slots=True, eq=False)
class RowUsage:
    """A row and what is used of it now."""

    row: QuotaRow
    inflight_jobs: int = 0
    inflight_tokens: float = 0.0
    queued_jobs: int = 0
    jobs_limit: float = math.inf
    """Of jobs in flight; follows the fleet where the row says so."""
    bucket_tokens: float = 0.0
    bucket_at_s: float | None = None
    """When it was last filled; None before the first look: it fills from then on."""
    refused_models: dict[str, None] = field(default_factory=dict[str, None])
    """Models with jobs that this row holds back: to be looked at when it gives way."""

    def refill(self, at_s: float) -> None:
        """Let the bucket fill up to now."""
        per_min = self.row.tokens_per_min
        if per_min is None:
            return
        if self.bucket_at_s is None:
            self.bucket_at_s = at_s
        elif at_s > self.bucket_at_s:
            filled = self.bucket_tokens + per_min * (at_s - self.bucket_at_s) / BUCKET_S
            self.bucket_tokens = min(float(per_min), filled)
            self.bucket_at_s = at_s


@dataclass(frozen=True, slots=True)
class Refusal:
    """A row that holds a job back, and by what."""

    row: RowUsage
    used: float
    limit: float
    retry_at_s: float = math.inf
    """When time alone will let the job pass; never, for rows that wait for a lease to end."""


class Quotas:
    """All rows of a policy."""

    def __init__(self, rows: Iterable[QuotaRow], *, before: "Quotas | None" = None) -> None:
        """Make all rows unused; a bucket that `before` had too keeps what is in it."""
        self.rows = tuple(RowUsage(row) for row in rows)
        buckets = {_bucket_name(usage.row): usage for usage in before.rows} if before else {}
        for usage in self.rows:
            bucket = buckets.get(_bucket_name(usage.row))
            if bucket is not None:
                usage.bucket_tokens, usage.bucket_at_s = bucket.bucket_tokens, bucket.bucket_at_s
        self.released: dict[str, None] = {}
        """Models whose jobs may pass again since this was last cleared."""

    def matching(self, *, lane: str, band: int, model: str) -> tuple[RowUsage, ...]:
        """Find the rows that a job must pass."""
        return tuple(
            usage
            for usage in self.rows
            if usage.row.lane in (None, lane)
            and usage.row.band in (None, band)
            and usage.row.model in (None, model)
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
            if limit > usage.jobs_limit:
                self._gave_way(usage)
            usage.jobs_limit = limit

    def take(self, rows: Iterable[RowUsage], cost_tokens: float, *, starts: bool) -> None:
        """Count a lease. `starts` is False for one that was found running."""
        for usage in rows:
            usage.inflight_jobs += 1
            usage.inflight_tokens += cost_tokens
            if starts and usage.row.tokens_per_min is not None:
                usage.bucket_tokens -= cost_tokens

    def give_back(self, rows: Iterable[RowUsage], cost_tokens: float, *, unstarted: bool) -> None:
        """Uncount a lease. `unstarted`: no worker ran it, so that its tokens never started."""
        for usage in rows:
            usage.inflight_jobs -= 1
            usage.inflight_tokens -= cost_tokens
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

    def _gave_way(self, usage: RowUsage) -> None:
        if usage.refused_models:
            self.released.update(usage.refused_models)
            usage.refused_models.clear()


def _bucket_name(row: QuotaRow) -> tuple[str, int | None]:
    return (row.name, row.tokens_per_min)


def jobs_refusal(rows: Iterable[RowUsage]) -> Refusal | None:
    """Find a row that has no place for one more job, whatever its size."""
    for usage in rows:
        if usage.inflight_jobs >= usage.jobs_limit:
            return Refusal(usage, usage.inflight_jobs, usage.jobs_limit)
    return None


def refusal(rows: Iterable[RowUsage], cost_tokens: float, *, at_s: float) -> Refusal | None:
    """Find the first row that one more job of this cost would overshoot. Changes no usage."""
    for usage in rows:
        if usage.inflight_jobs >= usage.jobs_limit:
            return Refusal(usage, usage.inflight_jobs, usage.jobs_limit)
        row = usage.row
        tokens_max = row.inflight_tokens_max
        if tokens_max is not None and usage.inflight_tokens + cost_tokens > tokens_max:
            return Refusal(usage, usage.inflight_tokens, float(tokens_max))
        if row.tokens_per_min is not None:
            usage.refill(at_s)
            missing = cost_tokens - usage.bucket_tokens
            if missing > 0:
                per_min = float(row.tokens_per_min)
                after_s = BUCKET_S * missing / per_min if per_min else math.inf
                return Refusal(usage, per_min - usage.bucket_tokens, per_min, at_s + after_s)
    return None


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
