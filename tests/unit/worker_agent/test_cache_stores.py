"""What an engine's cache is believed to hold, for both kinds of cache."""

import random

import pytest

from worker_agent.cache_stores import BlockCache, Chain, Reuse, SequenceCache, Store


def run(store: Store, name: str, chain: Chain, *, at_s: float, tail_blocks: int = 0) -> Reuse:
    """One request from beginning to end."""
    reuse = store.begin(name, chain, at_s=at_s)
    store.fill(name, at_s=at_s)
    store.end(name, tail_blocks=tail_blocks, at_s=at_s)
    return reuse


@pytest.mark.parametrize("store", [BlockCache(), SequenceCache(slots=2)])
def test_a_prompt_is_held_once_it_is_computed(store: Store) -> None:
    """Not when it was given: a second request that comes before the first token finds nothing."""
    chain = [1, 2, 3]
    assert store.begin("a", chain, at_s=1.0) == Reuse()
    assert store.depth(chain) == 0
    store.fill("a", at_s=2.0)
    assert store.depth(chain) == 3
    store.end("a", tail_blocks=0, at_s=3.0)
    assert run(store, "b", [1, 2, 9], at_s=4.0).blocks == 2


@pytest.mark.parametrize("store", [BlockCache(), SequenceCache(slots=2)])
def test_a_cleared_cache_holds_nothing_and_says_so(store: Store) -> None:
    """After an engine's restart every block is gone."""
    run(store, "a", [1, 2, 3], at_s=1.0)
    store.clear()
    assert store.depth([1, 2, 3]) == 0
    assert sorted(store.take_gone()) == [1, 2, 3]
    assert store.take_gone() == []


@pytest.mark.parametrize("store", [BlockCache(), SequenceCache(slots=4)])
def test_what_was_not_used_expires_and_what_runs_does_not(store: Store) -> None:
    """Idle prefixes go after their time; a long request keeps its own."""
    run(store, "old", [1, 2], at_s=10.0)
    store.begin("long", [7, 8], at_s=11.0)
    store.fill("long", at_s=11.0)
    run(store, "new", [4, 5], at_s=100.0)
    store.expire(10.0)
    assert store.take_gone() == []
    store.expire(50.0)
    assert sorted(store.take_gone()) == [1, 2]
    assert (store.depth([4, 5]), store.depth([7, 8])) == (2, 2)


def test_blocks_leave_deepest_first_and_oldest_chain_first() -> None:
    """A prefix loses its tail, never its root before its tail."""
    store = BlockCache()
    run(store, "a", [1, 2, 3], at_s=1.0)
    run(store, "b", [1, 8, 9], at_s=2.0)
    store.bound(4)
    assert store.take_gone() == [3]
    store.bound(3)
    assert store.take_gone() == [2]
    store.bound(1)
    assert store.take_gone() == [9, 8]
    assert store.depth([1]) == 1


def test_what_runs_stays_beyond_the_bound() -> None:
    """The engine can't evict what a running request reads; when it ended, it may."""
    store = BlockCache()
    store.begin("long", [1, 2, 3], at_s=1.0)
    store.fill("long", at_s=1.0)
    run(store, "b", [7, 8], at_s=2.0)
    store.bound(2)
    assert sorted(store.take_gone()) == [7, 8]
    assert store.depth([1, 2, 3]) == 3
    store.end("long", tail_blocks=0, at_s=3.0)
    store.bound(2)
    assert store.take_gone() == [3]


def test_a_prefix_of_two_requests_stays_until_both_have_ended() -> None:
    """The second still reads it; after both it may go."""
    store = BlockCache()
    for name in ("a", "b"):
        store.begin(name, [1, 2], at_s=1.0)
        store.fill(name, at_s=1.0)
    store.end("a", tail_blocks=0, at_s=2.0)
    store.bound(0)
    assert store.take_gone() == []
    store.end("b", tail_blocks=0, at_s=3.0)
    store.bound(0)
    assert sorted(store.take_gone()) == [1, 2]


def test_answers_take_room_too_and_are_never_told() -> None:
    """The answer's blocks push older prefixes out; nobody can name them, so nobody hears."""
    store = BlockCache()
    run(store, "a", [1, 2], at_s=1.0)
    run(store, "b", [7, 8], at_s=2.0, tail_blocks=3)
    store.bound(5)
    assert store.take_gone() == [2, 1]
    store.bound(2)
    assert store.take_gone() == []
    assert store.depth([7, 8]) == 2


def test_a_miss_tells_that_all_older_blocks_are_gone_too() -> None:
    """LRU: what was used before something that is gone is gone."""
    store = BlockCache()
    run(store, "older", [1, 2], at_s=1.0)
    run(store, "missed", [4, 5], at_s=2.0)
    run(store, "newer", [7, 8], at_s=3.0)
    reuse = run(store, "again", [4, 5], at_s=4.0)
    store.missed([4, 5], used_at_s=reuse.used_at_s)
    assert sorted(store.take_gone()) == [1, 2]
    assert (store.depth([7, 8]), store.depth([4, 5])) == (2, 2)


