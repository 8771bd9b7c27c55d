"""The cache-aware router: what is known of caches, and a job's way to its worker.

It keeps the prefix index up to date from dispatches (credited at once, dropped if never confirmed),
from the workers' reports, and from what engines say they found; and it remembers of each waiting
job who holds its prefix and the last answer, so that asking again costs next to nothing. The choice
itself is `choice`.
"""

from collections import OrderedDict
from collections.abc import Sequence

from broker.core.candidates import claim_worker, unclaim_worker
from broker.core.choice import Chooser, is_rare, session_key
from broker.core.claim import Claim
from broker.core.confinement import QUICK_USE_S, Confinement
from broker.core.decisions import Candidate, Explanation, HeldBy
from broker.core.events import JobSpec
from broker.core.expected_hits import expected_hit_tokens, learned_head_tokens
from broker.core.heat import Heat
from broker.core.known import Known
from broker.core.placement import Placement
from broker.core.policy import RoutingPolicy
from broker.core.prefix_index import PrefixIndex
from broker.core.prefix_search import depth_of
from broker.core.roster import Pool, Roster
from broker.core.scoring import TRUST_MAX, Scored, need_of
from broker.core.seat import Seat
from broker.core.state import Lease, Worker
from broker.core.stickiness import Stickiness
from broker.core.unconfirmed import Chain, Unconfirmed
from broker.wire.ids import BATCH_BAND
from broker.wire.messages import CacheSummary
from broker.wire.prefix import HASH_BYTES, unpack_hashes

KNOWN_JOBS_MAX = 16_384
"""Jobs whose last answer is kept: 64 candidates of each of 256 lanes."""

SWEEP_KEYS_MAX = 1024
"""Sticky keys forgotten at most by one `sweep`."""

TRUST_SHARE = 0.1
"""Weight of the newest hit in a worker's trust."""

TRUST_MIN = 0.1
"""Trust never falls so far that a worker could not win it back."""


