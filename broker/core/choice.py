"""The choice of a worker: filter, score, pick; the lowest score wins.

Reuse of a cached prefix pulls jobs together, load pushes them apart; the score weighs both
(`scoring`). Only `candidates` need a score: holders of the prefix, and the least loaded few that
hold none of it.

Jobs wait at the broker, not in workers (late binding), but for short ones: those join the last step
of the long prompt that their best worker prefills. A job whose best worker has no room waits for it
while that worker, wait included, is still better than the best one with room, and for no longer
than that gains: what the wait was predicted to save bounds what it may cost, so a wrong guess costs
twice at most (ski rental).

Ties go to the worker that was given nothing for longest. An answer stands until it could be
another: its chosen worker changed, or a worker became better than that one, or its time is over.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from operator import attrgetter
from zlib import crc32

from broker.core.candidates import (
    HASHES,
    best_of,
    cold,
    first_cold,
    holdings,
    pull_of,
)
from broker.core.events import JobSpec
from broker.core.heat import Heat, Spread
from broker.core.known import Known
from broker.core.placement import Placement
from broker.core.policy import RoutingPolicy
from broker.core.prefix_search import Level
from broker.core.roster import Pool, Roster, void_if_all
from broker.core.scoring import (
    Need,
    Scored,
    crowding,
    leave_cost,
    need_of,
    of_equals,
    score_of,
    scored_each,
    set_apart,
    tie,
)
from broker.core.seat import Seat, may_serve
from broker.core.stickiness import Key, Stickiness

_fits = attrgetter("fits")

State = tuple[float, int, int]
"""Time, changes of the workers so far, and of the index as far as they were looked at: while they
are the same, so is every score."""


class Chooser:
    """Chooses for one job at a time."""

    def __init__(
        self, policy: RoutingPolicy, roster: Roster, sticky: Stickiness, heat: Heat
    ) -> None:
        self._roster = roster
        self._sticky = sticky
        self._heat = heat
        self.scored_count = 0
        self._latest: tuple[Known | None, State, list[Scored]] = (None, (0.0, 0, 0), [])
        """Whose candidates were scored last to answer, in which state of things, and how."""
        self.reconfigure(policy)

    def reconfigure(self, policy: RoutingPolicy) -> None:
        """Take new knobs."""
        self._policy = policy
        self._score = score_of(policy)
        self._tie = tie(policy)
        self._leave_cost = leave_cost(policy)
        self._of_equals = of_equals(policy)

    def place(
        self,
        known: Known,
        pool: Pool,
        excluded: tuple[str, ...],
        output_tokens: int,
        *,
        at_s: float,
    ) -> Placement:
        """Answer for a job of a pool that has workers."""
        if known.need.output_tokens != output_tokens or known.excluded != excluded:
            known.need = need_of(known.job, output_tokens)
            known.excluded = excluded
            known.placement = None
        if known.useful_of != pool.bits:
            self._look_at_levels(known, pool)
        if known.placement is not None and self._stands(known, pool, at_s):
            return known.placement
        known.improved_count = pool.improved_count
        return self._place_by_score(known, pool, at_s)

    def score(
        self, known: Known, pool: Pool, chosen: str, *, at_s: float
    ) -> tuple[list[Scored], str]:
        """Score a job's candidates, `chosen` among them; and say who served its prefix last."""
        if known.useful_of != pool.bits:
            self._look_at_levels(known, pool)
        of, state, scored = self._latest
        is_as_then = of is known and state == self._state(known, at_s)
        if is_as_then and any(one.seat.worker.id == chosen for one in scored):
            return scored.copy(), known.previous
        self._look_back(known, pool, at_s)
        return self._scored_all(known, pool, at_s, also=chosen), known.previous

    def _state(self, known: Known, at_s: float) -> State:
        return (at_s, self._roster.changes_count, known.dated)

    def cached_tokens(self, known: Known, pool: Pool) -> float:
        """Tell how much of a job's prompt the worker that holds most of it has."""
        if known.useful_of != pool.bits:
            self._look_at_levels(known, pool)
        return known.most_tokens_held

    # ---- kept answers --------------------------------------------------------------------------

    def _look_at_levels(self, known: Known, pool: Pool) -> None:
        known.useful_of = pool.bits
        known.useful = holdings(
            known.levels, known.job, pool, self._roster, self._policy.prefix_tokens_min
        )
        known.placement = None

    def _stands(self, known: Known, pool: Pool, at_s: float) -> bool:
        """Say whether a job's last answer is still right."""
        seat = known.seat
        if at_s >= known.until_s or (seat is not None and seat.stamp != known.stamp):
            return False
        if seat is not None and not known.is_held and self._is_late(seat, known, at_s):
            return False
        key = known.sticky_key
        if key is not None and self._sticky.last(key, at_s=at_s) != known.previous:
            return False
        missed = pool.improved_count - known.improved_count
        if missed > len(pool.improved):
            return False
        for better in islice(pool.improved, len(pool.improved) - missed, None):
            if self._may_beat(known, pool, better, at_s):
                return False
        known.improved_count = pool.improved_count
        return True

    def _is_late(self, seat: Seat, known: Known, at_s: float) -> bool:
        """Say whether a worker's backlog takes longer than was predicted: it may be stuck."""
        return seat.backlog_wait_s(at_s) > known.wait_s + self._policy.saving_s_min

    def _may_beat(self, known: Known, pool: Pool, seat: Seat, at_s: float) -> bool:
        """Say whether a worker that became better could now be the answer."""
        if not seat.is_serving or seat is known.seat:
            return False
        one = self._scored(seat, known.need, known.hit_tokens(seat), at_s)
        if known.pull.seconds:
            set_apart(one, known.need, known.pull, pool.place(seat))
        if known.spread is not None:
            known.spread.apply(one)
        if known.seat is None or (one.fits and known.is_held):
            return one.fits
        return one.score < known.score

    # ---- the look in full -----------------------------------------------------------------------

    def _place_by_score(self, known: Known, pool: Pool, at_s: float) -> Placement:
        self._look_back(known, pool, at_s)
        every = self._scored_all(known, pool, at_s)
        self._latest = (known, self._state(known, at_s), every)
        forced = self._forced(known, pool, every, at_s)
        if forced is not None:
            return known.answer(forced)  # Whatever is cached elsewhere, and worth waiting for.
        scored = self._within_replicas(every, known, pool)
        free = self._best_with_room(scored, known)
        if free is None:
            return known.nowhere(pool)
        if not self._policy.hold_for_affinity:
            return known.answer(free)
        sure = min(1.0, self._policy.hold_decode_share * crowding(pool.jobs_each))
        warm = self._best(self._worth_waiting(scored, free, sure))
        since_s = at_s if known.held_since_s is None else known.held_since_s
        known.held_since_s = None if warm is None else since_s
        if warm is None:
            return known.answer(free)
        ends_at_s = since_s + _gain_s(warm, free, sure)
        if at_s >= ends_at_s:
            return known.answer(free)
        return known.answer(warm, held_until_s=ends_at_s)

    def _best_with_room(self, scored: list[Scored], known: Known) -> Scored | None:
        """Pick the best with room; nobody joins a backlog for a much later first token.

        Who computes the job's prefix just now has room once that is done: in one step with it, the
        engine would compute it twice.
        """
        able = self._in_time([one for one in scored if one.fits], scored)
        best = self._best(able)
        while best is not None and known.is_under_way(best):
            best.fits = False
            able.remove(best)
            best = self._best(able)
        return best

    def _in_time(self, able: list[Scored], scored: list[Scored]) -> list[Scored]:
        """Leave out backlogs that bring the first token much later than the best does."""
        if not any(one.wait_s for one in able):
            return able
        latest_s = min([one.ttft_s for one in scored]) + self._policy.hold_s_max
        return [one for one in able if not one.wait_s or one.ttft_s <= latest_s]

    def _forced(self, known: Known, pool: Pool, scored: list[Scored], at_s: float) -> Scored | None:
        """Return the worker with an empty cache that this job must fill, if it is one of a few."""
        share = self._policy.forced_share
        if not share or crc32(known.job.key.encode()) >= share * HASHES:
            return None
        need = known.need
        free: list[Scored] = []
        for seat in self._roster.cold(pool, at_s=at_s):
            if may_serve(seat, need.job, known.excluded):
                one = self._scored(seat, need, known.hit_tokens(seat), at_s)
                free += [one] if one.fits and not known.is_under_way(one) else []
        return self._best(self._in_time(free, scored))

    def _within_replicas(self, scored: list[Scored], known: Known, pool: Pool) -> list[Scored]:
        """Leave only the holders of a prefix that has enough of them, while one is not overloaded.

        A prefix that half the workers hold belongs everywhere.
        """
        limit, holders = self._policy.replicas_max, 0
        if not limit or not scored:
            return scored
        for holding in known.useful:
            holders |= holding.workers
            if holders.bit_count() >= limit:
                break
        if holders.bit_count() < limit or 2 * holders.bit_count() >= len(pool.order):
            return scored
        inside = [one for one in scored if one.seat.bit & holders]
        best_s = min([one.ttft_s for one in scored])
        calm = any(one.ttft_s - best_s <= self._policy.wait_s_over_best_max for one in inside)
        return inside if calm else scored

    def _scored_all(self, known: Known, pool: Pool, at_s: float, *, also: str = "") -> list[Scored]:
        need = known.need
        excluded = void_if_all(pool, known.excluded)
        known.pull = pull_of(self._policy, need, pool)
        scored = self._scored_warm(known, pool, excluded, at_s)
        scored += self._scored_cold(known, pool, excluded, at_s)
        seat = self._roster.seat(also)
        if seat is not None and all(one.seat is not seat for one in scored):
            scored.append(self._scored(seat, need, known.hit_tokens(seat), at_s))
        if known.pull.seconds:
            for one in scored:
                set_apart(one, known.need, known.pull, pool.place(one.seat))
        known.spread = self._hot(scored, known, at_s)
        if known.spread is not None:
            for one in scored:
                known.spread.apply(one)
        elif known.previous:
            self._stick(scored, known, pool, excluded, at_s)
        return scored

    def _scored_warm(
        self, known: Known, pool: Pool, excluded: Sequence[str], at_s: float
    ) -> list[Scored]:
        need = known.need
        scored: list[Scored] = []
        for holding in known.useful:
            seats = best_of(holding, need, pool, excluded)
            scored += self._scored_each(seats, need, holding.hit_tokens, at_s)
        return scored

    def _scored_cold(
        self, known: Known, pool: Pool, excluded: Sequence[str], at_s: float
    ) -> list[Scored]:
        need, warm = known.need, 0
        for holding in known.useful:
            warm |= holding.workers
        if warm.bit_count() >= len(pool.order):
            return []
        seats = cold(warm, need, pool, known.pull, excluded)
        scored = self._scored_each(seats, need, 0.0, at_s)
        if not any(map(_fits, scored)):
            seat = first_cold(warm, need, pool, excluded)
            if seat is not None:
                scored.append(self._scored(seat, need, 0.0, at_s))
        return scored

    def _scored_each(
        self, seats: Iterable[Seat], need: Need, hit_tokens: float, at_s: float
    ) -> list[Scored]:
        scored = scored_each(
            self._policy, self._score, need, seats, hit_tokens=hit_tokens, at_s=at_s
        )
        self.scored_count += len(scored)
        return scored

    def _hot(self, scored: list[Scored], known: Known, at_s: float) -> Spread | None:
        """Say by how much it pays to make a further copy of the job's prefix, if it is hot."""
        uses_min = self._policy.hot_uses_min
        if not uses_min or self._policy.policy != "first_token" or not known.useful:
            return None
        holding = known.useful[0]
        key = known.job.blocks[holding.depth_blocks - 1]
        uses = self._heat.uses(key, at_s=at_s) / (1 + holding.workers.bit_count())
        if uses < uses_min:
            return None
        held = [one for one in scored if one.seat.bit & holding.workers]
        if not held:
            return None
        gap_s = min([_token_gap_s(one.seat) for one in held])
        quickest_s = min([_token_gap_s(one.seat) for one in scored])
        if gap_s <= self._policy.hot_slowdown_max * quickest_s:
            return None
        output_s = self._policy.decode_weight * known.need.output_tokens
        best = min([one.score + output_s * _stalls_s(one.seat) for one in held])
        return Spread(holding.workers, holding.hit_tokens, uses, best - self._tie)

    def _scored(self, seat: Seat, need: Need, hit_tokens: float, at_s: float) -> Scored:
        return self._scored_each((seat,), need, hit_tokens, at_s)[0]

    def _worth_waiting(self, scored: Sequence[Scored], free: Scored, sure: float) -> list[Scored]:
        wait_s_max, ttft_s = self._policy.hold_s_max, free.ttft_s
        # Most that have no room are so far behind that what is gained needs no sum.
        return [
            one
            for one in scored
            if not one.fits
            and one.wait_s + one.prefill_s - ttft_s <= wait_s_max
            and _gain_s(one, free, sure) > self._tie
        ]

    def _best(self, scored: Sequence[Scored]) -> Scored | None:
        """Pick the lowest score; among equals, mostly who was given nothing for longest."""
        if not scored:
            return None
        if len(scored) == 1:
            return scored[0]
        limit = min([one.score for one in scored]) + self._tie
        equals = [one for one in scored if one.score <= limit]
        return equals[0] if len(equals) == 1 else min(equals, key=self._of_equals)

    # ---- stickiness ----------------------------------------------------------------------------

    def _look_back(self, known: Known, pool: Pool, at_s: float) -> None:
        """Note who served this session, or else this prefix, last."""
        job = known.job
        keys: list[Key] = [session_key(job)] if job.session else []
        keys += [
            job.blocks[level.depth_blocks - 1] for level in known.levels if is_rare(level, pool)
        ]
        known.previous, known.sticky_key = "", keys[0] if keys else None
        for key in keys:
            worker_id = self._sticky.last(key, at_s=at_s)
            if worker_id:
                known.previous, known.sticky_key = worker_id, key
                return

    def _stick(
        self,
        scored: list[Scored],
        known: Known,
        pool: Pool,
        excluded: Sequence[str],
        at_s: float,
    ) -> None:
        """Let the others pay for leaving the last worker, unless that is overloaded or gone.

        Where its tokens come slowly and another holds as much, the prefix sticks to that one now.
        """
        seat, need = self._roster.seat(known.previous), known.need
        if seat is None or not seat.is_serving or not may_serve(seat, need.job, excluded):
            return
        if not pool.has(seat):
            return
        last = next((one for one in scored if one.seat is seat), None)
        if last is None:
            last = self._scored(seat, need, 0.0, at_s)
            scored.append(last)
        best_s = min([one.ttft_s for one in scored])
        if last.ttft_s - best_s > self._policy.wait_s_over_best_max:
            return
        if last.hit_tokens:
            as_warm = [one for one in scored if one.hit_tokens >= last.hit_tokens]
            quickest = min(as_warm, key=lambda one: _token_gap_s(one.seat))
            bound_s = self._policy.hot_slowdown_max * _token_gap_s(quickest.seat)
            last = quickest if _token_gap_s(last.seat) > bound_s else last
        for one in scored:
            if one is not last:
                one.score += self._leave_cost


def _gain_s(one: Scored, free: Scored, sure: float) -> float:
    """Tell by how much waiting for a worker beats going to a free one.

    Quicker decoding counts in part: it comes late and is a guess, the wait comes first.
    """
    return free.score - one.score - (1.0 - sure) * (free.decode_s - one.decode_s)


def _stalls_s(seat: Seat) -> float:
    """Return by how much tokens come slower at a worker than by its decode steps alone."""
    return _token_gap_s(seat) - seat.step_s


def _token_gap_s(seat: Seat) -> float:
    """Return the seconds between two tokens at a worker, as seen of late, or of a step alone."""
    return max(seat.step_s, seat.worker.token_gap.gap_s if seat.worker.leases else 0.0)


def is_rare(level: Level, pool: Pool) -> bool:
    """Say whether under half of the workers hold it: what most hold sticks to nobody."""
    return 2 * (level.workers & pool.bits).bit_count() < len(pool.order)


def session_key(job: JobSpec) -> tuple[str, str, str]:
    """Return what a session sticks by."""
    return (job.lane, job.adapter or job.model, job.session)
