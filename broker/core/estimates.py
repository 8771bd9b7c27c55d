"""How long a job will wait: the work before it ÷ the rate at which its pool takes work up.

Before it goes its own queue up to its position, what the other lanes of its band get meanwhile by
their weights, quotas and arrivals, and what waits and arrives in higher bands, down to the share
that its own band is guaranteed (`backlog`). Rate, costs and arrivals are learned from what happens
(`paces`), and so is by how much small jobs overtake large ones (`size_factors`). An estimate is
finite, 0 when a slot is free, and never falls as the position grows.

Each is judged by the wait that follows (`wait_errors`): its accuracy is itself a metric.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

from broker.core.backlog import Rival, Supply, served_after_s
from broker.core.costs import OUTPUT_WEIGHT
from broker.core.decisions import HeldBy
from broker.core.events import JobSpec
from broker.core.mind import Mind
from broker.core.paces import Flow, Pace, Runs
from broker.core.queues import AGED_BANDS, Pool, Queue, Waiting
from broker.core.quotas import jobs_refusal
from broker.core.state import Lease
from broker.wire.ids import BANDS, BATCH_BAND

RATE_RATIO_MIN = 0.05
"""Share of its pool that a band without a guaranteed share is assumed to get at worst: an estimate
stays finite."""

LANES_MAX = 32
"""Other lanes of a band that an estimate looks at, least served first; the rest count as one."""

LANES_LOOKED_MAX = 4
"""Lanes of a band whose heads are looked at for one that waits for room, and not for its quota."""

TOLD_MAX = 20_000
"""Jobs whose estimate is remembered until their dispatch; of more, the oldest are not judged."""

BUCKET_S = 60.0
"""`tokens_per_min` is a rate over this long."""

NOT_FOR_ROOM = frozenset(
    (HeldBy.QUOTA, HeldBy.PRESSURE, HeldBy.BATCH_SHARE, HeldBy.NO_WORKERS, HeldBy.BREAKER)
)
"""What holds jobs while there is room for them: what is dispatched then is no sign of the rate. A
slot that is kept for online jobs is no room for others."""


@dataclass(frozen=True, slots=True)
class _Told:
    """An estimate that will be judged."""

    at_s: float
    told_s: float
    any_size_s: float
    """Before it was fitted to the job's size."""
    uncached_tokens: float
    slots: int


