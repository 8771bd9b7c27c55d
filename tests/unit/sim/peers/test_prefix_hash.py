"""Hash of the first two blocks: one home, until it is too busy."""

import random
from collections import Counter

from broker.sim.peers.prefix_hash import PrefixHash
from tests.unit.sim.peers.workers import FakeWorker, a_request, workers_with


def idle(count: int) -> list[FakeWorker]:
    """Build idle workers."""
    return workers_with(*[0] * count)


def test_the_bound_is_as_published() -> None:
    """Source: prefix_hash.rs: of 100 requests on 4 workers 30 are within 1.25, 35 are not."""
    peer = PrefixHash(random.Random(1), load_factor=1.25)
    assert peer.within_bound(30, [30, 30, 20, 20])
    assert not peer.within_bound(35, [35, 25, 20, 20])
    assert peer.within_bound(0, [0, 0, 0, 0])


def test_the_first_two_blocks_decide() -> None:
    """Source: prefix_hash.rs: the same first tokens, other tails: one worker."""
    peer = PrefixHash(random.Random(1))
    workers = idle(8)
    for block in range(50):
        first = peer.choose(a_request((0, block, 900 + block)), workers, at_s=0.0)
        assert peer.choose(a_request((0, block, 2000 + block, 7)), workers, at_s=0.0) == first


def test_different_prefixes_are_spread() -> None:
    """Each of 8 workers is home to its share, within a factor of two."""
    peer = PrefixHash(random.Random(1))
    homes = Counter(peer.choose(a_request((0, block)), idle(8), at_s=0.0) for block in range(4000))
    assert sorted(homes) == list(range(8))
    assert max(homes.values()) < 2 * min(homes.values())


def test_a_busy_home_gives_to_the_least_loaded() -> None:
    """Where the home is beyond the bound the fewest requests win; unbounded it never leaves."""
    workers = idle(4)
    home = PrefixHash(random.Random(1)).choose(a_request((0, 1)), workers, at_s=0.0)
    for worker in workers:
        worker.requests = 20
    workers[home].requests = 40
    workers[(home + 2) % 4].requests = 10
    bounded = PrefixHash(random.Random(1))
    assert bounded.choose(a_request((0, 1)), workers, at_s=0.0) == (home + 2) % 4
    unbounded = PrefixHash(random.Random(1), load_factor=float("inf"))
    assert unbounded.choose(a_request((0, 1)), workers, at_s=0.0) == home


def test_a_lost_worker_moves_only_its_own_prefixes() -> None:
    """The others' homes stay: the ring is consistent."""
    peer = PrefixHash(random.Random(1))
    workers = idle(4)
    before = {
        block: workers[peer.choose(a_request((0, block)), workers, at_s=0.0)].id
        for block in range(200)
    }
    left = workers[1:]
    for block, worker_id in before.items():
        now = left[peer.choose(a_request((0, block)), left, at_s=1.0)].id
        assert worker_id in {now, workers[0].id}


def test_a_prompt_shorter_than_two_blocks_goes_by_itself() -> None:
    """Short prompts that share only block 0 don't crowd one worker."""
    peer = PrefixHash(random.Random(1))
    homes = {
        peer.choose(a_request((0,), index=index), idle(4), at_s=0.0): None for index in range(100)
    }
    assert sorted(homes) == [0, 1, 2, 3]
