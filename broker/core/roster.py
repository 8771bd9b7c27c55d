"""The workers of each model in the order in which a job that finds nothing cached would take them.

Each pool keeps its serving workers sorted: those with room first, then by load, then by turn (least
recently given first, so that equals share evenly whatever their names). A change moves one entry,
found by bisection, so that a decision looks at the front alone, however many workers there are.

Load is work in seconds: prompt tokens given and not yet prefilled, and what a typical job would
take there and cost the jobs that run there.
"""

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import lt
from typing import Any

from broker.core.claim import Claim
from broker.core.events import JobSpec
from broker.core.policy import RoutingPolicy
from broker.core.state import Phase, Worker

TYPICAL_PREFILL_TOKENS = 1024
"""Prompt assumed where workers are compared before a job is known: near the mean of public chat
traces (Azure 2023, conversations: 1,155)."""

OUTPUT_TOKENS_TYPICAL = 256
"""Length of an answer assumed for a job that has none expected."""

TYPICAL_KV_TOKENS = TYPICAL_PREFILL_TOKENS + OUTPUT_TOKENS_TYPICAL
"""What such a job adds to a worker's KV cache."""

COLD_SEATS_MAX = 16
"""Workers with an empty cache that are looked at for a forced job: the latest that joined."""

WARM_FILL_RATIO = 0.5
"""A cache filled so far is warm."""

HELD_OFF_S = 1.0
"""A worker that said busy is looked at again at its next report: one heartbeat."""

IMPROVED_MAX = 8
"""Latest improvements of a pool against which kept answers are checked; older ones are given
anew."""

FOREVER = float("inf")

IDENTITY_FIELDS = 7
"""Of a signature: bit, phase, models, ready, draining, any slots, breaker lets new jobs in."""

Entry = tuple[bool, float, int, Any]
"""(has no room, load in seconds, turn, seat): lower is better. Turns are unique, so that seats are
never compared."""

KvEntry = tuple[float, int, Any]
"""(KV tokens left, less the turn, seat)."""


@dataclass(slots=True, eq=False)
class Seat:
    """A worker as the router sees it, with what follows from its state."""

    worker: Worker
    turn: int
    """Rises with each dispatch: the lowest has waited longest. Unique."""
    bit: int = 0
    """Its cache in the prefix index."""
    stamp: int = 0
    """Rises with each change."""
    has_room: bool = False
    is_serving: bool = False
    is_silent: bool = False
    """Would serve, but gets nothing until it is heard (a suspect) or its breaker lets a job in."""
    backlog_s: float = 0.0
    load_s: float = 0.0
    prefill_tokens_s: float = 1.0
    decode_tokens_s: float = 1.0
    step_s: float = 1.0
    """Of a decode step, at the KV tokens it has now."""
    step_slope_s: float = 0.0
    """What one more KV token adds to that."""
    prefill_began_at_s: float = 0.0
    decoding_jobs: int = 0
    trust: float = 1.0
    kv_tokens_free: float = 0.0
    prefill_tokens_free: float = 0.0
    """Prompt tokens that may be prefilled together with its backlog; no bound when it has none."""
    models: tuple[str, ...] = ()
    signature: tuple[Any, ...] = ()
    entry: "Entry" = (True, 0.0, 0, None)
    """Its place in its pools."""
    kv_entry: "KvEntry" = (0.0, 0, None)
    standing: tuple[float, ...] = ()
    lease_wait_s: float = 0.0
    lease_wait_stamp: int = -1
    cold_until_s: float = 0.0
    """When its warm-up ends, if its cache is not filled before."""
    cold_tokens: int = 0
    """Prompt tokens it was given since its cache was empty."""
    report_sequence: int | None = None
    """Of its last cache summary; None until a full one came."""
    guarded_in: tuple[str, ...] = ()
    """Models in whose pools it is guarded from batch (`confinement`)."""
    claim: Claim | None = None
    """It is kept for a job that would wait for ever."""

    def bars(self, job: JobSpec) -> bool:
        """Say whether it is kept for another job."""
        return self.claim is not None and self.claim.binds(job)

    def fits(self, job: JobSpec, kv_tokens: float, uncached_tokens: float) -> bool:
        """Say whether it has room for a job of so many tokens; a job alone always fits."""
        return (
            self.has_room
            and not self.bars(job)
            and uncached_tokens < self.prefill_tokens_free
            and (kv_tokens <= self.kv_tokens_free or not self.worker.leases)
        )

    def backlog_wait_s(self, at_s: float) -> float:
        """Predict how long its backlog still takes.

        One that is overdue by some time is expected to take as long again: a stuck worker looks the
        worse the longer it is stuck.
        """
        if self.worker.backlog_tokens <= 0:
            return 0.0
        return abs(self.backlog_s - max(0.0, at_s - self.prefill_began_at_s))

    def is_cold(self, at_s: float) -> bool:
        """Say whether its cache is new and not filled yet."""
        return at_s < self.cold_until_s

    def decode_cost_s(self, policy: RoutingPolicy, need_tokens: int, output_tokens: int) -> float:
        """Weigh the seconds that a job's decoding takes here, and those its KV costs the others."""
        growth_s = self.step_slope_s * need_tokens
        own_s = policy.decode_weight * (self.step_s + growth_s)
        others_s = policy.slowdown_weight * len(self.worker.leases) * growth_s
        return output_tokens * (own_s + others_s)

    def room_wait_s(self, kv_tokens: float) -> float:
        """Guess how long until one that has none gets room, beyond what its backlog takes."""
        worker = self.worker
        wait_s = HELD_OFF_S if worker.held_off else 0.0
        lacks_kv = kv_tokens > self.kv_tokens_free
        if worker.leases and (lacks_kv or len(worker.leases) >= worker.slots):
            wait_s = max(wait_s, self._lease_wait_s())
        return wait_s

    def _lease_wait_s(self) -> float:
        """Guess when the first of its jobs ends; looked at anew when the worker has changed."""
        if self.lease_wait_stamp != self.stamp:
            self.lease_wait_stamp = self.stamp
            tokens = min(
                max(0, lease.output_tokens_expected - lease.output_tokens)
                for lease in self.worker.leases.values()
            )
            self.lease_wait_s = tokens / self.decode_tokens_s
        return self.lease_wait_s


