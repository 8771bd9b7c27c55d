"""Which job of a model pool is next, and its dispatch: band, then lane, then job.

1. *Band*: `bands` says who is owed; else strictly by priority, aged jobs one band up while the cap
   allows.
2. *Lane* in the band: those whose virtual token counters lie within Q (`lane_slack_tokens`) of the
   least are equal, so that locality may choose between them. A lane that its quota holds back is
   passed over.
   Within a lane, batches take turns in the same way (`flows`).
3. *Job*: the least `prefill_s + α · enqueued_at_s`, which is least uncached prefill seconds less α
   times the wait, written so that waiting needs no new sums. What a worker can serve from its cache
   goes at once, short work goes before long, and nobody is overtaken for longer than its own
   prefill seconds ÷ α. A deadline that comes before the band's longest wait counts as time waited,
   by half: jobs that share one, as a batch's lines do, still go by who came first.

A dispatch takes two steps: every quota row, then the worker's own room (the router's). A job that
can't pass is passed over; what waits for room longer than it may be overtaken has some kept for it
(`claims`). When a whole look finds nobody who may go, the pool
is *settled*: until a worker or a row gives way, only newcomers are looked at, so an event costs the
same however many wait. Several that come together call for a contest, or the first would go.
"""

import math
from collections.abc import Iterator
from heapq import merge
from itertools import islice

from broker.core.bands import LOW_BAND_MIN, Way
from broker.core.breaker import BreakerState
from broker.core.decisions import Dispatch, Explanation, HeldBy
from broker.core.gate import Gate, cost_of
from broker.core.lanes import DEBT_TOKENS_MAX, Ranking
from broker.core.mind import Mind
from broker.core.placement import Placement
from broker.core.pressure_step import Step
from broker.core.queues import Line, Pool, Queue, Waiting
from broker.core.quotas import jobs_refusal
from broker.core.rows import Borrow
from broker.core.state import Lease
from broker.wire.ids import BANDS, BATCH_BAND, ONLINE_BANDS

PASSES = 4
"""How many placements are asked for, for each candidate to choose from: some are held for a
worker."""

STEP_DISPATCHES_MAX = 256
"""Jobs of one pool that a step sends at most; the next step, if only a tick, goes on from there."""

SETTLE_DISPATCHES_MAX = 8
"""The same, of `Scheduler.settle`, which is asked again for the rest: about a millisecond."""

DEADLINE_SHARE = 0.5
"""How much of the time that a deadline takes off a band's longest wait counts as waited. All of it
would leave jobs of one deadline no wait of their own: the short lines of a batch passed a long one
for as long as there were any (chaos, seed 7: 37 s, for microseconds of prefill)."""

SKIPS = 64
"""How far it is walked past jobs that are surely too large: that costs next to nothing."""

_Entry = tuple[float, str, int, bool]
"""A lane's place in a contest: what it is ranked by, lane, band, not aged. Of a lane's two lines
the aged one is first: who came before is not behind the others where few are looked at."""


