"""The baseline: the next worker in turn that has room, whatever it has cached.

The same filter and the same room as the cache-aware router, so that a comparison shows the score
alone.
"""

from collections.abc import Sequence

from broker.core.candidates import claim_worker, unclaim_worker
from broker.core.claim import Claim
from broker.core.decisions import Candidate, Explanation, HeldBy
from broker.core.events import JobSpec
from broker.core.placement import Placement
from broker.core.policy import RoutingPolicy
from broker.core.roster import Roster, void_if_all
from broker.core.seat import Seat, may_serve
from broker.core.state import Lease, Worker
from broker.wire.messages import CacheSummary


class RoundRobinRouter:
    """Knows no cache; turns are the roster's own order when load counts for nothing."""

    def __init__(self, policy: RoutingPolicy) -> None:
        self._policy = policy
        self._roster = Roster(policy, by_load=False)

    @property
    def index_entries_count(self) -> int:
        """None: no cache is known."""
        return 0

    def place(
        self,
        job: JobSpec,
        *,
        excluded: Sequence[str],
        at_s: float,
        output_tokens: int | None = None,
    ) -> Placement:
        """Find the next worker in turn with room for the job."""
        del at_s
        pool = self._roster.pool(job.adapter or job.model)
        if pool is None:
            return _nowhere(job, servable=False)
        excluded = void_if_all(pool, excluded)
        output = job.output_tokens_max if output_tokens is None else output_tokens
        for seat in pool.free(pool.free_count):
            if may_serve(seat, job, excluded) and seat.fits(
                job, job.prompt_tokens + output, job.prompt_tokens
            ):
                return _at(job, seat)
        return _nowhere(job, servable=pool.servable)

    def most_tokens(self, model: str, *, batch: bool) -> float:
        """Tell how many prompt tokens a worker takes at most beside what it has to prefill."""
        del batch
        pool = self._roster.pool(model)
        return 0.0 if pool is None else pool.most_tokens

    def claim(
        self,
        job: JobSpec,
        claim: Claim,
        *,
        excluded: Sequence[str],
        over: Claim | None = None,
    ) -> Worker | None:
        """Keep a worker for a job without room."""
        pool = self._roster.pool(job.adapter or job.model)
        return claim_worker(self._roster, pool, job, claim, excluded, over)

    def unclaim(self, worker: Worker) -> None:
        """Let everybody have a worker again."""
        unclaim_worker(self._roster, worker)

    def cached_tokens(self, job: JobSpec) -> float:
        """Know of no cache."""
        del job
        return 0.0

    def explain(self, job: JobSpec, placement: Placement, *, at_s: float) -> Explanation:
        """Say whose turn it was."""
        worker = placement.worker
        candidates: tuple[Candidate, ...] = ()
        if worker is not None:
            candidates = (Candidate(worker.id, 0.0, 0, worker.backlog_tokens),)
        return Explanation(
            policy="round_robin",
            candidates=candidates,
            previous_worker="",
            predicted_hit_tokens=0,
            predicted_ttft_s=placement.prefill_s,
            queue_s=max(0.0, at_s - job.enqueued_at_s),
            held_by=HeldBy.NOTHING,
        )

    def given(self, lease: Lease, worker: Worker, *, at_s: float) -> None:
        """Send the worker to the end of the turn."""
        del lease, at_s
        seat = self._roster.seat(worker.id)
        if seat is not None:
            self._roster.gave(seat, uncached_tokens=0)

    def changed(self, worker: Worker) -> None:
        """See a worker's state as it is now."""
        seat = self._roster.seat(worker.id)
        if seat is not None:
            self._roster.refresh(seat, bit=0)

    def joined(self, worker: Worker) -> None:
        """Meet a worker."""
        self._roster.join(worker)

    def gone(self, worker: Worker) -> None:
        """Forget a worker."""
        seat = self._roster.seat(worker.id)
        if seat is not None:
            self._roster.leave(seat)

    def summary(self, worker: Worker, summary: CacheSummary, *, at_s: float) -> bool:
        """Ignore a summary: nothing here needs a full one."""
        del worker, summary, at_s
        return True

    def cache_lost(self, worker: Worker) -> None:
        """Do nothing: no credit was given."""

    def ran(self, lease: Lease, worker: Worker, *, output_tokens: int, run_s: float) -> None:
        """Do nothing: sizes are not looked at."""

    def hit_seen(self, lease: Lease, worker: Worker, *, cached_tokens: int) -> None:
        """Do nothing: no hit was predicted."""

    def reconfigured(self, policy: RoutingPolicy) -> None:
        """Take new knobs."""
        self._policy = policy
        self._roster.reconfigure(policy)

    def sweep(self, at_s: float) -> list[str]:
        """Do nothing: no memory grows here, and nothing opens by time."""
        del at_s
        return []


def _at(job: JobSpec, seat: Seat) -> Placement:
    return Placement(seat.worker, 0, job.prompt_tokens, job.prompt_tokens / seat.prefill_tokens_s)


def _nowhere(job: JobSpec, *, servable: bool) -> Placement:
    return Placement(None, 0, job.prompt_tokens, 0.0, full=True, servable=servable)
