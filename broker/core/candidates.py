"""Which workers need a score for a job: holders of its prefix, and the least loaded of the others.

Of a few holders at the same depth all are candidates. More are represented by the least loaded with
room and the least loaded without: the others hold the same and are worse off. A crowd (a system
prompt that most hold) is not even listed: its best is met on the way from the front of the pool's
order, after (workers ÷ crowd) steps on average. So a decision looks at about the square root of the
number of workers, and at WALK_MAX whatever happens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter

from broker.core.events import JobSpec
from broker.core.prefix_search import Level
from broker.core.roster import Pool, Roster, Seat, may_serve
from broker.core.scoring import Need
from broker.wire.prefix import BLOCK_BYTES, BLOCKS_MAX
from broker.wire.prompt import BYTES_PER_TOKEN

HOLDERS_EACH_MAX = 4
"""So few holders at one depth are all candidates."""

WALK_MAX = 128
"""Most steps from the front of a pool's order in search of one of a crowd, or of one outside: twice
the mean at 4,096 workers."""

_entry = attrgetter("entry")


@dataclass(frozen=True, slots=True)
class Holding:
    """Workers of a pool that hold equally much of a job's prompt."""

    workers: int
    hit_tokens: float
    seats: tuple[Seat, ...]
    """All of them; empty when they are a crowd."""


def holdings(
    levels: Sequence[Level], job: JobSpec, pool: Pool, roster: Roster, *, prefix_tokens_min: int
) -> tuple[Holding, ...]:
    """Return who of a pool holds a useful part of the job, deepest first."""
    block_tokens = tokens_per_block(job)
    found: list[Holding] = []
    for level in levels:
        hit_tokens = level.depth_blocks * block_tokens
        workers = level.workers & pool.bits
        if workers and hit_tokens >= prefix_tokens_min:
            count = workers.bit_count()
            is_crowd = count > HOLDERS_EACH_MAX and count * count > len(pool.order)
            seats = () if is_crowd else tuple(roster.of_bits(workers))
            found.append(Holding(workers, hit_tokens, seats))
    return tuple(found)


def tokens_per_block(job: JobSpec) -> float:
    """Return the tokens of a block; where nobody told, the prompt's are spread over its text."""
    if job.block_tokens:
        return job.block_tokens
    blocks = len(job.blocks)
    if not 0 < blocks < BLOCKS_MAX:
        # Nothing to share, or a prompt too long to tell where its text ends.
        return BLOCK_BYTES / BYTES_PER_TOKEN
    # The last, partial block has no hash: half of one, on average. A token is a byte at least.
    return min(float(BLOCK_BYTES), job.prompt_tokens / (blocks + 0.5))


def find(
    held: Sequence[Holding], need: Need, pool: Pool, excluded: Sequence[str]
) -> Iterator[tuple[Seat, float]]:
    """Yield (worker, prompt tokens it holds) of each worth a score, every worker once."""
    warm = 0
    for holding in held:
        warm |= holding.workers
        hit_tokens = holding.hit_tokens
        if len(holding.seats) > HOLDERS_EACH_MAX:
            for seat in _best_listed(holding.seats, need, excluded):
                yield seat, hit_tokens
        elif holding.seats:
            for seat in holding.seats:
                if may_serve(seat, need.job, excluded):
                    yield seat, hit_tokens
        else:
            for seat in _best_of_crowd(holding.workers, need, pool, excluded):
                yield seat, hit_tokens
    if warm.bit_count() < len(pool.order):
        cold = _first_free(warm, need, pool, excluded, inside=False)
        if cold is not None:
            yield cold, 0.0


def _best_listed(seats: Sequence[Seat], need: Need, excluded: Sequence[str]) -> Iterator[Seat]:
    """Yield the least loaded that has room for the job, and the least loaded that has none."""
    able = [seat for seat in seats if may_serve(seat, need.job, excluded)]
    free = [seat for seat in able if seat.fits(need.kv_tokens)]
    if free:
        yield min(free, key=_entry)
    if len(free) < len(able):
        yield min([seat for seat in able if not seat.fits(need.kv_tokens)], key=_entry)


def _best_of_crowd(workers: int, need: Need, pool: Pool, excluded: Sequence[str]) -> Iterator[Seat]:
    free = _first_free(workers, need, pool, excluded, inside=True)
    if free is not None:
        yield free
    for _, _, _, seat in islice(pool.order, pool.free_count, pool.free_count + WALK_MAX):
        if seat.bit & workers and may_serve(seat, need.job, excluded):
            yield seat
            return


def _first_free(
    workers: int, need: Need, pool: Pool, excluded: Sequence[str], *, inside: bool
) -> Seat | None:
    """Find the least loaded in (or outside) `workers` with room for the job, near the front."""
    front = (entry[3] for entry in islice(pool.order, min(pool.free_count, WALK_MAX)))
    for seat in chain(front, pool.roomiest()):
        is_meant = bool(seat.bit & workers) is inside
        if is_meant and seat.fits(need.kv_tokens) and may_serve(seat, need.job, excluded):
            return seat
    return None