def test_a_slot_keeps_one_sequence() -> None:
    """What is not common with the next prompt in that slot is overwritten."""
    store = SequenceCache(slots=1)
    run(store, "a", [1, 2, 3], at_s=1.0)
    run(store, "b", [1, 2, 9], at_s=2.0)
    assert store.take_gone() == [3]
    run(store, "c", [5, 6, 7], at_s=3.0)
    assert sorted(store.take_gone()) == [1, 2, 9]


def test_the_slot_with_the_longest_common_prefix_is_taken() -> None:
    """Else the one idle for longest; a busy slot can't be reused."""
    store = SequenceCache(slots=3)
    run(store, "a", [1, 2, 3], at_s=1.0)
    run(store, "b", [5, 6, 7], at_s=2.0)
    run(store, "c", [8, 9, 10], at_s=3.0)
    assert run(store, "d", [5, 6, 99], at_s=4.0).blocks == 2
    assert store.begin("e", [20, 21], at_s=5.0).blocks == 0
    assert sorted(store.take_gone()) == [1, 2, 3, 7]
    # e runs in the slot of a; f would like its prompt, and has to take another.
    store.fill("e", at_s=5.0)
    assert store.begin("f", [20, 21], at_s=6.0).blocks == 0
    assert store.depth([20, 21]) == 2


def test_a_block_in_two_slots_is_gone_only_from_both() -> None:
    """Two slots may hold the same prefix; it is told as gone when the last one lost it."""
    store = SequenceCache(slots=2)
    store.begin("a", [1, 2], at_s=1.0)
    store.begin("b", [1, 2], at_s=1.0)
    for name in "ab":
        store.fill(name, at_s=2.0)
        store.end(name, tail_blocks=0, at_s=2.0)
    store.begin("c", [5, 6], at_s=3.0)
    assert store.take_gone() == []
    store.begin("d", [7, 8], at_s=4.0)
    assert sorted(store.take_gone()) == [1, 2]


def test_a_miss_empties_the_slots_that_should_have_served() -> None:
    """The idle slots of that prefix are forgotten, others not."""
    store = SequenceCache(slots=3)
    run(store, "a", [1, 2, 3], at_s=1.0)
    run(store, "b", [5, 6], at_s=2.0)
    store.missed([1, 2, 9], used_at_s=3.0)
    assert sorted(store.take_gone()) == [1, 2, 3]
    assert store.depth([5, 6]) == 2


def test_more_requests_than_slots_are_survived() -> None:
    """A request that finds no idle slot is not modelled, and nothing else changes."""
    store = SequenceCache(slots=1)
    store.begin("a", [1, 2], at_s=1.0)
    assert store.begin("b", [1, 2], at_s=1.0) == Reuse()
    store.fill("b", at_s=2.0)
    store.end("b", tail_blocks=1, at_s=2.0)
    store.fill("a", at_s=2.0)
    assert store.depth([1, 2]) == 2


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["blocks", "sequences"])
def test_gone_and_held_agree_after_any_history(kind: str, seed: int) -> None:
    """Computed minus gone = held, whatever the order of requests."""
    rng = random.Random(seed)
    store: Store = BlockCache() if kind == "blocks" else SequenceCache(slots=3)
    chains = [[group * 100 + depth for depth in range(rng.randint(1, 8))] for group in range(6)]
    chains += [
        [*chain[:2], *(900 + index * 10 + i for i in range(3))]
        for index, chain in enumerate(chains)
    ]
    told: set[int] = set()
    running: dict[str, Chain] = {}
    for step in range(300):
        at_s = float(step)
        match rng.choice(("begin", "fill", "end", "bound", "miss", "expire")):
            case "begin" if len(running) < 3:
                running[f"r{step}"] = rng.choice(chains)
                store.begin(f"r{step}", running[f"r{step}"], at_s=at_s)
            case "fill" if running:
                name = rng.choice(list(running))
                store.fill(name, at_s=at_s)
                told.update(running[name])
            case "end" if running:
                name = rng.choice(list(running))
                del running[name]
                store.end(name, tail_blocks=rng.randint(0, 2), at_s=at_s)
            case "bound":
                store.bound(20)
            case "miss":
                store.missed(rng.choice(chains), used_at_s=at_s - rng.randint(1, 50))
            case _:
                store.expire(at_s - 100)
        told.difference_update(store.take_gone())
        for chain in chains:
            depth = store.depth(chain)
            assert set(chain[:depth]) <= told
    store.clear()
    told.difference_update(store.take_gone())
    assert told == set()


def test_what_the_engine_evicted_takes_what_it_used_before_along() -> None:
    """Its children, and older chains; its parents and what was used later stay, and what runs."""
    store = BlockCache()
    run(store, "old", [1, 2], at_s=1.0)
    run(store, "shared", [3, 4, 5], at_s=2.0)
    run(store, "new", [6, 7], at_s=3.0)
    store.begin("running", [1, 2], at_s=2.5)
    store.lost([4, 99])
    assert sorted(store.take_gone()) == [4, 5]
    assert [store.depth(chain) for chain in ([1, 2], [3, 4, 5], [6, 7])] == [2, 1, 2]
    store.lost([1])
    assert store.take_gone() == []


def test_a_slot_that_lost_a_block_is_empty() -> None:
    """Idle ones only."""
    store = SequenceCache(slots=2)
    run(store, "a", [1, 2], at_s=1.0)
    store.begin("b", [3, 4], at_s=2.0)
    store.lost([2, 3])
    assert store.depth([1, 2]) == 0