def _no_seats() -> deque[Seat]:
    return deque(maxlen=IMPROVED_MAX)


@dataclass(slots=True)
class Pool:
    """Workers that serve one model."""

    order: list[Entry] = field(default_factory=list["Entry"])
    """All that serve now: those with room first, then by load, then by turn."""
    by_kv_room: list[KvEntry] = field(default_factory=list["KvEntry"])
    """Those with room, by the KV cache they have left, most last."""
    free_count: int = 0
    bits: int = 0
    """Of all in `order`."""
    silent_count: int = 0
    improved_count: int = 0
    """Rises when a worker may have become a better choice than it was."""
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

    def add(self, seat: Seat) -> None:
        """Take a serving worker in."""
        insort(self.order, seat.entry)
        self.bits |= seat.bit
        if seat.has_room:
            insort(self.by_kv_room, seat.kv_entry)
            self.free_count += 1
        if self.part is not None and seat not in self.closed:
            self.part.add(seat)

    def remove(self, seat: Seat) -> None:
        """Take it out; its state must be as it was when added."""
        place = bisect_left(self.order, seat.entry)
        assert self.order[place] is seat.entry, "an entry must be removed as it was added"
        del self.order[place]
        if seat.has_room:
            del self.by_kv_room[bisect_left(self.by_kv_room, seat.kv_entry)]
            self.free_count -= 1
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
        self._cold: OrderedDict[str, Seat] = OrderedDict()
        """Those with a new cache, the oldest first."""

    def pool(self, model: str) -> Pool | None:
        """Return the model's pool; None when no worker ever served it."""
        return self._pools.get(model)

    def seat(self, worker_id: str) -> Seat | None:
        """Return a known worker's seat."""
        return self._seats.get(worker_id)

    def of_bits(self, workers: int) -> Iterator[Seat]:
        """Yield the seats whose caches have these bits."""
        while workers:
            bit = workers & -workers
            yield self._by_bit[bit]
            workers ^= bit

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
        if claim is None:
            self._improved(seat)

    def leave(self, seat: Seat) -> None:
        """Forget a worker."""
        self._take_out(seat)
        self._hide(seat)
        seat.is_serving = seat.is_silent = False
        seat.stamp += 1
        if self._seats.get(seat.worker.id) is seat:
            del self._seats[seat.worker.id]
            self._cold.pop(seat.worker.id, None)

    def gave(self, seat: Seat, *, uncached_tokens: int) -> None:
        """Put a worker behind all others of the same load: it was given a job."""
        seat.cold_tokens += uncached_tokens
        if seat.cold_tokens >= WARM_FILL_RATIO * (seat.worker.kv_tokens_max or FOREVER):
            seat.cold_until_s = 0.0
            self._cold.pop(seat.worker.id, None)
        self._update(seat, _signature(seat.worker, seat.bit), turn=self._next_turn())

    def refresh(self, seat: Seat, *, bit: int) -> None:
        """Take a worker's state as it is now."""
        signature = _signature(seat.worker, bit)
        if signature != seat.signature:
            self._update(seat, signature, turn=seat.turn)

    def _update(self, seat: Seat, signature: tuple[Any, ...], *, turn: int) -> None:
        self._take_out(seat)
        if seat.signature[:IDENTITY_FIELDS] != signature[:IDENTITY_FIELDS]:
            self._hide(seat)
        before = seat.standing
        seat.turn = turn
        self._derive(seat, signature[0])
        seat.signature = signature
        seat.stamp += 1
        self._put_in(seat)
        # Worse in all that counts: no other job's best answer becomes another for it.
        if not before or any(map(lt, seat.standing, before)):
            self._improved(seat)

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

    def _derive(self, seat: Seat, bit: int) -> None:
        policy, worker = self._policy, seat.worker
        seat.bit = bit
        seat.models = tuple(dict.fromkeys(worker.models))
        seat.decoding_jobs, seat.trust = worker.decoding_jobs, worker.trust
        seat.prefill_tokens_s = worker.prefill_tokens_s or policy.prefill_tokens_s
        seat.decode_tokens_s = worker.decode_tokens_s or policy.decode_tokens_s
        seat.backlog_s = worker.backlog_tokens / seat.prefill_tokens_s
        rate = worker.decode_rate
        seat.step_s = rate.step_s(worker.kv_tokens_in_use) or 1.0 / seat.decode_tokens_s
        seat.step_slope_s = rate.slope_s
        seat.prefill_began_at_s = worker.prefill_began_at_s
        seat.load_s = _load_s(policy, seat) if self._by_load else 0.0
        is_able = worker.ready and not worker.draining and worker.slots > 0
        is_trusted = worker.phase is Phase.LIVE and worker.breaker.takes_new
        seat.is_serving = is_able and is_trusted
        seat.is_silent = is_able and not is_trusted and worker.phase is not Phase.GONE
        has_prefill_room = worker.backlog_tokens <= 0 or seat.backlog_s < policy.backlog_s_max
        has_slot = len(worker.leases) < worker.slots and not worker.held_off
        seat.has_room = has_slot and has_prefill_room
        room_s = policy.backlog_s_max - seat.backlog_s
        is_idle = worker.backlog_tokens <= 0
        seat.prefill_tokens_free = FOREVER if is_idle else room_s * seat.prefill_tokens_s
        bound = worker.kv_tokens_max * policy.kv_fill_ratio_max
        in_use = worker.kv_tokens_in_use
        seat.kv_tokens_free = bound - in_use if worker.kv_tokens_max else FOREVER
        seat.entry = (not seat.has_room, seat.load_s, seat.turn, seat)
        # Among equals the least recently given is last.
        seat.kv_entry = (seat.kv_tokens_free, -seat.turn, seat)
        seat.standing = _standing(seat)
        if bit:
            self._by_bit[bit] = seat

    def _put_in(self, seat: Seat) -> None:
        for model in seat.models:
            pool = self._pools.setdefault(model, Pool())
            if seat.is_serving:
                pool.add(seat)
            elif seat.is_silent:
                pool.silent_count += 1

    def _take_out(self, seat: Seat) -> None:
        for model in seat.models:
            if seat.is_serving:
                self._pools[model].remove(seat)
            elif seat.is_silent:
                self._pools[model].silent_count -= 1


