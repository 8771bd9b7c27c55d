"""The workers of each model in the order in which a job that finds nothing cached would take them.

Each pool keeps its serving workers sorted: those with room first, then by load, then by turn (least
recently given first, so that equals share evenly whatever their names). A change moves one entry,
found by bisection, so that a decision looks at the front alone, however many workers there are.
"""

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import ceil
from operator import lt

from broker.core.claim import Claim
from broker.core.events import JobSpec
from broker.core.policy import RoutingPolicy
from broker.core.seat import (
    FOREVER,
    IDENTITY_FIELDS,
    Entry,
    KvEntry,
    LineEntry,
    Seat,
    Signature,
    signature_of,
)
from broker.core.size_intervals import SizeIntervals
from broker.core.state import Worker
from broker.core.turnover import Turnover

COLD_SEATS_MAX = 16
"""Workers with an empty cache that are looked at for a forced job: the latest that joined."""

CROWD_MIN = 2.5
"""Jobs a worker up to which nothing is set apart or evened out between workers, neither sizes nor
what is written to caches: where few run beside each other they cost each other little, and to
spread them is worth more."""

WARM_FILL_RATIO = 0.5
"""A cache filled so far is warm."""

ROOM_OCTAVES = 64
"""Rooms for prompts that are told apart: octaves of tokens, the last without a bound."""

IMPROVED_MAX = 8
"""Latest improvements of a pool against which kept answers are checked; older ones are given
anew."""


def _no_seats() -> deque[Seat]:
    return deque(maxlen=IMPROVED_MAX)


