"""A quota row with what is used of it now, and the refusal that names it."""

import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from broker.core.claim import Claim
from broker.core.events import JobSpec
from broker.core.policy import QuotaRow

if TYPE_CHECKING:
    from broker.core.lending import Cohort

BUCKET_S = 60.0
"""A `tokens_per_min` row may burst one minute's worth, and no more."""

RESULT_BYTES_TYPICAL = 1_500.0
"""Of a stored result until a lane has some: 370 bytes around an answer of some 250 tokens."""


class Borrow(IntEnum):
    """From whom a job beyond its row's own seats may take one."""

    NOTHING = 0
    FROM_BATCH = 1
    """Rows of the batch band."""
    ANY = 2


@dataclass(slots=True, eq=False)
class RowUsage:
    """A row and what is used of it now."""

    row: QuotaRow
    inflight_jobs: int = 0
    inflight_tokens: float = 0.0
    queued_jobs: int = 0
    jobs_limit: float = math.inf
    """Its own seats: jobs in flight; follows the fleet where the row says so."""
    jobs_ceiling: float = math.inf
    """Most jobs in flight, with seats that others lend."""
    cohort: "Cohort | None" = None
    """Rows that lend to it and borrow from it; None for a row that does neither."""
    lendable_jobs: float = 0.0
    lent_jobs: int = 0
    """Own seats that others use."""
    borrowed_jobs: int = 0
    """Others' seats that it uses."""
    bucket_tokens: float = 0.0
    bucket_at_s: float | None = None
    """When it was last filled; None before the first look: it fills from then on."""
    refused_models: dict[str, None] = field(default_factory=dict[str, None])
    """Models with jobs that this row holds back: to be looked at when it gives way."""
    stored_bytes: float = 0.0
    """Of its lane's results, by the last word of them and the ends since."""
    result_bytes_mean: float = RESULT_BYTES_TYPICAL
    stored_bytes_max: float = math.inf
    """What the stream of its lane's results can hold, where that is less than the row allows."""
    result_bytes_limit: float = field(init=False, default=math.inf)
    """Bytes of results that may stand: the row's bound, or its stream's if that is less."""
    claim: Claim | None = None
    """A seat and tokens of it are kept for a job that would wait for ever."""

    def __post_init__(self) -> None:
        """Take the row's own bound, until the server tells its stream's."""
        if self.row.result_bytes_max is not None:
            self.result_bytes_limit = float(self.row.result_bytes_max)

    def claimed_tokens(self, job: JobSpec) -> float:
        """Tell how many of its tokens are kept from a job."""
        claim = self.claim
        return claim.cost_tokens if claim is not None and claim.binds(job) else 0.0

    @property
    def bounds_results(self) -> bool:
        """Whether it bounds the bytes of its lane's results."""
        return self.row.result_bytes_max is not None

    @property
    def result_bytes(self) -> float:
        """Bytes of results that stand, and that the jobs in flight will add."""
        return self.stored_bytes + self.inflight_jobs * self.result_bytes_mean

    @property
    def lacks_result_room(self) -> bool:
        """Whether the result of one more job would be too much."""
        taken_bytes = self.stored_bytes + (self.inflight_jobs + 1) * self.result_bytes_mean
        return taken_bytes > self.result_bytes_limit

    def results_stand(self, stored_bytes: float, *, mean_bytes: float, bytes_max: float) -> None:
        """Take what the server says of its lane's results."""
        self.stored_bytes, self.result_bytes_mean = stored_bytes, mean_bytes
        self.stored_bytes_max = bytes_max
        if self.row.result_bytes_max is not None:
            self.result_bytes_limit = min(float(self.row.result_bytes_max), bytes_max)

    def keeps_seat(self, job: JobSpec) -> bool:
        """Say whether its last seat is kept from a job."""
        claim = self.claim
        is_last = self.seats_used + 1 >= self.jobs_limit
        return is_last and claim is not None and claim.binds(job)

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

    @property
    def seats_used(self) -> int:
        """Own seats that are taken, by its own jobs or by those it was lent to."""
        return self.inflight_jobs - self.borrowed_jobs + self.lent_jobs

    @property
    def offered_jobs(self) -> float:
        """Own seats that nobody uses and others may."""
        free = self.jobs_limit - self.seats_used
        return max(0.0, min(self.lendable_jobs - self.lent_jobs, free))

    def lacks_seat(self, borrow: Borrow) -> bool:
        """Say whether one more job finds no seat, own or, where it may borrow, another's."""
        if self.seats_used < self.jobs_limit:
            return False
        cohort = self.cohort
        return (
            not borrow
            or cohort is None
            or self.seats_used > self.jobs_limit  # Jobs were found running that nobody lends to.
            or self.inflight_jobs >= self.jobs_ceiling
            or not cohort.lends(borrow)
        )

    @property
    def may_borrow(self) -> bool:
        """Whether it could use a seat of another's at all."""
        return self.cohort is not None and self.inflight_jobs < self.jobs_ceiling


@dataclass(frozen=True, slots=True)
class Refusal:
    """A row that holds a job back, and by what."""

    row: RowUsage
    used: float
    limit: float
    of_results: bool = False
    """Results that stand are what there is too much of."""
    retry_at_s: float = math.inf
    """When time alone will let the job pass; never, for rows that wait for a lease to end."""

    @property
    def name(self) -> str:
        """What people call it: the row's name, and its limit where that is of results."""
        return f"{self.row.row.name} result_bytes" if self.of_results else self.row.row.name
