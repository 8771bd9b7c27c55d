"""What an engine's prefix cache holds, guessed from what it was given: two kinds of cache. Pure.

`BlockCache` keeps blocks of any prefix, least recently used out first and the deepest block of a
chain before the others, as vLLM and SGLang do. `SequenceCache` keeps one whole sequence a slot and
reuses the longest common prefix of an idle one, as llama.cpp does.

Both count what falls out in `gone`. A miss of something held is told by `missed`: an LRU cache that
lost a block has lost all that was used before it (the inclusion property, Mattson et al. 1970), so
a miss tells about more than its own chain.
"""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

SLOT_SIMILARITY_MIN = 0.1
"""llama.cpp's `slot_prompt_similarity`: a smaller common share of the prompt takes the oldest slot
instead."""

Chain = Sequence[int]
"""Prefix-block hashes of one prompt, first block first."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """What a request should find cached: blocks from its front, and when they were last used."""

    blocks: int = 0
    used_at_s: float = 0.0


class Store(Protocol):
    """One kind of cache. Requests have a name from `begin` to `end`."""

    def depth(self, chain: Chain) -> int:
        """Return how many blocks from the front of `chain` are held."""
        ...

    def begin(self, name: Hashable, chain: Chain, *, at_s: float) -> Reuse:
        """Give a request to the engine; returns what it can reuse."""
        ...

    def fill(self, name: Hashable, *, at_s: float) -> None:
        """Note that its prefill is done: its whole chain is held."""
        ...

    def end(self, name: Hashable, *, tail_blocks: int, at_s: float) -> None:
        """Note that it no longer runs; its answer left `tail_blocks` behind that no chain names."""
        ...

    def bound(self, blocks_max: int) -> None:
        """Hold at most so many blocks from now on."""
        ...

    def expire(self, before_s: float) -> None:
        """Forget what was not used since `before_s`."""
        ...

    def missed(self, chain: Chain, *, used_at_s: float) -> None:
        """Forget what must be gone: the engine did not find `chain`, last used then."""
        ...

    def lost(self, blocks: Sequence[int]) -> None:
        """Forget blocks that the engine says are gone, and all that must have gone before them."""
        ...

    def clear(self) -> None:
        """Hold nothing: the engine restarted, and what ran was aborted."""
        ...

    def take_gone(self) -> list[int]:
        """Return the blocks that fell out since the last call and are not back."""
        ...


class BlockCache:
    """Blocks, least recently used first. Within a chain, children stand before their parents."""

    def __init__(self) -> None:
        self._used_at_s: OrderedDict[int, float] = OrderedDict()
        self._running: dict[Hashable, Chain] = {}
        self._pins: Counter[int] = Counter()
        self._gone: list[int] = []
        self._tails = 0
        """Answers' blocks made so far; they are named by negative numbers, which no hash is."""

    def depth(self, chain: Chain) -> int:
        """Return how many blocks from the front of `chain` are held."""
        # A block is held only if all before it are, so the edge is found by halving.
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high) // 2
            if chain[middle] in self._used_at_s:
                low = middle + 1
            else:
                high = middle
        return low

    def begin(self, name: Hashable, chain: Chain, *, at_s: float) -> Reuse:
        """Pin what it reuses and what it will add; the latter is held only once computed."""
        depth = self.depth(chain)
        reuse = Reuse(depth, self._used_at_s[chain[depth - 1]]) if depth else Reuse()
        self._touch(chain[:depth], at_s)
        self._running[name] = chain
        self._pins.update(chain)
        return reuse

    def fill(self, name: Hashable, *, at_s: float) -> None:
        """Hold the whole chain."""
        self._touch(self._running.get(name, ()), at_s)

    def end(self, name: Hashable, *, tail_blocks: int, at_s: float) -> None:
        """Unpin it; its answer is cached behind its prompt and goes first."""
        chain = self._running.pop(name, ())
        for block in chain:
            if self._pins[block] == 1:
                del self._pins[block]
            else:
                self._pins[block] -= 1
        for _ in range(tail_blocks):
            self._tails += 1
            self._used_at_s[-self._tails] = at_s
        self._touch(chain[: self.depth(chain)], at_s)

    def bound(self, blocks_max: int) -> None:
        """Evict the least recently used; what runs stays, even beyond the bound."""
        for _ in range(len(self._used_at_s)):
            if len(self._used_at_s) <= blocks_max:
                return
            block = next(iter(self._used_at_s))
            if block in self._pins:
                self._used_at_s.move_to_end(block)
            else:
                self._drop(block)

    def expire(self, before_s: float) -> None:
        """Forget what was not used since `before_s`, but for what runs."""
        out: list[int] = []
        for block, used_at_s in self._used_at_s.items():
            if used_at_s >= before_s:
                break
            if block not in self._pins:
                out.append(block)
        for block in out:
            self._drop(block)

    def missed(self, chain: Chain, *, used_at_s: float) -> None:
        """Forget all that was last used before it."""
        del chain
        self.expire(used_at_s)

    def lost(self, blocks: Sequence[int]) -> None:
        """Forget them and all that stands before them, their children among that."""
        left = {block for block in blocks if block in self._used_at_s and block not in self._pins}
        out: list[int] = []
        for block in self._used_at_s:
            if not left:
                break
            if block not in self._pins:
                out.append(block)
                left.discard(block)
        for block in out:
            self._drop(block)

    def clear(self) -> None:
        """Hold nothing."""
        self._gone.extend(self._used_at_s)
        self._used_at_s.clear()
        self._running.clear()
        self._pins.clear()

    def take_gone(self) -> list[int]:
        """Return the blocks that fell out since the last call and are not back."""
        gone = [block for block in self._gone if block >= 0 and block not in self._used_at_s]
        self._gone.clear()
        return gone

    def _touch(self, chain: Chain, at_s: float) -> None:
        for block in reversed(chain):
            self._used_at_s[block] = at_s
            self._used_at_s.move_to_end(block)

    def _drop(self, block: int) -> None:
        del self._used_at_s[block]
        self._gone.append(block)