@dataclass(slots=True)
class Pool:
    """Workers that serve one model."""

    order: list[Entry] = field(default_factory=list[Entry])
    """All that serve now: those with room first, then by load, then by turn."""
    by_kv_room: list[KvEntry] = field(default_factory=list[KvEntry])
    """Those with room, by the KV cache they have left, most last."""
    free_count: int = 0
    rooms: list[int] = field(default_factory=lambda: [0] * ROOM_OCTAVES)
    """Those with room, counted by the octave of the prompt tokens that they have room for."""
    bits: int = 0
    """Of all in `order`."""
    silent_count: int = 0
    improved_count: int = 0
    """Rises when a worker may have become a better choice than it was."""
    lease_count: int = 0
    """Jobs at all in `order`."""
    line: list[LineEntry] = field(default_factory=list[LineEntry])
    """All in `order`, smaller caches first: short jobs belong at its front, long ones at its end.
    A part has none: the whole's counts."""
    sizes: SizeIntervals = field(default_factory=SizeIntervals)
    """Of the jobs that ran there; of a part, the whole's count."""
    turnover: Turnover = field(default_factory=Turnover)
    """Of the caches of those that have its model first."""
    improved: deque[Seat] = field(default_factory=_no_seats)
    """The latest of those, newest last."""
    part: "Pool | None" = None
    """Those of them that batch may use; kept once batch came."""
    whole: "Pool | None" = None
    """Of a part, what it is a part of."""
    closed: OrderedDict[Seat, float] = field(default_factory=OrderedDict[Seat, float])
    """Those that hold what people come back to and are closed to batch; until when."""
    spared: OrderedDict[Seat, float] = field(default_factory=OrderedDict[Seat, float])
    """The same, of those that batch may use all the same."""

    @property
    def servable(self) -> bool:
        """Whether any worker serves the model, be it a silent one."""
        return bool(self.order) or self.silent_count > 0

    @property
    def jobs_each(self) -> float:
        """Jobs a worker, of those that serve now."""
        return self.lease_count / max(1, len(self.order))

    @property
    def most_tokens(self) -> float:
        """How many prompt tokens one of them has room for at most, rounded up to an octave."""
        for octave in range(ROOM_OCTAVES - 1, -1, -1):
            if self.rooms[octave]:
                return FOREVER if octave == ROOM_OCTAVES - 1 else 2.0**octave
        return 0.0

    @property
    def crowd_share(self) -> float:
        """How much what jobs beside each other cost each other counts, in 0..1."""
        jobs = self.jobs_each
        return 1.0 - CROWD_MIN / jobs if jobs > CROWD_MIN else 0.0

    def free(self, limit: int) -> Iterator[Seat]:
        """Yield at most `limit` workers with room, least loaded first."""
        for _, _, _, seat in islice(self.order, min(limit, self.free_count)):
            yield seat

    def busy(self, limit: int) -> Iterator[Seat]:
        """Yield at most `limit` workers without room, least loaded first."""
        for _, _, _, seat in islice(self.order, self.free_count, self.free_count + limit):
            yield seat

    def is_full_for(self, job: JobSpec, kv_tokens: int) -> bool:
        """Say whether slots or KV cache are what a job of so many tokens lacks, everywhere."""
        if self.whole is not None:
            return self.whole.is_full_for(job, kv_tokens)
        seat = next(self.roomiest(job), None)
        return seat is None or (kv_tokens > seat.kv_tokens_free and bool(seat.worker.leases))

    def roomiest(self, job: JobSpec) -> Iterator[Seat]:
        """Yield the one with room and most KV cache left: a large job fits there or nowhere."""
        for _, _, seat in reversed(self.by_kv_room):
            if not seat.bars(job):  # At most one is kept for each model's jobs.
                yield seat
                return

    def has(self, seat: Seat) -> bool:
        """Say whether a serving worker of its model is in it, be it a part."""
        return self.whole is None or seat not in self.whole.closed

    def place(self, seat: Seat) -> float:
        """Tell where a worker stands in the line, in 0..1."""
        line = self.line if self.whole is None else self.whole.line
        return (bisect_left(line, seat.line_entry) + 0.5) / max(1, len(line))

    def between(self, low: float, high: float, *, limit: int, share: float) -> Iterator[Seat]:
        """Yield the workers between two places of the line, one at least.

        Of more than `limit`, so many in a row, which begin at a share (0..1) of all beginnings.
        """
        line = self.line if self.whole is None else self.whole.line
        first = min(int(low * len(line)), len(line) - 1)
        count = max(1, ceil(high * len(line)) - first)
        if count > limit:
            first += int(share * (count - limit))
            count = limit
        for _, _, seat in islice(line, first, first + count):
            if self.has(seat):
                yield seat

    def add(self, seat: Seat) -> None:
        """Take a serving worker in."""
        insort(self.order, seat.entry)
        self.bits |= seat.bit
        self.lease_count += seat.leases
        if seat.has_room:
            insort(self.by_kv_room, seat.kv_entry)
            self.free_count += 1
            self.rooms[_room_octave(seat)] += 1
        if self.part is not None and seat not in self.closed:
            self.part.add(seat)

    def remove(self, seat: Seat) -> None:
        """Take it out; its state must be as it was when added."""
        place = bisect_left(self.order, seat.entry)
        assert self.order[place] is seat.entry, "an entry must be removed as it was added"
        del self.order[place]
        self.lease_count -= seat.leases
        if seat.has_room:
            del self.by_kv_room[bisect_left(self.by_kv_room, seat.kv_entry)]
            self.free_count -= 1
            self.rooms[_room_octave(seat)] -= 1
        if self.part is not None and seat not in self.closed:
            self.part.remove(seat)

    def hide(self, seat: Seat) -> None:
        """Forget a worker's cache."""
        self.bits &= ~seat.bit
        if self.part is not None:
            self.part.hide(seat)

    def note_improved(self, seat: Seat) -> None:
        """Note that a worker may be a better choice than it was."""
        self.improved_count += 1
        self.improved.append(seat)
        if self.part is not None and seat not in self.closed:
            self.part.note_improved(seat)


