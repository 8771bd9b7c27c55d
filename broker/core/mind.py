"""All that the mind remembers, and the moves of a job between waiting, leased and ended.

    held -> waiting -> leased -> ended
               ^---------'  (requeue)

Every path (first dispatch, retry, adoption, revocation, cancel) uses these moves, so the sums can't
differ by path.
"""

import random
from dataclasses import replace

from broker.core.alarms import Alarms
from broker.core.blame import is_suspect
from broker.core.claims import Claims
from broker.core.costs import OUTPUT_WEIGHT, Costs, cost_tokens
from broker.core.decisions import Decision, Release
from broker.core.events import JobSpec
from broker.core.fleet import Fleet
from broker.core.ledger import Ledger
from broker.core.placement import Router
from broker.core.policy import Policy
from broker.core.queues import AGED_BANDS, Queues, Waiting
from broker.core.quotas import Quotas
from broker.core.state import Lease, Worker
from broker.wire.messages import Attempt, Failure


class Mind:
    """The state that all modules of the core share."""

    def __init__(self, policy: Policy, *, epoch: int, router: Router, rng: random.Random) -> None:
        self.policy = policy
        self.epoch = epoch
        self.router = router
        self.rng = rng
        self.at_s = 0.0
        self.dispatching = False
        """Start-up is over. Before, nothing is dispatched, revoked, rejected or expired."""
        self.link_up = True
        """While our own link is down nothing is dispatched: it could not be sent."""
        self.out: list[Decision] = []
        self.quotas = Quotas(policy.quotas)
        self.queues = Queues(policy, self.quotas)
        self.ledger = Ledger(self.queues, self.quotas)
        self.fleet = Fleet(self.queues, self.quotas)
        self.costs = Costs()
        self.claims = Claims(self)
        self.arrivals: list[Waiting] = []
        """Began to wait in this step: they are looked at, told and given their alarms at its
        end."""
        self.attempts = 0
        self.suspects: dict[str, set[str]] = {}
        """By worker, jobs there that one more worker's death would end."""
        self._revoked: dict[str, Attempt] = {}
        """Attempts of earlier epochs that were adopted and are over: not to be adopted again. One
        of this epoch that has no lease needs no note: it was ours."""
        self.progress_alarms = Alarms[Lease](lambda lease: self.ledger.get(lease.job.key) is lease)
        """When a lease has made no progress for too long."""

    def waits(
        self,
        job: JobSpec,
        *,
        failures: tuple[Failure, ...] = (),
        not_before_s: float = 0.0,
        excluded: tuple[str, ...] = (),
        retried: bool = False,
    ) -> Waiting:
        """Let a job wait."""
        queue = self.queues.queue(lane=job.lane, band=job.band, model=job.model)
        waiting = Waiting(
            job,
            queue,
            held_at_s=self.at_s if retried or failures else job.enqueued_at_s,
            due_at_s=self.queues.due_at_s(job, queue),
            output_tokens_expected=self.costs.expected_output_tokens(job),
            work_tokens=self.costs.work_tokens(job),
            not_before_s=not_before_s,
            failures=failures,
            excluded=excluded,
            resting=not_before_s > self.at_s,
            retried=retried,
        )
        aging_s = self.policy.bands[job.band].aging_s
        if aging_s is not None and job.band in AGED_BANDS:
            waiting.aged = self.at_s >= job.enqueued_at_s + aging_s
        self.queues.add(waiting)
        self.arrivals.append(waiting)
        return waiting

    def leases(self, lease: Lease, worker: Worker, *, starts: bool = True) -> None:
        """Give a job to a worker: count it, and charge its lane."""
        worker.passes(self.at_s)
        self.ledger.add(lease, worker, starts=starts)
        self.fleet.busied(worker)
        if starts and worker.breaker.given(lease.attempt):
            self.fleet.refresh(worker)  # Nothing else goes there until the probe has ended.
        queue = self.ledger.queue_of(lease)
        queue.pool.counters.inflight(queue.pool.inflight_jobs)
        if starts:
            self.queues.charge(queue, lease.cost_tokens, client=lease.job.client)
        else:  # Found running: it did not go in its lane's turn, or was refunded since.
            self.queues.correct(queue, lease.cost_tokens, client=lease.job.client)
            self._errs(lease, lease.cost_tokens)
        stall_s = self.policy.leases.stall_s
        self.progress_alarms.set(lease.progressed_at_s + stall_s, lease)
        if is_suspect(lease.failures, self.policy.leases):
            self.suspects.setdefault(worker.id, set()).add(lease.job.key)

    def unleases(self, lease: Lease, *, unstarted: bool = False, refund: bool = True) -> Worker:
        """Take a job back from its worker; by default its lane gets its tokens back."""
        worker = self.fleet.workers[lease.worker]
        worker.passes(self.at_s)
        self.ledger.remove(lease, worker, unstarted=unstarted)
        self.fleet.busied(worker)
        # Fewer slots may be kept for online jobs now, whichever worker this was.
        self.ledger.queue_of(lease).pool.settled = False
        worker.breaker.left(lease.attempt)
        suspects = self.suspects.get(worker.id)
        if suspects is not None:
            suspects.discard(lease.job.key)
            if not suspects:
                del self.suspects[worker.id]
        if lease.attempt.epoch != self.epoch:
            self._revoked[lease.job.key] = lease.attempt
        if refund:
            self.refunds(lease, lease.cost_tokens)
            self._errs(lease, lease.cost_tokens)
        self.changed(worker, opened=True)
        return worker

    def was_revoked(self, key: str, attempt: Attempt) -> bool:
        """Say whether an attempt without a lease was one of ours."""
        revoked = self._revoked.get(key)
        return attempt.epoch == self.epoch or (revoked is not None and attempt <= revoked)

    def corrects(self, lease: Lease) -> None:
        """Charge a running job that writes more than was expected."""
        uncached_tokens = lease.job.prompt_tokens - lease.hit_tokens
        cost = cost_tokens(uncached_tokens=uncached_tokens, output_tokens=lease.output_tokens)
        if cost > lease.cost_tokens:
            self.refunds(lease, lease.cost_tokens - cost)
            self.ledger.correct(lease, float(cost))
            excess_tokens = OUTPUT_WEIGHT * (lease.output_tokens - lease.output_tokens_expected)
            self._errs(lease, excess_tokens)

    def refunds(self, lease: Lease, tokens: float) -> None:
        """Give a lane back what its job did not use (or charge the rest, when negative)."""
        queue = self.ledger.queue_of(lease)
        self.queues.correct(queue, -tokens, client=lease.job.client)

    def settles(self, lease: Lease, *, cost_tokens_real: float | None) -> None:
        """End a leased job; its lane pays for what it really used, where that is known."""
        self.unleases(lease, refund=False)
        if cost_tokens_real is not None:
            error_tokens = lease.cost_tokens - cost_tokens_real
            self._errs(lease, error_tokens)
            self.refunds(lease, error_tokens)
        self.out.append(Release(lease.job.key))

    def _errs(self, lease: Lease, error_tokens: float) -> None:
        queue = self.ledger.queue_of(lease)
        queue.pool.counters.erred(error_tokens / queue.weight)

    def forgets(self, key: str) -> bool:
        """Drop a waiting job; False when it doesn't wait."""
        waiting = self.queues.waiting.get(key)
        if waiting is None:
            return False
        self.queues.remove(waiting)
        return True

    def changed(self, worker: Worker, *, opened: bool) -> None:
        """Let pools and router see a worker's new state. `opened`: it may take more than before."""
        self.fleet.refresh(worker)
        self.router.changed(worker)
        has_slot = len(worker.leases) < worker.slots and not worker.held_off
        takes_more = has_slot and worker.breaker.takes_new
        if opened and takes_more and self.fleet.serves_now(worker):
            for model in worker.models:
                self.queues.pool(model).opened()

    def next_attempt(self) -> Attempt:
        """Number a run."""
        self.attempts += 1
        return Attempt(self.epoch, self.attempts)

    def learns(self, waiting: Waiting, job: JobSpec) -> Waiting:
        """Learn what a waiting job is, now that its message was pulled; it is lined up anew."""
        self.queues.remove(waiting)
        again = self.waits(
            job,
            failures=waiting.failures or job.failures,
            not_before_s=waiting.not_before_s,
            excluded=waiting.excluded,
            retried=True,
        )
        again.held_at_s, again.held_by = waiting.held_at_s, waiting.held_by
        return again

    def completes(self, lease: Lease, job: JobSpec) -> None:
        """Learn what a leased job is, now that its message was pulled."""
        lease.failures = lease.failures or job.failures
        lease.job = replace(
            job, band=lease.job.band, model=lease.job.model, prompt_tokens=lease.job.prompt_tokens
        )
