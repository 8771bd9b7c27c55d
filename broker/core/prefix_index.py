"""Which worker holds which prefix: block hash -> the set of workers that hold it.

A block's hash names everything before it too, and a worker's cache is closed: no block without its
parent. So the depth of a chain at a worker is found by galloping search (Bentley & Yao 1976), at a
cost of log(blocks), whatever the number of workers: a look-up yields a bitset, and sets only shrink
on the way down.

- Equal sets are one object (`Holders`): a block with one holder costs its key and a reference.
- Each worker has a bit for one life of its cache. When the cache is lost the bit is retired at
  once, and its traces are cleared as blocks are used again or evicted; until then a mask hides
  them.
- Use is noted by generation, as in generational garbage collection: a block belongs to the
  generation of its last use, and each generation logs its blocks in order. Eviction takes the
  oldest log from its end. Since a use touches a whole chain, parents first, children always go
  before their parents, and what is left is closed.
- A dispatch counts at once, but its blocks are written in bounded steps: until then the chain
  itself is asked.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat

from msgspec import Struct

from broker.core.prefix_search import Holders, Level, deepened, depth_of, search

SHARES = 4
"""A generation ends when it has logged, or added, 1/4 of the index: eviction is exact to that."""

GENERATIONS_MAX = 8
"""Beyond it the oldest goes, even below the bound: so many uses ago, and the logs stay bounded
too."""

TTL_TURNS = 4
"""A generation lasts 1/4 of the time to live at most: blocks live between 1 and 1 1/4 times
that."""

SWEEP_BLOCKS_MAX = 512
"""Most blocks written, and as many forgotten, by one `sweep`: three quarters of a millisecond, and
at 20 ticks a second what 80 GPUs prefill at 8,000 tokens a second."""

EVICT_BLOCKS = 256
"""Forgotten by a sweep before it looks at the bounds again."""

EVICT_ROUNDS_MAX = 8
"""Times that room is made for the same blocks: where most of what was logged longest ago has been
used since, little is found at first, and the search must end."""

HOLDER_SETS_MAX = 65_536
"""Distinct sets remembered so that equal ones are one object; beyond it sharing starts anew."""

UNWRITTEN_CHAINS_MAX = 8
"""Dispatched chains not yet written out; each costs a look-up a comparison, and a full queue is
written."""

RETIRED_BITS_MAX = 4096
"""Lives of caches not yet cleared out of the sets. Beyond it a restarted worker has no credit for a
while."""

CHANGES_MAX = 64
"""Latest changes against which an old answer is checked; an older answer is looked up again."""


def _no_blocks() -> "array[int]":
    return array("Q")


@dataclass(slots=True)
class _Generation:
    number: int
    began_at_s: float = 0.0
    ended_at_s: float = 0.0
    entries: int = 0
    """Added in it."""
    log: "array[int]" = field(default_factory=_no_blocks)
    """Blocks used in it, in order; some of them used again since."""


class _Chain(Struct, eq=False):
    """A dispatched chain that is written out up to `written_blocks`."""

    bit: int
    blocks: Sequence[int]
    written_blocks: int = 0


class _Change(Struct, frozen=True):
    """A worker's holdings changed: by a chain; without blocks, in any way."""

    bit: int
    blocks: Sequence[int] = ()


