"""Batches whose window is at risk: their lines compete one band up, while they are.

Batches of a queue share it (`flows`) as long as all of them come in time. One is at risk when it
and those whose windows end first, with what waits in the stream and what their producers have not
published yet, would take longer at the pace of the queue than its deadline leaves, with a margin.
Then the lines at its head are aged, some at a time: they go before the queue's others and take part
in what bands 2-3 may take together (`aged_share_max`), so a late batch presses people no more than
an old backlog does. Batch does not age by the clock. While pressure holds batch (`pressure`, from
step 2 on), aged lines too have its guaranteed share alone.
"""

import math
from collections.abc import Iterator
from heapq import nsmallest
from itertools import islice

from broker.core.estimates import Estimates
from broker.core.flows import Flow
from broker.core.mind import Mind
from broker.core.queues import LineEntry, Queue
from broker.wire.ids import BATCH_BAND

LOOK_S = 1.0
"""How often the windows are looked at, where they are few."""

ESTIMATES_MAX = 8
"""Batches asked about in one step: about a millisecond. A look at many goes on in the next steps:
twenty a second, so that a thousand batches are looked at within seven seconds."""

LANES_MAX = 64
"""Queues of a pool that one look asks."""

FLOWS_MAX = 32
"""Batches of a queue that one look asks, those whose windows end first."""

PROMOTED_JOBS_MAX = 64
"""Lines of a queue that stand one band up at once: as many as are looked at for the next job."""


class Windows:
    """Watches the deadlines of batch."""

    def __init__(self, mind: Mind, estimates: Estimates) -> None:
        self._mind = mind
        self._estimates = estimates
        self._look_at_s = -math.inf
        self._look: Iterator[None] = iter(())
        """Under way; a step of it asks about one batch."""

    def time_passed(self) -> None:
        """Look at the pools, not too often, and at some batches at a time."""
        left = ESTIMATES_MAX - self._go_on(ESTIMATES_MAX)
        at_s = self._mind.at_s
        if left and at_s >= self._look_at_s:
            self._look_at_s = at_s + LOOK_S
            self._look = self._look_at_all()
            self._go_on(left)

    def _go_on(self, steps: int) -> int:
        return sum(1 for _ in islice(self._look, steps))

    def _look_at_all(self) -> Iterator[None]:
        pools = list(self._mind.queues.pools.values())
        for pool in pools:
            lanes = [lane for _, lane in islice(pool.fresh[BATCH_BAND], LANES_MAX)]
            for lane in lanes:
                yield from self._look_at(pool.queues[lane, BATCH_BAND])

    def _look_at(self, queue: Queue) -> Iterator[None]:
        """Age lines of the batches at risk: of the one that ends first, first."""
        if queue.flows is None or len(queue.aged) >= PROMOTED_JOBS_MAX:
            return
        before_jobs = 0
        for flow in nsmallest(FLOWS_MAX, queue.flows, key=_first):
            if not flow.line:
                continue  # It went since this look began.
            room = PROMOTED_JOBS_MAX - len(queue.aged)
            if room <= 0:
                return
            before_jobs += len(flow.line) + flow.jobs_behind
            jobs = len(queue.aged) + queue.pending_jobs + before_jobs
            needs_s = self._estimates.wait_s(queue, position=jobs)
            risky_at_s = self._mind.at_s + self._mind.policy.order.window_margin_ratio * needs_s
            at_risk = [entry[3] for entry in flow.line[:room] if _ends_by(entry, risky_at_s)]
            before_jobs -= len(at_risk)  # They are counted as aged from now on.
            for waiting in at_risk:
                self._mind.queues.age(waiting)
                queue.pool.settled = False
            yield


def _first(flow: Flow) -> tuple[float, int, str]:
    return flow.line[0][:3]


def _ends_by(entry: LineEntry, at_s: float) -> bool:
    deadline_at_s = entry[3].job.deadline_at_s
    return deadline_at_s is not None and deadline_at_s <= at_s
