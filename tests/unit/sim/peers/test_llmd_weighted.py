"""llm-d's weighted scorers."""

import random

import pytest

from broker.sim.peers.llmd_weighted import LlmdWeighted, queue_scores
from tests.unit.sim.peers.workers import FakeWorker, a_request


def test_queues_score_as_published() -> None:
    """Source: queuedepth/queue_test.go: 10, 5 and 0 score 0, .5 and 1; equals score 1."""
    assert queue_scores([10, 5, 0]) == [0.0, 0.5, 1.0]
    assert queue_scores([5, 5]) == [1.0, 1.0]
    assert queue_scores([0, 0]) == [1.0, 1.0]


def test_kv_use_scores_as_published() -> None:
    """Source: kvcache_utilization_test.go: .8, .5 and 0 in use score .2, .5 and 1."""
    workers = [FakeWorker(id=place, kv_ratio=used) for place, used in enumerate((0.8, 0.5, 0.0))]
    peer = LlmdWeighted(random.Random(1), weights=(0, 0, 1))
    assert peer.scores(a_request((1,)), workers) == pytest.approx([0.2, 0.5, 1.0])


def test_prefixes_score_as_published() -> None:
    """Source: prefix/plugin_test.go: 5 and 2 of 10 blocks score .5 and .2."""
    workers = [FakeWorker(id=0, cached=set(range(5))), FakeWorker(id=1, cached=set(range(2)))]
    peer = LlmdWeighted(random.Random(1), precise=True, weights=(1, 0, 0))
    assert peer.scores(a_request(range(10)), workers) == [0.5, 0.2]


def test_the_weights_are_3_2_2() -> None:
    """Half a prompt cached outweighs a longer queue only while the queue is not the longest.

    1.5 + 0 + 2 against 0 + 2 + 2; with equal queues 1.5 + 2 + 2 against 4.
    """
    workers = [FakeWorker(id=0, cached={1}, waiting=4), FakeWorker(id=1)]
    peer = LlmdWeighted(random.Random(1), precise=True)
    assert peer.scores(a_request((1, 2)), workers) == [3.5, 4.0]
    assert peer.choose(a_request((1, 2)), workers, at_s=0.0) == 1
    workers[0].waiting = 0
    assert peer.scores(a_request((1, 2)), workers) == [5.5, 4.0]
    assert peer.choose(a_request((1, 2)), workers, at_s=0.0) == 0


def test_the_approximate_index_remembers_until_it_is_full() -> None:
    """500,000 tokens a worker are kept, the latest ones."""
    peer = LlmdWeighted(random.Random(1))
    worker = FakeWorker(id=0)
    peer.choose(a_request((1,)), [worker], at_s=0.0)
    assert peer.scores(a_request((1,)), [worker]) == [7.0]
    peer.choose(a_request(range(10, 10 + 31_250)), [worker], at_s=1.0)
    assert peer.scores(a_request((1,)), [worker]) == [4.0]
    peer.lost(worker, at_s=2.0)
    assert peer.scores(a_request((10,)), [worker]) == [4.0]
