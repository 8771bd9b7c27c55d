"""What is said of single jobs: an order's answer, a first token, an end, a cancel.

*Fencing*: an attempt's word counts only for its own lease; one that was revoked changes nothing.
The one exception is a settled job: its terminal record stands, whoever wrote it, so every other
attempt and any waiting entry go.
"""

from broker.core.breakers import Breakers
from broker.core.costs import cost_tokens
from broker.core.decisions import Cancel, Release
from broker.core.estimates import Estimates
from broker.core.events import DispatchAnswered, Unanswered
from broker.core.leases import Leases
from broker.core.mind import Mind
from broker.core.retries import Retries
from broker.core.state import Lease, Worker
from broker.wire.messages import Answer, Attempt, Finished, FirstToken, Kind, Outcome, Reason


class Endings:
    """Takes what is said of single jobs."""

    def __init__(
        self,
        mind: Mind,
        leases: Leases,
        retries: Retries,
        estimates: Estimates,
        breakers: Breakers,
    ) -> None:
        self._mind = mind
        self._breakers = breakers
        self._leases = leases
        self._retries = retries
        self._estimates = estimates

    def answered(self, event: DispatchAnswered) -> None:
        """Take the answer to a dispatch, or the lack of one."""
        lease = self._lease(event.key, event.worker, event.attempt)
        if lease is None:
            return
        worker = self._mind.fleet.workers[lease.worker]
        match event.answer:
            case Answer.ACCEPTED | Answer.DUPLICATE:
                lease.accept(self._mind.at_s)
            case Unanswered.TIMEOUT:
                lease.unanswered = not lease.accepted
                self._leases.probe(worker)
            case Unanswered.UNSENT:
                self._retries.not_run(lease, after_s=self._mind.policy.leases.retry_base_s)
            case Unanswered.NO_RESPONDERS:
                self._leases.doubt(worker)
                self._retries.not_run(lease)
            case Answer.DRAINING:
                worker.draining = True
                self._hold_off(worker)
                self._retries.not_run(lease)
            case Answer.BUSY | Answer.STALE_EPOCH:
                self._hold_off(worker)
                self._retries.not_run(lease)
            case Answer.UNKNOWN:
                self._hold_off(worker)
                self._retries.not_run(lease, excluded=True)

    def first_token(self, note: FirstToken) -> None:
        """Take a job's first token: its prompt is no backlog any more."""
        lease = self._lease(note.key, note.worker, note.attempt)
        if lease is None:
            return
        worker = self._mind.fleet.workers[lease.worker]
        lease.accept(self._mind.at_s)
        lease.progressed_at_s = self._mind.at_s
        if note.cached_tokens is not None:
            self._hit(lease, worker, note.cached_tokens)
        if worker.mark_prefilled(lease, at_s=self._mind.at_s):
            self._mind.changed(worker, opened=True)

    def attempt_ended(self, worker_id: str, incarnation: int, finished: Finished) -> None:
        """Take the end of an attempt; the same may be told many times."""
        lease = self._lease(finished.key, worker_id, finished.attempt)
        worker = self._mind.fleet.workers.get(worker_id)
        if worker is not None and worker.incarnation == incarnation and lease is not None:
            worker.note_ended(finished.key, finished.attempt)
        if finished.outcome is Outcome.SETTLED:
            if lease is None:
                self.job_ended(finished.key)
            else:
                self._settled(lease, finished)
        elif lease is None:
            return
        elif finished.reason is Reason.WORKER_LOST:
            # The engine died under its agent, and with it all that ran there: one death for all.
            self._retries.worker_died(
                self._mind.fleet.workers[worker_id], cause=finished.detail or "engine died"
            )
        else:
            reason = finished.reason or Reason.ENGINE_FAILED
            self._retries.failed(lease, reason, charged=finished.charged, detail=finished.detail)

    def job_ended(self, key: str) -> None:
        """Forget a job whose terminal record stands; stop whoever still runs it."""
        lease = self._mind.ledger.get(key)
        if lease is not None:
            worker = self._mind.fleet.workers[lease.worker]
            self._leases.abort(lease, worker, Reason.DUPLICATE)
            worker.note_ended(key, lease.attempt)
            self._mind.settles(lease, cost_tokens_real=None)
        elif self._mind.forgets(key):
            self._mind.out.append(Release(key))

    def cancel(self, key: str) -> None:
        """Stop a job for its owner."""
        lease = self._mind.ledger.get(key)
        if lease is not None:
            if not lease.cancelled:
                lease.cancelled = True
                worker = self._mind.fleet.workers[lease.worker]
                self._leases.abort(lease, worker, Reason.CANCELLED)
        elif self._mind.forgets(key):
            self._mind.out.append(Cancel(key))

    def _lease(self, key: str, worker: str, attempt: Attempt) -> Lease | None:
        lease = self._mind.ledger.get(key)
        if lease is None or lease.worker != worker or lease.attempt != attempt:
            return None
        return lease

    def _hold_off(self, worker: Worker) -> None:
        worker.held_off = True
        self._mind.changed(worker, opened=False)

    def _settled(self, lease: Lease, finished: Finished) -> None:
        mind, usage = self._mind, finished.usage
        worker = mind.fleet.workers[lease.worker]
        real: float | None = None
        if finished.ran and finished.kind is Kind.COMPLETED:
            self._breakers.attempt_completed(lease)
            mind.router.ran(lease, worker, output_tokens=usage.output_tokens, run_s=finished.run_s)
        if not finished.ran:
            real = 0.0
        elif usage.prompt_tokens:
            real = float(
                cost_tokens(
                    uncached_tokens=max(0, usage.prompt_tokens - usage.cached_tokens),
                    output_tokens=usage.output_tokens,
                )
            )
            if usage.cached_tokens or finished.predicted_hit_tokens:
                # An engine that does not tell its hits reports none, and none predicted.
                self._hit(lease, worker, usage.cached_tokens)
        elif finished.kind is not Kind.COMPLETED:
            uncached_tokens = lease.job.prompt_tokens - lease.hit_tokens
            real = float(
                cost_tokens(uncached_tokens=uncached_tokens, output_tokens=lease.output_tokens)
            )
        if real and finished.kind is Kind.COMPLETED:
            mind.costs.learn(lease.job, output_tokens=usage.output_tokens)
            self._estimates.ran(lease, cost_tokens=real, run_s=finished.run_s)
        mind.settles(lease, cost_tokens_real=real)

    def _hit(self, lease: Lease, worker: Worker, cached_tokens: int) -> None:
        if not lease.hit_told:
            lease.hit_told = True
            self._mind.router.hit_seen(lease, worker, cached_tokens=cached_tokens)