class Order:
    """Chooses and dispatches."""

    def __init__(self, mind: Mind, gate: Gate) -> None:
        self._mind = mind
        self._gate = gate

    @property
    def has_more(self) -> bool:
        """Whether a pool was left in the middle of its dispatches."""
        pools = self._mind.queues.pools.values()
        return any(not pool.settled and not pool.closed and pool.waiting for pool in pools)

    def dispatch(self, *, dispatches_max: int = STEP_DISPATCHES_MAX) -> None:
        """Dispatch all that may go now, of each pool so many at most."""
        mind = self._mind
        released = mind.quotas.released
        if released:
            for model in released:
                mind.queues.pool(model).settled = False
            released.clear()
        for waiting in self._newcomers():
            self._dispatch_alone(waiting)
        for pool in mind.queues.pools.values():
            if not pool.settled:
                self._dispatch_pool(pool, dispatches_max)

    def _newcomers(self) -> list[Waiting]:
        """Return who came alone to a pool where nobody else may go; of several, the best goes."""
        first: dict[str, Waiting] = {}
        for waiting in self._mind.arrivals:
            pool = waiting.queue.pool
            if pool.settled and pool.overdue_at_s <= self._mind.at_s:
                pool.settled = False  # Room is to be kept before this one takes it.
            if pool.settled and self._in_line(waiting):
                pool.settled = first.setdefault(pool.model, waiting) is waiting
        return [waiting for waiting in first.values() if waiting.queue.pool.settled]

    def _in_line(self, waiting: Waiting) -> bool:
        return self._mind.queues.waiting.get(waiting.job.key) is waiting and not waiting.resting

    def _dispatch_alone(self, waiting: Waiting) -> None:
        if self._gate.is_passed_by(waiting):
            return
        queue = waiting.queue
        if self._keeps_back(queue.pool, queue.band):
            return
        placement = self._gate.look(waiting)
        if placement is not None:
            self._goes_first(queue)
            self._give(waiting, placement, Way.PRIORITY)

    def _dispatch_pool(self, pool: Pool, dispatches_max: int) -> None:
        pool.holding, pool.overdue_at_s = False, math.inf
        for _ in range(dispatches_max):
            chosen = self._choose(pool) if pool.waiting and not pool.closed else None
            if chosen is None:
                pool.settled = True
                return
            self._give(*chosen)

    def _choose(self, pool: Pool) -> tuple[Waiting, Placement, Way] | None:
        """Choose among those with seats of their own; of the others, only if none of them may."""
        pool.lacks_seats = False
        chosen = self._choose_by_band(pool, Borrow.NOTHING)
        if chosen is None and pool.lacks_seats and not pool.closed:
            return self._choose_by_band(pool, Borrow.ANY)
        return chosen

    def _choose_by_band(self, pool: Pool, borrow: Borrow) -> tuple[Waiting, Placement, Way] | None:
        for band in pool.shares.owed(pool.in_line, pool.mean_tokens):
            if self._keeps_back(pool, band, by_share=True):
                continue
            best = self._contest(pool, [(band, False), (band, True)], _more(pool, band, borrow))
            if best is not None:
                return (*best, Way.SHARE)
            if pool.closed:
                return None
        for band in BANDS:
            claimant = self._claimant(pool, band, borrow)
            if claimant is not None:
                self._goes_first(claimant[0].queue)
                return (*claimant, Way.CLAIM)
            for stands in self._stands(pool, band):
                best = self._contest(pool, stands, _more(pool, band, borrow))
                if best is not None:
                    if best[0].queue.band == band:
                        return (*best, Way.PRIORITY)
                    self._goes_first(best[0].queue)
                    return (*best, Way.AGED if any(pool.in_line[: band + 1]) else Way.PRIORITY)
                if pool.closed:
                    return None
        return None

    def _claimant(self, pool: Pool, band: int, borrow: Borrow) -> tuple[Waiting, Placement] | None:
        """Return the job for which room is kept, once that is enough: its turn came before."""
        waiting = self._mind.claims.of(pool.model) if self._mind.claims else None
        if waiting is None or waiting.queue.band != band or self._keeps_back(pool, band):
            return None
        placement = self._gate.look(waiting, borrow=_more(pool, band, borrow), claims=True)
        return None if placement is None else (waiting, placement)

    def _stands(self, pool: Pool, band: int) -> list[list[tuple[int, bool]]]:
        """List who competes in a band, contest after contest.

        Each band has counters of its own, which say nothing beside another's. So what aged jobs of
        the band below have earned goes first; where nobody of a higher band waits, they take no
        slot that is kept for such.
        """
        own, rising = [(band, False), (band, True)], band + 1
        stands = [] if self._keeps_back(pool, band) else [own]
        if rising not in BANDS:
            return stands
        is_held = rising == BATCH_BAND and pool.pressure >= Step.HOLD_BATCH
        competes = any(pool.in_line[:LOW_BAND_MIN]) and not is_held
        if self._keeps_back(pool, rising, by_share=competes):
            return stands
        if not pool.shares.may_age(rising, pool.in_line, pool.mean_tokens):
            return stands
        return [[(rising, True)], *stands]

    def _keeps_back(self, pool: Pool, band: int, *, by_share: bool = False) -> bool:
        """Say whether no job of a band may go now, and note why at the one that would be next."""
        if not pool.in_line[band]:
            return False
        held_by = self._gate.kept_back(pool, band, by_share=by_share)
        if held_by is None:
            return False
        for ranking, is_aged in ((pool.fresh[band], False), (pool.aged[band], True)):
            if ranking:
                queue = pool.queues[ranking.first, band]
                self._gate.hold((queue.aged if is_aged else queue.fresh)[0][3], held_by)
        return True

    def _contest(
        self, pool: Pool, stands: list[tuple[int, bool]], borrow: Borrow
    ) -> tuple[Waiting, Placement] | None:
        """Find the best job of a band's least served lanes that have one which may go."""
        order = self._mind.policy.order
        fair: list[Line] = []
        passed: list[tuple[Queue, float]] = []
        least, is_least = 0.0, True
        floor = pool.counters.floor(band=stands[0][0])
        best: tuple[Waiting, Placement] | None = None
        for place, lane, band, is_fresh in self._entries(pool, stands, borrow):
            counter = max(floor, place)
            if fair and (
                counter > least + order.lane_slack_tokens or len(fair) >= order.candidates_max
            ):
                best = self._best_in_turn(fair, borrow, claims=is_least)
                is_least = False
                if best is not None or pool.closed:
                    break
                passed += [(line[0][3].queue, DEBT_TOKENS_MAX) for line in fair]
                fair = []
            queue = pool.queues[lane, band]
            line = queue.fresh if is_fresh else queue.aged
            blocked = jobs_refusal(queue.rows, borrow=borrow)
            if blocked is not None:
                self._gate.hold(line[0][3], HeldBy.QUOTA, blocked)
                passed.append((queue, 0.0))
                continue
            if not fair:
                least = counter
            fair += queue.turns(aged=not is_fresh, slack_tokens=order.lane_slack_tokens)
        if best is None and fair and not pool.closed:
            best = self._best_in_turn(fair, borrow, claims=is_least)
        if best is not None:
            self._lift(passed, best[0].queue)
        return best

    def _entries(
        self, pool: Pool, stands: list[tuple[int, bool]], borrow: Borrow
    ) -> Iterator[_Entry]:
        """List the lanes that stand in a contest, least served first."""
        ranked: list[Iterator[_Entry]] = []
        for band, aged in stands:
            ranking = (pool.aged if aged else pool.fresh)[band]
            if ranking and not self._is_blocked(pool, ranking, borrow, band=band, aged=aged):
                ranked.append(_stand(ranking, band=band, aged=aged))
        return ranked[0] if len(ranked) == 1 else merge(*ranked)

    def _is_blocked(
        self, pool: Pool, ranking: Ranking, borrow: Borrow, *, band: int, aged: bool
    ) -> bool:
        """Say whether a row over all lanes holds back a whole band, so that none need a look."""
        queue = pool.queues[ranking.first, band]
        over_all = (usage for usage in queue.rows if usage.row.lane is None)
        blocked = jobs_refusal(over_all, borrow=borrow)
        if blocked is None:
            return False
        line = queue.aged if aged else queue.fresh
        self._gate.hold(line[0][3], HeldBy.QUOTA, blocked)
        return True

    def _goes_first(self, queue: Queue) -> None:
        """Let no lane in line bank that a job goes whosever turn it is."""
        queue.pool.counters.goes_first(
            queue.lane,
            band=queue.band,
            slack_tokens=self._mind.policy.order.lane_slack_tokens,
        )

    def _lift(self, passed: list[tuple[Queue, float]], chosen: Queue) -> None:
        """Let nobody bank the time in which its quota kept it; little, where it found no room."""
        counter = chosen.pool.counters.counter(chosen.lane, band=chosen.band)
        floor = counter - self._mind.policy.order.lane_slack_tokens
        for queue, debt_max in passed:
            self._mind.queues.lift(queue, floor - debt_max)

    def _best_in_turn(
        self, fair: list[Line], borrow: Borrow, *, claims: bool
    ) -> tuple[Waiting, Placement] | None:
        """Find the best of those whose turn it is; where none may go, of their lanes' others."""
        best = self._best(fair, borrow, claims=claims)
        if best is not None or self._mind.queues.pool(fair[0][0][3].job.model).closed:
            return best
        slack_tokens = self._mind.policy.order.lane_slack_tokens
        fresh = (line[0][3].queue for line in fair if not line[0][3].aged)
        others = [
            line
            for queue in dict.fromkeys(fresh)
            for line in queue.others(slack_tokens=slack_tokens)
        ]
        return self._best(others, borrow, claims=False) if others else None

    def _best(
        self, fair: list[Line], borrow: Borrow, *, claims: bool
    ) -> tuple[Waiting, Placement] | None:
        order = self._mind.policy.order
        candidates_max = max(1, order.candidates_max // len(fair))
        best: tuple[Waiting, Placement] | None = None
        best_key: tuple[bool, float, float, int, str] | None = None
        for line in fair:
            candidates = passes = 0
            for due_at_s, sequence, key, waiting in islice(line, SKIPS * candidates_max):
                early_s = due_at_s - waiting.queue.wait_s_max
                least_s = order.wait_credit * early_s
                if best_key is not None and not best_key[0] and least_s > best_key[1]:
                    break  # Prefill takes no less than nothing, and later ones have less credit.
                if waiting.queue.is_closed:
                    break
                if self._gate.is_passed_by(waiting):
                    continue
                placement = self._gate.look(waiting, borrow=borrow, claims=claims)
                if placement is not None:
                    late_s = waiting.job.enqueued_at_s - early_s
                    credit = order.wait_credit * (early_s + (1.0 - DEADLINE_SHARE) * late_s)
                    cost_s = placement.prefill_s + credit
                    # One of another lane tells more of a worker that is tried.
                    candidate_key = (_repeats(waiting, placement), cost_s, due_at_s, sequence, key)
                    if best_key is None or candidate_key < best_key:
                        best, best_key = (waiting, placement), candidate_key
                    candidates += 1
                passes += 1
                if candidates >= candidates_max or passes >= PASSES * candidates_max:
                    break
        return best

    def _give(self, waiting: Waiting, placement: Placement, way: Way) -> None:
        mind, job, worker = self._mind, waiting.job, placement.worker
        assert worker is not None, "chosen with a worker"
        pool = waiting.queue.pool
        why = mind.router.explain(job, placement, at_s=mind.at_s)
        explanation = Explanation(
            why.policy,
            why.candidates,
            why.previous_worker,
            why.predicted_hit_tokens,
            why.predicted_ttft_s,
            queue_s=max(0.0, mind.at_s - waiting.held_at_s),
            held_by=_held_by(waiting),
            is_probe=worker.breaker.state is BreakerState.HALF_OPEN,
        )
        lease = Lease(
            job,
            mind.next_attempt(),
            worker.id,
            mind.fleet.number_order(worker),
            granted_at_s=mind.at_s,
            cost_tokens=cost_of(waiting, placement),
            uncached_tokens=placement.uncached_tokens,
            hit_tokens=placement.hit_tokens,
            output_tokens_expected=waiting.output_tokens_expected,
            progressed_at_s=mind.at_s,
            failures=waiting.failures,
            excluded=waiting.excluded,
        )
        pool.shares.dispatched(
            waiting.queue.band,
            lease.cost_tokens,
            way=way,
            waiting_jobs=pool.in_line,
            bands=mind.policy.bands,
            aged_share_max=mind.policy.order.aged_share_max,
        )
        mind.queues.remove(waiting)
        mind.leases(lease, worker)
        pool.most_tokens.clear()  # It may be less now: who is too long needs no look.
        if mind.claims:
            mind.claims.left(waiting)
        worker.dispatched_at_s = mind.at_s
        worker.dispatched_count += 1
        mind.router.given(lease, worker, at_s=mind.at_s)
        mind.out.append(
            Dispatch(
                job.key,
                worker.id,
                lease.attempt,
                lease.number,
                job.stream_sequence,
                why.predicted_hit_tokens,
                job.enqueued_at_s,
                waiting.failures,
                mind.policy.leases.run_s_max,
                mind.policy.leases.stall_s,
                explanation,
            )
        )


def _repeats(waiting: Waiting, placement: Placement) -> bool:
    """Say whether a job would be tried where its own lane's failures opened the breaker."""
    worker = placement.worker
    return worker is not None and worker.breaker.lane == waiting.job.lane


def _stand(ranking: Ranking, *, band: int, aged: bool) -> Iterator[_Entry]:
    return ((counter, lane, band, not aged) for counter, lane in ranking)


def _more(pool: Pool, band: int, borrow: Borrow) -> Borrow:
    """Under pressure the bands of people borrow from batch before batch itself is served."""
    if pool.pressure >= Step.BORROW and band in ONLINE_BANDS:
        return max(borrow, Borrow.FROM_BATCH)
    return borrow


def _held_by(waiting: Waiting) -> HeldBy:
    if waiting.held_by is HeldBy.NOTHING and waiting.receipted:
        return HeldBy.ORDER  # It waited, and was never looked at until now.
    return waiting.held_by
