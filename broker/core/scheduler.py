"""The mind's one door: an event goes in, decisions come out.

Pure and deterministic: time stands on the event, chance comes from `rng`. What an event costs does
not depend on how many jobs wait or how many workers there are, but on how many jobs it sets free.
"""

import random
from functools import partial
from itertools import islice

from broker.core.admission import Door
from broker.core.alarms import Alarms
from broker.core.breakers import Breakers
from broker.core.decisions import Decision, Dispatch, Expire, Queued
from broker.core.endings import Endings
from broker.core.estimates import Estimates
from broker.core.events import (
    AttemptEnded,
    CancelRequested,
    DispatchAllowed,
    DispatchAnswered,
    DrainRequested,
    Event,
    FirstTokenSeen,
    JobEnded,
    JobHeld,
    JobSpec,
    LinkChanged,
    PolicyChanged,
    ProbeAnswered,
    QueueDepth,
    ResultsStand,
    Tick,
    WorkerReported,
)
from broker.core.gate import Gate
from broker.core.leases import Leases
from broker.core.mind import Mind
from broker.core.order import SETTLE_DISPATCHES_MAX, STEP_DISPATCHES_MAX, Order
from broker.core.placement import Router
from broker.core.policy import BandPolicy, Policy
from broker.core.pressure import Pressure
from broker.core.queues import AGED_BANDS, Waiting
from broker.core.quotas import Quotas
from broker.core.reports import Reports
from broker.core.retries import Retries
from broker.core.state import Lease
from broker.core.views import Views
from broker.core.windows import Windows
from broker.wire.messages import Reason

_Rare = (
    ProbeAnswered
    | LinkChanged
    | DrainRequested
    | QueueDepth
    | DispatchAllowed
    | PolicyChanged
    | ResultsStand
)


TICK_JOBS_MAX = 256
"""Jobs that one tick expires, ages or wakes, of each: a crowd is dealt with over several ticks."""


