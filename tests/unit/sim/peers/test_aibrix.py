"""AIBrix's prefix-cache routing."""

import random

from broker.sim.peers.aibrix import TABLE_BLOCKS_MAX, TABLE_KEPT_S, AIBrix
from tests.unit.sim.peers.workers import FakeWorker, a_request, workers_with

ABCD, EGFH, EFGH, IJKL, WXYZ = 1, 2, 3, 4, 5


def give(peer: AIBrix, workers: list[FakeWorker], *blocks: int) -> int:
    """Route a prompt of these blocks, and count it in."""
    place = peer.choose(a_request(blocks), workers, at_s=0.0)
    workers[place].requests += 1
    return place


def test_the_published_walk() -> None:
    """Source: prefix_cache_test.go, four workers, blocks of four letters, counts as given there.

    A new prompt goes to any, the next to another; the first again to its holder; one that its
    holder can't take within one deviation to an idle worker; a longer one to the holder of less
    that is in line; the fully matched to its holder; and with 9 against 0 to the idlest.
    """
    for seed in range(20):
        peer = AIBrix(random.Random(seed))
        workers = workers_with(0, 0, 0, 0)
        first = give(peer, workers, ABCD, EGFH)
        second = give(peer, workers, WXYZ)
        assert second != first
        assert give(peer, workers, ABCD, EGFH) == first
        third = give(peer, workers, ABCD)
        assert third not in {first, second}
        assert give(peer, workers, ABCD, EFGH, IJKL) == third
        assert give(peer, workers, ABCD, EFGH) == third
        workers[third].requests += 6
        assert sorted(worker.requests for worker in workers) == [0, 1, 2, 9]
        assert give(peer, workers, ABCD, EFGH) not in {first, second, third}


def test_more_deviations_keep_a_busy_holder_in_line() -> None:
    """Counts 2, 1, 0, 0: mean .75, deviation .96: 2 is out of line at one, in line at two."""
    for deviations, stays in ((1, False), (2, True)):
        peer = AIBrix(random.Random(1), deviations=deviations)
        peer.choose(a_request((1,)), workers_with(0, 9, 9, 9), at_s=0.0)
        chosen = peer.choose(a_request((1,)), workers_with(2, 1, 0, 0), at_s=0.0)
        assert (chosen == 0) is stays


def test_a_holder_at_the_bound_is_in_line() -> None:
    """Where all counts are equal the bound is their mean, and the holder is at it."""
    for seed in range(10):
        peer = AIBrix(random.Random(seed))
        peer.choose(a_request((1,)), workers_with(0, 9), at_s=0.0)
        assert peer.choose(a_request((1,)), workers_with(2, 2), at_s=0.0) == 0


def test_a_severe_imbalance_matches_only_the_idlest() -> None:
    """10 against 2, 1 and 1: above 2 x (mean + 1) and a gap of 8; with a gap of 16 it isn't."""
    for gap, place in ((8, 3), (16, 1)):
        peer = AIBrix(random.Random(1), gap=gap)
        workers = workers_with(10, 2, 1, 1)
        peer.choose(a_request((1, 2)), workers[1:2], at_s=0.0)
        peer.choose(a_request((1,)), workers[3:], at_s=0.0)
        assert peer.choose(a_request((1, 2)), workers, at_s=0.0) == place


def test_the_table_forgets_after_20_minutes_and_beyond_its_size() -> None:
    """A block not used for longer is gone; 200,000 others push it out."""
    busy_holder = workers_with(1, 0)
    for at_s, blocks, place in (
        (TABLE_KEPT_S, (9,), 0),
        (TABLE_KEPT_S + 1.0, (9,), 1),
        (1.0, range(10, 10 + TABLE_BLOCKS_MAX), 1),
    ):
        peer = AIBrix(random.Random(1), deviations=2)
        peer.choose(a_request((1,)), workers_with(0, 1), at_s=0.0)
        peer.choose(a_request(blocks), workers_with(1, 0), at_s=at_s)
        assert peer.choose(a_request((1,)), busy_holder, at_s=at_s) == place


def test_a_lost_worker_leaves_the_table() -> None:
    """Its blocks match nobody."""
    peer = AIBrix(random.Random(1), deviations=2)
    workers = workers_with(0, 1)
    peer.choose(a_request((1,)), workers, at_s=0.0)
    peer.lost(workers[0], at_s=1.0)
    assert peer.choose(a_request((1,)), workers_with(1, 0), at_s=2.0) == 1
