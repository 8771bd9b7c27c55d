"""A worker as the router sees it: its state, and what a choice needs of that, worked out once.

Load is work in seconds: prompt tokens given and not yet prefilled, and what a typical job would
take there and cost the jobs that run there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from broker.core.claim import Claim
from broker.core.events import JobSpec
from broker.core.policy import RoutingPolicy
from broker.core.slot_cache import SlotCache
from broker.core.state import Phase, Worker
from broker.core.turnover import Written

TYPICAL_PREFILL_TOKENS = 1024
"""Prompt assumed where workers are compared before a job is known: near the mean of public chat
traces (Azure 2023, conversations: 1,155)."""

OUTPUT_TOKENS_TYPICAL = 256
"""Length of an answer assumed for a job that has none expected."""

TYPICAL_KV_TOKENS = TYPICAL_PREFILL_TOKENS + OUTPUT_TOKENS_TYPICAL
"""What such a job adds to a worker's KV cache."""

HELD_OFF_S = 1.0
"""A worker that said busy is looked at again at its next report: one heartbeat."""

FOREVER = float("inf")

LineEntry = tuple[int, str, Any]
"""(KV tokens at most, 0 where not told; id; seat): ids are unique, so that seats are never
compared."""

IDENTITY_FIELDS = 7
"""Of a signature: bit, phase, models, ready, draining, any slots, breaker lets new jobs in."""

