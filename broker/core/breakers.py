"""All workers' breakers: what counts against which, and when an open one is tried again.

A job that makes every engine fail looks like a sick engine at each of them. It counts at the first
worker where it fails and nowhere else: a second failure of the same job says more of the job. And
once it has failed at a second worker that completed others meanwhile, the job is to blame: what it
counted at the first is taken back. So such jobs open no breaker of a sound worker for long, while
in a fleet that is sick as a whole nobody completes anything, and every breaker opens. (Waiting for
the second failure before anything counts would feed a black hole for a back-off longer.)

A lane may send nothing else, faster than anybody completes anything in between: images for a text
model, each its own job. That the engine is sound shows when a job of another lane completes at a
worker where this one's failed before. Then the lane is to blame: until a job of its own completes
anywhere, or for `open_s_max` after the last such sign, its failures count nowhere, and what they
alone opened is closed. (For a time only: in a fleet that falls sick they must count again.) And
while all of a pool are shut, a new job of another lane is tried at once where one lane's jobs did
it: in a sound fleet it does not wait for them, in a sick one it costs each worker one job more.

A new leader has no breakers, but agents tell how many jobs their engine failed in a row: such a
worker is tried with one job before it gets more.

Time comes with ticks. With all of a pool open jobs wait at the broker, where they are not charged,
and each worker is tried in its own time.
"""

import math
from dataclasses import dataclass, field
from itertools import islice

from broker.core.alarms import Alarms
from broker.core.breaker import BreakerState
from broker.core.mind import Mind
from broker.core.queues import Waiting
from broker.core.state import Lease, Worker
from broker.wire.faults import is_fault
from broker.wire.messages import Reason

TICK_WORKERS_MAX = 256
"""Breakers that one tick half-opens: a fleet that was sick as a whole is tried over several."""


OPENED_WORKERS_MAX = TICK_WORKERS_MAX
"""Workers that one lane's failures opened which are closed at once when it is to blame; of more the
earliest are left to their time."""

TRIAL_LOOKS_MAX = 8
"""Workers that are looked at for one that a new job may try before its time."""


@dataclass(slots=True)
class LaneRun:
    """A lane's failures since one of its jobs completed."""

    completed_at_s: float = -math.inf
    blamed_until_s: float = -math.inf
    """Until then they count nowhere."""
    opened: dict[str, None] = field(default_factory=dict[str, None])
    """Workers that they alone opened."""


class Breakers:
    """Tells each worker's breaker what concerns it."""

    def __init__(self, mind: Mind) -> None:
        self._mind = mind
        self._alarms = Alarms[Worker](self._is_open)
        self._lanes: dict[str, LaneRun] = {}
        """Those that failed."""

    def attempt_failed(self, lease: Lease, reason: Reason, *, charged: bool) -> None:
        """Take a failed attempt, while its lease still stands."""
        if not is_fault(reason, charged=charged):
            return
        mind, key, lane = self._mind, lease.job.key, lease.job.lane
        worker = mind.fleet.workers[lease.worker]
        breaker, policy = worker.breaker, mind.policy.breaker
        elsewhere = [
            failure
            for failure in lease.failures
            if failure.worker != worker.id and is_fault(failure.reason, charged=failure.charged)
        ]
        before, run = breaker.openings_all, self._lanes.setdefault(lane, LaneRun())
        is_blamed = mind.at_s < run.blamed_until_s
        breaker.fails(
            key,
            lease.attempt,
            lane=lane,
            given_at_s=lease.granted_at_s,
            at_s=mind.at_s,
            policy=policy,
            doubtful=is_blamed or bool(elsewhere),
        )
        if breaker.openings_all != before:
            self._alarms.set(breaker.until_s, worker)
            if is_blamed:
                self._absolve(worker.id, lane)
            elif breaker.lane == lane:
                keep(run, worker.id)
        for failure in elsewhere:
            if breaker.completed_at_s >= failure.at_s:
                self._forgive(failure.worker, key)

    def attempt_completed(self, lease: Lease) -> None:
        """Take a completed attempt, while its lease still stands."""
        mind, lane = self._mind, lease.job.lane
        breaker = mind.fleet.workers[lease.worker].breaker
        breaker.completes(lease.attempt, at_s=mind.at_s)
        run = self._lanes.get(lane)
        if run is not None:
            self._lanes[lane] = LaneRun(completed_at_s=mind.at_s)
        for other, failed_at_s in breaker.outlived(lane, given_at_s=lease.granted_at_s):
            self._blame(other, failed_at_s=failed_at_s)

    def arrived(self, waiting: Waiting) -> None:
        """Meet a job in line: where one other lane's jobs shut its whole pool, it is tried."""
        pool, mind = waiting.queue.pool, self._mind
        if pool.slots or waiting.resting or waiting.failures:
            return
        for worker in islice(pool.workers.values(), TRIAL_LOOKS_MAX):
            if worker.breaker.half_opens(mind.at_s, lane=waiting.job.lane):
                mind.changed(worker, opened=True)
                return

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
        lanes = {lane.name for lane in mind.policy.lanes}
        self._lanes = {lane: run for lane, run in self._lanes.items() if lane in lanes}
        if mind.policy.breaker.failures_max:
            return
        for worker in mind.fleet.workers.values():
            if worker.breaker.state is not BreakerState.CLOSED:
                worker.breaker.close(mind.at_s)
                mind.changed(worker, opened=True)

    def _is_open(self, worker: Worker) -> bool:
        is_known = self._mind.fleet.workers.get(worker.id) is worker
        return is_known and worker.breaker.state is BreakerState.OPEN

    def _blame(self, lane: str, *, failed_at_s: float) -> None:
        """Hold a lane to blame for its failures, unless it has completed a job since."""
        run = self._lanes.get(lane)
        if run is None or failed_at_s <= run.completed_at_s:
            return
        run.blamed_until_s = self._mind.at_s + self._mind.policy.breaker.open_s_max
        opened, run.opened = run.opened, {}
        for worker_id in opened:
            self._absolve(worker_id, lane)

    def _absolve(self, worker_id: str, lane: str) -> None:
        """Close what a lane alone opened; while a job is tried there, that one will tell."""
        worker = self._mind.fleet.workers.get(worker_id)
        if worker is None or worker.breaker.lane != lane or worker.breaker.probe is not None:
            return
        worker.breaker.close(self._mind.at_s)
        self._mind.changed(worker, opened=True)

    def _forgive(self, worker_id: str, key: str) -> None:
        mind = self._mind
        worker = mind.fleet.workers.get(worker_id)
        if worker is None:
            return
        took = worker.breaker.takes_new
        worker.breaker.forgives(key, at_s=mind.at_s, policy=mind.policy.breaker)
        if worker.breaker.takes_new and not took:
            mind.changed(worker, opened=True)


def keep(run: LaneRun, worker_id: str) -> None:
    """Note a worker that a lane's failures opened."""
    run.opened.pop(worker_id, None)
    if len(run.opened) >= OPENED_WORKERS_MAX:
        del run.opened[next(iter(run.opened))]
    run.opened[worker_id] = None