@dataclass(slots=True)
class _Slot:
    chain: Chain = ()
    used_at_s: float = 0.0
    name: Hashable | None = None
    """Request that runs in it; its prompt is `filling` until computed."""
    filling: Chain = ()


class SequenceCache:
    """One sequence a slot."""

    def __init__(self, *, slots: int) -> None:
        self._slots = [_Slot() for _ in range(slots)]
        self._held: Counter[int] = Counter()
        self._gone: list[int] = []

    def depth(self, chain: Chain) -> int:
        """Return the longest prefix of `chain` in any slot."""
        return max((_common(slot.chain, chain) for slot in self._slots), default=0)

    def begin(self, name: Hashable, chain: Chain, *, at_s: float) -> Reuse:
        """Take the idle slot with the longest common prefix, else the one idle for longest."""
        idle = [slot for slot in self._slots if slot.name is None]
        if not idle:
            return Reuse()
        slot = max(idle, key=lambda one: _common(one.chain, chain))
        common = _common(slot.chain, chain)
        if common <= SLOT_SIMILARITY_MIN * len(chain):
            slot = min(idle, key=lambda one: one.used_at_s)
            common = _common(slot.chain, chain)
        reuse = Reuse(common, slot.used_at_s) if common else Reuse()
        # What differs is overwritten now; the rest of the prompt is there once computed.
        self._hold(slot, chain[:common])
        slot.used_at_s, slot.name, slot.filling = at_s, name, chain
        return reuse

    def fill(self, name: Hashable, *, at_s: float) -> None:
        """Hold the whole chain in its slot."""
        for slot in self._slots:
            if slot.name == name:
                self._hold(slot, slot.filling)
                slot.used_at_s = at_s

    def end(self, name: Hashable, *, tail_blocks: int, at_s: float) -> None:
        """Make its slot idle; the sequence stays, with the answer behind it in the same slot."""
        del tail_blocks
        for slot in self._slots:
            if slot.name == name:
                slot.name, slot.filling, slot.used_at_s = None, (), at_s

    def bound(self, blocks_max: int) -> None:
        """Do nothing: the slots are the bound, and a sequence never exceeds its slot's context."""

    def expire(self, before_s: float) -> None:
        """Empty idle slots not used since `before_s`."""
        for slot in self._slots:
            if slot.name is None and slot.used_at_s < before_s:
                self._hold(slot, ())

    def missed(self, chain: Chain, *, used_at_s: float) -> None:
        """Empty the idle slots that should have served it: they hold something else."""
        for slot in self._slots:
            is_suspect = slot.name is None and slot.used_at_s <= used_at_s
            if is_suspect and _common(slot.chain, chain):
                self._hold(slot, ())

    def lost(self, blocks: Sequence[int]) -> None:
        """Empty the idle slots that hold one of them."""
        gone = set(blocks)
        for slot in self._slots:
            if slot.name is None and not gone.isdisjoint(slot.chain):
                self._hold(slot, ())

    def clear(self) -> None:
        """Empty all slots."""
        for slot in self._slots:
            self._hold(slot, ())
            slot.used_at_s, slot.name, slot.filling = 0.0, None, ()

    def take_gone(self) -> list[int]:
        """Return the blocks that no slot holds any more, since the last call."""
        gone = [block for block in self._gone if block not in self._held]
        self._gone.clear()
        return gone

    def _hold(self, slot: _Slot, chain: Chain) -> None:
        common = _common(slot.chain, chain)
        self._held.update(chain[common:])
        for block in slot.chain[common:]:
            self._held[block] -= 1
            if not self._held[block]:
                del self._held[block]
                self._gone.append(block)
        slot.chain = chain


def _common(left: Chain, right: Chain) -> int:
    # Chained hashes: equal at one place means equal before it.
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high) // 2
        if left[middle] == right[middle]:
            low = middle + 1
        else:
            high = middle
    return low
