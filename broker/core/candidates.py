"""Which workers need a score for a job: holders of its prefix, and the least loaded of the others.

Of the others, those are a few with room and a few without, which may be worth waiting for.

In a large fleet a few of the stretch where jobs of its size belong (`size_intervals`) come to that.

Of a few holders at the same depth all are candidates. More are represented by the least loaded with
room and the least loaded without: the others hold the same and are worse off. A crowd (a system
prompt that most hold) is not even listed: its best is met on the way from the front of the pool's
order, after (workers ÷ crowd) steps on average. So a decision looks at about the square root of the
number of workers, and at WALK_MAX whatever happens.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from operator import attrgetter
from zlib import crc32

from msgspec import Struct

from broker.core.claim import Claim
from broker.core.events import JobSpec
from broker.core.policy import RoutingPolicy
from broker.core.prefix_search import Level
from broker.core.roster import Pool, Roster, void_if_all
from broker.core.scoring import Need, crowding, tokens_per_block
from broker.core.seat import Entry, Seat, may_serve
from broker.core.size_intervals import NO_PULL, Pull
from broker.core.state import Worker

HOLDERS_EACH_MAX = 4
"""So few holders at one depth are all candidates."""

COLD_EACH_MAX = 4
"""So many that hold nothing are candidates: of those with room, and of those without."""

HASHES = 1 << 32
"""Values of a job key's hash: no chance is needed."""

SMALL_FLEET = 8
"""Of so few workers each is looked at for each job."""

STRETCH_EACH_MAX = 8
"""Workers of a job's stretch of the line that are looked at; the least loaded is a candidate."""

CLAIM_LOOKS_MAX = 16
"""Workers looked at for one to keep for a job: some lack its adapter, or failed it before."""

WALK_MAX = 128
"""Most steps from the front of a pool's order in search of one of a crowd, or of one outside: twice
the mean at 4,096 workers."""

_entry = attrgetter("entry")


class Holding(Struct, frozen=True):
    """Workers of a pool that hold equally much of a job's prompt."""

    workers: int
    hit_tokens: float
    depth_blocks: int
    seats: tuple[Seat, ...]
    """All of them; empty when they are a crowd."""


def holdings(
    levels: Sequence[Level], job: JobSpec, pool: Pool, roster: Roster, prefix_tokens_min: int
) -> tuple[Holding, ...]:
    """Return who of a pool holds a useful part of the job, deepest first."""
    if not levels:
        return ()
    block_tokens = tokens_per_block(job)
    found: list[Holding] = []
    bits, few = pool.bits, SMALL_FLEET * SMALL_FLEET
    for level in levels:
        hit_tokens = level.depth_blocks * block_tokens
        if hit_tokens < prefix_tokens_min:
            break  # The others hold less.
        workers = level.workers & bits
        if workers:
            count = workers.bit_count()
            is_crowd = count > HOLDERS_EACH_MAX and count * count > max(few, len(pool.order))
            seats = () if is_crowd else roster.of_bits(workers)
            found.append(Holding(workers, hit_tokens, level.depth_blocks, seats))
    return tuple(found)


def best_of(holding: Holding, need: Need, pool: Pool, excluded: Sequence[str]) -> Iterable[Seat]:
    """Return those of a holding that are worth a score, every worker once."""
    seats = holding.seats
    if not seats:
        return _best_of_crowd(holding, need, pool, excluded)
    if len(seats) > HOLDERS_EACH_MAX and len(pool.order) > SMALL_FLEET:
        return _best_listed(holding, need, excluded)
    if not excluded and not need.job.adapter:
        return seats  # All in the job's pool serve its model.
    return [seat for seat in seats if may_serve(seat, need.job, excluded)]


def _best_listed(holding: Holding, need: Need, excluded: Sequence[str]) -> Iterator[Seat]:
    """Yield the least loaded that has room for the job, and the least loaded that has none."""
    uncached = need.prompt_tokens - holding.hit_tokens
    able = [seat for seat in holding.seats if may_serve(seat, need.job, excluded)]
    free = [seat for seat in able if seat.fits(need.job, uncached + need.output_tokens, uncached)]
    if free:
        yield min(free, key=_entry)
    if len(free) < len(able):
        yield min(
            [s for s in able if not s.fits(need.job, uncached + need.output_tokens, uncached)],
            key=_entry,
        )


