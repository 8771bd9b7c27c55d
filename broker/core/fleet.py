"""The workers: who is known, who serves which model now, and how orders to them are numbered."""

import heapq

from broker.core.queues import Queues
from broker.core.quotas import Quotas
from broker.core.state import Phase, Worker


class Fleet:
    """All known workers. Membership of the pools follows their state through `refresh` alone."""

    def __init__(self, queues: Queues, quotas: Quotas) -> None:
        self.workers: dict[str, Worker] = {}
        self._queues = queues
        self._quotas = quotas
        self._serves: dict[str, tuple[tuple[str, ...], int, int]] = {}
        """By worker: the models whose pools it stands in, and the slots counted there, all and
        busy ones."""
        self._indexes_free: list[int] = []
        self._indexes_used = 0
        self._orders: dict[str, int] = {}
        """Numbers used by workers that left: a worker that returns in this epoch must not see one
        again."""

    def join(self, worker_id: str, *, at_s: float) -> Worker:
        """Make a worker known."""
        if self._indexes_free:
            index = heapq.heappop(self._indexes_free)
        else:
            index = self._indexes_used
            self._indexes_used += 1
        worker = Worker(worker_id, index, joined_at_s=at_s, reported_at_s=at_s)
        worker.orders = self._orders.pop(worker_id, 0)
        self.workers[worker_id] = worker
        return worker

    def leave(self, worker: Worker) -> None:
        """Forget a worker that has no leases any more."""
        assert not worker.leases, "leases are revoked first"
        worker.phase = Phase.GONE
        self.refresh(worker)
        del self.workers[worker.id]
        self._orders[worker.id] = worker.orders
        heapq.heappush(self._indexes_free, worker.index)

    def number_order(self, worker: Worker) -> int:
        """Number an order to a worker."""
        worker.orders += 1
        return worker.orders

    def serves_now(self, worker: Worker) -> bool:
        """Say whether a worker is one of its pools: its breaker aside, it takes new jobs."""
        return worker.phase is Phase.LIVE and worker.ready and not worker.draining

    def refresh(self, worker: Worker) -> None:
        """Bring the pools in line with a worker's phase, readiness, models, slots and breaker."""
        serves = self.serves_now(worker)
        models, slots = (worker.models, worker.slots_for_new) if serves else ((), 0)
        models_before, slots_before, busy_before = self._serves.get(worker.id, ((), 0, 0))
        if (models, slots) == (models_before, slots_before):
            self.busied(worker)
            return
        for model in models_before:
            pool = self._queues.pool(model)
            del pool.workers[worker.id]
            pool.slots -= slots_before
            pool.busy_slots -= busy_before
            pool.opened()  # Who was kept from all but this one may now go anywhere.
        for model in models:
            pool = self._queues.pool(model)
            pool.workers[worker.id] = worker
            pool.slots += slots
        if models:
            self._serves[worker.id] = models, slots, 0
        else:
            self._serves.pop(worker.id, None)
        self.busied(worker)
        self.count(self._quotas)

    def busied(self, worker: Worker) -> None:
        """Bring the pools in line with how many of a worker's slots its jobs take."""
        models, slots, before = self._serves.get(worker.id, ((), 0, 0))
        busy = min(slots, len(worker.leases))
        if busy == before:
            return
        for model in models:
            pool = self._queues.pool(model)
            pool.busy_slots += busy - before
            if busy < before:
                pool.settled = False  # More is free beside what is kept for online jobs.
        self._serves[worker.id] = models, slots, busy

    def count(self, quotas: Quotas) -> None:
        """Tell the rows that follow the fleet how many workers are live."""
        self._quotas = quotas
        live = {pool.model: len(pool.workers) for pool in self._queues.pools.values()}
        quotas.fleet_changed(live, live_workers_all=len(self._serves))
