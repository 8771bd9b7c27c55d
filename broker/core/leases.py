"""When a worker is gone: silence makes it suspect, only a probe or long silence makes it gone.

The lease clock is the broker's time less the time in which silence proves nothing: while its own
link is down, and while more than half of the fleet falls silent at once (that is the network, not
the workers), plus a grace period in which workers reconnect. A job that its worker lists is never
dropped for its age: only silence of the worker, an answer without the job, or a stall ends a lease.

    LIVE --lease_s silent--> SUSPECT (probed, nothing new) --no responders--> gone
      ^------ any word ---------'  '--------------------revoke_s silent-----> gone
"""

from dataclasses import dataclass
from itertools import islice

from broker.core.alarms import Alarms
from broker.core.decisions import Abort, Probe, Requeue, WorkerGone
from broker.core.events import Unanswered
from broker.core.mind import Mind
from broker.core.retries import Retries
from broker.core.state import Lease, Phase, Worker
from broker.wire.messages import Reason

TICK_WORKERS_MAX = 512
"""Workers whose silence one tick looks at: 4,000 that are looked at every two seconds, in 20 ticks
a second, are 100 a tick."""

TICK_JOBS_MAX = 256
"""Jobs whose progress one tick looks at."""

RESTARTED = "restarted"
"""Cause of an end by which nobody is the fewer: the worker's next life is there."""

FLEET_SILENT_MIN = 2
"""One silent worker is never "the fleet", also where it is the only one."""


@dataclass(slots=True)
class LeaseClock:
    """The time that counts for silence, in seconds since the first event."""

    skipped_s: float = 0.0
    stopped_at_s: float | None = None
    """Standing still since then."""
    resumes_at_s: float | None = None
    """Runs on from then; None while it is not known."""

    def read(self, at_s: float) -> float:
        """Tell the lease time."""
        if self.resumes_at_s is not None and at_s >= self.resumes_at_s:
            assert self.stopped_at_s is not None, "resumes only when stopped"
            self.skipped_s += self.resumes_at_s - self.stopped_at_s
            self.stopped_at_s = self.resumes_at_s = None
        return (at_s if self.stopped_at_s is None else self.stopped_at_s) - self.skipped_s

    def stop(self, at_s: float) -> None:
        """Stand still from now on, until `resume`."""
        self.read(at_s)
        if self.stopped_at_s is None:
            self.stopped_at_s = at_s
        self.resumes_at_s = None

    def resume(self, at_s: float) -> None:
        """Run on from `at_s`, if it stands."""
        if self.stopped_at_s is not None:
            self.resumes_at_s = max(at_s, self.stopped_at_s)

    @property
    def stands(self) -> bool:
        """Say whether it stands still (as of the last reading)."""
        return self.stopped_at_s is not None