class PrefixIndex:
    """Bounded by `entries_max` (block, worker) pairs; a block unused for `ttl_s` is forgotten."""

    def __init__(self, *, entries_max: int, ttl_s: float) -> None:
        self._entries_max = entries_max
        self._ttl_s = ttl_s
        self._blocks: dict[int, Holders] = {}
        self._entries = 0
        self._sets: dict[tuple[int, int], Holders] = {}
        self._generations = deque([_Generation(0)])
        self._at_s = 0.0
        self._bits: dict[int, int] = {}
        """Worker index -> its bit (as a mask)."""
        self._live = 0
        self._written = 0
        """Bits that stand in some set, or did."""
        self._free_bits: list[int] = []
        self._bits_made = 0
        self._retired: deque[tuple[int, int]] = deque()
        """(bit, generation in which it was retired)."""
        self._unwritten: deque[_Chain] = deque()
        self._changes: deque[_Change] = deque(maxlen=CHANGES_MAX)
        self.changes_count = 0
        """Changes so far: what an answer of `match` is dated by."""
        self.probes_count = 0
        """Blocks looked up by `match` so far."""

    @property
    def entries_count(self) -> int:
        """How many (block, worker) pairs are kept, those of lost caches included until cleared."""
        return self._entries

    @property
    def blocks_count(self) -> int:
        """How many distinct blocks are kept."""
        return len(self._blocks)

    def reconfigure(self, *, entries_max: int, ttl_s: float) -> None:
        """Take new bounds; `sweep` brings the index under them."""
        self._entries_max = entries_max
        self._ttl_s = ttl_s

    # ---- workers -------------------------------------------------------------------------------

    def bit(self, worker: int) -> int:
        """Return the worker's bit as a mask; 0 while none is to be had."""
        known = self._bits.get(worker)
        if known is not None:
            return known
        if self._free_bits:
            bit = self._free_bits.pop()
        elif len(self._retired) < RETIRED_BITS_MAX:
            bit = 1 << self._bits_made
            self._bits_made += 1
        else:
            return 0
        self._bits[worker] = bit
        self._live |= bit
        return bit

    def forget(self, worker: int) -> None:
        """Drop all credit of a worker at once: its cache is lost, or it is gone."""
        bit = self._bits.pop(worker, None)
        if bit is None:
            return
        self._live &= ~bit
        self._unwritten = deque(chain for chain in self._unwritten if chain.bit != bit)
        if self._written & bit:
            self._retired.append((bit, self._generations[-1].number))
        else:
            self._free_bits.append(bit)
        self._note(_Change(bit))

    # ---- what workers hold ---------------------------------------------------------------------

    def store(self, worker: int, hashes: Sequence[int]) -> None:
        """Note blocks that a worker reports, parents before children."""
        bit = self.bit(worker)
        if not bit or not hashes:
            return
        self._turn_if_due()
        self._put(hashes, bit)
        self._note(_Change(bit))

    def drop(self, worker: int, hashes: Sequence[int]) -> None:
        """Note blocks that a worker no longer holds."""
        bit = self._bits.get(worker, 0)
        if not bit or not hashes:
            return
        if any(chain.bit == bit for chain in self._unwritten):
            self.write()
        for block in hashes:
            self._remove(block, bit)
        self._note(_Change(bit))

    def hold(self, worker: int, blocks: Sequence[int], *, start: int) -> None:
        """Credit a worker with a whole chain from now on; it held `start` blocks of it before."""
        bit = self.bit(worker)
        if not bit or not blocks:
            return
        if len(self._unwritten) == UNWRITTEN_CHAINS_MAX:
            self._write_part(len(self._unwritten[0].blocks))
        self._unwritten.append(_Chain(bit, blocks))
        if start < len(blocks):
            self._note(_Change(bit, blocks))

    def write(self, blocks_max: int | None = None) -> None:
        """Write out chains of `hold`, at most `blocks_max` blocks of them."""
        left = sum(len(chain.blocks) for chain in self._unwritten)
        if blocks_max is not None:
            left = min(left, blocks_max)
        while self._unwritten and left > 0:
            left -= self._write_part(left)

    # ---- look-up -------------------------------------------------------------------------------

    def match(self, blocks: Sequence[int]) -> list[Level]:
        """Return who holds a prefix of the chain, deepest first; a worker stands in one level only.

        Depths are exact while holdings are closed (as agents report them, and as eviction leaves
        them). Where a parent was removed under its child, the depth may be that of the child, never
        less than the truth, until the chain is next dispatched there. At most LEVELS_MAX depths.
        """
        levels, probes = search(self._blocks, self._live, blocks)
        self.probes_count += probes
        for chain in self._unwritten:
            levels = deepened(levels, blocks, chain.blocks, chain.bit)
        return levels

    def update(
        self, blocks: Sequence[int], levels: list[Level], *, since: int
    ) -> list[Level] | None:
        """Bring an answer of `match` up to date; None when it must be asked for anew.

        `since` is `changes_count` at that time. Returns the same list when nothing changed for it.
        """
        missed = self.changes_count - since
        if missed > len(self._changes):
            return None
        if missed == 0 or not blocks:
            return levels
        first = self._blocks.get(blocks[0])
        holders = first.bits if first is not None else 0
        for level in levels:
            holders |= level.workers
        for change in islice(self._changes, len(self._changes) - missed, None):
            if change.blocks:
                levels = deepened(levels, blocks, change.blocks, change.bit)
                if depth_of(change.bit, levels):
                    holders |= change.bit
            elif change.bit & holders:
                return None
        return levels

    def _note(self, change: _Change) -> None:
        self._changes.append(change)
        self.changes_count += 1

    # ---- writing -------------------------------------------------------------------------------

    def _write_part(self, blocks_max: int) -> int:
        """Write the next blocks of the oldest unwritten chain; returns how many."""
        chain = self._unwritten[0]
        if not chain.written_blocks:
            self._turn_if_due()
        part = chain.blocks[chain.written_blocks : chain.written_blocks + blocks_max]
        chain.written_blocks += len(part)
        if not self._is_fresh(part, chain.bit):
            self._put(part, chain.bit)
        if chain.written_blocks == len(chain.blocks):
            self._unwritten.popleft()
        return len(part)

    def _is_fresh(self, hashes: Sequence[int], bit: int) -> bool:
        """Say whether all these blocks are the worker's, and used in this generation."""
        now = self._generations[-1].number
        # A set of few objects, and its order reaches nothing: all must agree.
        sets = set(map(self._blocks.get, hashes))
        return all(held is not None and held.generation == now and held.bits & bit for held in sets)

    def _put(self, hashes: Sequence[int], bit: int) -> None:
        """Credit a worker with blocks, as used now."""
        hashes = hashes[: self._entries_max]
        # What finds no room, at the end of the chain, is not credited.
        hashes = hashes[: self._make_room(len(hashes))]
        self._written |= bit
        newest = self._generations[-1]
        before = self._entries
        if self._blocks.keys().isdisjoint(hashes):
            self._put_new(hashes, self._set(bit, newest.number), newest.log)
        else:
            self._put_each(hashes, bit, newest)
        newest.entries += max(0, self._entries - before)

    def _put_new(self, hashes: Sequence[int], alone: Holders, log: "array[int]") -> None:
        before = len(self._blocks)
        self._blocks.update(zip(hashes, repeat(alone)))
        log.extend(hashes)
        self._entries += len(self._blocks) - before

    def _put_each(self, hashes: Sequence[int], bit: int, newest: _Generation) -> None:
        known = self._blocks
        alone = self._set(bit, newest.number)
        last: Holders | None = None
        joined = alone
        for block in hashes:
            holders = known.get(block)
            if holders is None:
                known[block] = alone
                newest.log.append(block)
                self._entries += 1
                continue
            if holders is not last:
                last = holders
                joined = self._set((holders.bits & self._live) | bit, newest.number)
            if joined is not holders:
                known[block] = joined
                self._entries += joined.count - holders.count
                if holders.generation != newest.number:
                    newest.log.append(block)

    def _remove(self, block: int, bit: int) -> None:
        holders = self._blocks.get(block)
        if holders is None or not holders.bits & bit:
            return
        left = holders.bits & self._live & ~bit
        self._entries += left.bit_count() - holders.count
        if left:
            self._blocks[block] = self._set(left, holders.generation)
        else:
            del self._blocks[block]

    def _set(self, bits: int, generation: int) -> Holders:
        """Return the one object for these workers and this generation."""
        key = (bits, generation)
        holders = self._sets.get(key)
        if holders is None:
            if len(self._sets) >= HOLDER_SETS_MAX:
                self._sets.clear()
            holders = self._sets[key] = Holders(bits, generation)
        return holders

    # ---- forgetting ----------------------------------------------------------------------------

    def sweep(self, at_s: float) -> None:
        """Let time pass: write what is unwritten, forget what expired, in bounded steps."""
        self._at_s = at_s
        self.write(SWEEP_BLOCKS_MAX)
        self._turn_if_due()
        for _ in range(SWEEP_BLOCKS_MAX // EVICT_BLOCKS):
            oldest = self._generations[0]
            is_over = self._entries > self._entries_max or len(self._generations) > GENERATIONS_MAX
            is_closed = oldest is not self._generations[-1]
            is_expired = is_closed and at_s - oldest.ended_at_s >= self._ttl_s
            if not (is_expired or is_over):
                return
            self._evict(EVICT_BLOCKS)

    def _turn_if_due(self) -> None:
        newest = self._generations[-1]
        if not newest.log:
            newest.began_at_s = self._at_s
            return
        if self._unwritten and self._unwritten[0].written_blocks:
            return
        share = self._entries_max // SHARES
        is_full = len(newest.log) >= share or newest.entries >= share
        if is_full or self._at_s - newest.began_at_s >= self._ttl_s / TTL_TURNS:
            self._turn()

    def _turn(self) -> None:
        newest = self._generations[-1]
        newest.ended_at_s = self._at_s
        self._generations.append(_Generation(newest.number + 1, began_at_s=self._at_s))

    def _make_room(self, entries: int) -> int:
        """Evict until so many entries fit, in a bounded number of steps; returns how many do.

        Where logs are too many, they are taken from twice as fast as they grow.
        """
        for _ in range(EVICT_ROUNDS_MAX):
            over = self._entries + entries - self._entries_max
            if over <= 0 or not self._blocks:
                break
            # Blocks have several holders: that many entries are fewer blocks.
            self._evict(-(-over * len(self._blocks) // self._entries))
        for _ in range(2):
            if len(self._generations) > GENERATIONS_MAX:
                self._evict(entries)
        return max(0, self._entries_max - self._entries)

    def _evict(self, blocks_max: int) -> None:
        """Take the oldest generation's last blocks; those go that were not used again since."""
        if len(self._generations) == 1:
            self._turn()
        oldest = self._generations[0]
        start = max(0, len(oldest.log) - blocks_max)
        last = oldest.log[start:]
        del oldest.log[start:]
        sets = set(map(self._blocks.get, last))
        alike = sets.pop() if len(sets) == 1 else None
        if alike is not None and alike.generation == oldest.number:
            # All in C: in a full index each new block costs an eviction. One logged twice goes
            # once.
            before = len(self._blocks)
            deque(map(self._blocks.pop, last, repeat(None)), maxlen=0)
            self._entries -= (before - len(self._blocks)) * alike.count
        else:
            self._evict_each(reversed(last), oldest.number)
        if not oldest.log:
            self._generations.popleft()
            self._free_retired()

    def _evict_each(self, blocks: Iterable[int], generation: int) -> None:
        for block in blocks:
            holders = self._blocks.get(block)
            if holders is not None and holders.generation == generation:
                del self._blocks[block]
                self._entries -= holders.count

    def _free_retired(self) -> None:
        oldest = self._generations[0].number
        while self._retired and self._retired[0][1] < oldest:
            bit, _ = self._retired.popleft()
            self._written &= ~bit
            self._free_bits.append(bit)
