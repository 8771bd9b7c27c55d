"""Power of two: the less loaded of two drawn."""

import random
from collections import Counter

from broker.sim.peers.power_of_two import PowerOfTwo
from tests.unit.sim.peers.workers import a_request, workers_with


def test_the_less_loaded_is_chosen_more_often_and_the_most_loaded_never() -> None:
    """Source: power_of_two.rs's own case: loads 10, 5 and 0 over 100 draws."""
    peer = PowerOfTwo(random.Random(1))
    workers = workers_with(10, 5, 0)
    drawn = Counter(peer.choose(a_request(), workers, at_s=0.0) for _ in range(100))
    assert drawn[2] > drawn[1] > drawn[0] == 0


def test_equals_are_both_drawn() -> None:
    """The first drawn wins a tie, and either may be drawn first."""
    peer = PowerOfTwo(random.Random(1))
    drawn = [peer.choose(a_request(), workers_with(4, 4), at_s=0.0) for _ in range(50)]
    assert sorted(dict.fromkeys(drawn)) == [0, 1]


def test_a_lone_worker_is_taken() -> None:
    """There is nothing to draw."""
    assert PowerOfTwo(random.Random(1)).choose(a_request(), workers_with(7), at_s=0.0) == 0
