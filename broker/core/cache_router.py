"""The cache-aware router: filter, score, pick; the lowest score wins.

Reuse of a cached prefix pulls jobs together, load pushes them apart; the score weighs both
(`scoring`). For one job only two kinds of worker need a score: holders of its prefix, and the least
loaded that hold none of it. The others hold the same and are worse off. So the cost of a decision
does not grow with the number of workers.

Jobs wait at the broker, not in workers (late binding). A job whose best worker has no room waits
for it while that worker, wait included, is still better than the best one with room, and for no
longer than that gains: what the wait was predicted to save bounds what it may cost, so a wrong
guess costs twice at most (ski rental).

Ties go to the worker that was given nothing for longest. Answers are kept per job until something
changes that could change them: its holdings (`PrefixIndex.is_current`), its chosen worker, or any
worker for the better.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from broker.core.candidates import Candidates
from broker.core.decisions import Candidate, Explanation, HeldBy
from broker.core.events import JobSpec
from broker.core.placement import Placement
from broker.core.policy import RoutingPolicy
from broker.core.prefix_index import Level, PrefixIndex
from broker.core.roster import Pool, Roster, Seat, may_serve, void_if_all
from broker.core.scoring import Need, Scored, candidate, leave_cost, score_of, tie
from broker.core.state import Lease, Worker
from broker.core.stickiness import Stickiness
from broker.core.unconfirmed import Chain, Unconfirmed
from broker.wire.messages import CacheSummary
from broker.wire.prefix import HASH_BYTES, unpack_hashes

KNOWN_JOBS_MAX = 16_384
"""Jobs whose last answer is kept: 64 candidates of each of 256 lanes."""

WRITE_BLOCKS = 192
"""Blocks of earlier dispatches written into the index at each dispatch: the mean chain of a public
conversation trace (Mooncake: 192), so that the queue stays short."""

SWEEP_KEYS_MAX = 1024
"""Sticky keys forgotten at most by one `sweep`."""

TRUST_SHARE = 0.1
"""Weight of the newest hit in a worker's trust."""

TRUST_MIN = 0.1
"""Trust never falls so far that a worker could not win it back."""


@dataclass(slots=True)
class _Choice:
    """What was found for a job."""

    chosen: Scored | None
    scored: list[Scored]
    previous: str
    until_s: float
    """From then on it may be another, even if nothing changes."""
    held: bool = False
    """The chosen one has no room: the job waits for it."""


@dataclass(slots=True)
class _Known:
    """A job's last answer, and what it rests on."""

    job: JobSpec
    levels: list[Level]
    workers: int
    dated: int
    placement: Placement | None = None
    seat: Seat | None = None
    stamp: int = 0
    improved_count: int = 0
    until_s: float = 0.0
    excluded: tuple[str, ...] = ()
    output_tokens: int = 0
    held_since_s: float | None = None


