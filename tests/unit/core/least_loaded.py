"""The simplest complete router: the free worker with the fewest jobs. No cache, no hold."""

# ruff: noqa: ARG002 (the Protocol names more than this one needs)

import math
from collections.abc import Sequence

from broker.core.claim import Claim
from broker.core.decisions import Candidate, Explanation, HeldBy
from broker.core.events import JobSpec
from broker.core.placement import Placement
from broker.core.policy import RoutingPolicy
from broker.core.state import Lease, Phase, Worker
from broker.wire.messages import CacheSummary


class LeastLoadedRouter:
    """Fewest leases first, then longest without a dispatch; room is slots and KV tokens."""

    def __init__(self, *, prefill_tokens_s: float = 8000.0) -> None:
        self.workers: dict[str, Worker] = {}
        self.prefill_tokens_s = prefill_tokens_s
        self.hits: dict[tuple[str, str], int] = {}
        """By (job key, worker): cached tokens of its prompt there."""
        self.cache_lost_count = 0
        self.hits_seen: list[tuple[str, int]] = []
        self.summaries_fit = True
        self.placed = 0
        self.claims: dict[str, Claim] = {}
        self.told: dict[str, tuple[object, ...]] = {}
        """Each worker as it was last told: a router that keeps what it heard must not be behind."""

    index_entries_count = 0

    def place(
        self,
        job: JobSpec,
        *,
        excluded: Sequence[str],
        at_s: float,
        output_tokens: int | None = None,
    ) -> Placement:
        self.placed += 1
        for worker in self.workers.values():
            assert self.told[worker.id] == standing(worker), "every change is told"
        able = [worker for worker in self.workers.values() if takes_new(worker, job.model)]
        takers = [worker for worker in able if worker.breaker.takes_new]
        takers = [worker for worker in takers if worker.id not in excluded] or takers
        need = job.prompt_tokens + (
            job.output_tokens_max if output_tokens is None else output_tokens
        )
        free = [worker for worker in takers if has_room(worker, need)]
        free = [one for one in free if not self._bars(one, job)]
        if not free:
            return Placement(None, 0, job.prompt_tokens, 0.0, full=True, servable=bool(able))
        best = min(free, key=lambda one: (len(one.leases), one.dispatched_at_s, one.id))
        hit = self.hits.get((job.key, best.id), 0)
        uncached = job.prompt_tokens - hit
        return Placement(best, hit, uncached, uncached / self.prefill_tokens_s)

    def most_tokens(self, model: str, *, batch: bool) -> float:
        """Know no bound."""
        return math.inf

    def claim(
        self,
        job: JobSpec,
        claim: Claim,
        *,
        excluded: Sequence[str],
        over: Claim | None = None,
    ) -> Worker | None:
        able = [one for one in self.workers.values() if takes_new(one, job.model)]
        able = [one for one in able if one.breaker.takes_new and one.id not in excluded]
        mine = [one for one in able if self.claims.get(one.id) in (None, over)]
        free = [one for one in mine if has_room(one, 0)]
        if not free:
            return None
        best = min(free, key=lambda one: (one.kv_tokens - one.kv_tokens_max, one.id))
        self.claims[best.id] = claim
        return best

    def unclaim(self, worker: Worker) -> None:
        self.claims.pop(worker.id, None)

    def ran(self, lease: Lease, worker: Worker, *, output_tokens: int, run_s: float) -> None:
        pass

    def cached_tokens(self, job: JobSpec) -> float:
        return max((hit for (key, _), hit in self.hits.items() if key == job.key), default=0)

    def _bars(self, worker: Worker, job: JobSpec) -> bool:
        claim = self.claims.get(worker.id)
        return claim is not None and claim.binds(job)

    def explain(self, job: JobSpec, placement: Placement, *, at_s: float) -> Explanation:
        worker = placement.worker
        assert worker is not None
        scored = (Candidate(worker.id, 0.0, placement.hit_tokens, worker.backlog_tokens),)
        return Explanation(
            "least_loaded", scored, "", placement.hit_tokens, 0.0, 0.0, HeldBy.NOTHING
        )

    def given(self, lease: Lease, worker: Worker, *, at_s: float) -> None:
        assert lease.job.key in worker.leases
        self.told[worker.id] = standing(worker)

    def changed(self, worker: Worker) -> None:
        assert worker.id in self.workers
        self.told[worker.id] = standing(worker)

    def joined(self, worker: Worker) -> None:
        assert worker.id not in self.workers
        self.workers[worker.id] = worker
        self.told[worker.id] = standing(worker)

    def gone(self, worker: Worker) -> None:
        del self.workers[worker.id]
        self.claims.pop(worker.id, None)

    def summary(self, worker: Worker, summary: CacheSummary, *, at_s: float) -> bool:
        return self.summaries_fit

    def cache_lost(self, worker: Worker) -> None:
        self.cache_lost_count += 1

    def hit_seen(self, lease: Lease, worker: Worker, *, cached_tokens: int) -> None:
        self.hits_seen.append((lease.job.key, cached_tokens))

    def reconfigured(self, policy: RoutingPolicy) -> None:
        self.prefill_tokens_s = policy.prefill_tokens_s

    def sweep(self, at_s: float) -> list[str]:
        del at_s
        return []


def standing(worker: Worker) -> tuple[object, ...]:
    """All of a worker that a placement may rest on."""
    return (
        worker.phase,
        worker.ready,
        worker.draining,
        worker.held_off,
        worker.breaker.takes_new,
        worker.models,
        worker.slots,
        len(worker.leases),
        worker.backlog_tokens,
        worker.kv_tokens,
        worker.kv_tokens_max,
    )


def takes_new(worker: Worker, model: str) -> bool:
    """Say whether a worker may be given a job of the model, room and breaker aside."""
    return (
        worker.phase is Phase.LIVE
        and worker.ready
        and not worker.draining
        and not worker.held_off
        and model in worker.models
    )


def has_room(worker: Worker, kv_tokens: int) -> bool:
    """Say whether a worker has a free slot and KV cache for the job."""
    if len(worker.leases) >= worker.slots:
        return False
    return not worker.kv_tokens_max or worker.kv_tokens + kv_tokens <= 0.9 * worker.kv_tokens_max