def _signature(worker: Worker, bit: int) -> tuple[Any, ...]:
    """All of a worker's state that its seat follows from; first what it is, then how it is."""
    return (
        bit,
        worker.phase,
        worker.models,
        worker.ready,
        worker.draining,
        worker.slots > 0,
        worker.breaker.takes_new,
        worker.slots,
        len(worker.leases),
        worker.held_off,
        worker.backlog_tokens,
        worker.decoding_jobs,
        worker.kv_tokens,
        worker.kv_tokens_max,
        worker.prefill_tokens_s,
        worker.decode_tokens_s,
        worker.trust,
        worker.kv_base_tokens,
        worker.prefill_began_at_s,
    )


def _load_s(policy: RoutingPolicy, seat: Seat) -> float:
    """Score a worker for a job that is not known yet."""
    weight = 1 + policy.bias + policy.interference_weight * len(seat.worker.leases)
    prefill_s = weight * TYPICAL_PREFILL_TOKENS / seat.prefill_tokens_s
    decode_s = seat.decode_cost_s(policy, TYPICAL_KV_TOKENS, OUTPUT_TOKENS_TYPICAL)
    return seat.backlog_s + prefill_s + decode_s


def _standing(seat: Seat) -> tuple[float, ...]:
    """How bad a choice a worker is, in all that counts: no less in any is no better."""
    return (
        not seat.is_serving,
        not seat.has_room,
        seat.load_s,
        seat.backlog_s,
        -seat.prefill_tokens_free,
        -seat.kv_tokens_free,
        -seat.prefill_tokens_s,
        seat.step_s,
        seat.step_slope_s,
        seat.decoding_jobs,
        -seat.trust,
    )


def may_serve(seat: Seat, job: JobSpec, excluded: Sequence[str]) -> bool:
    """Say whether a worker has the job's model (and adapter) and is not passed over."""
    if job.adapter and job.adapter not in seat.models:
        return False
    return job.model in seat.models and seat.worker.id not in excluded


def void_if_all(pool: Pool, excluded: Sequence[str]) -> Sequence[str]:
    """Return whom to pass over: nobody, when that would leave nobody."""
    if len(excluded) < len(pool.order):
        return excluded
    return () if all(entry[3].worker.id in excluded for entry in pool.order) else excluded
