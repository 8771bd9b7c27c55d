"""AIBrix's prefix-cache routing: the best match among workers whose load is not out of line.

Where the busiest worker has more than 2 x (mean + 1) requests and at least `gap` more than the
idlest, only the least loaded workers are matched. Candidates are ordered by the share of the
prompt's blocks that a table of past choices says they hold (whole percents, falling), then by
requests (rising), equals by chance; the first with at most mean + `deviations` x the standard
deviation of requests is taken. Where nobody matches or none qualifies: the fewest requests.

Source: AIBrix gateway, pkg/plugins/gateway/algorithms/prefix_cache.go and its test; table
pkg/utils/prefixcacheindexer/hash.go: 200,000 blocks in all, each for 20 minutes since its last use,
least lately used first out. A block there is 128 characters by default; here it is the workload's.
"""

import random
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from statistics import fmean, stdev

from broker.sim.peers.base import MakePeer, PeerWorker
from broker.sim.peers.forgetful import Forgetful
from broker.sim.peers.picks import any_least
from broker.sim.request import Request

NAME: str = "aibrix"
SOURCE: str = "AIBrix gateway, algorithms/prefix_cache.go and prefixcacheindexer/hash.go"

TABLE_BLOCKS_MAX = 200_000
TABLE_KEPT_S = 20 * 60.0
IMBALANCE_FACTOR = 2.0

KNOBS = ((8, 1), (16, 2), (4, 1), (8, 2))
"""Gap and deviations: the project's defaults first, then an operator's published setting."""


class AIBrix(Forgetful):
    """Keeps a bounded table of which workers were given which blocks."""

    def __init__(
        self, rng: random.Random, *, gap: int = KNOBS[0][0], deviations: int = KNOBS[0][1]
    ) -> None:
        self._rng = rng
        self._gap = gap
        self._deviations = deviations
        self._holders: OrderedDict[int, tuple[float, tuple[int, ...]]] = OrderedDict()

    def choose(self, request: Request, workers: Sequence[PeerWorker], *, at_s: float) -> int:
        """Return the best matching place in line, or that with the fewest requests."""
        self._expire(at_s)
        counts = [worker.requests for worker in workers]
        percents = self._percents(request, workers, self._candidates(counts))
        place = self._best(percents, counts)
        if place is None:
            place = any_least(counts, self._rng)
        self._insert(request, workers[place].id, at_s)
        return place

    def lost(self, worker: PeerWorker, *, at_s: float) -> None:
        """Take the worker out of the table."""
        del at_s
        for block, (used_at_s, holders) in self._holders.items():
            if worker.id in holders:
                left = tuple(holder for holder in holders if holder != worker.id)
                self._holders[block] = (used_at_s, left)

    def _candidates(self, counts: Sequence[int]) -> list[int]:
        least, most = min(counts), max(counts)
        if most > IMBALANCE_FACTOR * (fmean(counts) + 1) and most - least >= self._gap:
            return [place for place, count in enumerate(counts) if count == least]
        return list(range(len(counts)))

    def _percents(
        self, request: Request, workers: Sequence[PeerWorker], places: list[int]
    ) -> dict[int, int]:
        percents: dict[int, int] = {}
        for depth, block in enumerate(request.blocks, start=1):
            _, holders = self._holders.get(block, (0.0, ()))
            places = [place for place in places if workers[place].id in holders]
            if not places:
                break
            for place in places:
                percents[place] = depth * 100 // len(request.blocks)
        return percents

    def _best(self, percents: dict[int, int], counts: Sequence[int]) -> int | None:
        if not percents:
            return None
        spread = stdev(counts) if len(counts) > 1 else 0.0
        requests_max = fmean(counts) + self._deviations * spread
        places = list(percents)
        self._rng.shuffle(places)
        places.sort(key=lambda place: (-percents[place], counts[place]))
        return next((place for place in places if counts[place] <= requests_max), None)

    def _insert(self, request: Request, worker_id: int, at_s: float) -> None:
        for block in request.blocks:
            _, holders = self._holders.get(block, (0.0, ()))
            if worker_id not in holders:
                holders = (*holders, worker_id)
            self._holders[block] = (at_s, holders)
            self._holders.move_to_end(block)
        while len(self._holders) > TABLE_BLOCKS_MAX:
            self._holders.popitem(last=False)

    def _expire(self, at_s: float) -> None:
        while self._holders:
            block = next(iter(self._holders))
            used_at_s, _ = self._holders[block]
            if at_s - used_at_s <= TABLE_KEPT_S:
                return
            del self._holders[block]


def variants() -> dict[str, MakePeer]:
    """Return gaps and deviations."""
    return {
        f"{NAME} {gap}/{deviations}": partial(AIBrix, gap=gap, deviations=deviations)
        for gap, deviations in KNOBS
    }
