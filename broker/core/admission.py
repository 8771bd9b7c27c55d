"""The door: whether a job may wait here at all. A refusal changes nothing.

What is refused is told at once, with the row, what is used of it, its limit, and when to try again.
Batch is bounded by its stream; what is submitted while online jobs wait too long is refused as
`queue_full` too (`pressure`). A deadline that would pass while the job waits is told at once.
"""

from collections.abc import Callable

from broker.core.blame import is_ended
from broker.core.decisions import DeadLetter, Expire, Reject
from broker.core.estimates import Estimates
from broker.core.events import JobSpec
from broker.core.mind import Mind
from broker.core.policy import LanePolicy
from broker.core.pressure import is_refusing
from broker.core.queues import Pool, Queue, Waiting
from broker.core.quotas import (
    jobs_refusal,
    never_fits,
    queue_refusal,
    refusal,
    results_refusal,
)
from broker.core.rows import Refusal
from broker.wire.ids import BATCH_BAND
from broker.wire.messages import Reason

PRESSURE_ROW = "pressure"
"""What refuses batch while online jobs wait too long, in place of a quota row."""

RETRY_AFTER_S_MIN = 1.0
"""A refusal stands as a record for this long at least: sooner, the next try would only find it."""

RETRY_AFTER_S_MAX = 300.0
"""After five minutes anything may have changed: nobody is told to wait longer."""

RESULTS_RETRY_AFTER_S = 30.0
"""Results go when somebody takes them out or their time is over: nobody knows when."""

PAUSED_RETRY_AFTER_S = 30.0
"""A person paused the lane, and people take minutes."""


