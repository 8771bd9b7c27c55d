"""What the mind remembers: jobs, leases and workers. Changed only by the modules of `core`.

Usage of every kind is a sum over the live leases, kept by `Worker.add` and `Worker.remove` (and for
all else by `Ledger`) alone: no other code counts anything, so no path can forget to.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from broker.core.breaker import Breaker, BreakerState
from broker.core.decode_rate import DecodeRate, KvOverTime, TokenGap
from broker.core.events import JobSpec
from broker.wire.messages import Attempt, Failure

ENDED_JOBS_MAX = 4096
"""Ends remembered for a worker that sends notes but no reports: a second's worth of the fastest."""


class Phase(Enum):
    """How sure we are of a worker."""

    LIVE = auto()
    SUSPECT = auto()
    """Silent past its lease: probed, gets nothing new, keeps what it runs."""
    GONE = auto()


@dataclass(slots=True)
class Lease:
    """A worker's right to a job."""

    job: JobSpec
    attempt: Attempt
    worker: str
    number: int
    """Of the order that carried it; 0: found running, not given by this broker."""
    granted_at_s: float
    cost_tokens: float
    """Weighted tokens charged; corrected while it runs."""
    uncached_tokens: int
    """Of the prompt, as predicted; 0 once prefilled."""
    hit_tokens: int
    """Of the prompt, as predicted."""
    output_tokens_expected: int
    output_tokens: int = 0
    held_blocks: int = 0
    """Of the prompt's blocks, those that its worker was known to hold when it was given."""
    prefilled: bool = False
    accepted: bool = False
    """The worker said so, or listed it."""
    unanswered: bool = False
    """The order's fate is not known: until the echo tells, no second dispatch."""
    aborting: bool = False
    progressed_at_s: float = 0.0
    """When its token count last rose, or its worker took it."""
    abort_number: int = 0
    """Of the last order to stop it; it is sent again when that is past and the job still runs."""
    cancelled: bool = False
    """Its owner wants it stopped: it is not tried again."""
    hit_told: bool = False
    """The engine's own word on the cached part of its prompt was taken."""
    failures: tuple[Failure, ...] = ()
    """Of earlier attempts."""
    excluded: tuple[str, ...] = ()
    """Workers where an earlier attempt failed."""

    def accept(self, at_s: float) -> None:
        """Note that its worker has it: how long it is without a token counts from then on."""
        if not self.accepted:
            self.accepted, self.progressed_at_s = True, at_s
        self.unanswered = False

    @property
    def kv_tokens(self) -> int:
        """KV cache the job adds at its worker until it ends: prompt not cached, expected output."""
        return self.job.prompt_tokens - self.hit_tokens + self.output_tokens_expected