Signature = tuple[Any, ...]
"""All of a worker's state that its seat follows from; first what it is, then how it is."""

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
    prefill_weight: float = 1.0
    """What a second of prefill here counts: its own, and in part of those that it holds up."""
    slowdown_weight: float = 0.0
    """What a second more of each step counts for those that run here."""
    prefill_began_at_s: float = 0.0
    decoding_jobs: int = 0
    trust: float = 1.0
    kv_tokens_free: float = 0.0
    prefill_tokens_free: float = 0.0
    """Prompt tokens that may join its backlog; no bound when it has none."""
    models: tuple[str, ...] = ()
    signature: Signature = ()
    entry: Entry = (True, 0.0, 0, None)
    """Its place in its pools."""
    kv_entry: KvEntry = (0.0, 0, None)
    standing: tuple[float, ...] = ()
    lease_wait_s: float = 0.0
    lease_wait_stamp: int = -1
    cold_until_s: float = 0.0
    """When its warm-up ends, if its cache is not filled before."""
    cold_tokens: int = 0
    """Prompt tokens it was given since its cache was empty."""
    written: Written = field(default_factory=Written)
    """What was computed there of late."""
    eviction_ratio: float = 1.0
    """What a token that is computed there costs its cache, against the mean of the workers."""
    report_sequence: int | None = None
    """Of its last cache summary; None until a full one came."""
    guarded_in: tuple[str, ...] = ()
    """Models in whose pools it is guarded from batch (`confinement`)."""
    slot_cache: SlotCache | None = None
    """Set where its engine caches whole sequences, one a slot."""
    leases: int = 0
    """Its jobs, when it was last looked at."""
    lined_in: tuple[str, ...] = ()
    """Models in whose line it stands."""
    line_entry: LineEntry = (0, "", None)
    """Its place there."""
    claim: Claim | None = None
    """It is kept for a job that would wait for ever."""

    def bars(self, job: JobSpec) -> bool:
        """Say whether it is kept for another job."""
        return self.claim is not None and self.claim.binds(job)

    def fits(self, job: JobSpec, kv_tokens: float, uncached_tokens: float) -> bool:
        """Say whether it has room for a job of so many tokens; a job alone always fits."""
        return (
            self.has_room
            and (self.claim is None or not self.claim.binds(job))
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
        return output_tokens * (own_s + self.slowdown_weight * growth_s)

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
            leases = self.worker.leases.values()
            tokens = min([lease.output_tokens_expected - lease.output_tokens for lease in leases])
            self.lease_wait_s = max(0, tokens) / self.decode_tokens_s
        return self.lease_wait_s

    # ---- following its worker ------------------------------------------------------------------

    def follow_slots(self) -> None:
        """See which jobs ended, where its engine caches by slot."""
        count = self.worker.cache_sequences
        if not count:
            self.slot_cache = None
            return
        if self.slot_cache is None or self.slot_cache.count != count:
            self.slot_cache = SlotCache(count)
        self.slot_cache.settle(self.worker.leases)

    def identify(self, bit: int) -> None:
        """Take what the worker is: whom it serves, and whether it does."""
        worker = self.worker
        self.bit = bit
        self.models = tuple(dict.fromkeys(worker.models))
        is_able = worker.ready and not worker.draining and worker.slots > 0
        is_trusted = worker.phase is Phase.LIVE and worker.breaker.takes_new
        self.is_serving = is_able and is_trusted
        self.is_silent = is_able and not is_trusted and worker.phase is not Phase.GONE

    def derive(self, policy: RoutingPolicy, *, by_load: bool) -> None:
        """Take how the worker is: its rates, its load, and what room it has."""
        worker = self.worker
        leases, backlog_tokens = len(worker.leases), worker.backlog_tokens
        self.leases = leases
        kv_tokens = worker.kv_base_tokens + worker.kv_tokens
        self.decoding_jobs, self.trust = worker.decoding_jobs, worker.trust
        prefill_tokens_s = worker.prefill_tokens_s or policy.prefill_tokens_s
        self.prefill_tokens_s = prefill_tokens_s
        self.decode_tokens_s = worker.decode_tokens_s or policy.decode_tokens_s
        self.backlog_s = backlog_s = backlog_tokens / prefill_tokens_s
        step_s, self.step_slope_s = worker.decode_rate.step_and_slope_s(kv_tokens)
        self.step_s = step_s or 1.0 / self.decode_tokens_s
        self.prefill_began_at_s = worker.prefill_began_at_s
        self.prefill_weight = (
            1 + policy.bias * self.eviction_ratio + policy.interference_weight * leases
        )
        self.slowdown_weight = policy.slowdown_weight * leases
        self.load_s = load_s = self._load_s(policy) if by_load else 0.0
        prefill_tokens_free = FOREVER
        if backlog_tokens > 0:
            # Together with all of it, or in the last step of the prompt that is under way.
            join_tokens = policy.join_s_max * prefill_tokens_s - worker.behind_tokens
            all_tokens = (policy.backlog_s_max - backlog_s) * prefill_tokens_s
            prefill_tokens_free = max(0.0, join_tokens, all_tokens)
        has_room = leases < worker.slots and not worker.held_off and prefill_tokens_free > 0
        self.has_room = has_room
        self.prefill_tokens_free = prefill_tokens_free
        bound = worker.kv_tokens_max * policy.kv_fill_ratio_max
        kv_tokens_free = bound - kv_tokens if worker.kv_tokens_max else FOREVER
        self.kv_tokens_free = kv_tokens_free
        self.entry = (not has_room, load_s, self.turn, self)
        # Among equals the least recently given is last.
        self.kv_entry = (kv_tokens_free, -self.turn, self)
        # How bad a choice it is, in all that counts: no less in any is no better.
        self.standing = (
            not self.is_serving,
            not has_room,
            load_s,
            backlog_s,
            -prefill_tokens_free,
            -kv_tokens_free,
            -prefill_tokens_s,
            self.step_s,
            self.step_slope_s,
            self.decoding_jobs,
            -self.trust,
            self.eviction_ratio,
        )

    def _load_s(self, policy: RoutingPolicy) -> float:
        """Score it for a job that is not known yet."""
        prefill_s = self.prefill_weight * TYPICAL_PREFILL_TOKENS / self.prefill_tokens_s
        decode_s = self.decode_cost_s(policy, TYPICAL_KV_TOKENS, OUTPUT_TOKENS_TYPICAL)
        return self.backlog_s + prefill_s + decode_s


def signature_of(worker: Worker, bit: int) -> Signature:
    """Return all that a worker's seat follows from."""
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
        worker.behind_tokens,
        worker.decoding_jobs,
        worker.kv_tokens,
        worker.kv_tokens_max,
        worker.prefill_tokens_s,
        worker.decode_tokens_s,
        worker.trust,
        worker.kv_base_tokens,
        worker.prefill_began_at_s,
        worker.decode_rate,  # One that is idle learns from its kin, too.
    )


def may_serve(seat: Seat, job: JobSpec, excluded: Sequence[str]) -> bool:
    """Say whether a worker has the job's model (and adapter) and is not passed over."""
    if job.adapter and job.adapter not in seat.models:
        return False
    return job.model in seat.models and seat.worker.id not in excluded
