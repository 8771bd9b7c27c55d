"""vLLM production-stack's trie: any holder of the longest prefix."""

import random

from broker.sim.peers.production_stack import ProductionStack
from tests.unit.sim.peers.workers import BLOCK_TOKENS, a_request, workers_with


def test_the_longest_prefix_wins_over_load() -> None:
    """Source: test_prefixaware_router.py: with no minimum the matched worker is used."""
    peer = ProductionStack(random.Random(1))
    only = workers_with(0, 0)[1:]
    peer.choose(a_request((1, 2)), only, at_s=0.0)
    workers = workers_with(0, 50)
    assert [peer.choose(a_request((1, 2, 3)), workers, at_s=0.0) for _ in range(9)] == [1] * 9


def test_holders_of_the_same_prefix_are_drawn_by_chance() -> None:
    """Two hold it, a third doesn't: both are drawn, the third never."""
    peer = ProductionStack(random.Random(1))
    workers = workers_with(0, 0, 0)
    for holder in workers[:2]:
        peer.choose(a_request((1,)), [holder], at_s=0.0)
    drawn = [peer.choose(a_request((1,)), workers, at_s=0.0) for _ in range(50)]
    assert sorted(dict.fromkeys(drawn)) == [0, 1]


def test_an_unknown_prompt_goes_anywhere() -> None:
    """With no minimum, all workers are candidates, loaded or not."""
    peer = ProductionStack(random.Random(1))
    drawn = [peer.choose(a_request((block,)), workers_with(9, 0), at_s=0.0) for block in range(50)]
    assert sorted(dict.fromkeys(drawn)) == [0, 1]


def test_below_the_minimum_near_ties_of_load_are_drawn() -> None:
    """Source: test_prefixaware_router.py: of 2, 3 and 5 in flight the first two, by chance."""
    peer = ProductionStack(random.Random(1), match_tokens_min=4096)
    drawn = [
        peer.choose(a_request((block,)), workers_with(2, 3, 5), at_s=0.0) for block in range(50)
    ]
    assert sorted(dict.fromkeys(drawn)) == [0, 1]


def test_a_choice_below_the_minimum_pins_the_follow_up() -> None:
    """Source: test_prefixaware_router.py: idle against 8 in flight, then the other way round."""
    peer = ProductionStack(random.Random(1), match_tokens_min=BLOCK_TOKENS)
    assert peer.choose(a_request((1,)), workers_with(0, 8), at_s=0.0) == 0
    assert peer.choose(a_request((1, 2)), workers_with(8, 0), at_s=0.0) == 0


def test_a_lost_worker_leaves_the_trie() -> None:
    """Its prefixes match nobody any more, others' stay."""
    peer = ProductionStack(random.Random(1), match_tokens_min=BLOCK_TOKENS)
    workers = workers_with(0, 8)
    peer.choose(a_request((1, 2)), workers, at_s=0.0)
    peer.lost(workers[0], at_s=1.0)
    assert peer.choose(a_request((1, 2)), workers_with(8, 0), at_s=2.0) == 1
