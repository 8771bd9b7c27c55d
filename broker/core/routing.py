"""Where a job runs: filter, score, pick; the lowest score wins."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from broker.core.decisions import Explanation
from broker.core.events import JobSpec
from broker.core.policy import RoutingPolicy
from broker.core.state import Lease, Worker
from broker.wire.messages import CacheSummary


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a job would go now, and what that costs."""

    worker: Worker | None
    """None: no worker may take it now."""
    hit_tokens: int
    uncached_tokens: int
    prefill_s: float
    """Uncached prefill seconds on the best free worker: the order's key."""
    held_for: str = ""
    """Set when the best worker has no room yet and the job is held for it (then `worker` is None)."""
    servable: bool = True
    """False: no known worker serves the model at all (alive, ready, not draining)."""


class Router(Protocol):
    """The seam between order (which job) and place (which worker).

    Added to the first draft, both additive: `place` takes the expected output (for KV room), and
    `reconfigured` takes new knobs of the same policy without losing what is known of caches. A change
    between `round_robin` and the others needs a new router (`make_router`), to which every worker is `joined`.
    """

    def place(
        self,
        job: JobSpec,
        *,
        excluded: Sequence[str],
        at_s: float,
        output_tokens: int | None = None,
    ) -> Placement:
        """Find the best worker with room for the job. Pure look-up: changes no counter.

        `output_tokens` is the expected output, None when only the job's own limit is known. Workers in
        `excluded` are passed over while any other serves the model. Cheap to call again: the answer is
        kept until a worker that could change it changes.
        """
        ...

    def explain(self, job: JobSpec, placement: Placement, *, at_s: float) -> Explanation:
        """Say why, for the decision log: only the candidates that were scored."""
        ...

    def given(self, lease: Lease, worker: Worker, *, at_s: float) -> None:
        """A dispatch was decided: count its work, note stickiness, provisional index entries, heap."""
        ...

    def changed(self, worker: Worker) -> None:
        """Worker's room, load, phase, readiness or model list changed: refresh its place in heaps."""
        ...

    def joined(self, worker: Worker) -> None: ...
    def gone(self, worker: Worker) -> None: ...

    def summary(self, worker: Worker, summary: CacheSummary, *, at_s: float) -> bool:
        """Apply a cache summary; False when a gap in its sequence calls for a full one."""
        ...

    def cache_lost(self, worker: Worker) -> None:
        """New incarnation of agent or engine: all credit gone at once."""
        ...

    def hit_seen(self, lease: Lease, worker: Worker, *, cached_tokens: int) -> None:
        """The engine told the real hit: correct trust."""
        ...

    def reconfigured(self, policy: RoutingPolicy) -> None:
        """Take new knobs; what is known of workers and caches stays."""
        ...

    def sweep(self, at_s: float) -> None:
        """Forget expired entries, a bounded number a call."""
        ...
