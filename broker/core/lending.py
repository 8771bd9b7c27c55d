"""Seats that rows lend each other: nominal, lendable, ceiling.

A row's own seats are its `inflight_jobs_max` (its nominal). Of those that it leaves idle it lends
up to `lendable_share`; it may use others' up to `ceiling_ratio` times its own. A *cohort* is the
rows of one model that name the same things (all lanes, all bands, or all pairs), so that no job is
in two of them. The terms are those of Kubernetes' API priority and fairness; seats are moved at
each dispatch and end here, not by the clock.

Rules, held at every dispatch:
- own jobs + seats lent <= nominal, so what a row did not lend is always its own;
- seats lent <= lendable, jobs in flight <= ceiling;
- jobs of a cohort <= the sum of its nominals.
A seat comes back when any job of the borrower ends (its own seat is then used instead), so no
longer than one job's run after the lender wants it; nothing is preempted, so nobody can take turns
in throwing the other out. Whoever has own seats goes before those that need another's: `order` asks
first without, then with borrowing.
"""

import math
from collections.abc import Iterable

from broker.core.rows import Borrow, RowUsage
from broker.wire.ids import BATCH_BAND


class Cohort:
    """Rows that lend to each other."""

    def __init__(self) -> None:
        self.rows: list[RowUsage] = []
        self.refused_models: dict[str, None] = {}
        """Models with jobs that wait for any of its seats."""
        self._lenders: dict[RowUsage, list[RowUsage]] = {}
        """By borrower, who lent it each of its seats, in order."""
        self._batch: list[RowUsage] = []
        self._offers: dict[RowUsage, float] = {}
        self._offered_jobs = 0.0

    def join(self, usage: RowUsage) -> None:
        """Take a row in, before anything is used of it."""
        usage.cohort = self
        self.rows.append(usage)
        self._lenders[usage] = []
        self._offers[usage] = 0.0
        if usage.row.band == BATCH_BAND:
            self._batch.append(usage)
        self.resize(usage)

    def lends(self, borrow: Borrow) -> bool:
        """Say whether a seat is offered. Who has none of its own left offers none."""
        if borrow is Borrow.FROM_BATCH:
            return any(self._offers[usage] >= 1 for usage in self._batch)
        return self._offered_jobs >= 1

    def resize(self, usage: RowUsage) -> None:
        """Take a row's new number of own seats."""
        row, limit = usage.row, usage.jobs_limit
        bounded = limit < math.inf
        usage.lendable_jobs = math.floor(row.lendable_share * limit) if bounded else 0.0
        usage.jobs_ceiling = math.floor(row.ceiling_ratio * limit) if bounded else math.inf
        self.settle(usage)

    def settle(self, usage: RowUsage) -> None:
        """Borrow for the jobs that have no own seat, or give seats back, after any change."""
        lenders = self._lenders[usage]
        self._offer(usage)  # Never its own lender by an offer that no longer stands.
        while lenders and usage.seats_used < usage.jobs_limit:
            self._repay(usage, lenders)
        while usage.seats_used > usage.jobs_limit and usage.inflight_jobs <= usage.jobs_ceiling:
            lender = max(self.rows, key=self._offers.__getitem__)
            if self._offers[lender] < 1:
                break  # Found running, or the fleet has shrunk: it ends, and no other comes.
            lenders.append(lender)
            usage.borrowed_jobs += 1
            lender.lent_jobs += 1
            self._offer(lender)
        self._offer(usage)

    def _repay(self, usage: RowUsage, lenders: list[RowUsage]) -> None:
        """Give a seat back: to one that holds jobs back for it, or else to the latest lender."""
        waited_for = (place for place, lender in enumerate(lenders) if lender.refused_models)
        lender = lenders.pop(next(waited_for, -1))
        usage.borrowed_jobs -= 1
        lender.lent_jobs -= 1
        self._offer(lender)

    def _offer(self, usage: RowUsage) -> None:
        offered = usage.offered_jobs
        self._offered_jobs += offered - self._offers[usage]
        self._offers[usage] = offered


def form_cohorts(rows: Iterable[RowUsage]) -> None:
    """Group the rows that lend or borrow; a row alone of its kind has nobody to lend to."""
    by_kind: dict[tuple[str | None, bool, bool], list[RowUsage]] = {}
    for usage in rows:
        row = usage.row
        if row.inflight_jobs_max is not None or row.inflight_jobs_max_per_worker is not None:
            kind = (row.model, row.lane is None, row.band is None)
            by_kind.setdefault(kind, []).append(usage)
    for alike in by_kind.values():
        if any(one.row.lendable_share for one in alike) and any(
            one.row.ceiling_ratio > 1 for one in alike
        ):
            cohort = Cohort()
            for usage in alike:
                cohort.join(usage)
