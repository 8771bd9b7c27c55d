"""What becomes of a job whose attempt came to nothing: again, later, elsewhere, or never.

- Not run at all (busy, unreachable, never sent): it waits again at its old place, and nothing is
  counted.
- Failed: it waits out a back-off curve with jitter, another worker is tried, and after
  `failures_max` charged failures it is dead-lettered.
- Turned away by an engine without room (429): the same curve and another worker, but uncharged, so
  that its own time limit ends it. (Asked again at once, one job made 200 attempts a second.)
- Its worker died: `blame` says which job that is charged to.
- A stream whose first token was sent is not restarted behind the caller's back, unless the caller
  asked for that.
"""

from broker.core.blame import death_marks, is_charged, is_ended
from broker.core.breakers import Breakers
from broker.core.decisions import Cancel, DeadLetter, Expire, FailStream, HeldBy, Requeue
from broker.core.mind import Mind
from broker.core.policy import LeasePolicy
from broker.core.state import Lease, Worker
from broker.wire.messages import Failure, Reason

JITTER_RATIO = 0.25
"""Back-offs vary by this much either way, so that jobs that failed together don't return
together."""


def backoff_s(failures_charged: int, policy: LeasePolicy, *, jitter: float) -> float:
    """Tell the wait after the nth charged failure. `jitter` is in -1..1."""
    exponent = min(max(0, failures_charged - 1), 60)  # 2.0**60 is beyond any cap already.
    wait_s = policy.retry_base_s * 2.0**exponent
    return min(policy.retry_s_max, wait_s * (1.0 + JITTER_RATIO * jitter))


FAILURES_KEPT_MAX = 32
"""Failures remembered of one job, which each dispatch carries: beyond it the oldest that count for
nothing go."""

_NO_REST = (Reason.WORKER_LOST, Reason.HANDED_BACK)
"""Uncharged failures that say nothing against another try right now."""


def failure_rest_s(failures: tuple[Failure, ...], policy: LeasePolicy, *, jitter: float) -> float:
    """Tell the wait after the last of these failures: by the curve of its own sort."""
    last = failures[-1]
    if not last.charged and last.reason in _NO_REST:
        return 0.0
    alike = sum(1 for one in failures if one.charged == last.charged and _rests(one))
    return backoff_s(alike, policy, jitter=jitter)


def _rests(failure: Failure) -> bool:
    return failure.charged or failure.reason not in _NO_REST


def remembered(
    failures: tuple[Failure, ...], *, kept_max: int = FAILURES_KEPT_MAX
) -> tuple[Failure, ...]:
    """Drop the oldest that neither count towards an end nor mark a death, beyond the bound."""
    over = max(0, len(failures) - kept_max)
    spare = [
        place
        for place, one in enumerate(failures)
        if not one.charged and one.reason is not Reason.WORKER_LOST
    ]
    dropped = frozenset(spare[:over])
    return tuple(one for place, one in enumerate(failures) if place not in dropped)


class Retries:
    """Decides what follows an attempt that came to nothing."""

    def __init__(self, mind: Mind, breakers: Breakers) -> None:
        self._mind = mind
        self._breakers = breakers

    def not_run(self, lease: Lease, *, after_s: float = 0.0, excluded: bool = False) -> None:
        """Let a job wait again whose attempt was surely not run: nothing is charged."""
        self._mind.unleases(lease, unstarted=True)
        self._again(
            lease,
            None,
            not_before_s=self._mind.at_s + after_s if after_s else 0.0,
            excluded=_with(lease, lease.worker) if excluded else lease.excluded,
        )

    def lost(self, lease: Lease) -> None:
        """Let a job wait again whose worker says it does not run it: nothing is charged."""
        self._mind.unleases(lease)
        if not self._ends_stream(lease, lease.failures):
            self._again(lease, None)

    def failed(self, lease: Lease, reason: Reason, *, charged: bool, detail: str = "") -> None:
        """Note a failed attempt, and try again elsewhere if that may help."""
        mind, policy = self._mind, self._mind.policy.leases
        failure = Failure(lease.attempt, lease.worker, reason, mind.at_s, detail, charged)
        failures = remembered((*lease.failures, failure))
        self._breakers.attempt_failed(lease, reason, charged=charged)
        mind.unleases(lease)
        if self._ends_stream(lease, failures):
            return
        if is_ended(failures, policy) and not lease.cancelled:
            mind.out.append(DeadLetter(lease.job.key, failures))
            return
        rest_s = failure_rest_s(failures, policy, jitter=2.0 * mind.rng.random() - 1.0)
        self._again(
            lease,
            failure,
            failures=failures,
            not_before_s=mind.at_s + rest_s if rest_s else 0.0,
            excluded=_with(lease, lease.worker) if rest_s else lease.excluded,
        )

    def worker_died(self, worker: Worker, *, cause: str) -> None:
        """Take back all jobs of a worker that died, and blame whom it must be."""
        leases = sorted(worker.leases.values(), key=lambda lease: lease.attempt)
        all_marks = [death_marks(lease.failures) for lease in leases]
        for lease, marks in zip(leases, all_marks, strict=True):
            charged = is_charged(marks, all_marks=all_marks)
            self.failed(lease, Reason.WORKER_LOST, charged=charged, detail=cause)

    def _ends_stream(self, lease: Lease, failures: tuple[Failure, ...]) -> bool:
        job = lease.job
        if lease.cancelled or not (job.streamed and lease.prefilled) or job.restart_visible:
            return False
        self._mind.out.append(FailStream(job.key, failures))
        return True

    def _again(
        self,
        lease: Lease,
        failure: Failure | None,
        *,
        failures: tuple[Failure, ...] | None = None,
        not_before_s: float = 0.0,
        excluded: tuple[str, ...] | None = None,
    ) -> None:
        mind, job = self._mind, lease.job
        if lease.cancelled:
            mind.out.append(Cancel(job.key))
            return
        if job.deadline_at_s is not None and job.deadline_at_s <= mind.at_s:
            mind.out.append(Expire(job.key, Reason.DEADLINE_EXPIRED))
            return
        mind.out.append(Requeue(job.key, failure, not_before_s))
        waiting = mind.waits(
            job,
            failures=lease.failures if failures is None else failures,
            not_before_s=not_before_s,
            excluded=lease.excluded if excluded is None else excluded,
            retried=True,
        )
        if waiting.resting:
            waiting.held_by = HeldBy.BACK_OFF


def _with(lease: Lease, worker: str) -> tuple[str, ...]:
    return lease.excluded if worker in lease.excluded else (*lease.excluded, worker)