def _best_of_crowd(
    holding: Holding, need: Need, pool: Pool, excluded: Sequence[str]
) -> Iterator[Seat]:
    uncached = need.prompt_tokens - holding.hit_tokens
    free = _first_free(holding.workers, need, uncached, pool, excluded, inside=True)
    if free is not None:
        yield free
    for seat in pool.busy(WALK_MAX):
        if seat.bit & holding.workers and may_serve(seat, need.job, excluded):
            yield seat
            return


def cold(warm: int, need: Need, pool: Pool, pull: Pull, excluded: Sequence[str]) -> list[Seat]:
    """Return the least loaded few that are not of `warm`, with room and without.

    And the least loaded of a few with room among which jobs of its size belong; of a small fleet,
    all.
    """
    if len(pool.order) <= SMALL_FLEET:
        near = pool.order
    else:
        count = pool.free_count
        near = pool.order[: min(count, COLD_EACH_MAX)] + pool.order[count : count + COLD_EACH_MAX]
        found = _of_size(warm, need.job, pool, pull) if pull.seconds else None
        near += [found] if found is not None and found not in near else []
    if excluded or need.job.adapter:
        near = [entry for entry in near if may_serve(entry[3], need.job, excluded)]
    return [entry[3] for entry in near if not entry[3].bit & warm]


def _of_size(warm: int, job: JobSpec, pool: Pool, pull: Pull) -> Entry | None:
    """Look at a few with room in the stretch where jobs of this size belong; return the best."""
    share = crc32(job.key.encode()) / HASHES
    seats = pool.between(*pull.stretch, limit=STRETCH_EACH_MAX, share=share)
    free = [seat.entry for seat in seats if seat.has_room and not seat.bit & warm]
    return min(free, default=None)


def pull_of(policy: RoutingPolicy, need: Need, pool: Pool) -> Pull:
    """Say what draws a job to workers with others of its size."""
    if policy.policy != "first_token":
        return NO_PULL
    beside = pool.crowd_share * crowding(pool.jobs_each)
    sizes = pool.sizes if pool.whole is None else pool.whole.sizes
    seconds = policy.size_weight * beside * sizes.mean_burden_s
    return Pull(sizes.stretch(need.prompt_tokens), seconds) if seconds else NO_PULL


def first_cold(warm: int, need: Need, pool: Pool, excluded: Sequence[str]) -> Seat | None:
    """Find the least loaded that is not of `warm` and has room for the job, near the front."""
    return _first_free(warm, need, need.prompt_tokens, pool, excluded, inside=False)


def claim_worker(
    roster: Roster,
    pool: Pool | None,
    job: JobSpec,
    claim: Claim,
    excluded: Sequence[str],
    over: Claim | None,
) -> Worker | None:
    """Keep the worker with room and most KV cache left, of those kept for nobody or by `over`."""
    if pool is None:
        return None
    excluded = void_if_all(pool, excluded)
    for _, _, seat in islice(reversed(pool.by_kv_room), CLAIM_LOOKS_MAX):
        is_free = seat.claim is None or seat.claim is over
        if is_free and may_serve(seat, job, excluded):
            roster.keep(seat, claim)
            return seat.worker
    return None


def unclaim_worker(roster: Roster, worker: Worker) -> None:
    """Let everybody have a worker again."""
    seat = roster.seat(worker.id)
    if seat is not None:
        roster.keep(seat, None)


def _first_free(
    workers: int,
    need: Need,
    uncached: float,
    pool: Pool,
    excluded: Sequence[str],
    *,
    inside: bool,
) -> Seat | None:
    """Find the least loaded in (or outside) `workers` with room for the job, near the front."""
    for seat in chain(pool.free(WALK_MAX), pool.roomiest(need.job)):
        is_meant = bool(seat.bit & workers) is inside
        fits = is_meant and seat.fits(need.job, uncached + need.output_tokens, uncached)
        if fits and may_serve(seat, need.job, excluded):
            return seat
    return None
