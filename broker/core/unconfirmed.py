"""Chains that workers were given and have not reported as cached yet.

A dispatch is credited at once. Once its prefill is over, the worker's reports should list its
blocks; what a few reports do not is credit for nothing (the engine evicts, caches no such thing, or
the prefix is too short to be reported), and is dropped.
"""

from collections import deque
from collections.abc import Sequence
from itertools import compress

from msgspec import Struct

from broker.core.state import Lease, Worker

CONFIRM_REPORTS_MAX = 4
"""Reports after the prefill in which a block must appear: agents report each second or two, and a
large change takes several reports."""

UNCONFIRMED_CHAINS_MAX = 512
"""Chains followed per worker: twice the slots of a large engine (vLLM's `max_num_seqs`, 256)."""


class Chain(Struct, eq=False):
    """Blocks of a dispatched job from `start` on are not confirmed."""

    lease: Lease
    start: int
    reports_left: int = CONFIRM_REPORTS_MAX

    @property
    def blocks(self) -> Sequence[int]:
        """All its blocks."""
        return self.lease.job.blocks

    @property
    def unconfirmed(self) -> Sequence[int]:
        """Blocks that no report has listed."""
        return self.blocks[self.start :]


class Unconfirmed:
    """By worker."""

    def __init__(self) -> None:
        self._chains: dict[str, deque[Chain]] = {}

    def add(self, lease: Lease, *, start: int) -> Chain | None:
        """Follow a dispatch beyond the `start` blocks held; returns a chain no longer followed."""
        if start >= len(lease.job.blocks):
            return None
        chains = self._chains.setdefault(lease.worker, deque())
        chains.append(Chain(lease, start))
        return chains.popleft() if len(chains) > UNCONFIRMED_CHAINS_MAX else None

    def forget(self, worker_id: str) -> None:
        """Drop all of a worker."""
        self._chains.pop(worker_id, None)

    def running(self, worker: Worker) -> list[Chain]:
        """Return the chains still in prefill: they will be held, whatever was reported."""
        return [chain for chain in self._chains.get(worker.id, ()) if _is_prefilling(chain, worker)]

    def reported(self, worker: Worker, added: Sequence[int]) -> list[Chain]:
        """Take a report's blocks; returns the chains that have waited in vain."""
        chains = self._chains.get(worker.id)
        if not chains:
            return []
        listed = frozenset(added)
        kept: deque[Chain] = deque()
        failed: list[Chain] = []
        for chain in chains:
            _confirm(chain, listed)
            if chain.start >= len(chain.blocks):
                continue
            if not _is_prefilling(chain, worker):
                chain.reports_left -= 1
            (kept if chain.reports_left > 0 else failed).append(chain)
        if kept:
            self._chains[worker.id] = kept
        else:
            del self._chains[worker.id]
        return failed


def _confirm(chain: Chain, listed: frozenset[int]) -> None:
    """Move `start` behind the deepest listed block: a block is held only with all before it."""
    count = len(chain.blocks)
    places = range(count - 1, chain.start - 1, -1)
    hits = compress(places, map(listed.__contains__, reversed(chain.unconfirmed)))
    deepest = next(hits, None)
    if deepest is not None:
        chain.start = deepest + 1
        chain.reports_left = CONFIRM_REPORTS_MAX


def _is_prefilling(chain: Chain, worker: Worker) -> bool:
    lease = chain.lease
    return not lease.prefilled and worker.leases.get(lease.job.key) is lease
