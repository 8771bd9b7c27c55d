"""llm-d's affinity filter: sticky at 80 %, until the gate; then token load."""

import random
from functools import partial

import pytest

from broker.sim.peers.llmd_affinity import LlmdAffinity, token_load_score
from tests.unit.sim.peers.workers import FakeWorker, a_request

REQUEST = a_request(range(100), prompt_tokens=100)


def test_narrows_to_the_sticky_ones() -> None:
    """Source: prefixcacheaffinity/plugin_test.go: matches 90, 85 and 10 of 100 leave two."""
    workers = [FakeWorker(id=place) for place in range(3)]
    peer = LlmdAffinity(random.Random(1), gate_s=5.0)
    assert peer.left(REQUEST, workers, [90, 85, 10]) == [0, 1]


def test_without_a_sticky_one_all_are_left() -> None:
    """Source: plugin_test.go: matches 10, 20 and 50 of 100 leave all three."""
    workers = [FakeWorker(id=place) for place in range(3)]
    assert LlmdAffinity(random.Random(1)).left(REQUEST, workers, [10, 20, 50]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("gate_s", "sticky_tokens", "left"),
    [(0.1, 500, [0, 1]), (1.0, 500, [0]), (0.0, 5000, [0])],
)
def test_the_gate_breaks_stickiness(gate_s: float, sticky_tokens: int, left: list[int]) -> None:
    """Source: plugin_test.go: 1,000 tokens/s, 50 tokens elsewhere; a gate of 0 always sticks."""
    workers = [
        FakeWorker(id=0, prefill_tokens=sticky_tokens),
        FakeWorker(id=1, prefill_tokens=50),
    ]
    peer = LlmdAffinity(random.Random(1), gate_s=gate_s, prefill_tokens_s=1000.0)
    assert peer.left(REQUEST, workers, [90, 10]) == left


def test_by_default_a_sticky_worker_may_start_18_s_later() -> None:
    """18 s at 15,928 tokens/s are 286,704 tokens of prompts before it."""
    peer = LlmdAffinity(random.Random(1))
    at_gate = [FakeWorker(id=0, prefill_tokens=286_704), FakeWorker(id=1)]
    assert peer.left(REQUEST, at_gate, [80, 79]) == [0]
    beyond = [FakeWorker(id=0, prefill_tokens=286_705), FakeWorker(id=1)]
    assert peer.left(REQUEST, beyond, [80, 79]) == [0, 1]


def test_a_token_load_scores_as_published() -> None:
    """Source: tokenload/token_load_test.go: 250, 500 and 1,000 of 1,000 are .75, .5 and 0."""
    scores = [token_load_score(tokens, tokens_max=1000) for tokens in (250, 500, 1000, 2000, 0)]
    assert scores == [0.75, 0.5, 0.0, 0.0, 1.0]


def test_the_least_token_load_wins_with_the_request_counted_in() -> None:
    """What a worker has cached of the request lightens its load."""
    peer = LlmdAffinity(random.Random(1), precise=True)
    workers = [
        FakeWorker(id=0, prefill_tokens=10),
        FakeWorker(id=1, prefill_tokens=20, cached={1}),
        FakeWorker(id=2, prefill_tokens=15),
    ]
    assert peer.choose(a_request((1, 2, 3, 4)), workers, at_s=0.0) == 1


def test_equal_loads_take_turns() -> None:
    """Source: picker/common.go: equal best scores rotate."""
    peer = LlmdAffinity(random.Random(1), precise=True)
    choose = partial(peer.choose, workers=[FakeWorker(id=place) for place in range(3)], at_s=0.0)
    assert [choose(a_request((index,))) for index in range(5)] == [0, 1, 2, 0, 1]


def test_the_approximate_index_sticks_to_its_own_choice_at_once() -> None:
    """The second of two like prompts follows the first before any engine tells of it."""
    peer = LlmdAffinity(random.Random(1))
    workers = [FakeWorker(id=place) for place in range(3)]
    places = [peer.choose(a_request((5, 6)), workers, at_s=0.0) for _ in range(4)]
    assert places == [0] * 4
    peer.lost(workers[0], at_s=1.0)
    assert peer.choose(a_request((5, 6)), workers, at_s=2.0) == 1