class Estimates:
    """Wait estimates of all pools."""

    def __init__(self, mind: Mind) -> None:
        self._mind = mind
        self._paces: dict[str, Pace] = {}
        self._told: OrderedDict[str, _Told] = OrderedDict()

    # ---- what happens --------------------------------------------------------------------------

    def arrived(self, waiting: Waiting) -> None:
        """Count an arrival."""
        queue, at_s = waiting.queue, self._mind.at_s
        self._flow(queue).arrived(waiting.work_tokens, at_s=at_s)
        self._pace(queue.pool).bands[queue.band].arrived(waiting.work_tokens, at_s=at_s)

    def ran(self, lease: Lease, *, cost_tokens: float, run_s: float) -> None:
        """Learn from a job that ended what it cost, and for how long it ran."""
        if run_s <= 0 or cost_tokens <= 0:
            return
        queue = self._mind.ledger.queue_of(lease)
        for runs in (self._pace(queue.pool).runs, self._flow(queue).runs):
            runs.ran(cost_tokens, run_s, at_s=self._mind.at_s)

    def dispatched(self, lease: Lease) -> None:
        """Learn from a dispatch how fast its pool works, and judge what its owner was told."""
        mind, queue = self._mind, self._mind.ledger.queue_of(lease)
        pace, flow = self._pace(queue.pool), self._flow(queue)
        pace.pass_time(mind.at_s)
        pace.dispatched(lease.cost_tokens)
        work_tokens = float(mind.costs.work_tokens(lease.job))
        for one in (flow, pace.bands[queue.band]):
            one.dispatched(cost_tokens=lease.cost_tokens, work_tokens=work_tokens, at_s=mind.at_s)
        told = self._told.pop(lease.job.key, None)
        if told is None:
            return
        had_s = mind.at_s - told.at_s
        pace.errors_of(queue.band).learn(told_s=told.told_s, had_s=had_s)
        if told.slots == queue.pool.slots:  # With another fleet it says nothing of sizes.
            flow.sizes.learn(told.uncached_tokens, estimated_s=told.any_size_s, had_s=had_s)

    def settled(self) -> None:
        """See which pools are saturated, once all was dispatched that may go."""
        for model, pace in self._paces.items():
            pool = self._mind.queues.pool(model)
            if pace.waits or pool.waiting:
                pace.pass_time(self._mind.at_s)
                pace.waits = pool.waiting
                pace.slots = pool.slots
                pace.saturated = pool.waiting and pool.slots > 0 and _waits_for_room(pool)

    # ---- estimates -----------------------------------------------------------------------------

    def told_s(self, waiting: Waiting, *, position: int) -> float:
        """Estimate for a receipt; its dispatch will judge it."""
        queue, job = waiting.queue, waiting.job
        any_size_s = self.wait_s(queue, position=position)
        uncached_tokens = self._uncached_tokens(job)
        told_s = self._fitted_s(queue, any_size_s, uncached_tokens)
        self._told[job.key] = _Told(
            self._mind.at_s, told_s, any_size_s, uncached_tokens, queue.pool.slots
        )
        if len(self._told) > TOLD_MAX:
            self._told.popitem(last=False)
        return told_s

    def wait_s(self, queue: Queue, *, position: int, job: JobSpec | None = None) -> float:
        """Estimate the wait at a position of a queue, of a job of any size unless it is given."""
        if self._is_free(queue, position):
            return 0.0
        after_s = min(queue.wait_s_max, self._after_s(queue, position))
        return (
            after_s if job is None else self._fitted_s(queue, after_s, self._uncached_tokens(job))
        )

    def retry_after_s(self, queue: Queue) -> float:
        """Tell when about a tenth of a full queue will be gone: then a try is worth it."""
        return self.wait_s(queue, position=max(1, queue.waiting_jobs // 10))

    def rate_tokens_s(self, pool: Pool) -> float:
        """Tell how fast a pool takes work up; 0 when it has no workers."""
        return self._pace(pool).rate_tokens_s(slots=pool.slots, inflight_jobs=pool.inflight_jobs)

    def errors(self, pool: Pool) -> Iterator[tuple[int, float, int]]:
        """Tell, by band, the median error of long waits' estimates, and of how many in all."""
        for band, errors in sorted(self._pace(pool).errors.items()):
            yield band, errors.ratio_p50, errors.jobs

    def _is_free(self, queue: Queue, position: int) -> bool:
        pool = queue.pool
        floor_share = self._mind.policy.pressure.online_floor_share
        return (
            position == 0
            and not pool.keeps_from(queue.band, floor_share)
            and pool.busy_slots < pool.slots
            and not any(pool.in_line[: queue.band + 1])
            and jobs_refusal(queue.rows) is None
        )

    def _after_s(self, queue: Queue, position: int) -> float:
        """Tell when the work before a position, and what comes between, will be done."""
        pool = queue.pool
        pace, flow = self._pace(pool), self._flow(queue)
        rate = min(self.rate_tokens_s(pool), self._shared_limit(queue, pace))
        if rate <= 0:
            return math.inf
        job_tokens = flow.cost_ratio * queue.work_tokens / max(1, queue.waiting_jobs)
        ahead_tokens = position * job_tokens
        own_tokens = ahead_tokens + pace.runs.job_tokens  # A slot frees after one job more.
        rivals = self._rivals(queue, own_tokens)
        pool_s = served_after_s(own_tokens, rivals, self._supply(queue, rate))
        return max(pool_s, self._quota_s(queue, ahead_tokens, job_tokens))

    def _fitted_s(self, queue: Queue, any_size_s: float, uncached_tokens: float) -> float:
        factor = self._flow(queue).sizes.of(uncached_tokens)
        return min(queue.wait_s_max, any_size_s * factor)

    def _uncached_tokens(self, job: JobSpec) -> float:
        return max(1.0, job.prompt_tokens - self._mind.router.cached_tokens(job))

    # ---- what goes before ----------------------------------------------------------------------

    def _supply(self, queue: Queue, rate: float) -> Supply:
        """Say what a queue's band gets of its pool's rate."""
        mind, pool, band = self._mind, queue.pool, queue.band
        bands, aged_share = mind.policy.bands, mind.policy.order.aged_share_max
        lower = [one for one in BANDS[band + 1 :] if pool.in_line[one]]
        owed = sum(bands[one].guaranteed_share for one in lower)
        if any(pool.aged[one] for one in lower):
            owed = max(owed, aged_share)
        higher_tokens = arrivals_tokens_s = 0.0
        for higher in BANDS[:band]:
            flow = self._pace(pool).bands[higher]
            higher_tokens += pool.work_tokens[higher] * flow.cost_ratio
            arrivals_tokens_s += flow.arrivals_tokens_s(mind.at_s)
        aging_s = bands[band].aging_s if band in AGED_BANDS else None
        share = max(RATE_RATIO_MIN, bands[band].guaranteed_share)
        return Supply(
            left_tokens_s=rate * max(0.0, 1.0 - owed) - arrivals_tokens_s,
            higher_tokens=higher_tokens,
            floor_tokens_s=rate * share,
            aging_s=math.inf if aging_s is None or not band else aging_s,
            aged_tokens_s=rate * aged_share,
        )

    def _rivals(self, queue: Queue, own_tokens: float) -> list[Rival]:
        """List the other lanes of a queue's band, those that are not looked at as one."""
        pool, band, at_s = queue.pool, queue.band, self._mind.at_s
        pace = self._pace(pool)
        own, whole = self._flow(queue), pace.bands[band]
        counter = pool.counters.counter(queue.lane, band=band) + own_tokens / queue.weight
        rivals: list[Rival] = []
        for lane in _lanes(pool, band):
            if lane == queue.lane:
                continue
            other = pool.queues[lane, band]
            flow = self._flow(other)
            behind = max(0.0, counter - pool.counters.counter(lane, band=band))
            rivals.append(
                Rival(
                    other.work_tokens * flow.cost_ratio,
                    flow.arrivals_tokens_s(at_s),
                    other.weight * behind,
                    self._own_limit(other, pace)[0] if other.rows else math.inf,
                )
            )
        seen_tokens = queue.work_tokens * own.cost_ratio + sum(r.backlog_tokens for r in rivals)
        seen_tokens_s = own.arrivals_tokens_s(at_s) + sum(r.arrivals_tokens_s for r in rivals)
        unseen = pace.lanes[band] - len(rivals) - 1
        if unseen > 0:
            rest = Rival(
                max(0.0, pool.work_tokens[band] * whole.cost_ratio - seen_tokens),
                max(0.0, whole.arrivals_tokens_s(at_s) - seen_tokens_s),
                unseen * own_tokens / queue.weight,
            )
            rivals.append(rest)
        return rivals

    # ---- quotas --------------------------------------------------------------------------------

    def _quota_s(self, queue: Queue, ahead_tokens: float, job_tokens: float) -> float:
        """Tell when a queue's own rows will have let so much through, and one job more."""
        limit, at_once_tokens = self._own_limit(queue, self._pace(queue.pool))
        if limit == math.inf:
            return 0.0
        needs = max(0.0, ahead_tokens + max(1.0, job_tokens) - at_once_tokens)
        return needs / limit if limit > 0 else math.inf

    def _own_limit(self, queue: Queue, pace: Pace) -> tuple[float, float]:
        """Tell what the rows of a queue's lane let through a second, and what at once."""
        runs = self._flow(queue).runs
        if not runs.jobs:
            runs = pace.runs
        limit, at_once_tokens = math.inf, 0.0
        for usage in queue.rows:
            if usage.row.lane is None:
                continue
            # Seats that it borrows now it is likely to have for a while.
            seats = max(usage.jobs_limit, usage.inflight_jobs)
            limit = min(limit, seats * runs.slot_tokens_s)
            if usage.row.inflight_tokens_max is not None:
                limit = min(limit, usage.row.inflight_tokens_max / runs.job_s)
            if usage.row.tokens_per_min is not None:
                usage.refill(self._mind.at_s)
                if usage.row.tokens_per_min / BUCKET_S < limit:
                    limit = usage.row.tokens_per_min / BUCKET_S
                    at_once_tokens = usage.bucket_tokens
        return limit, at_once_tokens

    def _shared_limit(self, queue: Queue, pace: Pace) -> float:
        """Tell what the rows over all lanes let through a second."""
        runs, limit = pace.runs, math.inf
        for usage in queue.rows:
            if usage.row.lane is not None:
                continue
            seats = max(usage.jobs_limit, usage.inflight_jobs)
            limit = min(limit, seats * runs.slot_tokens_s)
            if usage.row.inflight_tokens_max is not None:
                limit = min(limit, usage.row.inflight_tokens_max / runs.job_s)
            if usage.row.tokens_per_min is not None:
                limit = min(limit, usage.row.tokens_per_min / BUCKET_S)
        if queue.band == BATCH_BAND:
            floor_jobs = queue.pool.floor_jobs(self._mind.policy.pressure.online_floor_share)
            limit = min(limit, (queue.pool.slots - floor_jobs) * runs.slot_tokens_s)
        return limit

    # ---- what is learned -----------------------------------------------------------------------

    def _flow(self, queue: Queue) -> Flow:
        return self._pace(queue.pool).flow((queue.lane, queue.band), at_s=self._mind.at_s)

    def _pace(self, pool: Pool) -> Pace:
        pace = self._paces.get(pool.model)
        if pace is None:
            tokens_s = OUTPUT_WEIGHT * self._mind.policy.routing.decode_tokens_s
            at_s = self._mind.at_s
            bands = tuple(Flow(at_s, at_s) for _ in BANDS)
            pace = self._paces[pool.model] = Pace(Runs(tokens_s, 1.0, 1.0), at_s, bands)
        return pace


def _lanes(pool: Pool, band: int) -> dict[str, None]:
    """List lanes that stand in line in a band, least served first, and not too many."""
    ranked = chain(islice(pool.aged[band], LANES_MAX), islice(pool.fresh[band], LANES_MAX))
    return dict.fromkeys(lane for _, lane in islice(ranked, LANES_MAX))


def _waits_for_room(pool: Pool) -> bool:
    """Say whether anybody waits that would go in an idle pool."""
    for band in BANDS:
        for ranking, aged in ((pool.fresh[band], False), (pool.aged[band], True)):
            for _, lane in islice(ranking, LANES_LOOKED_MAX):
                queue = pool.queues[lane, band]
                head = (queue.aged if aged else queue.fresh)[0][3]
                if head.held_by not in NOT_FOR_ROOM:
                    return True
    return False