@dataclass(slots=True)
class Worker:
    """A worker as last reported, plus what was given to it since."""

    id: str
    index: int
    """Dense number for the prefix index's bitsets; stable while the worker is known."""
    incarnation: int = 0
    engine_incarnation: int = 0
    phase: Phase = Phase.LIVE
    models: tuple[str, ...] = ()
    slots: int = 0
    ready: bool = False
    draining: bool = False
    drained: bool = False
    reported_at_s: float = 0.0
    joined_at_s: float = 0.0
    dispatched_at_s: float = 0.0
    """Last dispatch; ties go to the worker that waited longest."""
    dispatched_count: int = 0
    orders: int = 0
    """Number of the last order sent in this epoch."""
    echo: int = 0
    """Number of the last order it says it has processed."""
    held_off: bool = False
    """Said busy: nothing new until its next report."""
    kv_tokens_max: int = 0
    """0: not known, no bound."""
    prefill_tokens_s: float = 0.0
    decode_tokens_s: float = 0.0
    waiting: int = 0
    """Requests in the engine's own queue, as it reports."""
    leases: dict[str, Lease] = field(default_factory=dict[str, Lease])
    backlog_tokens: int = 0
    """Uncached prompt tokens given and not yet prefilled: Σ over leases."""
    prefilling: dict[str, Lease] = field(default_factory=dict[str, Lease])
    """The leases of the backlog, in the order in which they are prefilled, as far as is known."""
    behind_tokens: int = 0
    """The backlog but for the prompt at its head, which is under way."""
    prefill_began_at_s: float = 0.0
    """When the prompt at the head of the backlog began, as far as is known."""
    decoding_jobs: int = 0
    kv_tokens: int = 0
    """Σ kv_tokens over leases."""
    kv_base_tokens: int = 0
    """KV cache that its engine uses beyond what its jobs add to it, by its last report: the cached
    prefixes that they hold."""
    decode_rate: DecodeRate = field(default_factory=DecodeRate)
    """What its decode steps are taken to last."""
    own_decode_rate: DecodeRate = field(default_factory=DecodeRate)
    """The same, by its own reports alone."""
    kv_over_time: KvOverTime = field(default_factory=KvOverTime)
    token_gap: TokenGap = field(default_factory=TokenGap)
    sequence: int = -1
    """Of its last report: earlier ones that come late say nothing."""
    drain_wanted: bool = False
    """An operator's word, which stands over the worker's own."""
    breaker: Breaker = field(default_factory=Breaker)
    probing: bool = False
    """A probe's answer is awaited."""
    ended: dict[str, Attempt] = field(default_factory=dict[str, Attempt])
    """Attempts that ended since its last report; one on its way may still list them."""
    ended_before: dict[str, Attempt] = field(default_factory=dict[str, Attempt])
    """The same, since the one before."""
    cache_sequences: int = 0
    """Whole sequences that its engine caches, one a slot; 0: it caches blocks."""
    trust: float = 1.0
    """Moving average of actual ÷ predicted hits; multiplies its credit."""
    head_tokens: float = 0.0
    """Moving average of what its engine finds cached of prompts that share no whole block."""

    @property
    def slots_for_new(self) -> int:
        """Slots that new jobs may use: none while its breaker is open, one while it is tried."""
        if not self.breaker.takes_new:
            return 0
        return self.slots if self.breaker.state is BreakerState.CLOSED else min(1, self.slots)

    def note_ended(self, key: str, attempt: Attempt) -> None:
        """Remember that an attempt ended, until two more reports came."""
        if len(self.ended) >= ENDED_JOBS_MAX:
            self.forget_ended()
        self.ended[key] = attempt

    def has_ended(self, key: str, attempt: Attempt) -> bool:
        """Say whether an attempt that a report lists is known to be over."""
        ended = self.ended.get(key) or self.ended_before.get(key)
        return ended is not None and attempt <= ended

    def forget_ended(self) -> None:
        """Keep what ended since the last report, and forget what ended before it."""
        self.ended_before, self.ended = self.ended, {}

    def add(self, lease: Lease) -> None:
        """Take a lease into the sums."""
        key = lease.job.key
        self.leases[key] = lease
        self.kv_tokens += lease.kv_tokens
        if lease.prefilled:
            self.decoding_jobs += 1
        else:
            if self.backlog_tokens <= 0:
                self.prefill_began_at_s = lease.progressed_at_s
            self.prefilling[key] = lease
            self._count_backlog(lease.uncached_tokens)

    def remove(self, key: str) -> Lease | None:
        """Take a lease out of the sums; None when it isn't here."""
        lease = self.leases.pop(key, None)
        if lease is None:
            return None
        self.kv_tokens -= lease.kv_tokens
        if lease.prefilled:
            self.decoding_jobs -= 1
        else:
            del self.prefilling[key]
            self._count_backlog(-lease.uncached_tokens)
        return lease

    def _count_backlog(self, tokens: int) -> None:
        self.backlog_tokens += tokens
        head = next(iter(self.prefilling.values()), None)
        self.behind_tokens = self.backlog_tokens - (head.uncached_tokens if head else 0)

    def learn_kv_use(self, kv_tokens_used: int) -> None:
        """See how much KV cache the engine uses; 0: it doesn't tell, and each hit counts in full.

        What its jobs added is known from the dispatches, what was there before is not: a prefix
        that several hold takes its room once.
        """
        if not kv_tokens_used:
            self.kv_base_tokens = sum(lease.hit_tokens for lease in self.leases.values())
            return
        added = sum(
            lease.job.prompt_tokens - lease.hit_tokens + lease.output_tokens
            for lease in self.leases.values()
        )
        self.kv_base_tokens = max(0, kv_tokens_used - added)

    @property
    def kv_tokens_in_use(self) -> int:
        """KV cache that is taken when all its jobs end."""
        return self.kv_base_tokens + self.kv_tokens

    def passes(self, at_s: float) -> None:
        """Note what was there until now, before its leases change."""
        self.kv_over_time.passes(
            kv_tokens=self.kv_tokens_in_use, answers=self.decoding_jobs, at_s=at_s
        )

    def mark_prefilled(self, lease: Lease, *, at_s: float) -> bool:
        """Move a lease's prompt out of the backlog; False when it was out already."""
        if lease.prefilled:
            return False
        self.passes(at_s)
        self.prefill_began_at_s = at_s
        del self.prefilling[lease.job.key]
        self._count_backlog(-lease.uncached_tokens)
        lease.prefilled = True
        lease.uncached_tokens = 0
        self.decoding_jobs += 1
        return True