class Door:
    """Lets jobs in, or says why not."""

    def __init__(self, mind: Mind, estimates: Estimates, settle: Callable[[], None]) -> None:
        """Open the door. `settle` sends off those that were let in before, if they may go."""
        self._mind = mind
        self._estimates = estimates
        self._settle = settle
        self._lanes: dict[str, LanePolicy] = {}
        self.reconfigured()

    def reconfigured(self) -> None:
        """Take the lanes of a new policy."""
        self._lanes = {lane.name: lane for lane in self._mind.policy.lanes}

    def knock(self, job: JobSpec) -> Reject | Expire | DeadLetter | None:
        """Say why a new job may not wait here; None lets it in."""
        spent = self._spent(job)
        if spent is not None:
            return spent
        return self._late(job) or self._stranger(job) or self._too_much(job)

    def recheck(self, waiting: Waiting) -> Reject | Expire | DeadLetter | None:
        """Say why a job that waits can't stay: nobody asked before, or limits changed."""
        job = waiting.job
        return (
            self._spent(job)
            or self._late(job)
            or self._stranger(job)
            or self._never(job, waiting.queue, waiting.work_tokens)
        )

    def _spent(self, job: JobSpec) -> DeadLetter | None:
        """Say whether a job's earlier failures were its last: its dead letter was not written."""
        if job.failures and is_ended(job.failures, self._mind.policy.leases):
            return DeadLetter(job.key, job.failures)
        return None

    def _late(self, job: JobSpec) -> Expire | None:
        """Say whether nobody waits for a job's answer any more."""
        if job.deadline_at_s is not None and job.deadline_at_s <= self._mind.at_s:
            return Expire(job.key, Reason.DEADLINE_EXPIRED)
        return None

    def _stranger(self, job: JobSpec) -> Reject | None:
        lane = self._lanes.get(job.lane)
        if lane is None:
            return _reject(job, Reason.UNKNOWN_MODEL, row=f"lane={job.lane}")
        if job.band not in lane.bands:
            return _reject(job, Reason.UNKNOWN_MODEL, row=f"lane={job.lane} band={job.band}")
        if job.model not in self._mind.policy.models or (
            lane.models and job.model not in lane.models
        ):
            return _reject(job, Reason.UNKNOWN_MODEL, row=f"lane={job.lane} model={job.model}")
        adapters = self._mind.policy.adapters
        if job.adapter and adapters and job.adapter not in adapters.get(job.model, ()):
            row = f"lane={job.lane} model={job.model} adapter={job.adapter}"
            return _reject(job, Reason.UNKNOWN_MODEL, row=row)
        if lane.paused:
            row, after_s = f"lane={job.lane}", PAUSED_RETRY_AFTER_S
            return _reject(job, Reason.LANE_PAUSED, row=row, retry_after_s=after_s)
        return None

    def _too_much(self, job: JobSpec) -> Reject | None:
        mind = self._mind
        queue = mind.queues.queue(lane=job.lane, band=job.band, model=job.model)
        work_tokens = mind.costs.work_tokens(job)
        never = self._never(job, queue, work_tokens)
        if never is not None:
            return never
        if not mind.dispatching or job.failures:
            return None
        if job.band == BATCH_BAND:
            return self._pressed(job, queue)
        of_results = results_refusal(queue.rows)
        if of_results is not None:
            return _refused(
                job, Reason.RESULTS_FULL, of_results, retry_after_s=RESULTS_RETRY_AFTER_S
            )
        full = queue_refusal(queue.rows)
        if full is None and job.deadline_at_s is None:
            return None
        if self._may_start(job, queue, work_tokens):
            if not self._is_contended(queue.pool, is_full=full is not None):
                return None
            self._settle()
            full = queue_refusal(queue.rows)
            if self._may_start(job, queue, work_tokens):
                return None
        if full is not None:
            after_s = self._estimates.retry_after_s(queue)
            return _refused(job, Reason.QUEUE_FULL, full, retry_after_s=after_s)
        return self._infeasible(job, queue)

    def _pressed(self, job: JobSpec, queue: Queue) -> Reject | None:
        """Say whether online jobs wait so long that new batch has to come later."""
        pool = queue.pool
        if not is_refusing(pool, band=job.band, enqueued_at_s=job.enqueued_at_s):
            return None
        limit_s = self._mind.policy.pressure.refuse_batch_wait_s
        after_s = _bounded(pool.online_wait_s)
        return Reject(
            job.key, Reason.QUEUE_FULL, PRESSURE_ROW, pool.online_wait_s, limit_s, after_s
        )

    def _infeasible(self, job: JobSpec, queue: Queue) -> Reject | None:
        """Say whether a job would wait until its time is over; without workers nobody knows."""
        if job.deadline_at_s is None or not queue.pool.slots:
            return None
        due_at_s = self._mind.queues.due_at_s(job, queue)
        position = queue.position_of(job, due_at_s=due_at_s)
        wait_s = self._estimates.wait_s(queue, position=position, job=job)
        left_s = job.deadline_at_s - self._mind.at_s
        if wait_s <= left_s:
            return None
        after_s = _bounded(self._estimates.retry_after_s(queue))
        row = f"lane={job.lane} band={job.band} deadline"
        return Reject(job.key, Reason.DEADLINE_INFEASIBLE, row, wait_s, left_s, after_s)

    def _never(self, job: JobSpec, queue: Queue, work_tokens: float) -> Reject | None:
        never = never_fits(queue.rows, work_tokens)
        if never is None:
            return None
        return _refused(job, Reason.QUOTA_EXCEEDED, never, retry_after_s=RETRY_AFTER_S_MAX)

    def _is_contended(self, pool: Pool, *, is_full: bool) -> bool:
        """Say whether the room may be gone to those that came with a job, and are not sent yet.

        With a full queue any of them may take the last of it, by whatever a worker lacks next.
        """
        free_slots = 1 if is_full else max(1, pool.slots - pool.busy_slots)
        return len(self._mind.arrivals) >= free_slots

    def _may_start(self, job: JobSpec, queue: Queue, work_tokens: float) -> bool:
        """Say whether the job need not wait: then a full queue is no reason."""
        mind = self._mind
        floor_share = mind.policy.pressure.online_floor_share
        if not mind.link_up or queue.pool.keeps_from(job.band, floor_share):
            return False
        if jobs_refusal(queue.rows) or refusal(queue.rows, job, work_tokens, at_s=mind.at_s):
            return False
        output_tokens = mind.costs.expected_output_tokens(job)
        placement = mind.router.place(job, excluded=(), at_s=mind.at_s, output_tokens=output_tokens)
        return placement.worker is not None


def _refused(job: JobSpec, reason: Reason, by: Refusal, *, retry_after_s: float) -> Reject:
    return Reject(job.key, reason, by.name, by.used, by.limit, _bounded(retry_after_s))


def _reject(
    job: JobSpec, reason: Reason, *, row: str, retry_after_s: float = RETRY_AFTER_S_MIN
) -> Reject:
    return Reject(job.key, reason, row, 0.0, 0.0, _bounded(retry_after_s))


def _bounded(retry_after_s: float) -> float:
    return min(RETRY_AFTER_S_MAX, max(RETRY_AFTER_S_MIN, retry_after_s))
