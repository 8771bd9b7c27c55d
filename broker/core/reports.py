"""What a worker says of itself, compared with what the ledger says of it.

The ledger bridges the time between reports, the reports repair the ledger: each kind of difference
is put right at once and told, so that losing any one message (an order, an answer, a note) heals
with the next report. An order's number and the report's echo tell "not yet arrived" from "not
running". Reports that come late, of an earlier life or sequence, say nothing.
"""

from broker.core.breakers import Breakers
from broker.core.costs import cost_tokens
from broker.core.decisions import (
    Abort,
    Difference,
    DifferenceKind,
    Drained,
    DrainOrder,
    Resync,
)
from broker.core.decode_rate import Kinds
from broker.core.endings import Endings
from broker.core.events import JobSpec
from broker.core.leases import RESTARTED, Leases
from broker.core.mind import Mind
from broker.core.retries import Retries
from broker.core.state import Lease, Worker
from broker.wire.ids import split_job_key
from broker.wire.messages import Attempt, Heartbeat, InFlight, Load, Reason

RATE_RISE_RATIO_MIN = 1.1
"""A smaller rise of a worker's prefill rate is no reason to look at the queues again."""


class Reports:
    """Takes heartbeats."""

    def __init__(
        self,
        mind: Mind,
        leases: Leases,
        retries: Retries,
        endings: Endings,
        breakers: Breakers,
    ) -> None:
        self._mind = mind
        self._breakers = breakers
        self._leases = leases
        self._retries = retries
        self._endings = endings
        self._kinds = Kinds()

    def take(self, beat: Heartbeat) -> None:
        """Take a heartbeat."""
        worker = self._mind.fleet.workers.get(beat.worker)
        if worker is not None and beat.incarnation > worker.incarnation:
            self._leases.revoke(worker, cause=RESTARTED)
            worker = None
        if worker is None:
            worker = self._join(beat)
        elif beat.incarnation < worker.incarnation or beat.sequence <= worker.sequence:
            return
        worker.sequence = beat.sequence
        worker.reported_at_s = self._mind.at_s
        opened = self._update(worker, beat)
        self._leases.heard(worker)
        for finished in beat.finished:
            self._endings.attempt_ended(worker.id, beat.incarnation, finished)
        self._compare(worker, beat)
        self._learn(worker, beat.load)
        worker.forget_ended()
        self._mind.changed(worker, opened=opened)
        self._caches(worker, beat)
        self.look_for_drained(worker)

    def _learn(self, worker: Worker, load: Load) -> None:
        """Take what an engine says of its memory and speed, its list of jobs being compared."""
        worker.passes(self._mind.at_s)
        worker.learn_kv_use(load.kv_tokens_used)
        kind = (worker.models, worker.slots, worker.kv_tokens_max)
        if load.decode_tokens_s > 0:
            kv_tokens = worker.kv_over_time.read()
            if kv_tokens is None:
                kv_tokens = worker.kv_tokens_in_use  # Its engine's page, before its first answers.
            step_s = 1.0 / load.decode_tokens_s
            worker.own_decode_rate.learn(kv_tokens=kv_tokens, step_s=step_s)
            self._kinds.learn(kind, kv_tokens=kv_tokens, step_s=step_s)
        worker.decode_rate = self._kinds.line(kind, worker.own_decode_rate)

    def look_for_drained(self, worker: Worker) -> None:
        """Say once that a draining worker is empty."""
        if worker.draining and not worker.leases and not worker.drained:
            worker.drained = True
            self._mind.out.append(Drained(worker.id))
        elif not worker.draining:
            worker.drained = False

    def drain(self, worker: Worker, *, draining: bool) -> None:
        """Give an operator's word to a worker."""
        worker.drain_wanted = worker.draining = draining
        self._order_drain(worker)
        self._mind.changed(worker, opened=not draining)
        self.look_for_drained(worker)

    def _order_drain(self, worker: Worker) -> None:
        number = self._mind.fleet.number_order(worker)
        self._mind.out.append(DrainOrder(worker.id, number, worker.drain_wanted))

    def _join(self, beat: Heartbeat) -> Worker:
        mind = self._mind
        worker = mind.fleet.join(beat.worker, at_s=mind.at_s)
        worker.incarnation = beat.incarnation
        worker.engine_incarnation = beat.engine_incarnation
        worker.models, worker.slots = _models(beat), beat.slots
        self._breakers.joined(worker, faults=beat.engine_faults)
        worker.cache_sequences = beat.cache_sequences
        mind.router.joined(worker)
        self._leases.joined(worker)
        return worker

    def _update(self, worker: Worker, beat: Heartbeat) -> bool:
        """Take over what a worker says of itself; say whether it may take more than before."""
        before = _capacity(worker)
        if beat.engine_incarnation != worker.engine_incarnation:
            worker.engine_incarnation = beat.engine_incarnation
            self._breakers.engine_restarted(worker)
            self._mind.router.cache_lost(worker)
        worker.models, worker.slots, worker.ready = _models(beat), beat.slots, beat.ready
        worker.cache_sequences = beat.cache_sequences
        worker.draining = beat.draining or worker.drain_wanted
        worker.held_off = False
        if worker.drain_wanted and not beat.draining:
            self._order_drain(worker)  # It may never have arrived, and saying it twice is harmless.
        if beat.epoch == self._mind.epoch:
            worker.echo = max(worker.echo, beat.echo)
        load, rate = beat.load, worker.prefill_tokens_s
        worker.kv_tokens_max, worker.waiting = load.kv_tokens_max, load.waiting
        worker.prefill_tokens_s = load.prefill_tokens_s
        if load.decode_tokens_s > 0:  # Else nothing was decoded alone since the last report.
            worker.decode_tokens_s = load.decode_tokens_s
        return _capacity(worker) != before or _faster(load.prefill_tokens_s, was=rate)

    def _caches(self, worker: Worker, beat: Heartbeat) -> None:
        mind = self._mind
        if beat.summary is not None and not mind.router.summary(
            worker, beat.summary, at_s=mind.at_s
        ):
            mind.out.append(Resync(worker.id))

    def _compare(self, worker: Worker, beat: Heartbeat) -> None:
        worker.token_gap.turn()
        listed: set[str] = set()
        for entry in beat.inflight:
            listed.add(entry.key)
            self._listed(worker, entry)
        unlisted = [lease for lease in worker.leases.values() if lease.job.key not in listed]
        for lease in unlisted:
            if lease.number > worker.echo:
                if lease.unanswered:
                    self._leases.probe(worker)  # If the order was lost, only a later one can tell.
                continue
            self._differ(DifferenceKind.LEASED_NOT_RUNNING, lease.job.key, worker, lease.attempt)
            if lease.aborting and not lease.cancelled:
                self._retries.failed(lease, Reason.STALLED, charged=True)
            else:
                self._retries.lost(lease)

    def _listed(self, worker: Worker, entry: InFlight) -> None:
        mind = self._mind
        if entry.attempt.epoch > mind.epoch:
            return  # A later broker's: this one is no longer the leader, and will hear of it.
        if worker.has_ended(entry.key, entry.attempt):
            return  # It ended while this report was on its way.
        lease = mind.ledger.get(entry.key)
        if lease is None:
            self._listed_unleased(worker, entry)
        elif lease.attempt == entry.attempt and lease.worker == worker.id:
            self._progressed(worker, lease, entry)
        elif lease.worker == worker.id:
            self._listed_under_another_attempt(worker, lease, entry)
        else:
            self._listed_twice(worker, lease, entry)

    def _listed_unleased(self, worker: Worker, entry: InFlight) -> None:
        mind = self._mind
        waiting = mind.queues.waiting.get(entry.key)
        if waiting is None and mind.was_revoked(entry.key, entry.attempt):
            self._abort(worker, entry, DifferenceKind.STALE_ATTEMPT)
            return
        self._adopt(worker, entry)

    def _listed_under_another_attempt(self, worker: Worker, lease: Lease, entry: InFlight) -> None:
        if lease.number > worker.echo:
            return  # Our order is on its way; until it has arrived, nothing is known.
        self._differ(DifferenceKind.LEASED_NOT_RUNNING, entry.key, worker, lease.attempt)
        self._mind.unleases(lease)
        self._adopt(worker, entry, known=lease)

    def _listed_twice(self, worker: Worker, lease: Lease, entry: InFlight) -> None:
        if entry.attempt < lease.attempt:
            self._abort(worker, entry, DifferenceKind.RUNS_TWICE)
            return
        other = self._mind.fleet.workers[lease.worker]
        self._differ(DifferenceKind.RUNS_TWICE, entry.key, other, lease.attempt)
        self._leases.abort(lease, other, Reason.DUPLICATE)
        self._mind.unleases(lease)
        self._adopt(worker, entry, known=lease)

    def _progressed(self, worker: Worker, lease: Lease, entry: InFlight) -> None:
        mind = self._mind
        lease.accept(mind.at_s)
        if entry.prefilled and worker.mark_prefilled(lease, at_s=mind.at_s):
            lease.progressed_at_s = mind.at_s
            mind.changed(worker, opened=True)
        if entry.output_tokens > lease.output_tokens:
            grown = entry.output_tokens - max(1, lease.output_tokens)
            if grown > 0:
                worker.token_gap.note(tokens=grown, seconds=mind.at_s - lease.progressed_at_s)
            lease.output_tokens = entry.output_tokens
            lease.progressed_at_s = mind.at_s
            mind.corrects(lease)
        if lease.aborting and lease.abort_number <= worker.echo:
            # Still at it: the order to stop was lost, or was not heard.
            self._leases.abort(
                lease, worker, Reason.CANCELLED if lease.cancelled else Reason.STALLED
            )

    def _adopt(self, worker: Worker, entry: InFlight, *, known: Lease | None = None) -> None:
        mind = self._mind
        waiting = mind.queues.waiting.get(entry.key)
        job = _spec(entry)
        failures, excluded = (), ()
        if waiting is not None:
            mind.forgets(entry.key)
            job, failures, excluded = waiting.job, waiting.failures, waiting.excluded
        elif known is not None:
            job, failures, excluded = known.job, known.failures, known.excluded
        hit_tokens = min(entry.cached_tokens, job.prompt_tokens)
        uncached_tokens = job.prompt_tokens - hit_tokens
        output_tokens = max(mind.costs.expected_output_tokens(job), entry.output_tokens)
        lease = Lease(
            job,
            entry.attempt,
            worker.id,
            number=0,
            granted_at_s=entry.started_at_s,
            cost_tokens=float(
                cost_tokens(uncached_tokens=uncached_tokens, output_tokens=output_tokens)
            ),
            uncached_tokens=0 if entry.prefilled else uncached_tokens,
            hit_tokens=hit_tokens,
            output_tokens_expected=output_tokens,
            output_tokens=entry.output_tokens,
            prefilled=entry.prefilled,
            accepted=True,
            progressed_at_s=mind.at_s,
            cancelled=known.cancelled if known is not None else False,
            failures=failures,
            excluded=excluded,
        )
        mind.leases(lease, worker, starts=False)
        if known is None:
            self._differ(DifferenceKind.RUNS_UNLEASED, entry.key, worker, entry.attempt)

    def _abort(self, worker: Worker, entry: InFlight, kind: DifferenceKind) -> None:
        number = self._mind.fleet.number_order(worker)
        self._mind.out.append(Abort(entry.key, worker.id, entry.attempt, number, Reason.DUPLICATE))
        self._differ(kind, entry.key, worker, entry.attempt)

    def _differ(self, kind: DifferenceKind, key: str, worker: Worker, attempt: Attempt) -> None:
        detail = f"attempt {attempt.epoch}.{attempt.number}"
        self._mind.out.append(Difference(kind, key, worker.id, detail))


def _models(beat: Heartbeat) -> tuple[str, ...]:
    """List what a worker serves, each once: in a pool it has one place."""
    return tuple(dict.fromkeys(beat.models))


def _capacity(worker: Worker) -> tuple[object, ...]:
    """All that a worker's report may change of what it can be given."""
    return (
        worker.models,
        worker.slots,
        worker.ready,
        worker.draining,
        worker.held_off,
        worker.breaker.takes_new,
        worker.kv_tokens_max,
    )


def _faster(rate: float, *, was: float) -> bool:
    """Say whether a worker prefills so much faster that it may take more."""
    return rate > RATE_RISE_RATIO_MIN * was


def _spec(entry: InFlight) -> JobSpec:
    """Tell what a worker's list says of a job."""
    lane, _ = split_job_key(entry.key)
    return JobSpec(
        entry.key,
        lane,
        entry.band,
        entry.model,
        client=entry.client,
        adapter=entry.adapter,
        prompt_tokens=entry.prompt_tokens,
        output_tokens_max=entry.output_tokens_max,
        enqueued_at_s=entry.enqueued_at_s,
        stream_sequence=entry.stream_sequence,
        bare=True,
    )
