"""Workers that went, for people who look later: which, how, when, and what of theirs waits again.

Kept by the process over its leaderships; another broker that takes over has seen nothing of it.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace

from broker.core.decisions import WorkerGone

REMEMBERED_S = 3600.0
"""How long a worker that went is told: who is called at night looks within that."""

WORKERS_MAX = 256
"""Workers remembered; beyond them the one that went longest ago is forgotten. Fleets whose workers
get a new name each time come to this in a large roll-out."""


@dataclass(frozen=True, slots=True)
class Departure:
    """A worker that went, perhaps more than once."""

    worker: str
    how: str
    """The last time: `lost`, `left` (it was draining), or `restarted` under its name."""
    cause: str
    at_s: float
    times: int
    """Within REMEMBERED_S of each other."""
    jobs: int
    """Leased to it as it went, all times."""
    requeued_jobs: int
    """Of these, put back to wait again; the others ended with it (`worker_lost`, cancelled)."""


class Departures:
    """The latest departure of each worker."""

    def __init__(self) -> None:
        """Nobody went yet."""
        self._by_worker: OrderedDict[str, Departure] = OrderedDict()

    def note(self, gone: WorkerGone, *, at_s: float) -> None:
        """Remember that a worker went."""
        self._forget(at_s)
        how = "restarted" if gone.restarted else "left" if gone.draining else "lost"
        now = Departure(gone.worker, how, gone.cause, at_s, 1, gone.jobs, gone.requeued_jobs)
        before = self._by_worker.pop(gone.worker, None)
        if before is not None:
            now = replace(
                now,
                times=before.times + 1,
                jobs=before.jobs + now.jobs,
                requeued_jobs=before.requeued_jobs + now.requeued_jobs,
            )
        elif len(self._by_worker) >= WORKERS_MAX:
            self._by_worker.popitem(last=False)
        self._by_worker[gone.worker] = now

    def latest(self, *, at_s: float) -> tuple[Departure, ...]:
        """Return who went within REMEMBERED_S, the latest first."""
        self._forget(at_s)
        return tuple(reversed(self._by_worker.values()))

    def _forget(self, at_s: float) -> None:
        while self._by_worker:
            oldest = next(iter(self._by_worker.values()))
            if at_s - oldest.at_s <= REMEMBERED_S:
                return
            del self._by_worker[oldest.worker]
