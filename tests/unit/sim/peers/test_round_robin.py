"""Round robin: in turn, over the workers there are."""

import random

from broker.sim.peers.round_robin import RoundRobin, variants
from tests.unit.sim.peers.workers import a_request, workers_with


def test_three_workers_take_turns() -> None:
    """Source: round_robin.rs's own case: three workers, five requests: 0, 1, 2, 0, 1."""
    peer = RoundRobin()
    workers = workers_with(0, 0, 0)
    assert [peer.choose(a_request(), workers, at_s=0.0) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_a_worker_that_goes_changes_only_the_modulus() -> None:
    """The count goes on; each place stays within the workers there are."""
    peer = variants()["round-robin"](random.Random(1))
    assert [peer.choose(a_request(), workers_with(0, 0, 0), at_s=0.0) for _ in range(4)][-1] == 0
    assert [peer.choose(a_request(), workers_with(0, 0), at_s=1.0) for _ in range(2)] == [0, 1]