class Scheduler:
    """Admission, order, dispatch and leases of one leader's epoch."""

    def __init__(self, policy: Policy, *, epoch: int, router: Router, rng: random.Random) -> None:
        mind = self._mind = Mind(policy, epoch=epoch, router=router, rng=rng)
        self._estimates = Estimates(mind)
        self._door = Door(mind, self._estimates, partial(self._settle, STEP_DISPATCHES_MAX))
        self._pressure = Pressure(mind, self._estimates)
        self._windows = Windows(mind, self._estimates)
        self._gate = Gate(mind)
        self._order = Order(mind, self._gate)
        self._breakers = Breakers(mind)
        self._retries = Retries(mind, self._breakers)
        self._leases = Leases(mind, self._retries)
        self._endings = Endings(mind, self._leases, self._retries, self._estimates, self._breakers)
        self._reports = Reports(mind, self._leases, self._retries, self._endings, self._breakers)
        self.views = Views(mind, self._estimates)

        def waits(waiting: Waiting) -> bool:
            return mind.queues.waiting.get(waiting.job.key) is waiting

        self._expiries = Alarms[Waiting](waits)
        self._agings = Alarms[Waiting](waits)
        self._rests = Alarms[Waiting](waits)

    def step(self, event: Event, *, settles: bool = True) -> list[Decision]:
        """Take an event; return what is to be done about it, in order.

        With `settles` False nothing is dispatched yet: of events that come together the last one
        settles, or `settle` does, so that order and place are chosen among all that they bring.
        """
        mind = self._mind
        mind.at_s = max(mind.at_s, event.at_s)
        self._take(event)
        if settles:
            self._settle(STEP_DISPATCHES_MAX)
        return self._taken_out()

    def settle(self) -> list[Decision]:
        """Dispatch what may go after events that did not settle, and tell those that wait.

        A few dispatches at most: while `is_unsettled`, there are more, and it is asked again.
        """
        self._settle(SETTLE_DISPATCHES_MAX)
        return self._taken_out()

    @property
    def is_unsettled(self) -> bool:
        """Whether `settle` has more to dispatch."""
        mind = self._mind
        return mind.dispatching and mind.link_up and self._order.has_more

    def _taken_out(self) -> list[Decision]:
        mind = self._mind
        decisions, mind.out = mind.out, []
        return decisions

    def is_known(self, key: str) -> bool:
        """Say whether a job waits or is leased here."""
        return key in self._mind.queues.waiting or key in self._mind.ledger

    def is_leased(self, key: str) -> bool:
        """Say whether a job is leased to a worker."""
        return key in self._mind.ledger

    def leases(self) -> tuple[Lease, ...]:
        """List the live leases."""
        return tuple(self._mind.ledger)

    def _take(self, event: Event) -> None:
        match event:
            case JobHeld(_, job):
                self._held(job)
            case WorkerReported(_, heartbeat):
                self._reports.take(heartbeat)
            case AttemptEnded(_, worker, incarnation, finished):
                self._endings.attempt_ended(worker, incarnation, finished)
                self._look_for_drained(worker)
            case FirstTokenSeen(_, note):
                self._endings.first_token(note)
            case DispatchAnswered():
                self._endings.answered(event)
                self._look_for_drained(event.worker)
            case Tick():
                self._time_passed()
            case JobEnded(_, key):
                self._endings.job_ended(key)
            case CancelRequested(_, key):
                self._endings.cancel(key)
            case _:
                self._take_rare(event)

    def _take_rare(self, event: _Rare) -> None:
        mind = self._mind
        match event:
            case ProbeAnswered(_, worker_id, incarnation, missed):
                worker = mind.fleet.workers.get(worker_id)
                if worker is not None:
                    self._leases.probed(worker, incarnation=incarnation, missed=missed)
            case LinkChanged(_, up):
                self._leases.link_changed(up=up)
            case DrainRequested(_, worker_id, draining):
                worker = mind.fleet.workers.get(worker_id)
                if worker is not None:
                    self._reports.drain(worker, draining=draining)
            case QueueDepth(_, lane, band, model, pending_jobs):
                queue = mind.queues.queue(lane=lane, band=band, model=model)
                queue.pool.pending_jobs[band] += pending_jobs - queue.pending_jobs
                queue.pending_jobs = pending_jobs
            case ResultsStand(_, lane, stored_bytes, mean_bytes, bytes_max):
                mind.quotas.results_stand(
                    lane, stored_bytes=stored_bytes, mean_bytes=mean_bytes, bytes_max=bytes_max
                )
            case DispatchAllowed(_, allowed):
                self._allow(allowed=allowed)
            case PolicyChanged(_, policy):
                if policy != mind.policy:
                    self._reconfigure(policy)

    def _held(self, job: JobSpec) -> None:
        mind = self._mind
        known = mind.queues.waiting.get(job.key)
        if known is not None:
            if known.job.bare:
                self._learns(known, job)
            return
        lease = mind.ledger.get(job.key)
        if lease is not None:
            if lease.job.bare:
                mind.completes(lease, job)
            return
        if mind.dispatching:
            refused = self._door.knock(job)
            if refused is not None:
                mind.out.append(refused)
                return
        waiting = mind.waits(job, failures=job.failures)
        self._estimates.arrived(waiting)

    def _learns(self, known: Waiting, job: JobSpec) -> None:
        """Take a waiting job as its message says it is; it may have to go."""
        mind = self._mind
        waiting = mind.learns(known, job)
        refused = self._door.recheck(waiting) if mind.dispatching else None
        if refused is not None:
            mind.queues.remove(waiting)
            mind.out.append(refused)

    def _settle(self, dispatches_max: int) -> None:
        """Dispatch what may go, and tell those that wait, once it is known who does."""
        mind = self._mind
        if mind.claims:
            mind.claims.check()
        if mind.dispatching and mind.link_up:
            for waiting in mind.arrivals:
                self._breakers.arrived(waiting)
            self._dispatch(dispatches_max)
            if dispatches_max < STEP_DISPATCHES_MAX and self._order.has_more:
                return
        for waiting in mind.arrivals:
            if mind.queues.waiting.get(waiting.job.key) is waiting:
                self._settle_down(waiting)
        mind.arrivals.clear()

    def _dispatch(self, dispatches_max: int) -> None:
        mind = self._mind
        decided = len(mind.out)
        self._order.dispatch(dispatches_max=dispatches_max)
        for decision in islice(mind.out, decided, None):
            if isinstance(decision, Dispatch):
                lease = mind.ledger.get(decision.key)
                assert lease is not None, "what was dispatched is leased"
                self._estimates.dispatched(lease)
        self._estimates.settled()

    def _settle_down(self, waiting: Waiting) -> None:
        """Set the alarms of a job that did not go at once, and tell its owner."""
        mind, job = self._mind, waiting.job
        band = mind.policy.bands[job.band]
        expires_at_s = _expires_at_s(waiting, band)
        if expires_at_s is not None:
            self._expiries.set(expires_at_s, waiting)
        if band.aging_s is not None and job.band in AGED_BANDS and not waiting.aged:
            self._agings.set(job.enqueued_at_s + band.aging_s, waiting)
        if waiting.resting:
            self._rests.set(waiting.not_before_s, waiting)
        if mind.dispatching and not waiting.receipted and not waiting.retried:
            waiting.receipted = True
            position = waiting.queue.ahead_of(waiting)
            wait_s = self._estimates.told_s(waiting, position=position)
            mind.out.append(Queued(job.key, position, wait_s))

    def _time_passed(self) -> None:
        mind = self._mind
        for model in mind.router.sweep(mind.at_s):
            mind.queues.pool(model).opened()
        self._leases.time_passed()
        self._breakers.time_passed()
        for waiting in islice(self._agings.due(mind.at_s), TICK_JOBS_MAX):
            mind.queues.age(waiting)
        if not mind.dispatching:
            return
        for waiting in islice(self._expiries.due(mind.at_s), TICK_JOBS_MAX):
            self._expire(waiting)
        for waiting in islice(self._rests.due(mind.at_s), TICK_JOBS_MAX):
            mind.queues.wake(waiting)
            mind.arrivals.append(waiting)
        self._pressure.time_passed()
        self._windows.time_passed()
        self._gate.time_passed()

    def _expire(self, waiting: Waiting) -> None:
        mind, deadline_at_s = self._mind, waiting.job.deadline_at_s
        expires_at_s = _expires_at_s(waiting, mind.policy.bands[waiting.job.band])
        if expires_at_s is None or expires_at_s > mind.at_s:
            return  # A newer policy gave it more time, and another alarm for that.
        mind.queues.remove(waiting)
        missed = deadline_at_s is not None and deadline_at_s <= mind.at_s
        reason = Reason.DEADLINE_EXPIRED if missed else Reason.WAIT_EXPIRED
        mind.out.append(Expire(waiting.job.key, reason))

    def _allow(self, *, allowed: bool) -> None:
        mind = self._mind
        if allowed and not mind.dispatching:
            self._recheck()
            for pool in mind.queues.pools.values():
                pool.opened()
            mind.arrivals = list(mind.queues.waiting.values())
        mind.dispatching = allowed

    def _recheck(self) -> None:
        """Ask the door about all that waits: it was not open before, or limits changed."""
        mind = self._mind
        for waiting in list(mind.queues.waiting.values()):
            refused = self._door.recheck(waiting)
            if refused is not None:
                mind.queues.remove(waiting)
                mind.out.append(refused)

    def _reconfigure(self, policy: Policy) -> None:
        """Take a new policy, whole."""
        mind = self._mind
        mind.claims.clear()
        quotas = Quotas(policy.quotas, before=mind.quotas)
        mind.policy, mind.quotas = policy, quotas
        mind.queues.reconfigured(policy, quotas)
        mind.ledger.reconfigured(quotas)
        mind.fleet.count(quotas)
        mind.router.reconfigured(policy.routing)
        self._door.reconfigured()
        self._breakers.reconfigured()
        if mind.dispatching:
            self._recheck()
        mind.arrivals = list(mind.queues.waiting.values())

    def _look_for_drained(self, worker_id: str) -> None:
        worker = self._mind.fleet.workers.get(worker_id)
        if worker is not None and worker.draining:
            self._reports.look_for_drained(worker)


def _expires_at_s(waiting: Waiting, band: BandPolicy) -> float | None:
    """Tell when a waiting job's time is over: at its deadline, or after its band's longest wait."""
    ends_at_s = waiting.job.deadline_at_s
    if band.wait_s_max is None:
        return ends_at_s
    wait_ends_at_s = waiting.held_at_s + band.wait_s_max
    return wait_ends_at_s if ends_at_s is None else min(ends_at_s, wait_ends_at_s)
