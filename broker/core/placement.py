"""The seam between order (which job) and place (which worker): what the scheduler asks a router."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from broker.core.claim import Claim
from broker.core.decisions import Explanation
from broker.core.events import JobSpec
from broker.core.policy import RoutingPolicy
from broker.core.state import Lease, Worker
from broker.wire.messages import CacheSummary


class Placement(Struct, frozen=True):
    """Where a job would go now, and what that costs."""

    worker: Worker | None
    """None: no worker may take it now."""
    hit_tokens: int
    uncached_tokens: int
    prefill_s: float
    """Uncached prefill seconds on the best free worker: the order's key."""
    held_for: str = ""
    """Set when the best worker has no room yet and the job waits for it (`worker` is None then)."""
    full: bool = False
    """No larger job finds room either, whatever is cached: slots or KV cache are what it lacks."""
    confined: bool = False
    """Workers have room for it, and batch may use none of them."""
    servable: bool = True
    """False: no known worker serves the model at all (ready, not draining, not gone)."""
    least_tokens: int = 0
    """Of its prompt, what must be computed at whoever holds most of it; 0 where nobody looked."""


class Router(Protocol):
    """What the scheduler calls. A change of worker state is told after it was made."""

    @property
    def index_entries_count(self) -> int:
        """Pairs (block, worker) that are kept, those of lost caches included until cleared."""
        ...

    def place(
        self,
        job: JobSpec,
        *,
        excluded: Sequence[str],
        at_s: float,
        output_tokens: int | None = None,
    ) -> Placement:
        """Find the best worker with room for the job. Pure look-up: changes no counter.

        `output_tokens` is the expected output, None when only the job's own limit is known. Workers
        in `excluded` are passed over while any other serves the model. Cheap to call again: the
        answer is kept until a worker changes that could change it.
        """
        ...

    def most_tokens(self, model: str, *, batch: bool) -> float:
        """Tell how many prompt tokens a worker takes at most beside what it has to prefill.

        No worker that serves the model (of those that batch may use) has room for a job that must
        compute more.
        """
        ...

    def claim(
        self,
        job: JobSpec,
        claim: Claim,
        *,
        excluded: Sequence[str],
        over: Claim | None = None,
    ) -> Worker | None:
        """Keep a worker for a job without room: for whom `claim` binds, none is there.

        It is one that takes new jobs now, and nobody else's but that of `over`, a claim that gives
        way. None if there is none. The claim stands until it is taken back or the worker is gone.
        """
        ...

    def unclaim(self, worker: Worker) -> None:
        """Take back the claim on a worker."""
        ...

    def cached_tokens(self, job: JobSpec) -> float:
        """Tell how much of a job's prompt is cached where most of it is. Pure look-up."""
        ...

    def explain(self, job: JobSpec, placement: Placement, *, at_s: float) -> Explanation:
        """Say why, for the decision log: only the candidates that were scored."""
        ...

    def given(self, lease: Lease, worker: Worker, *, at_s: float) -> None:
        """Note a dispatch, once `worker` has the lease in its sums: its turn, stickiness, cache."""
        ...

    def changed(self, worker: Worker) -> None:
        """See a worker's room, load, phase, readiness, rates or models as they are now."""
        ...

    def joined(self, worker: Worker) -> None:
        """Meet a worker, or a returning one."""
        ...

    def gone(self, worker: Worker) -> None:
        """Forget a worker: nothing goes there, and its credit is dropped."""
        ...

    def summary(self, worker: Worker, summary: CacheSummary, *, at_s: float) -> bool:
        """Apply a cache summary; False when a gap in its sequence calls for a full one."""
        ...

    def cache_lost(self, worker: Worker) -> None:
        """Drop all credit at once: the agent or its engine has started anew."""
        ...

    def ran(self, lease: Lease, worker: Worker, *, output_tokens: int, run_s: float) -> None:
        """Learn from a completed job how long it was there, and what that cost the others."""
        ...

    def hit_seen(self, lease: Lease, worker: Worker, *, cached_tokens: int) -> None:
        """Correct trust by what the engine really found cached."""
        ...

    def reconfigured(self, policy: RoutingPolicy) -> None:
        """Take new knobs; what is known of workers and caches stays.

        A change between `round_robin` and the others needs a new router, which every worker joins.
        """
        ...

    def sweep(self, at_s: float) -> list[str]:
        """Let time pass: forget what expired, a bounded number a call.

        Returns the models of which a worker may take more than before.
        """
        ...
