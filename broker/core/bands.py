"""Which band is next in a model pool: strict priority, with two bounded exceptions.

Both are counted in weighted tokens, in the manner of a deficit counter (Shreedhar & Varghese 1995):
- *Guaranteed share*: while a band has jobs waiting, it is owed its share of all work that its pool
  dispatches, less what it got. A band that is owed goes before higher ones. What it got by priority
  or in idle capacity counts, so people pay only for what is missing.
- *Aging*: a job that has waited longer than its band's `aging_s` competes one band up, once. Bands
  2-3 together take at most `aged_share_max` of the work by exceptions while higher bands have
  demand, and batch (which ages when its window is at risk) as much of what bands 0-2 would have.

Neither credit is banked: demand that could not run (no room, a quota) is owed at most
`CREDIT_TOKENS_MAX`, and so is idle capacity used ahead of the share. Re-sorting everything by
waiting time instead lets an old backlog lock people out for as long as the backlog is old.
"""

from collections.abc import Sequence
from enum import StrEnum

from broker.core.policy import BandPolicy
from broker.wire.ids import BANDS, BATCH_BAND

CREDIT_TOKENS_MAX = 16_384.0
"""Most that a band can be owed or be ahead: about four chat jobs, so a burst after a block is
short."""

LOW_BAND_MIN = 2
"""Bands from here on are capped in what they take from higher ones."""


class Way(StrEnum):
    """By what right a job was dispatched."""

    PRIORITY = "priority"
    """Nothing more urgent could run."""
    SHARE = "share"
    """Its band was owed its guaranteed share."""
    AGED = "aged"
    """It had waited long and competed one band up."""
    CLAIM = "claim"
    """Room was kept for it, that smaller jobs would have taken."""

    @property
    def in_turn(self) -> bool:
        """Whether nobody more urgent had to wait for it."""
        return self in (Way.PRIORITY, Way.CLAIM)


class BandShares:
    """The accounts of one model pool."""

    def __init__(self) -> None:
        self._owed = [0.0 for _ in BANDS]
        self._exception_credit = 0.0
        self._batch_credit = 0.0
        self.work: dict[tuple[int, Way], float] = {}
        """Weighted tokens dispatched, by band and way: how much each exception took."""

    def owed(self, waiting_jobs: Sequence[int], work_tokens: Sequence[float]) -> list[int]:
        """List the bands that go before higher ones now, most urgent first.

        Only a band with waiting jobs under others' demand: without it, priority alone serves it.
        And only when it is owed a whole job (of the mean of those that wait, `work_tokens` in all):
        a share is earned first and taken then, so that people don't wait for what nobody earned.
        """
        owed: list[int] = []
        above = 0
        for band in BANDS:
            jobs = waiting_jobs[band]
            if jobs and above and self._owed[band] >= _whole_job(work_tokens[band], jobs):
                owed.append(band)
            above += jobs
        return owed

    def owed_tokens(self, band: int) -> float:
        """Tell what a band is owed; negative when it is ahead of its share."""
        return self._owed[band]

    def may_age(self, band: int, waiting_jobs: Sequence[int], work_tokens: Sequence[float]) -> bool:
        """Say whether aged jobs of a band may compete one band up: that, too, is earned."""
        if band < LOW_BAND_MIN:
            return True
        jobs = waiting_jobs[band]
        if not jobs:
            return False
        whole_job = _whole_job(work_tokens[band], jobs)
        if band == BATCH_BAND and self._batch_credit < whole_job:
            return False
        if band == BATCH_BAND and not any(waiting_jobs[:LOW_BAND_MIN]):
            return True
        return self._exception_credit >= whole_job

    def dispatched(
        self,
        band: int,
        cost_tokens: float,
        *,
        way: Way,
        waiting_jobs: Sequence[int],
        bands: tuple[BandPolicy, BandPolicy, BandPolicy, BandPolicy],
        aged_share_max: float,
    ) -> None:
        """Account for a dispatch. `waiting_jobs` by band, this job included."""
        self.work[band, way] = self.work.get((band, way), 0.0) + cost_tokens
        owed = self._owed
        for other in BANDS:
            value = owed[other] + bands[other].guaranteed_share * cost_tokens
            if value > 0.0:
                value = min(value, CREDIT_TOKENS_MAX) if waiting_jobs[other] else 0.0
            owed[other] = value
        behind = owed[band] - cost_tokens
        if way.in_turn:
            behind = max(behind, min(owed[band], -CREDIT_TOKENS_MAX))
        owed[band] = behind
        earned = aged_share_max * cost_tokens
        taken = 0.0 if way.in_turn else cost_tokens
        # Without higher demand nothing is taken from anyone, and nothing is saved up.
        credit = self._exception_credit + earned - (taken if band >= LOW_BAND_MIN else 0.0)
        credit_max = CREDIT_TOKENS_MAX if any(waiting_jobs[:LOW_BAND_MIN]) else 0.0
        self._exception_credit = min(credit, credit_max)
        credit = self._batch_credit + earned - (taken if band == BATCH_BAND else 0.0)
        credit_max = CREDIT_TOKENS_MAX if any(waiting_jobs[:BATCH_BAND]) else 0.0
        self._batch_credit = min(credit, credit_max)


def _whole_job(work_tokens: float, jobs: int) -> float:
    return min(work_tokens / jobs, CREDIT_TOKENS_MAX)
