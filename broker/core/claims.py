"""Room kept for a job that others overtake because they are smaller.

The order lets a job pass another only for that one's prefill seconds ÷ α, but chooses among those
that may go now. Where KV cache, prefill room or a token row frees in small pieces, small jobs take
every piece, and a large one would wait as long as they come. So once a job has waited its prefill
seconds ÷ α and still finds no room, it claims some: the worker with most KV cache left, or a seat
and its cost in the row that refused it. What was enqueued later than it may be overtaken by finds
that room taken, what is more urgent by its band does not. Nothing that runs is touched, so the wait
that is left is one residual of that worker's jobs, and one of the row's: while a row refuses it, no
worker stands idle for it.

One job of each model has a claim at a time, and only if its lane is among the least served: a claim
is a job's own turn, kept, and no way past other lanes.
"""

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from broker.core.claim import Claim
from broker.core.queues import Waiting
from broker.core.rows import RowUsage
from broker.core.state import Worker

if TYPE_CHECKING:
    from broker.core.mind import Mind


@dataclass(slots=True, eq=False)
class _Claimed:
    """A claim and what is kept for it."""

    waiting: Waiting
    claim: Claim
    worker: Worker | None = None
    rows: list[RowUsage] = field(default_factory=list[RowUsage])


class Claims:
    """The claims of all models."""

    def __init__(self, mind: "Mind") -> None:
        self._mind = mind
        self._by_model: dict[str, _Claimed] = {}

    def __bool__(self) -> bool:
        """Say whether anybody has one."""
        return bool(self._by_model)

    def of(self, model: str) -> Waiting | None:
        """Return the job of a model for which room is kept."""
        claimed = self._by_model.get(model)
        return None if claimed is None else claimed.waiting

    def worker_of(self, model: str) -> Worker | None:
        """Return the worker that is kept for a model's job."""
        claimed = self._by_model.get(model)
        return None if claimed is None else claimed.worker

    def may_claim(self, waiting: Waiting) -> bool:
        """Say whether a job without room has waited long enough, and has none claimed yet."""
        claimed = self._by_model.get(waiting.job.model)
        if claimed is not None and claimed.waiting is not waiting:
            return waiting.queue.band < claimed.claim.band and self._is_overdue(waiting)
        if claimed is not None and claimed.worker is not None:
            return False
        return claimed is not None or self._is_overdue(waiting)

    def claim_worker(self, waiting: Waiting, *, excluded: tuple[str, ...]) -> None:
        """Keep a worker for a job that finds room nowhere.

        A less urgent job's claim gives way, but only to one that gets something.
        """
        claimed, other = self._claimed(waiting)
        over = None if other is None else other.claim
        worker = self._mind.router.claim(waiting.job, claimed.claim, excluded=excluded, over=over)
        if worker is None:
            return
        if other is not None:
            other.worker = None if other.worker is worker else other.worker
            self._drop(other)
        claimed.worker = worker
        self._by_model[waiting.job.model] = claimed

    def claim_row(self, waiting: Waiting, usage: RowUsage, cost_tokens: float) -> None:
        """Keep a seat and a job's cost in a row that refuses it; till then its worker is others'.

        Where it is kept for another job that is no less urgent, it stays so.
        """
        claimed, other = self._claimed(waiting)
        self._release_worker(claimed)
        kept = usage.claim
        if kept is not None and kept.key != waiting.job.key and kept.band <= claimed.claim.band:
            if other is None and not claimed.rows:
                self._by_model.pop(waiting.job.model, None)
            return
        if other is not None:
            self._drop(other)
        if usage not in claimed.rows:
            if usage.claim is not None:
                self._take_row(usage)
            claimed.rows.append(usage)
        usage.claim = replace(claimed.claim, cost_tokens=cost_tokens)
        self._by_model[waiting.job.model] = claimed

    def left(self, waiting: Waiting) -> None:
        """Give up what was kept for a job, if anything: it went, or waits no more."""
        claimed = self._by_model.get(waiting.job.model)
        if claimed is not None and claimed.waiting is waiting:
            self._drop(claimed)

    def check(self) -> None:
        """Give up claims of jobs that left, and workers that take no new job."""
        for claimed in list(self._by_model.values()):
            waiting, worker = claimed.waiting, claimed.worker
            in_line = self._mind.queues.waiting.get(waiting.job.key) is waiting
            if (
                not in_line
                or waiting.resting
                or (worker is not None and not self._takes_new(worker, waiting))
            ):
                self._drop(claimed)

    def clear(self) -> None:
        """Give up all: rows are about to be others."""
        for claimed in list(self._by_model.values()):
            self._drop(claimed)

    def _is_overdue(self, waiting: Waiting) -> bool:
        """Say whether a job without room waits for too long; if not, note when it will."""
        overdue_at_s = waiting.job.enqueued_at_s + self._patience_s(waiting)
        if self._mind.at_s >= overdue_at_s:
            return True
        pool = waiting.queue.pool
        pool.overdue_at_s = min(pool.overdue_at_s, overdue_at_s)
        return False

    def _patience_s(self, waiting: Waiting) -> float:
        """Tell for how long others may go first: a job's prefill seconds ÷ α."""
        policy, pool = self._mind.policy, waiting.queue.pool
        worker = next(iter(pool.workers.values()), None)
        rate = worker.prefill_tokens_s if worker is not None else 0.0
        prefill_s = waiting.job.prompt_tokens / (rate or policy.routing.prefill_tokens_s)
        credit = policy.order.wait_credit
        return prefill_s / credit if credit else math.inf

    def _claimed(self, waiting: Waiting) -> tuple[_Claimed, _Claimed | None]:
        """Return a job's claim, or one to be; and that of another job of its model, if it has."""
        claimed = self._by_model.get(waiting.job.model)
        if claimed is not None and claimed.waiting is waiting:
            return claimed, None
        late_from_s = waiting.job.enqueued_at_s + self._patience_s(waiting)
        own = Claim(waiting.job.key, waiting.queue.band, late_from_s)
        return _Claimed(waiting, own), claimed

    def _takes_new(self, worker: Worker, waiting: Waiting) -> bool:
        fleet = self._mind.fleet
        return (
            fleet.workers.get(worker.id) is worker
            and fleet.serves_now(worker)
            and worker.breaker.takes_new
            and {waiting.job.model, waiting.job.adapter or waiting.job.model} <= {*worker.models}
            and not _is_passed_over(worker, waiting)
        )

    def _drop(self, claimed: _Claimed) -> None:
        mind = self._mind
        del self._by_model[claimed.waiting.job.model]
        for usage in claimed.rows:
            mind.quotas.unclaim(usage)
        self._release_worker(claimed)

    def _take_row(self, usage: RowUsage) -> None:
        """Take a row from the job of another model that it is kept for."""
        for claimed in list(self._by_model.values()):
            if usage in claimed.rows:
                claimed.rows.remove(usage)
                usage.claim = None
                if not claimed.rows and claimed.worker is None:
                    self._drop(claimed)

    def _release_worker(self, claimed: _Claimed) -> None:
        """Let everybody have the worker that was kept for a job, if one was."""
        mind, worker = self._mind, claimed.worker
        if worker is None:
            return
        claimed.worker = None
        mind.router.unclaim(worker)
        if mind.fleet.workers.get(worker.id) is worker:
            mind.changed(worker, opened=True)


def _is_passed_over(worker: Worker, waiting: Waiting) -> bool:
    """Say whether a job may not go where it failed; where it failed everywhere it may."""
    if worker.id not in waiting.excluded:
        return False
    workers = waiting.queue.pool.workers
    return len(workers) > len(waiting.excluded) or not workers.keys() <= {*waiting.excluded}
