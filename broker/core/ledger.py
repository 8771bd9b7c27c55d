"""Who has what: leases, and every sum over them.

Usage is the set of live leases. `add` and `remove` are the only way in and out, and every sum
(worker, quota rows, queue, pool) moves there and nowhere else; `correct` is the only way a cost
changes. So no path can forget to count, and there is no counter with a timer that could forget a
running job.
"""

from collections.abc import Iterator

from broker.core.queues import Queue, Queues
from broker.core.quotas import Quotas
from broker.core.state import Lease, Worker
from broker.wire.ids import BATCH_BAND, ONLINE_BANDS


class Ledger:
    """All live leases."""

    def __init__(self, queues: Queues, quotas: Quotas) -> None:
        self._leases: dict[str, Lease] = {}
        self._queues = queues
        self._quotas = quotas

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def __contains__(self, key: str) -> bool:
        return key in self._leases

    def get(self, key: str) -> Lease | None:
        """Find a job's lease."""
        return self._leases.get(key)

    def queue_of(self, lease: Lease) -> Queue:
        """Find the queue that a lease's job came from."""
        job = lease.job
        return self._queues.queue(lane=job.lane, band=job.band, model=job.model)

    def add(self, lease: Lease, worker: Worker, *, starts: bool) -> None:
        """Count a lease. `starts` is False for one that was found running."""
        assert lease.job.key not in self._leases, "a job has one lease"
        self._leases[lease.job.key] = lease
        queue = self.queue_of(lease)
        worker.add(lease)
        queue.inflight_jobs += 1
        queue.pool.inflight_jobs += 1
        queue.pool.inflight_batch_jobs += queue.band == BATCH_BAND
        queue.pool.inflight_online_jobs += queue.band in ONLINE_BANDS
        self._quotas.take(queue.rows, lease.cost_tokens, starts=starts)

    def remove(self, lease: Lease, worker: Worker, *, unstarted: bool = False) -> None:
        """Uncount a lease. `unstarted`: surely no worker ran it."""
        del self._leases[lease.job.key]
        queue = self.queue_of(lease)
        worker.remove(lease.job.key)
        queue.inflight_jobs -= 1
        queue.pool.inflight_jobs -= 1
        queue.pool.inflight_batch_jobs -= queue.band == BATCH_BAND
        queue.pool.inflight_online_jobs -= queue.band in ONLINE_BANDS
        self._quotas.give_back(queue.rows, lease.cost_tokens, unstarted=unstarted)

    def correct(self, lease: Lease, cost_tokens: float) -> None:
        """Correct a lease's cost."""
        delta_tokens = cost_tokens - lease.cost_tokens
        lease.cost_tokens = cost_tokens
        self._quotas.correct(self.queue_of(lease).rows, delta_tokens)

    def reconfigured(self, quotas: Quotas) -> None:
        """Count all leases under new rows. The queues know them already."""
        self._quotas = quotas
        for lease in self:
            quotas.take(self.queue_of(lease).rows, lease.cost_tokens, starts=False)
