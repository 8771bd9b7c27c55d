"""SGLang's cache-aware router: the tree while loads are even, the shortest queue otherwise."""

import random

import pytest

from broker.sim.peers.sglang import EVICTION_EVERY_S, TREE_TOKENS_MAX, SGLang
from broker.sim.request import Request
from tests.unit.sim.peers.workers import FakeWorker, a_request, workers_with


def choose(peer: SGLang, workers: list[FakeWorker], *blocks: int) -> int:
    """Route a prompt of these blocks."""
    return peer.choose(a_request(blocks), workers, at_s=0.0)


def test_a_known_prompt_and_its_beginning_go_where_it_went() -> None:
    """Source: cache_aware.rs: 'hello world' twice, then 'hello': one worker."""
    peer = SGLang(random.Random(1))
    workers = workers_with(1, 0)
    hello_world = tuple(range(11))
    first = choose(peer, workers, *hello_world)
    workers[first].requests = 9
    assert choose(peer, workers, *hello_world) == first
    assert choose(peer, workers, *hello_world[:5]) == first


def test_uneven_loads_go_to_the_shortest_queue() -> None:
    """Source: cache_aware.rs: loads 20 and 0, gap 5, ratio 2: the idle worker five times."""
    peer = SGLang(random.Random(1), match_ratio_min=0.5, gap=5, ratio=2.0)
    workers = workers_with(0, 20)
    assert choose(peer, workers, 1) == 0
    workers = workers_with(20, 0)
    assert [choose(peer, workers, 1) for _ in range(5)] == [1] * 5


@pytest.mark.parametrize(
    ("loads", "uneven"),
    [((64, 0), False), ((65, 0), True), ((195, 130), False), ((196, 130), True)],
)
def test_both_thresholds_must_be_passed(loads: tuple[int, int], *, uneven: bool) -> None:
    """By default max - min > 64 and max > 1.5 x min."""
    assert SGLang(random.Random(1)).uneven(loads) is uneven


def test_the_smallest_tree_takes_an_unknown_prompt_even_if_overloaded() -> None:
    """Source: cache_aware.rs's overload case: 50 requests with a tree of 5, none with 1,000.

    The older rule takes the first; the rule since 0.3 takes the idle one.
    """
    for smallest_tree, place in ((True, 0), (False, 1)):
        peer = SGLang(
            random.Random(1),
            match_ratio_min=0.5,
            gap=100,
            ratio=10.0,
            smallest_tree=smallest_tree,
        )
        choose(peer, workers_with(0, 1), *range(5))
        choose(peer, workers_with(200, 0), *range(1000, 2000))
        assert choose(peer, workers_with(50, 0), 7, 8, 9) == place


def test_a_match_of_30_percent_is_not_enough() -> None:
    """Strictly more than 0.3 of the prompt must match, tail included."""
    workers = workers_with(1, 0)
    peer = SGLang(random.Random(1))
    assert choose(peer, workers, 1, 2, 3) == 1
    workers = workers_with(0, 1)
    assert choose(peer, workers, 1, 2, 3, *range(20, 27)) == 0
    peer = SGLang(random.Random(1))
    choose(peer, workers_with(1, 0), 1, 2, 3)
    assert choose(peer, workers, 1, 2, 3, *range(20, 26)) == 1


def test_a_worker_taken_out_gets_nothing() -> None:
    """Source: cache_aware.rs: once the first worker is removed all go to the second."""
    peer = SGLang(random.Random(1))
    workers = workers_with(0, 0)
    choose(peer, workers, 1)
    peer.lost(workers[0], at_s=1.0)
    assert choose(peer, workers[1:], 1) == 0


def test_a_tree_is_cut_to_its_size_every_minute() -> None:
    """The least lately used prompt is forgotten first, from its leaves."""
    huge_tokens = TREE_TOKENS_MAX // 2

    def a_prompt(*blocks: int) -> Request:
        return Request(
            index=0,
            at_s=0.0,
            prompt_tokens=len(blocks) * huge_tokens,
            output_tokens=1,
            output_tokens_max=1,
            blocks=blocks,
            block_tokens=huge_tokens,
        )

    peer = SGLang(random.Random(1))
    held_by_1 = workers_with(1, 0)
    prefer_0 = workers_with(0, 1)
    peer.choose(a_prompt(1, 2), held_by_1, at_s=0.0)
    peer.choose(a_prompt(3), held_by_1, at_s=EVICTION_EVERY_S / 2)
    assert peer.choose(a_prompt(9), prefer_0, at_s=EVICTION_EVERY_S) == 0
    assert peer.choose(a_prompt(3), prefer_0, at_s=EVICTION_EVERY_S) == 1
    assert peer.choose(a_prompt(1, 2, 4, 5, 6), prefer_0, at_s=EVICTION_EVERY_S) == 0
    assert peer.choose(a_prompt(1), prefer_0, at_s=EVICTION_EVERY_S) == 1
