"""What the slots of one engine hold that caches one whole sequence a slot, as llama.cpp does.

Such an engine finds a prefix only in an idle slot: what runs with it has it alone, and a second
prompt that begins alike is computed anew in another slot, over what that one held. So of what a
worker holds, only so much can be reused now as its idle slots have. Which slot a prompt takes
follows from them: the longest common prefix, or else the one that is idle for longest. The broker
knows it as it dispatches; the worker's word comes a report later.

What a slot held before the first dispatch that we know of is not known: what the worker is credited
with is taken to be there, and such slots count as idle for longest.

Source: llama.cpp, tools/server, `get_available_slot`.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from broker.core.prefix_search import common_blocks
from broker.core.state import Lease

SIMILARITY_MIN = 0.1
"""llama.cpp's `slot_prompt_similarity`, as it ships: a slot that shares no more of the prompt is
taken only if it is idle for longest."""

SLOTS_MAX = 256
"""Slots that are followed: llama.cpp's own bound (`LLAMA_MAX_SEQ`)."""

Chain = Sequence[int]


class _Slot(Struct, eq=False):
    chain: Chain | None = None
    """What it holds; None: not known."""
    freed: int = -1
    """Rises with each job that ends: the lowest is idle for longest."""
    lease: Lease | None = None
    """What runs in it: its chain is `chain`."""
    kept_blocks: int = 0
    """Of that, what it held already."""


class SlotCache:
    """One worker's slots."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._slots = [_Slot() for _ in range(min(count, SLOTS_MAX))]
        self._freed = 0

    def reusable_blocks(self, chain: Chain) -> int | None:
        """Tell how much of a chain an idle slot holds; None: as much as the worker is credited."""
        best = in_use = 0
        is_known = True
        for slot in self._slots:
            if slot.chain is None:
                is_known = False
            elif slot.lease is None:
                best = max(best, common_blocks(slot.chain, chain))
            else:
                in_use = max(in_use, common_blocks(slot.chain, chain))
        return best if is_known or best or in_use else None

    def begin(self, lease: Lease, *, depth_blocks: int) -> Chain:
        """Give a dispatched job its slot; returns the blocks that no slot holds any more.

        `depth_blocks`: how much of its chain the worker is credited with.
        """
        idle = [slot for slot in self._slots if slot.lease is None]
        if not idle:
            return ()
        chain = lease.job.blocks
        slot, kept_blocks = _taken(idle, chain, depth_blocks)
        before = slot.chain or ()
        slot.lease, slot.chain, slot.kept_blocks = lease, chain, kept_blocks
        return before[self._deepest(before) :]

    def settle(self, leases: Mapping[str, Lease]) -> None:
        """Free the slots of jobs that run no more."""
        for slot in self._slots:
            lease = slot.lease
            if lease is None or leases.get(lease.job.key) is lease:
                continue
            self._freed += 1
            slot.lease, slot.freed = None, self._freed
            if not lease.prefilled and slot.chain is not None:
                # Cut short: how far it came is not known.
                slot.chain = slot.chain[: slot.kept_blocks]

    def lost(self, blocks: Iterable[int]) -> None:
        """Forget what the worker says that no slot holds."""
        gone = frozenset(blocks)
        for slot in self._slots:
            if slot.lease is None and slot.chain:
                kept = next((at for at, one in enumerate(slot.chain) if one in gone), None)
                slot.chain = slot.chain if kept is None else slot.chain[:kept]

    def unknow(self) -> None:
        """Forget what idle slots hold: a full report says it anew."""
        for slot in self._slots:
            if slot.lease is None:
                slot.chain, slot.freed = None, -1

    def _deepest(self, chain: Chain) -> int:
        """Return how much of a chain any slot holds."""
        held = [slot.chain for slot in self._slots if slot.chain]
        return max([common_blocks(one, chain) for one in held], default=0)


def _taken(idle: Sequence[_Slot], chain: Chain, depth_blocks: int) -> tuple[_Slot, int]:
    """Return the slot that the engine takes, and how many blocks it reuses of it."""
    known = [(common_blocks(one.chain, chain), one) for one in idle if one.chain]
    common, best = max(known, key=lambda one: one[0], default=(0, None))
    unknown = next((one for one in idle if one.chain is None), None)
    if unknown is not None and depth_blocks > common:
        return unknown, depth_blocks
    if best is not None and common > SIMILARITY_MIN * len(chain):
        return best, common
    oldest = unknown or min(idle, key=lambda one: one.freed)
    return oldest, common_blocks(oldest.chain or (), chain)
