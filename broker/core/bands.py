"""Which band is next in a model pool: strict priority, with two bounded exceptions.

Both are counted in weighted tokens, in the manner of a deficit counter (Shreedhar & Varghese 1995):
- *Guaranteed share*: while a band has jobs waiting, it is owed its share of all work that its pool
  dispatches, less what it got. A band that is owed goes before higher ones. What it got by priority
  or in idle capacity counts, so people pay only for what is missing.
- *Aging*: a job that has waited longer than its band's `aging_s` goes before the band above, once.
  Bands 2-3 together take at most `aged_share_max` of the work by exceptions while higher bands have
  demand, batch (which ages when its window is at risk) as much of what bands 0-2 would have, and
  band 1, where it ages, as much of what band 0 would.

Neither credit is banked: demand that could not run (no room, a quota) is owed a few jobs at most
(`owed_max_tokens`), and so is idle capacity used ahead of the share. Re-sorting everything by
waiting time instead lets an old backlog lock people out for as long as the backlog is old.

So, in any stretch of work T, with C = `CREDIT_TOKENS_MAX` and U the largest job:
- a band with demand that can run gets no less than its share of T, less 3·C + 2·U;
- by aging, bands 2-3 take no more than `aged_share_max` of T, and C + U.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum

from broker.core.policy import BandPolicy
from broker.wire.ids import BANDS, BATCH_BAND

CREDIT_TOKENS_MAX = 16_384.0
"""Most that a band can be ahead, or have saved up for aging: about four chat jobs, so a burst after
a block is short."""

LOW_BAND_MIN = 2
"""Bands from here on give way together."""

_TAKERS = {1: (1,), LOW_BAND_MIN: (2, 3), BATCH_BAND: (3,)}
"""Whose exceptions are capped by the credit of a band: what they take from those above it."""


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

    @property
    def forgives(self) -> bool:
        """Whether its band owes a bounded amount for it: what aging takes has a cap of its own."""
        return self is not Way.SHARE


class BandShares:
    """The accounts of one model pool."""

    def __init__(self) -> None:
        self._owed = [0.0 for _ in BANDS]
        self._credits = dict.fromkeys(_TAKERS, 0.0)
        self._cost_max = 0.0
        self.work: dict[tuple[int, Way], float] = {}
        """Weighted tokens dispatched, by band and way: how much each exception took."""

    def owed(self, waiting_jobs: Sequence[int], mean_tokens: Callable[[int], float]) -> list[int]:
        """List the bands that go before higher ones now, most urgent first.

        Only a band with waiting jobs under others' demand: without it, priority alone serves it.
        And only when it is owed a whole job (`mean_tokens` tells a band's mean): a share is earned
        first and taken then, so that people don't wait for what nobody earned.
        """
        owed: list[int] = []
        above = 0
        for band in BANDS:
            jobs = waiting_jobs[band]
            if jobs and above and self._owed[band] >= _whole_job(mean_tokens(band)):
                owed.append(band)
            above += jobs
        return owed

    def owed_tokens(self, band: int) -> float:
        """Tell what a band is owed; negative when it is ahead of its share."""
        return self._owed[band]

    def owed_max_tokens(self, share: float) -> float:
        """Tell the most that a band can be owed: nothing that it can take is cut off.

        It may lack a little to a whole job's turn when the largest job goes and earns it more; each
        counts twice, since other bands have their turns before it.
        """
        return 2.0 * (CREDIT_TOKENS_MAX + share * self._cost_max)

    def may_age(
        self, band: int, waiting_jobs: Sequence[int], mean_tokens: Callable[[int], float]
    ) -> bool:
        """Say whether aged jobs of a band may go before the band above: that, too, is earned."""
        if not waiting_jobs[band]:
            return False
        whole_job = _whole_job(mean_tokens(band))
        if self._credits[band] < whole_job:
            return False
        if band == BATCH_BAND and any(waiting_jobs[:LOW_BAND_MIN]):
            return self._credits[LOW_BAND_MIN] >= whole_job
        return True

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
        self._cost_max = max(self._cost_max, cost_tokens)
        owed = self._owed
        for other in BANDS:
            share = bands[other].guaranteed_share
            value = owed[other] + share * cost_tokens
            if value > 0.0:
                value = min(value, self.owed_max_tokens(share)) if waiting_jobs[other] else 0.0
            owed[other] = value
        behind = owed[band] - cost_tokens
        if way.forgives:
            behind = max(behind, min(owed[band], -CREDIT_TOKENS_MAX))
        owed[band] = behind
        earned = aged_share_max * cost_tokens
        taken = 0.0 if way.in_turn else cost_tokens
        for other, takers in _TAKERS.items():
            # Without higher demand nothing is taken from anyone, and nothing is saved up.
            credit = self._credits[other] + earned - (taken if band in takers else 0.0)
            credit_max = CREDIT_TOKENS_MAX if any(waiting_jobs[:other]) else 0.0
            self._credits[other] = min(credit, credit_max)


def _whole_job(mean_tokens: float) -> float:
    return min(mean_tokens, CREDIT_TOKENS_MAX)
