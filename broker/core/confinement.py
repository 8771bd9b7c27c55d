"""Where batch may run: where nothing lies that people come back to, and on a share of the rest.

An engine's cache forgets what was used least recently. A sweep of long prompts that share nothing
writes a whole cache in less time than people think between two turns, so whoever comes back finds
nothing. To bound what batch writes on each worker costs most of its idle time and still puts long
prefills before everybody; to leave some workers to it, and the others alone, costs as many workers
and keeps nearly all hits (figures: `ops/docs/simulator.md`). This is cache partitioning by way, as
in processors (Intel's Cache Allocation Technology), with a worker for a way.

A worker is *guarded* for `online_prefix_s` after an online job found a prefix of its own there that
a sweep would have pushed out: one that few hold, and that was not used a moment before. Of n
workers, batch has those that are not guarded, and guarded ones up to its share of n, at least one:
it is never without a worker, and where nobody's prefixes live it has all of them.

Each move is O(1): a pool keeps the guarded workers in the order of their last such use, apart for
those that batch has (`spared`) and has not (`closed`).
"""

import math
from collections import OrderedDict

from broker.core.policy import RoutingPolicy
from broker.core.roster import Pool, Roster
from broker.core.seat import Seat

QUICK_USE_S = 5.0
"""A prefix used again so soon is safe from a sweep: 40,000 tokens, a small cache, take 5 s at the
prefill rate that is assumed where none is known."""

EXPIRE_SEATS_MAX = 64
"""Guards of one pool that end at most in one look at the time: a large fleet's end over several."""

ROUNDING = 1e-9
"""A share of ten workers that is 2.9999999999999996 is three."""


class Confinement:
    """Decides for all pools of a roster."""

    def __init__(self, policy: RoutingPolicy, roster: Roster) -> None:
        self._policy = policy
        self._roster = roster
        self._guarded: dict[str, Pool] = {}
        """Pools with guarded workers, by model."""

    def reconfigure(self, policy: RoutingPolicy) -> None:
        """Take new knobs: what was guarded stays so until its time is over."""
        self._policy = policy
        if policy.batch_cache_share >= 1.0:
            for model, pool in self._guarded.items():
                for seat in (*pool.closed, *pool.spared):
                    seat.guarded_in = tuple(one for one in seat.guarded_in if one != model)
                pool.part = None
                pool.closed.clear()
                pool.spared.clear()
            self._guarded.clear()

    def part(self, pool: Pool) -> Pool:
        """Return the workers of a pool that batch may use; made when it first asks."""
        if self._policy.batch_cache_share >= 1.0:
            return pool
        part = pool.part
        if part is None:
            part = pool.part = Pool(whole=pool)
            for _, _, _, seat in pool.order:
                if seat not in pool.closed:
                    part.add(seat)
        if pool.closed or pool.spared:
            self._balance(pool)
        return part

    def guard(self, seat: Seat, *, at_s: float) -> None:
        """Note that an online job found a prefix on a worker that a sweep would push out."""
        if self._policy.batch_cache_share >= 1.0 or not seat.is_serving:
            return
        until_s = at_s + self._policy.online_prefix_s
        if seat.guarded_in != seat.models:
            self.release(seat)
            seat.guarded_in = seat.models
        for model in seat.models:
            pool = self._roster.pool(model)
            assert pool is not None, "a serving worker is in its pools"
            self._guarded[model] = pool
            if seat in pool.closed:
                pool.closed[seat] = until_s
                pool.closed.move_to_end(seat)
            elif seat in pool.spared or _open_count(pool) <= self._least_open(pool):
                pool.spared[seat] = until_s
                pool.spared.move_to_end(seat)
            else:
                _close(pool, seat, until_s)

    def refresh(self, seat: Seat) -> None:
        """See a worker's state as it is now."""
        if seat.guarded_in and not (seat.is_serving and seat.guarded_in == seat.models):
            self.release(seat)

    def release(self, seat: Seat) -> None:
        """Note that nothing of people's is on a worker: it is gone, new or silent."""
        for model in seat.guarded_in:
            pool = self._guarded.get(model)
            if pool is None:
                continue
            pool.spared.pop(seat, None)
            if seat in pool.closed:
                _open(pool, seat, is_there=seat.is_serving and model in seat.models)
        seat.guarded_in = ()

    def expire(self, at_s: float) -> list[str]:
        """End guards whose time is over; return the models for which batch has another worker."""
        opened: list[str] = []
        for model in [*self._guarded]:
            pool = self._guarded[model]
            due = _due(pool.closed, at_s)
            for seat in due:
                _open(pool, seat, is_there=True)
            if due:
                opened.append(model)
            for seat in _due(pool.spared, at_s):
                del pool.spared[seat]
            self._balance(pool)
            if not pool.closed and not pool.spared:
                del self._guarded[model]
        return opened

    def _least_open(self, pool: Pool) -> int:
        return max(1, math.floor(self._policy.batch_cache_share * len(pool.order) + ROUNDING))

    def _balance(self, pool: Pool) -> None:
        """Give batch its share, and no guarded worker beyond it."""
        least = self._least_open(pool)
        while pool.spared and _open_count(pool) > least:
            _close(pool, *pool.spared.popitem())
        while pool.closed and _open_count(pool) < least:
            seat = next(iter(pool.closed))
            pool.spared[seat] = pool.closed[seat]
            _open(pool, seat, is_there=True)


def _open_count(pool: Pool) -> int:
    return len(pool.order) - len(pool.closed)


def _close(pool: Pool, seat: Seat, until_s: float) -> None:
    if pool.part is not None:
        pool.part.remove(seat)
        pool.part.hide(seat)
    pool.closed[seat] = until_s


def _open(pool: Pool, seat: Seat, *, is_there: bool) -> None:
    del pool.closed[seat]
    if pool.part is not None and is_there:
        # With its bit, every kept answer that rests on the part's bits is given anew.
        pool.part.add(seat)


def _due(guarded: OrderedDict[Seat, float], at_s: float) -> list[Seat]:
    """List guards that are over. One that changed sides stands behind newer ones, and ends late."""
    due: list[Seat] = []
    for seat, until_s in guarded.items():
        if until_s > at_s or len(due) >= EXPIRE_SEATS_MAX:
            break
        due.append(seat)
    return due