class CacheAwareRouter:
    """Policies `first_token` and `weighted`."""

    def __init__(self, policy: RoutingPolicy) -> None:
        self._policy = policy
        self._index = PrefixIndex(entries_max=policy.index_entries_max, ttl_s=policy.index_ttl_s)
        self._roster = Roster(policy, by_load=True)
        self._sticky = Stickiness(sticky_s=policy.sticky_s)
        self._heat = Heat()
        self._chooser = Chooser(policy, self._roster, self._sticky, self._heat)
        self._confinement = Confinement(policy, self._roster)
        self._unconfirmed = Unconfirmed()
        self._known: OrderedDict[str, Known] = OrderedDict()

    @property
    def index(self) -> PrefixIndex:
        """Which worker holds which prefix."""
        return self._index

    @property
    def index_entries_count(self) -> int:
        """Pairs (block, worker) that are kept, those of lost caches included until cleared."""
        return self._index.entries_count

    @property
    def scored_count(self) -> int:
        """Candidates scored so far: what decisions cost."""
        return self._chooser.scored_count

    # ---- decisions -----------------------------------------------------------------------------

    def place(
        self,
        job: JobSpec,
        *,
        excluded: Sequence[str],
        at_s: float,
        output_tokens: int | None = None,
    ) -> Placement:
        """Find the best worker with room for the job, or the one to wait for."""
        pool = self._pool(job)
        if pool is None or not pool.order:
            servable = pool is not None and pool.servable
            return Placement(None, 0, job.prompt_tokens, 0.0, full=True, servable=servable)
        output = job.output_tokens_max if output_tokens is None else output_tokens
        if not pool.free_count:
            # Nobody has room for anything: who holds the prefix, and what it would cost, is asked
            # when somebody has.
            if pool.whole is not None and pool.whole.free_count:
                return Placement(None, 0, job.prompt_tokens, 0.0, confined=True)
            is_full = pool.is_full_for(job, output)
            return Placement(None, 0, job.prompt_tokens, 0.0, full=is_full)
        return self._chooser.place(self._know(job), pool, tuple(excluded), output, at_s=at_s)

    def most_tokens(self, model: str, *, batch: bool) -> float:
        """Tell how many prompt tokens a worker takes at most beside what it has to prefill."""
        pool = self._roster.pool(model)
        if pool is not None and batch:
            pool = self._confinement.part(pool)
        return 0.0 if pool is None else pool.most_tokens

    def _pool(self, job: JobSpec) -> Pool | None:
        """Return the workers among which a job's is chosen."""
        pool = self._roster.pool(job.adapter or job.model)
        if pool is None or job.band != BATCH_BAND:
            return pool
        return self._confinement.part(pool)

    def claim(
        self,
        job: JobSpec,
        claim: Claim,
        *,
        excluded: Sequence[str],
        over: Claim | None = None,
    ) -> Worker | None:
        """Keep a worker for a job without room."""
        pool = self._pool(job)
        return claim_worker(self._roster, pool, job, claim, excluded, over)

    def unclaim(self, worker: Worker) -> None:
        """Let everybody have a worker again."""
        unclaim_worker(self._roster, worker)

    def cached_tokens(self, job: JobSpec) -> float:
        """Tell how much of a job's prompt the worker that holds most of it has."""
        pool = self._pool(job)
        return 0.0 if pool is None else self._chooser.cached_tokens(self._know(job), pool)

    def explain(self, job: JobSpec, placement: Placement, *, at_s: float) -> Explanation:
        """Say why: every candidate that was scored, best first."""
        pool = self._pool(job)
        scored: list[Scored] = []
        previous = ""
        if pool is not None and pool.order:
            chosen = placement.worker.id if placement.worker is not None else ""
            scored, previous = self._chooser.score(self._know(job), pool, chosen, at_s=at_s)
        scored.sort(key=lambda one: (one.score, one.seat.turn))
        own = [one for one in scored if one.seat.worker is placement.worker]
        return Explanation(
            policy=self._policy.policy,
            candidates=tuple(map(_candidate, scored)),
            previous_worker=previous,
            predicted_hit_tokens=placement.hit_tokens or self._expected_hit_tokens(job, placement),
            predicted_ttft_s=own[0].ttft_s if own else placement.prefill_s,
            queue_s=max(0.0, at_s - job.enqueued_at_s),
            held_by=HeldBy.NOTHING,
        )

    def _expected_hit_tokens(self, job: JobSpec, placement: Placement) -> int:
        """Tell what the engine should find of a job that earned no credit for it."""
        seat = None if placement.worker is None else self._roster.seat(placement.worker.id)
        return 0 if seat is None else expected_hit_tokens(job, seat, self._know(job).levels)

    def _know(self, job: JobSpec) -> Known:
        """Return what is known of a job, its holders up to date."""
        index, known = self._index, self._known.get(job.key)
        held_since_s = None
        if known is not None and known.job is job:
            if known.dated == index.changes_count:
                return known
            levels = index.update(job.blocks, known.levels, since=known.dated)
            if levels is not None:
                known.renew(levels, index.changes_count)
                return known
            held_since_s = known.held_since_s
        need = need_of(job, job.output_tokens_max)
        known = Known(job, need, index.match(job.blocks), index.changes_count)
        known.held_since_s = held_since_s
        self._known[job.key] = known
        self._known.move_to_end(job.key)
        if len(self._known) > KNOWN_JOBS_MAX:
            self._known.popitem(last=False)
        return known

    # ---- what happens --------------------------------------------------------------------------

    def given(self, lease: Lease, worker: Worker, *, at_s: float) -> None:
        """Note a dispatch: the worker's turn, whom the prefix sticks to, what will be cached."""
        seat = self._roster.seat(worker.id)
        if seat is None:
            return
        job = lease.job
        known = self._know(job)
        del self._known[job.key]
        if self._is_come_back(known, seat, lease, at_s):
            self._confinement.guard(seat, at_s=at_s)
        self._note_sticky(known, worker, at_s)
        for holding in known.useful[:1]:
            self._heat.note(job.blocks[holding.depth_blocks - 1], at_s=at_s)
        start = lease.held_blocks = depth_of(seat.bit, known.levels)
        if seat.slot_cache is not None:
            self._index.drop(worker.index, seat.slot_cache.begin(lease, depth_blocks=start))
        self._index.hold(worker.index, job.blocks, start=start)
        overflow = self._unconfirmed.add(lease, start=start)
        if overflow is not None:
            self._index.drop(worker.index, overflow.unconfirmed)
        self._roster.gave(seat, uncached_tokens=lease.uncached_tokens, hit_tokens=lease.hit_tokens)
        # One that is tried serves nobody else now, and is nothing that batch could have.
        self._confinement.refresh(seat)

    def _is_come_back(self, known: Known, seat: Seat, lease: Lease, at_s: float) -> bool:
        """Say whether an online job found a prefix that few hold, after a while."""
        job = known.job
        if job.band == BATCH_BAND or lease.hit_tokens < max(1, self._policy.prefix_tokens_min):
            return False
        pool = self._roster.pool(job.adapter or job.model)
        level = next((one for one in known.levels if one.workers & seat.bit), None)
        if level is None or pool is None:
            return False
        if level.workers & pool.bits != seat.bit and not is_rare(level, pool):
            return False
        used_at_s = self._sticky.noted_at_s(job.blocks[level.depth_blocks - 1])
        return used_at_s is None or at_s - used_at_s >= QUICK_USE_S

    def _note_sticky(self, known: Known, worker: Worker, at_s: float) -> None:
        job = known.job
        pool = self._roster.pool(job.adapter or job.model)
        if job.session:
            self._sticky.note(session_key(job), worker.id, at_s=at_s)
        if pool is None or not job.blocks:
            return
        for level in known.levels:
            if is_rare(level, pool):
                key = job.blocks[level.depth_blocks - 1]
                self._sticky.note(key, worker.id, at_s=at_s)
                break
        self._sticky.note(job.blocks[-1], worker.id, at_s=at_s)

    def changed(self, worker: Worker) -> None:
        """See a worker's state as it is now."""
        seat = self._roster.seat(worker.id)
        if seat is not None:
            seat.follow_slots()
            self._roster.refresh(seat, bit=self._index.bit(worker.index))
            self._confinement.refresh(seat)

    def joined(self, worker: Worker) -> None:
        """Meet a worker."""
        before = self._roster.seat(worker.id)
        self._roster.join(worker, bit=self._index.bit(worker.index))
        self.changed(worker)
        if before is not None:
            self._confinement.refresh(before)

    def gone(self, worker: Worker) -> None:
        """Forget a worker and all its credit."""
        seat = self._roster.seat(worker.id)
        if seat is not None:
            self._roster.leave(seat)
            self._confinement.release(seat)
        self._index.forget(worker.index)
        self._unconfirmed.forget(worker.id)

    def cache_lost(self, worker: Worker) -> None:
        """Drop all credit at once; trust starts anew."""
        self._index.forget(worker.index)
        self._unconfirmed.forget(worker.id)
        worker.trust = 1.0
        seat = self._roster.seat(worker.id)
        if seat is not None:
            seat.report_sequence = None
            seat.slot_cache = None
            self._confinement.release(seat)
            self._roster.chilled(seat, at_s=worker.reported_at_s)
        self.changed(worker)

    def summary(self, worker: Worker, summary: CacheSummary, *, at_s: float) -> bool:
        """Apply a report. After a gap, what it says is still true, but a full one is needed."""
        del at_s
        seat = self._roster.seat(worker.id)
        if seat is None or len(summary.added) % HASH_BYTES or len(summary.removed) % HASH_BYTES:
            return False
        last = seat.report_sequence
        if last is not None and summary.sequence <= last and not summary.full:
            return True
        if summary.full:
            self._start_anew(worker, seat)
        added, removed = unpack_hashes(summary.added), unpack_hashes(summary.removed)
        if removed and seat.slot_cache is not None:
            seat.slot_cache.lost(removed)
        self._index.drop(worker.index, removed)
        self._index.store(worker.index, added)
        for chain in self._unconfirmed.reported(worker, added):
            self._uncredit(worker, chain)
        is_next = summary.full or (last is not None and summary.sequence == last + 1)
        if is_next:
            seat.report_sequence = summary.sequence
        return is_next

    def _start_anew(self, worker: Worker, seat: Seat) -> None:
        """Forget what a worker was credited with, but for what it is prefilling."""
        self._index.forget(worker.index)
        if seat.slot_cache is not None:
            seat.slot_cache.unknow()
        self.changed(worker)
        for chain in self._unconfirmed.running(worker):
            self._index.hold(worker.index, chain.blocks, start=0)

    def _uncredit(self, worker: Worker, chain: Chain) -> None:
        self._index.drop(worker.index, chain.unconfirmed)

    def ran(self, lease: Lease, worker: Worker, *, output_tokens: int, run_s: float) -> None:
        """Learn from a completed job how long it was there, and what that cost the others."""
        job = lease.job
        pool, seat = self._roster.pool(job.adapter or job.model), self._roster.seat(worker.id)
        if pool is None or seat is None:
            return
        prefill_s = max(0, job.prompt_tokens - lease.hit_tokens) / seat.prefill_tokens_s
        steps_s = output_tokens * seat.step_slope_s * job.prompt_tokens
        pool.sizes.note(job.prompt_tokens, there_s=run_s, burden_s=prefill_s + steps_s)

    def hit_seen(self, lease: Lease, worker: Worker, *, cached_tokens: int) -> None:
        """Move the worker's trust towards what its engine found of the predicted hit."""
        if not lease.hit_tokens:
            head_tokens = worker.head_tokens
            worker.head_tokens = learned_head_tokens(
                head_tokens, lease.job, cached_tokens=cached_tokens
            )
        # What is held counts, not how far it is trusted: else little trust could never be won back.
        if lease.hit_tokens < max(1.0, self._policy.prefix_tokens_min * worker.trust):
            return
        # The prediction was trusted already: this is what was found of all that seemed held.
        target = min(TRUST_MAX, worker.trust * cached_tokens / lease.hit_tokens)
        trust = worker.trust + TRUST_SHARE * (target - worker.trust)
        worker.trust = max(TRUST_MIN, trust)
        self.changed(worker)

    def reconfigured(self, policy: RoutingPolicy) -> None:
        """Take new knobs."""
        self._policy = policy
        self._chooser.reconfigure(policy)
        self._known.clear()
        self._sticky.sticky_s = policy.sticky_s
        self._index.reconfigure(entries_max=policy.index_entries_max, ttl_s=policy.index_ttl_s)
        self._confinement.reconfigure(policy)
        self._roster.reconfigure(policy)

    def sweep(self, at_s: float) -> list[str]:
        """Let time pass, in bounded steps."""
        self._index.sweep(at_s)
        self._sticky.expire(at_s, keys_max=SWEEP_KEYS_MAX)
        return self._confinement.expire(at_s)


def _candidate(one: Scored) -> Candidate:
    worker = one.seat.worker
    return Candidate(worker.id, one.score, one.hit_tokens, worker.backlog_tokens)
