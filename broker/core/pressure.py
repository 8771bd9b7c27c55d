"""How long online jobs must expect to wait, and what batch gives way for it, step by step.

The signal is the wait that a job of bands 0-1 would be told if it came now, in the worst of the
queues that wait for room; a lane that its own quota holds back presses nobody. Of many lanes those
are asked whose turn for one more job comes last: the lane with the greatest virtual finish, which
is its counter and what it has waiting ÷ its weight (as in fair queueing). Each step begins at
its threshold and ends below `release_ratio` of it, so by rule both ways, and never by the clock. A
pool without workers is under no pressure: batch is not what its jobs wait for.
"""

import math
from heapq import nlargest
from itertools import chain

from broker.core.decisions import HeldBy
from broker.core.estimates import Estimates
from broker.core.mind import Mind
from broker.core.policy import PressurePolicy
from broker.core.pressure_step import Step
from broker.core.queues import Pool, Queue
from broker.core.quotas import jobs_refusal
from broker.wire.ids import BATCH_BAND, ONLINE_BANDS

LOOK_S = 0.25
"""How often the expected waits are looked at."""

LANES_MAX = 8
"""Queues of a band that one look asks for their wait: 0.1 ms each where a hundred lanes wait. What
the order by finish does not know, such as how much of a lane's prompts is cached, decides among so
many."""


class Pressure:
    """Moves each pool from step to step."""

    def __init__(self, mind: Mind, estimates: Estimates) -> None:
        self._mind = mind
        self._estimates = estimates
        self._look_at_s = -math.inf

    def time_passed(self) -> None:
        """Look at the pools, not too often."""
        at_s = self._mind.at_s
        if at_s >= self._look_at_s:
            self._look_at_s = at_s + LOOK_S
            for pool in self._mind.queues.pools.values():
                self._look(pool)

    def _look(self, pool: Pool) -> None:
        policy = self._mind.policy.pressure
        pool.online_wait_s = self._online_wait_s(pool) if pool.slots else 0.0
        step = step_of(policy, pool.online_wait_s, before=pool.pressure)
        if step is pool.pressure:
            return
        if step is Step.REFUSE_BATCH:
            pool.refusing_since_s = self._mind.at_s
        pool.pressure = step
        pool.settled = False

    def _online_wait_s(self, pool: Pool) -> float:
        waits_s = [0.0]
        for band in ONLINE_BANDS:
            queues = (pool.queues[lane, band] for lane in _lanes(pool, band))
            last = nlargest(LANES_MAX, filter(_waits_for_room, queues), key=_finish)
            waits_s += [self._estimates.wait_s(one, position=one.waiting_jobs) for one in last]
        return max(waits_s)


def step_of(policy: PressurePolicy, wait_s: float, *, before: Step) -> Step:
    """Return the step for an expected wait; one that was reached is kept until it is released."""
    starts_s = (
        (Step.REFUSE_BATCH, policy.refuse_batch_wait_s),
        (Step.HOLD_BATCH, policy.hold_batch_wait_s),
        (Step.BORROW, policy.borrow_wait_s),
    )
    for step, start_s in starts_s:
        threshold_s = start_s * policy.release_ratio if step <= before else start_s
        if wait_s >= threshold_s and wait_s > 0.0:
            return step
    return Step.NONE


def is_refusing(pool: Pool, *, band: int, enqueued_at_s: float) -> bool:
    """Say whether a new job is batch that was submitted after its pool began to refuse it."""
    return (
        band == BATCH_BAND
        and pool.pressure is Step.REFUSE_BATCH
        and enqueued_at_s >= pool.refusing_since_s
    )


def _waits_for_room(queue: Queue) -> bool:
    """Say whether a queue's next job lacks what batch could leave to it: room, or a lent seat."""
    blocked = jobs_refusal(queue.rows)
    if blocked is not None:
        return blocked.row.may_borrow
    head = (queue.aged or queue.fresh)[0][3]
    return head.held_by is not HeldBy.QUOTA


def _finish(queue: Queue) -> float:
    """Tell where its lane's counter will be when all that it has waiting has gone."""
    counter = queue.pool.counters.counter(queue.lane, band=queue.band)
    return counter + queue.work_tokens / queue.weight


def _lanes(pool: Pool, band: int) -> dict[str, None]:
    """List the lanes that wait in a band."""
    return dict.fromkeys(lane for _, lane in chain(pool.fresh[band], pool.aged[band]))
