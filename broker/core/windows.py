"""Batches whose window is at risk: their lines compete one band up, while they are.

A queue of batch is at risk when all that waits of it, in its stream too, would take longer at the
pace it gets than its nearest deadline leaves, with a margin. Then the lines at its head are aged,
some at a time: they take part in what bands 2-3 may take together (`aged_share_max`), so a late
batch presses people no more than an old backlog does. Batch does not age by the clock.
"""

import math
from itertools import islice

from broker.core.estimates import Estimates
from broker.core.mind import Mind
from broker.core.queues import Queue
from broker.wire.ids import BATCH_BAND

LOOK_S = 1.0
"""How often the windows are looked at."""

LANES_MAX = 64
"""Queues of a pool that one look asks."""

PROMOTED_JOBS_MAX = 64
"""Lines of a queue that stand one band up at once: as many as are looked at for the next job."""


class Windows:
    """Watches the deadlines of batch."""

    def __init__(self, mind: Mind, estimates: Estimates) -> None:
        self._mind = mind
        self._estimates = estimates
        self._look_at_s = -math.inf

    def time_passed(self) -> None:
        """Look at the pools, not too often."""
        at_s = self._mind.at_s
        if at_s < self._look_at_s:
            return
        self._look_at_s = at_s + LOOK_S
        for pool in self._mind.queues.pools.values():
            for _, lane in list(islice(pool.fresh[BATCH_BAND], LANES_MAX)):
                self._look(pool.queues[lane, BATCH_BAND])

    def _look(self, queue: Queue) -> None:
        room = PROMOTED_JOBS_MAX - len(queue.aged)
        if room <= 0 or not self._is_at_risk(queue):
            return
        for _, _, _, waiting in queue.fresh[:room]:
            if waiting.job.deadline_at_s is not None:
                self._mind.queues.age(waiting)
                queue.pool.settled = False

    def _is_at_risk(self, queue: Queue) -> bool:
        deadline_at_s = queue.fresh[0][3].job.deadline_at_s
        if deadline_at_s is None:
            return False
        jobs = queue.waiting_jobs + queue.pending_jobs
        needs_s = self._estimates.wait_s(queue, position=jobs)
        margin = self._mind.policy.order.window_margin_ratio
        return self._mind.at_s + margin * needs_s >= deadline_at_s
