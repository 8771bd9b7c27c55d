"""Which job killed its worker: what a job's failures say of it.

A worker's death marks every job that was there, because any of them may be the killer (an uncharged
failure). It is charged only to a job that was alone there, or has more marks than any other there.
A job that one more death would end is a *suspect*, and runs where no other suspect runs. So a
killer's marks rise with every worker it takes, and those of its neighbours only if they meet a
killer again: the killer ends after `failures_max` deaths, its neighbours' record stays clean.
(Charging everybody instead dead-letters a worker's whole load; charging nobody never ends.)
"""

from collections.abc import Sequence

from broker.core.policy import LeasePolicy
from broker.wire.messages import Failure, Reason


def death_marks(failures: Sequence[Failure]) -> int:
    """Count the workers that died under a job."""
    return sum(1 for failure in failures if failure.reason is Reason.WORKER_LOST)


def is_suspect(failures: Sequence[Failure], policy: LeasePolicy) -> bool:
    """Say whether one more death would end the job."""
    return bool(failures) and death_marks(failures) >= max(1, policy.failures_max - 1)


def is_charged(marks: int, *, all_marks: Sequence[int]) -> bool:
    """Say whether a death is charged to a job with so many marks, among all those there."""
    return len(all_marks) == 1 or sum(1 for other in all_marks if other >= marks) == 1


def is_ended(failures: Sequence[Failure], policy: LeasePolicy) -> bool:
    """Say whether a job has failed too often to be tried again, its last failure included."""
    last = failures[-1]
    if not last.charged:
        return False
    charges = sum(1 for failure in failures if failure.charged)
    killed = last.reason is Reason.WORKER_LOST and death_marks(failures) >= policy.failures_max
    return killed or charges >= policy.failures_max
