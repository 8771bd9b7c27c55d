"""All workers' breakers: what counts against which, and when an open one is tried again.

A job that makes every engine fail looks like a sick engine at each of them. It counts at the first
worker where it fails and nowhere else: a second failure of the same job says more of the job. And
once it has failed at a second worker that completed others meanwhile, the job is to blame: what it
counted at the first is taken back. So such jobs open no breaker of a sound worker for long, while
in a fleet that is sick as a whole nobody completes anything, and every breaker opens. (Waiting for
the second failure before anything counts would feed a black hole for a back-off longer.)

A new leader has no breakers, but agents tell how many jobs their engine failed in a row: such a
worker is tried with one job before it gets more.

Time comes with ticks. With all of a pool open jobs wait at the broker, where they are not charged,
and each worker is tried in its own time.
"""

from itertools import islice

from broker.core.alarms import Alarms
from broker.core.breaker import BreakerState
from broker.core.mind import Mind
from broker.core.state import Lease, Worker
from broker.wire.faults import is_fault
from broker.wire.messages import Reason

TICK_WORKERS_MAX = 256
"""Breakers that one tick half-opens: a fleet that was sick as a whole is tried over several."""


class Breakers:
    """Tells each worker's breaker what concerns it."""

    def __init__(self, mind: Mind) -> None:
        self._mind = mind
        self._alarms = Alarms[Worker](self._is_open)

    def attempt_failed(self, lease: Lease, reason: Reason, *, charged: bool) -> None:
        """Take a failed attempt, while its lease still stands."""
        if not is_fault(reason, charged=charged):
            return
        mind, key = self._mind, lease.job.key
        worker = mind.fleet.workers[lease.worker]
        breaker, policy = worker.breaker, mind.policy.breaker
        elsewhere = [
            failure
            for failure in lease.failures
            if failure.worker != worker.id and is_fault(failure.reason, charged=failure.charged)
        ]
        before = breaker.openings_all
        breaker.fails(
            key,
            lease.attempt,
            given_at_s=lease.granted_at_s,
            at_s=mind.at_s,
            policy=policy,
            doubtful=bool(elsewhere),
        )
        if breaker.openings_all != before:
            self._alarms.set(breaker.until_s, worker)
        for failure in elsewhere:
            if breaker.completed_at_s >= failure.at_s:
                self._forgive(failure.worker, key)

    def attempt_completed(self, lease: Lease) -> None:
        """Take a completed attempt, while its lease still stands."""
        mind = self._mind
        mind.fleet.workers[lease.worker].breaker.completes(lease.attempt, at_s=mind.at_s)

    def joined(self, worker: Worker, *, faults: int) -> None:
        """Meet a worker; one that failed as many jobs in a row as open a breaker is tried first.

        What opened it under another leader is not known, and how long ago: a probe finds out.
        """
        failures_max = self._mind.policy.breaker.failures_max
        if failures_max and faults >= failures_max:
            worker.breaker.doubt(self._mind.at_s)

    def engine_restarted(self, worker: Worker) -> None:
        """Trust a new engine."""
        worker.breaker.close(self._mind.at_s)

    def time_passed(self) -> None:
        """Let those be tried whose time has come."""
        mind = self._mind
        for worker in islice(self._alarms.due(mind.at_s), TICK_WORKERS_MAX):
            if worker.breaker.half_opens(mind.at_s):
                mind.changed(worker, opened=True)

    def reconfigured(self) -> None:
        """Take a new policy: without breakers none stays open."""
        mind = self._mind
        if mind.policy.breaker.failures_max:
            return
        for worker in mind.fleet.workers.values():
            if worker.breaker.state is not BreakerState.CLOSED:
                worker.breaker.close(mind.at_s)
                mind.changed(worker, opened=True)

    def _is_open(self, worker: Worker) -> bool:
        is_known = self._mind.fleet.workers.get(worker.id) is worker
        return is_known and worker.breaker.state is BreakerState.OPEN

    def _forgive(self, worker_id: str, key: str) -> None:
        mind = self._mind
        worker = mind.fleet.workers.get(worker_id)
        if worker is None:
            return
        took = worker.breaker.takes_new
        worker.breaker.forgives(key, at_s=mind.at_s, policy=mind.policy.breaker)
        if worker.breaker.takes_new and not took:
            mind.changed(worker, opened=True)
