"""Least requests: the fewest given, equals by chance."""

import random

from broker.sim.peers.least_requests import LeastRequests
from tests.unit.sim.peers.workers import a_request, workers_with


def test_the_fewest_requests_win() -> None:
    """Source: least_request_test.go: of 1, 2, 3 and 9 running requests the first is taken."""
    peer = LeastRequests(random.Random(1))
    assert peer.choose(a_request(), workers_with(1, 2, 3, 9), at_s=0.0) == 0


def test_equals_are_drawn_by_chance() -> None:
    """Source: least_request_test.go: of 1, 5 and 1 either end may be taken, and both are."""
    peer = LeastRequests(random.Random(1))
    drawn = [peer.choose(a_request(), workers_with(1, 5, 1), at_s=0.0) for _ in range(50)]
    assert sorted(dict.fromkeys(drawn)) == [0, 2]
