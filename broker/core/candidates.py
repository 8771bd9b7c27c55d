"""Which workers need a score for a job: holders of its prefix, and the least loaded of the others.

Of a few holders at the same depth all are candidates. A crowd (a system prompt that hundreds hold)
is represented by its least loaded with room and its least loaded without: the others hold the same
and are worse off. All are found from the front of the pool's order, which expected-case takes
workers ÷ crowd steps, so that small crowds are listed, large ones met early, and the cost of a
decision is bounded by WALK_MAX whatever the number of workers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from broker.core.events import JobSpec
from broker.core.policy import RoutingPolicy
from broker.core.prefix_index import Level
from broker.core.roster import Pool, Roster, Seat, may_serve
from broker.core.scoring import Need
from broker.wire.prefix import BLOCK_BYTES, BLOCKS_MAX
from broker.wire.prompt import BYTES_PER_TOKEN

HOLDERS_EACH_MAX = 4
"""So few holders at one depth are all candidates."""

WALK_MAX = 64
"""Workers looked at from the front of the free, and of the busy, for one that holds or lacks a
prefix."""

COLD_MAX = 2
"""Candidates without the prefix: they were compared for a typical job, and are scored for this
one."""


@dataclass(slots=True)
class _Search:
    """What is looked for, and what was found."""

    need: Need
    excluded: Sequence[str]
    found: dict[int, tuple[Seat, float]] = field(default_factory=dict[int, tuple[Seat, float]])
    """By turn: (seat, tokens of the job it holds)."""
    crowds: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    """(workers, tokens that they hold)."""
    warm: int = 0
    """All workers whose hit counts."""

    def allows(self, seat: Seat) -> bool:
        return may_serve(seat, self.need.job, self.excluded)

    def add(self, seat: Seat, hit_tokens: float) -> None:
        self.found[seat.turn] = (seat, hit_tokens)


class Candidates:
    """Finds them."""

    def __init__(self, policy: RoutingPolicy, roster: Roster) -> None:
        self.policy = policy
        self._roster = roster

    def find(
        self, levels: Sequence[Level], need: Need, pool: Pool, excluded: Sequence[str]
    ) -> list[tuple[Seat, float]]:
        """Return (worker, tokens of the prompt it holds) of each worth a score."""
        search = _Search(need, excluded)
        self._add_holders(search, levels, pool)
        _add_free(search, pool)
        _add_busy(search, pool)
        return list(search.found.values())

    def _add_holders(self, search: _Search, levels: Sequence[Level], pool: Pool) -> None:
        block_tokens = tokens_per_block(search.need.job)
        for level in levels:
            hit_tokens = level.depth_blocks * block_tokens
            workers = level.workers & pool.bits
            if not workers or hit_tokens < self.policy.prefix_tokens_min:
                continue
            search.warm |= workers
            if workers.bit_count() > HOLDERS_EACH_MAX:
                search.crowds.append((workers, hit_tokens))
                continue
            for seat in self._seats(workers):
                if search.allows(seat):
                    search.add(seat, hit_tokens)

    def _seats(self, workers: int) -> Iterator[Seat]:
        while workers:
            bit = workers & -workers
            yield self._roster.of_bit(bit)
            workers ^= bit


def tokens_per_block(job: JobSpec) -> float:
    """Estimate the tokens of a block: the prompt's, spread over its text."""
    blocks = len(job.blocks)
    if not 0 < blocks < BLOCKS_MAX:
        # Nothing to share, or a prompt too long to tell where its text ends.
        return BLOCK_BYTES / BYTES_PER_TOKEN
    # The last, partial block has no hash: half of one, on average. A token is a byte at least.
    return min(float(BLOCK_BYTES), job.prompt_tokens / (blocks + 0.5))


def _add_free(search: _Search, pool: Pool) -> None:
    """Add the least loaded with room of each crowd, and of those that hold nothing."""
    kv_tokens = search.need.kv_tokens
    crowds = list(search.crowds)
    cold = cold_wanted = COLD_MAX if pool.bits & ~search.warm else 0
    for seat in pool.free(WALK_MAX):
        if not (cold or crowds):
            return
        if not (search.allows(seat) and seat.fits(kv_tokens)):
            continue
        if not seat.bit & search.warm:
            if cold:
                cold -= 1
                search.add(seat, 0.0)
        elif (hit_tokens := _take_crowd(crowds, seat)) is not None:
            search.add(seat, hit_tokens)
    if crowds or (cold_wanted and cold == cold_wanted):
        _add_roomiest(search, pool)


def _add_roomiest(search: _Search, pool: Pool) -> None:
    """Add the one with most KV cache left: nobody at the front had enough of it."""
    seat = pool.roomiest()
    if seat is not None and seat.turn not in search.found and search.allows(seat):
        search.add(seat, _take_crowd(list(search.crowds), seat) or 0.0)


def _add_busy(search: _Search, pool: Pool) -> None:
    """Add the least loaded without room of each crowd: the job may wait for it."""
    crowds = list(search.crowds)
    for seat in pool.busy(WALK_MAX):
        if not crowds:
            return
        if search.allows(seat):
            hit_tokens = _take_crowd(crowds, seat)
            if hit_tokens is not None:
                search.add(seat, hit_tokens)


def _take_crowd(crowds: list[tuple[int, float]], seat: Seat) -> float | None:
    """Strike off the crowd a worker belongs to; returns what it holds, None when in none."""
    for place, (workers, hit_tokens) in enumerate(crowds):
        if workers & seat.bit:
            del crowds[place]
            return hit_tokens
    return None