class Roster:
    """All workers, and the pools of all models."""

    def __init__(self, policy: RoutingPolicy, *, by_load: bool) -> None:
        self._policy = policy
        self._by_load = by_load
        self._seats: dict[str, Seat] = {}
        self._by_bit: dict[int, Seat] = {}
        self._pools: dict[str, Pool] = {}
        self._turns = 0
        self.changes_count = 0
        """Changes of any worker so far."""
        self._cold: OrderedDict[str, Seat] = OrderedDict()
        """Those with a new cache, the oldest first."""

    def pool(self, model: str) -> Pool | None:
        """Return the model's pool; None when no worker ever served it."""
        return self._pools.get(model)

    def seat(self, worker_id: str) -> Seat | None:
        """Return a known worker's seat."""
        return self._seats.get(worker_id)

    def of_bits(self, workers: int) -> tuple[Seat, ...]:
        """Return the seats whose caches have these bits."""
        by_bit = self._by_bit
        if workers & (workers - 1) == 0:
            return (by_bit[workers],)
        seats: list[Seat] = []
        while workers:
            bit = workers & -workers
            seats.append(by_bit[bit])
            workers ^= bit
        return tuple(seats)

    def join(self, worker: Worker, *, bit: int = 0) -> None:
        """Seat a worker, behind all that wait for a turn; one seated already is only refreshed."""
        seat = self._seats.get(worker.id)
        if seat is None or seat.worker is not worker:
            if seat is not None:
                self.leave(seat)
            seat = self._seats[worker.id] = Seat(worker, self._next_turn())
            self.chilled(seat, at_s=worker.joined_at_s)
        self.refresh(seat, bit=bit)

    def chilled(self, seat: Seat, *, at_s: float) -> None:
        """Note that a worker's cache is empty."""
        warm = sum(not one.is_cold(at_s) for one in self._seats.values() if one is not seat)
        seat.cold_until_s, seat.cold_tokens = at_s + self._policy.warmup_s, 0
        seat.written.fills = 0.0
        seat.signature = ()  # Looked at anew, though nothing else changed.
        if 2 * warm < len(self._seats):
            self._cold.pop(seat.worker.id, None)
            return  # A fleet that starts as a whole fills itself: nobody must be forced on it.
        self._cold[seat.worker.id] = seat
        self._cold.move_to_end(seat.worker.id)

    def cold(self, pool: Pool, *, at_s: float) -> list[Seat]:
        """List a pool's workers with an empty cache, the latest; none where most have one."""
        while self._cold and not next(iter(self._cold.values())).is_cold(at_s):
            self._cold.popitem(last=False)
        if 2 * len(self._cold) >= len(pool.order):
            return []
        latest = islice(reversed(self._cold.values()), COLD_SEATS_MAX)
        return [seat for seat in latest if seat.is_cold(at_s) and seat.bit & pool.bits]

    def keep(self, seat: Seat, claim: Claim | None) -> None:
        """Keep a worker for a job; None: let everybody have it again."""
        seat.claim = claim
        seat.stamp += 1
        self.changes_count += 1
        if claim is None:
            self._improved(seat)

    def leave(self, seat: Seat) -> None:
        """Forget a worker."""
        self._take_out(seat)
        self._hide(seat)
        self.changes_count += 1
        seat.is_serving = seat.is_silent = False
        self._line_up(seat)
        seat.stamp += 1
        if self._seats.get(seat.worker.id) is seat:
            del self._seats[seat.worker.id]
            self._cold.pop(seat.worker.id, None)

    def gave(self, seat: Seat, *, uncached_tokens: int, hit_tokens: int = 0) -> None:
        """Put a worker behind all others of the same load: it was given a job."""
        pool, cache_tokens = self._home(seat), seat.worker.kv_tokens_max
        if pool is not None and cache_tokens:
            pool.turnover.note(
                seat.written,
                found=hit_tokens / cache_tokens,
                computed=uncached_tokens / cache_tokens,
                workers=max(1, len(pool.order)),
            )
        seat.cold_tokens += uncached_tokens
        if seat.cold_tokens >= WARM_FILL_RATIO * (seat.worker.kv_tokens_max or FOREVER):
            seat.cold_until_s = 0.0
            self._cold.pop(seat.worker.id, None)
        self._update(seat, signature_of(seat.worker, seat.bit), turn=self._next_turn())

    def refresh(self, seat: Seat, *, bit: int) -> None:
        """Take a worker's state as it is now."""
        signature = signature_of(seat.worker, bit)
        if signature != seat.signature:
            self._update(seat, signature, turn=seat.turn)

    def _update(self, seat: Seat, signature: Signature, *, turn: int) -> None:
        self._take_out(seat)
        if seat.signature[:IDENTITY_FIELDS] != signature[:IDENTITY_FIELDS]:
            self._hide(seat)
            seat.identify(signature[0])
            if seat.bit:
                self._by_bit[seat.bit] = seat
        before = seat.standing
        self.changes_count += 1
        seat.turn = turn
        seat.eviction_ratio = self._eviction_ratio(seat)
        seat.derive(self._policy, by_load=self._by_load)
        seat.signature = signature
        seat.stamp += 1
        self._put_in(seat)
        # Worse in all that counts: no other job's best answer becomes another for it.
        if not before or any(map(lt, seat.standing, before)):
            self._improved(seat)

    def _home(self, seat: Seat) -> Pool | None:
        """Return the pool of the model that a worker has first: it has one cache for all."""
        return self._pools.get(seat.models[0]) if seat.models else None

    def _eviction_ratio(self, seat: Seat) -> float:
        """Tell what a token computed at a worker costs its cache, against the mean; 0 at least.

        As it was when the worker last changed.
        """
        pool = self._home(seat)
        if self._policy.policy != "first_token" or pool is None or not seat.worker.kv_tokens_max:
            return 1.0
        weight = self._policy.turnover_weight * pool.crowd_share
        return max(0.0, 1.0 + weight * pool.turnover.excess(seat.written)) if weight else 1.0

    def reconfigure(self, policy: RoutingPolicy) -> None:
        """Take new knobs."""
        self._policy = policy
        for seat in self._seats.values():
            seat.signature = ()
            self.refresh(seat, bit=seat.bit)
        for pool in self._pools.values():
            # Missed, and not remembered: every answer is given anew.
            pool.improved.clear()
            pool.improved_count += 1

    def _improved(self, seat: Seat) -> None:
        for model in seat.models:
            self._pools[model].note_improved(seat)

    def _hide(self, seat: Seat) -> None:
        """Take a worker's cache out of its pools: it has another now, or serves no more."""
        if self._by_bit.get(seat.bit) is seat:
            del self._by_bit[seat.bit]
        for model in seat.models:
            self._pools[model].hide(seat)

    def _next_turn(self) -> int:
        self._turns += 1
        return self._turns

    def _put_in(self, seat: Seat) -> None:
        for model in seat.models:
            pool = self._pools.get(model)
            if pool is None:
                pool = self._pools[model] = Pool()
            if seat.is_serving:
                pool.add(seat)
            elif seat.is_silent:
                pool.silent_count += 1

        self._line_up(seat)

    def _line_up(self, seat: Seat) -> None:
        """Let it stand in the line of each model that it serves, and in no other."""
        worker, before = seat.worker, seat.line_entry
        models = seat.models if seat.is_serving else ()
        if models == seat.lined_in and worker.kv_tokens_max == before[0] and worker.id == before[1]:
            return
        entry = (worker.kv_tokens_max, worker.id, seat)
        for model in seat.lined_in:
            line = self._pools[model].line
            del line[bisect_left(line, seat.line_entry)]
        for model in models:
            insort(self._pools[model].line, entry)
        seat.lined_in, seat.line_entry = models, entry

    def _take_out(self, seat: Seat) -> None:
        for model in seat.models:
            if seat.is_serving:
                self._pools[model].remove(seat)
            elif seat.is_silent:
                self._pools[model].silent_count -= 1


def _room_octave(seat: Seat) -> int:
    """Tell the octave of the prompt tokens that a worker has room for."""
    tokens = seat.prefill_tokens_free
    most = ROOM_OCTAVES - 1
    return most if tokens == FOREVER else min(most - 1, int(tokens).bit_length())


def void_if_all(pool: Pool, excluded: Sequence[str]) -> Sequence[str]:
    """Return whom to pass over: nobody, when that would leave nobody."""
    if len(excluded) < len(pool.order):
        return excluded
    return () if all(entry[3].worker.id in excluded for entry in pool.order) else excluded
