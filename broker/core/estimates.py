"""How long a job will wait: the work before it ÷ the rate at which its pool works.

Rate = slots that the queue may use × weighted tokens a second of one slot, as learned from the jobs
that ended. Work before a job: higher bands' backlog, its own queue up to its position, and of the
other lanes in its band what a fair share gives them meanwhile. Higher bands go on arriving while it
waits, so their measured arrivals are taken off the rate, down to the share that the band is
guaranteed. Finite, 0 when a slot is free, and never falling as the position grows.
"""

import math
from dataclasses import dataclass, field

from broker.core.costs import OUTPUT_WEIGHT
from broker.core.mind import Mind
from broker.core.queues import Pool, Queue, Waiting
from broker.core.quotas import jobs_refusal
from broker.wire.ids import BANDS

ARRIVALS_TAU_S = 30.0
"""Arrivals are averaged over about this long: a burst counts, an hour ago does not."""

PACE_JOBS = 50.0
"""Jobs that the pace remembers."""

RATE_RATIO_MIN = 0.05
"""Share of its pool that a band without a guaranteed share is assumed to get at worst: an estimate
stays finite."""


@dataclass(slots=True)
class _Pace:
    """What one slot does, and what arrives."""

    work_tokens: float
    seconds: float = 1.0
    jobs: float = 1.0
    arrivals: list[float] = field(default_factory=lambda: [0.0 for _ in BANDS])
    """Weighted tokens a second, by band."""
    arrivals_at_s: float = 0.0

    def decay(self, at_s: float) -> None:
        """Let old arrivals fade."""
        if at_s > self.arrivals_at_s:
            fade = math.exp((self.arrivals_at_s - at_s) / ARRIVALS_TAU_S)
            self.arrivals = [rate * fade for rate in self.arrivals]
            self.arrivals_at_s = at_s


class Estimates:
    """Wait estimates of all pools."""

    def __init__(self, mind: Mind) -> None:
        self._mind = mind
        self._paces: dict[str, _Pace] = {}

    def arrived(self, waiting: Waiting) -> None:
        """Count an arrival."""
        pace = self._pace(waiting.queue.pool)
        pace.decay(self._mind.at_s)
        pace.arrivals[waiting.queue.band] += waiting.work_tokens / ARRIVALS_TAU_S

    def ran(self, model: str, *, cost_tokens: float, run_s: float) -> None:
        """Learn from a job that ended how fast a slot works."""
        if run_s <= 0 or cost_tokens <= 0:
            return
        pace = self._pace(self._mind.queues.pool(model))
        keep = 1.0 - 1.0 / PACE_JOBS
        pace.work_tokens = pace.work_tokens * keep + cost_tokens
        pace.seconds = pace.seconds * keep + run_s
        pace.jobs = pace.jobs * keep + 1.0

    def rate_tokens_s(self, queue: Queue) -> float:
        """Tell how fast a queue's pool works for it alone; 0 when it has no workers."""
        pace = self._pace(queue.pool)
        slots = float(queue.pool.slots)
        for usage in queue.rows:
            slots = min(slots, usage.jobs_limit)
        return slots * pace.work_tokens / pace.seconds

    def wait_s(self, queue: Queue, *, position: int) -> float:
        """Estimate the wait of the job at a position of a queue."""
        if self._is_free(queue, position):
            return 0.0
        rate = self.rate_tokens_s(queue)
        if rate <= 0:
            return queue.wait_s_max
        pool, band = queue.pool, queue.band
        mine = position * queue.work_tokens / max(1, queue.waiting_jobs)
        lanes = len(pool.fresh[band]) + len(pool.aged[band])
        others = min(max(0.0, pool.work_tokens[band] - queue.work_tokens), mine * max(0, lanes - 1))
        ahead = sum(pool.work_tokens[:band]) + mine + others
        pace = self._pace(pool)
        pace.decay(self._mind.at_s)
        share = max(RATE_RATIO_MIN, self._mind.policy.bands[band].guaranteed_share)
        left = max(rate * share, rate - sum(pace.arrivals[:band]))
        residual_s = pace.seconds / pace.jobs / pool.slots
        return min(queue.wait_s_max, residual_s + ahead / left)

    def retry_after_s(self, queue: Queue) -> float:
        """Tell when about a tenth of a full queue will be gone: then a try is worth it."""
        return self.wait_s(queue, position=max(1, queue.waiting_jobs // 10))

    def _is_free(self, queue: Queue, position: int) -> bool:
        pool = queue.pool
        return (
            position == 0
            and pool.inflight_jobs < pool.slots
            and not any(pool.in_line[: queue.band + 1])
            and jobs_refusal(queue.rows) is None
        )

    def _pace(self, pool: Pool) -> _Pace:
        pace = self._paces.get(pool.model)
        if pace is None:
            decode_tokens_s = self._mind.policy.routing.decode_tokens_s
            pace = self._paces[pool.model] = _Pace(OUTPUT_WEIGHT * decode_tokens_s)
            pace.arrivals_at_s = self._mind.at_s
        return pace
