"""The two steps that every dispatch passes: quota rows first, then the worker's own room.

A look changes no usage. A job that can't pass is told what holds it, and notes where a sign must be
given when that may have changed: in the row that refused it, as the time at which a bucket will
have enough, or as the smallest job for which no worker had room.
"""

import math

from broker.core.alarms import Alarms
from broker.core.bands import LOW_BAND_MIN
from broker.core.blame import is_suspect
from broker.core.costs import cost_tokens
from broker.core.decisions import HeldBy
from broker.core.events import JobSpec
from broker.core.mind import Mind
from broker.core.placement import Placement
from broker.core.pressure_step import Step
from broker.core.queues import Pool, TooLarge, Waiting
from broker.core.quotas import jobs_refusal, refusal
from broker.core.rows import Borrow, Refusal
from broker.wire.ids import BANDS, BATCH_BAND

HOLD_LOOK_S = 0.01
"""Jobs held for a worker are looked at again this often even if nothing changed: a hold ends by
time as well."""


class Gate:
    """Says whether a job may go now, and where."""

    def __init__(self, mind: Mind) -> None:
        self._mind = mind
        self._refills = Alarms[Pool](lambda _: True)
        self._hold_look_at_s = -math.inf

    def time_passed(self) -> None:
        """Let rows that refilled and holds that ran out be looked at again."""
        mind = self._mind
        for pool in self._refills.due(mind.at_s):
            pool.settled = False
            pool.refill_at_s = None
        if mind.at_s >= self._hold_look_at_s:
            self._hold_look_at_s = mind.at_s + HOLD_LOOK_S
            for pool in mind.queues.pools.values():
                if pool.holding:
                    pool.settled = False

    def is_passed_by(self, waiting: Waiting) -> bool:
        """Say whether a look is needless: no job as small has found room since some opened."""
        pool, smaller = waiting.queue.pool, waiting.queue.pool.no_room
        if waiting.queue.is_closed and not pool.closed:
            waiting.held_by = HeldBy.BATCH_SHARE
            return True
        needless = pool.closed or (
            smaller is not None
            and waiting.job.prompt_tokens >= smaller.prompt_tokens
            and waiting.output_tokens_expected >= smaller.output_tokens
            and not self._has_another_claim(waiting, smaller)
        )
        if needless:
            waiting.held_by = _lacking(pool)
        return needless or (waiting.least_tokens > 0 and self._is_too_long(waiting, pool))

    def _is_too_long(self, waiting: Waiting, pool: Pool) -> bool:
        """Say whether all workers have prompts to prefill, and this one is too long to join any."""
        is_batch, tokens = waiting.job.band == BATCH_BAND, waiting.least_tokens
        if tokens < self._most_tokens(pool, batch=is_batch) or self._mind.claims.may_claim(waiting):
            return False
        is_shut_out = is_batch and tokens < self._most_tokens(pool, batch=False)
        waiting.held_by = HeldBy.BATCH_SHARE if is_shut_out else _lacking(pool)
        return True

    def _most_tokens(self, pool: Pool, *, batch: bool) -> float:
        """Tell how long a prompt has room at most; asked once until something opens."""
        most_tokens = pool.most_tokens.get(batch)
        if most_tokens is None:
            most_tokens = self._mind.router.most_tokens(pool.model, batch=batch)
            pool.most_tokens[batch] = most_tokens
        return most_tokens

    def _has_another_claim(self, waiting: Waiting, smaller: TooLarge) -> bool:
        """Say whether a job finds room where a smaller one found none, or may claim some."""
        claims, job = self._mind.claims, waiting.job
        if claims and (job.band < smaller.band or job.enqueued_at_s < smaller.enqueued_at_s):
            return True  # Some is kept from the smaller one, maybe not from this one.
        return claims.may_claim(waiting)

    def kept_back(self, pool: Pool, band: int, *, by_share: bool = False) -> HeldBy | None:
        """Say what keeps all jobs of a low band from a slot that is free, or will be.

        The last free slots are for online jobs: for batch always, for standard jobs while online
        ones run. `by_share`: the band is owed its guaranteed share, which only the floor that batch
        never gets stands against.
        """
        if band < LOW_BAND_MIN:
            return None
        floor_share = self._mind.policy.pressure.online_floor_share
        is_batch = band == BATCH_BAND
        if by_share:
            most = pool.slots - pool.floor_jobs(floor_share)
            return HeldBy.FLOOR if is_batch and pool.inflight_batch_jobs >= most else None
        if is_batch and pool.pressure >= Step.HOLD_BATCH:
            return HeldBy.PRESSURE
        return HeldBy.FLOOR if pool.keeps_from(band, floor_share) else None

    def look(
        self, waiting: Waiting, *, borrow: Borrow = Borrow.ANY, claims: bool = False
    ) -> Placement | None:
        """Find where a job may go now, through both steps; else note what holds it.

        `claims`: where it is only too large, and has waited for long enough, room is kept for it.
        """
        mind, queue = self._mind, waiting.queue
        blocked = jobs_refusal(queue.rows, borrow=borrow)
        if blocked is not None:
            self.hold(waiting, HeldBy.QUOTA, blocked)
            if claims and mind.claims.of(waiting.job.model) is waiting:
                mind.claims.claim_row(waiting, blocked.row, waiting.work_tokens)
            return None
        apart = mind.suspects if is_suspect(waiting.failures, mind.policy.leases) else ()
        placement = mind.router.place(
            waiting.job,
            excluded=(*waiting.excluded, *apart) if apart else waiting.excluded,
            at_s=mind.at_s,
            output_tokens=waiting.output_tokens_expected,
        )
        waiting.least_tokens = placement.least_tokens
        if placement.worker is None or placement.worker.id in apart:
            self._hold_back(waiting, placement, excluding=bool(waiting.excluded or apart))
            if waiting.held_by is HeldBy.ROOM and not apart and self._claims(waiting, now=claims):
                mind.claims.claim_worker(waiting, excluded=waiting.excluded)
            return None
        cost = cost_of(waiting, placement)
        blocked = refusal(queue.rows, waiting.job, cost, at_s=mind.at_s, borrow=borrow)
        if blocked is not None:
            self.hold(waiting, HeldBy.QUOTA, blocked)
            has_claim = claims and mind.claims.of(waiting.job.model) is waiting
            if has_claim or self._claims(waiting, now=claims):
                mind.claims.claim_row(waiting, blocked.row, cost)
            return None
        return placement

    def _claims(self, waiting: Waiting, *, now: bool) -> bool:
        """Say whether a job that is only too large has room kept for it, now or at a next look."""
        if not self._mind.claims.may_claim(waiting):
            return False
        if not now:
            waiting.queue.pool.overdue_at_s = self._mind.at_s
        return now

    def _hold_back(self, waiting: Waiting, placement: Placement, *, excluding: bool) -> None:
        pool = waiting.queue.pool
        if placement.held_for:
            pool.holding = True
            self.hold(waiting, HeldBy.AFFINITY)
        elif placement.confined:
            self.hold(waiting, HeldBy.BATCH_SHARE)
            # Else smaller ones may find room, or those that need no adapter.
            pool.closed_to_batch = not placement.least_tokens and not waiting.job.adapter
        elif not placement.servable:
            self.hold(waiting, HeldBy.NO_WORKERS)
            pool.closed = not waiting.job.adapter  # Nobody may have an adapter that others lack.
        else:
            self.hold(waiting, _lacking(pool) if placement.full else HeldBy.ROOM)
            if placement.full and not excluding and not waiting.job.adapter:
                # Those with an adapter have few workers: others may find room for more.
                self._no_room_for(waiting, pool)

    def _no_room_for(self, waiting: Waiting, pool: Pool) -> None:
        """Remember that there was none, and ask if there is any at all."""
        job, output_tokens = waiting.job, waiting.output_tokens_expected
        pool.no_room = TooLarge(job.prompt_tokens, output_tokens, job.band, job.enqueued_at_s)
        smallest = JobSpec("", "", BANDS[0], pool.model, output_tokens_max=1)
        placement = self._mind.router.place(smallest, excluded=(), at_s=self._mind.at_s)
        pool.closed = placement.worker is None and not placement.held_for

    def hold(self, waiting: Waiting, held_by: HeldBy, blocked: Refusal | None = None) -> None:
        """Note what holds a job, and, in the row that does, whom to look at when it gives way."""
        waiting.held_by = held_by
        waiting.row = ""
        if blocked is None:
            return
        pool = waiting.queue.pool
        waiting.row = blocked.name
        pool.lacks_seats = pool.lacks_seats or blocked.row.may_borrow
        self._mind.quotas.refused(blocked.row, pool.model)
        if blocked.retry_at_s < (pool.refill_at_s or math.inf):
            pool.refill_at_s = blocked.retry_at_s
            self._refills.set(blocked.retry_at_s, pool)


def _lacking(pool: Pool) -> HeldBy:
    """Say what a pool lacks that has no room."""
    if not pool.workers:
        return HeldBy.NO_WORKERS
    is_shut = not pool.slots and any(not one.breaker.takes_new for one in pool.workers.values())
    return HeldBy.BREAKER if is_shut else HeldBy.ROOM


def cost_of(waiting: Waiting, placement: Placement) -> float:
    """Weigh a job where it would go."""
    return float(
        cost_tokens(
            uncached_tokens=placement.uncached_tokens,
            output_tokens=waiting.output_tokens_expected,
        )
    )