class Leases:
    """Watches over workers' silence and jobs' stalls."""

    def __init__(self, mind: Mind, retries: Retries) -> None:
        self._mind = mind
        self._retries = retries
        self._clock = LeaseClock()
        self._silences = Alarms[tuple[Worker, int]](
            lambda watch: self._watches.get(watch[0].id) == watch[1]
        )
        self._watches: dict[str, int] = {}
        """By worker, the number of the one watch that counts."""
        self._watch_count = 0
        self._heard: dict[str, float] = {}
        """Lease time of each worker's last word."""
        self._late: dict[str, None] = {}
        """Workers that missed a report or more."""
        self._fleet_silent_until_s: float | None = None
        self._fleet_forgiven = False
        """Most of the fleet is silent and stayed so: no more forgiveness until it has spoken."""

    def joined(self, worker: Worker) -> None:
        """Watch a new worker."""
        self._heard[worker.id] = self._now()
        self._watch(worker)

    def heard(self, worker: Worker) -> None:
        """Note a worker's word: whatever it was suspected of is forgotten."""
        mind = self._mind
        self._heard[worker.id] = self._now()
        self._late.pop(worker.id, None)
        if worker.phase is Phase.SUSPECT:
            worker.phase = Phase.LIVE
            mind.changed(worker, opened=True)
            self._watch(worker)
        if not self._fleet_silent():
            self._fleet_forgiven = False
            if self._fleet_silent_until_s is not None:
                self._fleet_silent_until_s = None
                self._resume_after_grace()

    def link_changed(self, *, up: bool) -> None:
        """Stop the clock while our own link is down."""
        mind = self._mind
        mind.link_up = up
        if up:
            self._resume_after_grace()
            for pool in mind.queues.pools.values():
                pool.opened()
        else:
            self._clock.stop(mind.at_s)

    def time_passed(self) -> None:
        """Suspect, probe and revoke by silence; abort what stalls."""
        mind = self._mind
        at_s = mind.at_s
        if self._fleet_silent_until_s is not None and at_s >= self._fleet_silent_until_s:
            self._fleet_silent_until_s = None
            self._fleet_forgiven = True
            if mind.link_up:
                self._clock.resume(at_s)
        now = self._now()
        if self._clock.stands or not mind.dispatching:
            return
        for worker, _ in islice(self._silences.due(now), TICK_WORKERS_MAX):
            if self._clock.stands:
                self._watch(worker)
                return
            self._silent(worker, now)
        for lease in islice(mind.progress_alarms.due(at_s), TICK_JOBS_MAX):
            self._look_at_progress(lease, at_s)

    def doubt(self, worker: Worker) -> None:
        """Suspect a worker before its time, because an order found nobody there."""
        if worker.phase is Phase.LIVE:
            self._suspect(worker)
            self._watch(worker)

    def probed(self, worker: Worker, *, incarnation: int | None, missed: Unanswered | None) -> None:
        """Take a probe's answer."""
        worker.probing = False
        if incarnation is not None:
            if incarnation > worker.incarnation:
                self.revoke(worker, cause=RESTARTED)
            elif incarnation == worker.incarnation:
                self.heard(worker)
            return
        silent_s = self._now() - self._heard[worker.id]
        gone = missed is Unanswered.NO_RESPONDERS and worker.phase is Phase.SUSPECT
        if gone and not self._clock.stands and silent_s >= self._mind.policy.leases.lease_s:
            self.revoke(worker, cause="no responders")

    def revoke(self, worker: Worker, *, cause: str) -> None:
        """Take all jobs from a worker and forget it; it may join again."""
        mind = self._mind
        worker.phase = Phase.GONE
        self._late.pop(worker.id, None)
        del self._heard[worker.id], self._watches[worker.id]
        place, jobs = len(mind.out), len(worker.leases)
        self._retries.worker_died(worker, cause=cause)
        gone = WorkerGone(
            worker.id,
            cause,
            draining=worker.draining,
            restarted=cause == RESTARTED,
            jobs=jobs,
            requeued_jobs=sum(isinstance(one, Requeue) for one in mind.out[place:]),
        )
        mind.out.insert(place, gone)  # First whose end it is, then what becomes of its jobs.
        mind.router.gone(worker)
        mind.fleet.leave(worker)

    def _now(self) -> float:
        return self._clock.read(self._mind.at_s)

    def _watch(self, worker: Worker) -> None:
        self._watch_count += 1
        self._watches[worker.id] = self._watch_count
        self._silences.set(self._next_look(worker), (worker, self._watch_count))

    def _next_look(self, worker: Worker) -> float:
        policy = self._mind.policy.leases
        heard = self._heard[worker.id]
        if worker.phase is Phase.LIVE:
            late = worker.id in self._late
            return heard + (policy.lease_s if late else self._late_s())
        return min(heard + policy.revoke_s, self._now() + policy.heartbeat_s)

    def _late_s(self) -> float:
        policy = self._mind.policy.leases
        return max(policy.lease_s - policy.heartbeat_s, policy.lease_s / 2)

    def _silent(self, worker: Worker, now: float) -> None:
        policy = self._mind.policy.leases
        silent_s = now - self._heard[worker.id]
        if silent_s >= self._late_s():
            self._late[worker.id] = None
        if worker.phase is Phase.LIVE and silent_s >= policy.lease_s:
            if not self._forgive_fleet():
                self._suspect(worker)
        elif worker.phase is Phase.SUSPECT:
            if silent_s >= policy.revoke_s:
                self.revoke(worker, cause=f"silent for {policy.revoke_s:g} s")
                return
            self.probe(worker)
        self._watch(worker)

    def _suspect(self, worker: Worker) -> None:
        worker.phase = Phase.SUSPECT
        self._mind.changed(worker, opened=False)
        self.probe(worker)

    def probe(self, worker: Worker) -> None:
        """Ask a worker whether it lives; its answer also moves the echo past a lost order."""
        if not worker.probing:
            worker.probing = True
            self._mind.out.append(Probe(worker.id, self._mind.fleet.number_order(worker)))

    def _fleet_silent(self) -> bool:
        silent = len(self._late)
        ratio = self._mind.policy.leases.silent_fleet_ratio
        return silent >= FLEET_SILENT_MIN and silent > ratio * len(self._mind.fleet.workers)

    def _forgive_fleet(self) -> bool:
        """Stop the clock if most of the fleet is silent: once, and not for ever."""
        if self._fleet_forgiven or not self._fleet_silent():
            return False
        at_s = self._mind.at_s
        self._fleet_silent_until_s = at_s + self._mind.policy.leases.revoke_s
        self._clock.stop(at_s)
        return True

    def _resume_after_grace(self) -> None:
        if self._mind.link_up and self._fleet_silent_until_s is None:
            self._clock.resume(self._mind.at_s + self._mind.policy.leases.grace_s)

    def _look_at_progress(self, lease: Lease, at_s: float) -> None:
        mind, stall_s = self._mind, self._mind.policy.leases.stall_s
        worker = mind.fleet.workers[lease.worker]
        if at_s - lease.progressed_at_s < stall_s:
            mind.progress_alarms.set(lease.progressed_at_s + stall_s, lease)
            return
        mind.progress_alarms.set(at_s + stall_s, lease)
        if worker.phase is Phase.LIVE and lease.accepted:
            self.abort(lease, worker, Reason.STALLED)

    def abort(self, lease: Lease, worker: Worker, reason: Reason) -> None:
        """Tell a worker to stop a lease's attempt; the lease ends when the worker says so."""
        lease.aborting = True
        number = lease.abort_number = self._mind.fleet.number_order(worker)
        self._mind.out.append(Abort(lease.job.key, worker.id, lease.attempt, number, reason))