class CacheAwareRouter:
    """Policies `first_token` and `weighted`."""

    def __init__(self, policy: RoutingPolicy) -> None:
        self._policy = policy
        self._score = score_of(policy)
        self._index = PrefixIndex(entries_max=policy.index_entries_max, ttl_s=policy.index_ttl_s)
        self._roster = Roster(policy, by_load=True)
        self._candidates = Candidates(policy, self._roster)
        self._sticky = Stickiness(sticky_s=policy.sticky_s)
        self._unconfirmed = Unconfirmed()
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self.scored_count = 0
        """Candidates scored so far."""

    @property
    def index(self) -> PrefixIndex:
        """Which worker holds which prefix; for metrics."""
        return self._index

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
        pool = self._roster.pool(job.adapter or job.model)
        if pool is None or not pool.order:
            servable = pool is not None and pool.servable
            return Placement(None, 0, job.prompt_tokens, 0.0, servable=servable)
        output = job.output_tokens_max if output_tokens is None else output_tokens
        passed_over = tuple(excluded)
        known = self._know(job)
        if _stands(known, pool, at_s) and (passed_over, output) == (
            known.excluded,
            known.output_tokens,
        ):
            assert known.placement is not None, "an answer stands only where one was given"
            return known.placement
        known.excluded, known.output_tokens = passed_over, output
        choice = self._choose(known, pool, at_s=at_s)
        return self._answer(known, pool, choice, at_s=at_s)

    def explain(self, job: JobSpec, placement: Placement, *, at_s: float) -> Explanation:
        """Say why: every candidate that was scored, best first."""
        pool = self._roster.pool(job.adapter or job.model)
        scored: list[Scored] = []
        previous = ""
        if pool is not None and pool.order:
            choice = self._choose(self._know(job), pool, at_s=at_s)
            scored, previous = choice.scored, choice.previous
        scored.sort(key=lambda one: (one.score, one.seat.turn))
        own = [one for one in scored if one.seat.worker is placement.worker]
        return Explanation(
            policy=self._policy.policy,
            candidates=tuple(map(_candidate, scored)),
            previous_worker=previous,
            predicted_hit_tokens=placement.hit_tokens,
            predicted_ttft_s=own[0].ttft_s if own else placement.prefill_s,
            queue_s=max(0.0, at_s - job.enqueued_at_s),
            held_by=HeldBy.NOTHING,
        )

    def _know(self, job: JobSpec) -> _Known:
        """Return what is known of a job, its holders up to date."""
        index, known = self._index, self._known.get(job.key)
        if known is not None and known.job is job:
            if index.is_current(job.blocks, workers=known.workers, since=known.dated):
                known.dated = index.changes_count
                return known
            held_since_s = known.held_since_s
        else:
            held_since_s = None
        levels = index.match(job.blocks)
        workers = 0
        for level in levels:
            workers |= level.workers
        known = _Known(job, levels, workers, index.changes_count, held_since_s=held_since_s)
        self._known[job.key] = known
        self._known.move_to_end(job.key)
        if len(self._known) > KNOWN_JOBS_MAX:
            self._known.popitem(last=False)
        return known

    def _answer(self, known: _Known, pool: Pool, choice: _Choice, *, at_s: float) -> Placement:
        """Keep a choice, as the scheduler wants it."""
        chosen = choice.chosen
        if chosen is None:
            known.seat, known.stamp = None, 0
            placement = Placement(None, 0, known.job.prompt_tokens, 0.0)
        else:
            known.seat, known.stamp = chosen.seat, chosen.seat.stamp
            placement = Placement(
                None if choice.held else chosen.seat.worker,
                chosen.hit_tokens,
                known.job.prompt_tokens - chosen.hit_tokens,
                chosen.prefill_s,
                chosen.seat.worker.id if choice.held else "",
            )
        known.until_s = choice.until_s
        if not choice.held:
            known.held_since_s = None
        elif known.held_since_s is None:
            known.held_since_s = at_s
        known.improved_count = pool.improved_count
        known.placement = placement
        return placement

    def _choose(self, known: _Known, pool: Pool, *, at_s: float) -> _Choice:
        policy = self._policy
        need = Need(known.job, known.output_tokens or known.job.output_tokens_max)
        excluded = void_if_all(pool, known.excluded)
        scored = [
            self._scored(seat, need, hit_tokens)
            for seat, hit_tokens in self._candidates.find(known.levels, need, pool, excluded)
        ]
        previous, until_s = self._previous(known, pool, at_s)
        self._stick(scored, previous, need, excluded)
        self.scored_count += len(scored)
        free = self._best([one for one in scored if one.fits])
        if free is None or not policy.hold_for_affinity:
            return _Choice(free, scored, previous, until_s)
        waited_s = 0.0 if known.held_since_s is None else at_s - known.held_since_s
        warm = self._best([one for one in scored if self._is_worth_waiting(one, free)])
        if warm is None or waited_s >= free.score - warm.score:
            return _Choice(free, scored, previous, until_s)
        ends_at_s = at_s - waited_s + (free.score - warm.score)
        return _Choice(warm, scored, previous, min(until_s, ends_at_s), held=True)

    def _is_worth_waiting(self, one: Scored, free: Scored) -> bool:
        policy = self._policy
        return (
            not one.fits
            and one.hit_tokens > 0
            and one.score + tie(policy) < free.score
            and one.ttft_s - free.ttft_s <= policy.wait_s_over_best_max
        )

    def _best(self, scored: Sequence[Scored]) -> Scored | None:
        """Pick the lowest score; among equals, who was given nothing for longest."""
        if not scored:
            return None
        limit = min(one.score for one in scored) + tie(self._policy)
        return min((one for one in scored if one.score <= limit), key=lambda one: one.seat.turn)

    def _scored(self, seat: Seat, need: Need, hit_tokens: float) -> Scored:
        one = candidate(seat, need, hit_tokens=hit_tokens)
        one.score = self._score(self._policy, need, one)
        return one

    # ---- stickiness ----------------------------------------------------------------------------

    def _previous(self, known: _Known, pool: Pool, at_s: float) -> tuple[str, float]:
        """Return who served this session, or this prefix, last, and until when that counts."""
        job = known.job
        if job.session:
            worker_id, until_s = self._sticky.last(_session(job), at_s=at_s)
            if worker_id:
                return worker_id, until_s
        for level in known.levels:
            if _is_rare(level, pool):
                key = job.blocks[level.depth_blocks - 1]
                worker_id, until_s = self._sticky.last(key, at_s=at_s)
                if worker_id:
                    return worker_id, until_s
        return "", float("inf")

    def _stick(
        self, scored: list[Scored], previous: str, need: Need, excluded: Sequence[str]
    ) -> None:
        """Let the others pay for leaving the last worker, unless that is overloaded or gone."""
        seat = self._roster.seat(previous) if previous else None
        if seat is None or not seat.is_serving or not may_serve(seat, need.job, excluded):
            return
        last = next((one for one in scored if one.seat is seat), None)
        if last is None:
            last = self._scored(seat, need, 0.0)
            scored.append(last)
        best_s = min(one.ttft_s for one in scored)
        if last.ttft_s - best_s > self._policy.wait_s_over_best_max:
            return
        for one in scored:
            if one is not last:
                one.score += leave_cost(self._policy)

    # ---- what happens --------------------------------------------------------------------------

    def given(self, lease: Lease, worker: Worker, *, at_s: float) -> None:
        """Note a dispatch: the worker's turn, whom the prefix sticks to, what will be cached."""
        seat = self._roster.seat(worker.id)
        if seat is None:
            return
        job = lease.job
        known = self._know(job)
        del self._known[job.key]
        self._note_sticky(known, worker, at_s)
        start = _depth_at(seat.bit, known.levels)
        self._index.hold(worker.index, job.blocks, start=start)
        self._index.write(WRITE_BLOCKS)
        overflow = self._unconfirmed.add(lease, start=start)
        if overflow is not None:
            self._index.drop(worker.index, overflow.unconfirmed)
        self._roster.gave(seat)

    def _note_sticky(self, known: _Known, worker: Worker, at_s: float) -> None:
        job = known.job
        pool = self._roster.pool(job.adapter or job.model)
        if job.session:
            self._sticky.note(_session(job), worker.id, at_s=at_s)
        if pool is None or not job.blocks:
            return
        for level in known.levels:
            if _is_rare(level, pool):
                key = job.blocks[level.depth_blocks - 1]
                self._sticky.note(key, worker.id, at_s=at_s)
                break
        self._sticky.note(job.blocks[-1], worker.id, at_s=at_s)

    def changed(self, worker: Worker) -> None:
        """See a worker's state as it is now."""
        seat = self._roster.seat(worker.id)
        if seat is not None:
            self._roster.refresh(seat, bit=self._index.bit(worker.index))

    def joined(self, worker: Worker) -> None:
        """Meet a worker."""
        self._roster.join(worker, bit=self._index.bit(worker.index))

    def gone(self, worker: Worker) -> None:
        """Forget a worker and all its credit."""
        seat = self._roster.seat(worker.id)
        if seat is not None:
            self._roster.leave(seat)
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
            self._start_anew(worker)
        added = unpack_hashes(summary.added)
        self._index.drop(worker.index, unpack_hashes(summary.removed))
        self._index.store(worker.index, added)
        for chain in self._unconfirmed.reported(worker, added):
            self._uncredit(worker, chain)
        is_next = summary.full or (last is not None and summary.sequence == last + 1)
        if is_next:
            seat.report_sequence = summary.sequence
        return is_next

    def _start_anew(self, worker: Worker) -> None:
        """Forget what a worker was credited with, but for what it is prefilling."""
        self._index.forget(worker.index)
        self.changed(worker)
        for chain in self._unconfirmed.running(worker):
            self._index.hold(worker.index, chain.blocks, start=0)

    def _uncredit(self, worker: Worker, chain: Chain) -> None:
        self._index.drop(worker.index, chain.unconfirmed)

    def hit_seen(self, lease: Lease, worker: Worker, *, cached_tokens: int) -> None:
        """Move the worker's trust towards what its engine found of the predicted hit."""
        if lease.hit_tokens < max(1, self._policy.prefix_tokens_min):
            return
        found = min(1.0, cached_tokens / lease.hit_tokens)
        # The prediction was trusted already: a full hit proves that more was held than trusted.
        target = 1.0 if found >= 1.0 else found * worker.trust
        trust = worker.trust + TRUST_SHARE * (target - worker.trust)
        worker.trust = max(TRUST_MIN, trust)
        self.changed(worker)

    def reconfigured(self, policy: RoutingPolicy) -> None:
        """Take new knobs."""
        self._policy = policy
        self._score = score_of(policy)
        self._candidates.policy = policy
        self._sticky.sticky_s = policy.sticky_s
        self._index.reconfigure(entries_max=policy.index_entries_max, ttl_s=policy.index_ttl_s)
        self._roster.reconfigure(policy)

    def sweep(self, at_s: float) -> None:
        """Let time pass, in bounded steps."""
        self._index.sweep(at_s)
        self._sticky.expire(at_s, keys_max=SWEEP_KEYS_MAX)


def _stands(known: _Known, pool: Pool, at_s: float) -> bool:
    """Say whether a job's last answer is still right."""
    return (
        known.placement is not None
        and known.improved_count == pool.improved_count
        and at_s < known.until_s
        and (known.seat is None or known.seat.stamp == known.stamp)
    )


def _is_rare(level: Level, pool: Pool) -> bool:
    """Say whether under half of the workers hold it: what most hold sticks to nobody."""
    return 2 * (level.workers & pool.bits).bit_count() < len(pool.order)


def _depth_at(bit: int, levels: list[Level]) -> int:
    return next((level.depth_blocks for level in levels if level.workers & bit), 0)


def _session(job: JobSpec) -> tuple[str, str, str]:
    return (job.lane, job.model, job.session)


def _candidate(one: Scored) -> Candidate:
    worker = one.seat.worker
    return Candidate(worker.id, one.score, one.hit_tokens, worker.backlog_tokens)
