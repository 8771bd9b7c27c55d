"""Memory of the modelled engine: who holds it, what stays for reuse, what goes first."""

from broker.engine_model.kv_cache import KvCache


def a_cache_with(*chains: tuple[int, ...], capacity: int = 100, size: int = 10) -> KvCache:
    """A cache in which each chain was prefilled and released, in this order."""
    cache = KvCache(capacity)
    for chain in chains:
        hits, _ = cache.match(chain, tokens_max=capacity)
        for block in chain[:hits]:
            cache.hold(block)
        for block in chain[hits:]:
            assert cache.allocate(size)
            cache.store(block, size)
        for block in reversed(chain):
            cache.release(block)
    return cache


def hits(cache: KvCache, *blocks: int) -> int:
    """How many leading blocks are there."""
    return cache.match(blocks, tokens_max=10_000)[0]


def test_match_stops_at_the_first_missing_block() -> None:
    """A block without the ones before it is no prefix."""
    cache = a_cache_with((1, 2, 3))
    assert hits(cache, 1, 2, 3, 4) == 3
    assert hits(cache, 1, 9, 3) == 1
    assert hits(cache, 2, 3) == 2  # A hash names all before it: the chain starts where it starts.
    assert hits(cache, 9) == 0
    assert hits(cache) == 0


def test_match_leaves_room_to_compute() -> None:
    """No more tokens are matched than asked for: an engine computes at least one itself."""
    cache = a_cache_with((1, 2, 3))
    assert cache.match((1, 2, 3), tokens_max=29) == (2, 20)
    assert cache.match((1, 2, 3), tokens_max=30) == (3, 30)


def test_least_recently_released_goes_first() -> None:
    """Under pressure the chain that was released longest ago goes, deepest block first."""
    cache = a_cache_with((1, 2), (3, 4), (5, 6), (1, 2), capacity=60)
    assert cache.allocate(10)
    assert hits(cache, 3, 4) == 1
    assert cache.allocate(10)
    assert hits(cache, 3, 4) == 0
    assert hits(cache, 5, 6) == hits(cache, 1, 2) == 2
    assert cache.evicted_blocks == 2


def test_held_blocks_are_never_evicted() -> None:
    """What a running request holds stays, and the room for more is only what is idle."""
    cache = a_cache_with((1, 2), (3,), capacity=30)
    cache.hold(1)
    cache.hold(2)
    assert not cache.allocate(11)
    assert hits(cache, 1, 2) == 2
    assert hits(cache, 3) == 1
    assert cache.allocate(10)
    assert hits(cache, 1, 2) == 2
    assert hits(cache, 3) == 0


def test_refused_allocation_changes_nothing() -> None:
    """Without room, nothing is evicted and nothing taken."""
    cache = a_cache_with((1, 2), capacity=30)
    assert not cache.allocate(31)
    assert (cache.used_tokens, cache.idle_tokens, cache.evicted_blocks) == (0, 20, 0)


def test_shared_block_counts_once_and_stays_until_the_last_leaves() -> None:
    """Two holders of one block use its memory once; it turns idle when both are gone."""
    cache = a_cache_with((1,))
    cache.hold(1)
    cache.hold(1)
    assert (cache.used_tokens, cache.idle_tokens) == (10, 0)
    cache.release(1)
    assert (cache.used_tokens, cache.idle_tokens) == (10, 0)
    cache.release(1)
    assert (cache.used_tokens, cache.idle_tokens) == (0, 10)


def test_second_copy_of_a_block_is_freed() -> None:
    """Of two requests that prefilled the same block at once, the later shares the earlier's."""
    cache = KvCache(100)
    assert cache.allocate(20)
    cache.store(1, 10)
    cache.store(1, 10)
    assert (cache.used_tokens, cache.block_count) == (10, 1)
    cache.release(1)
    assert cache.used_tokens == 10
    cache.release(1)
    assert (cache.used_tokens, cache.idle_tokens) == (0, 10)


def test_clear_idle_keeps_what_is_held() -> None:
    """Forgetting the cache does not touch running requests."""
    cache = a_cache_with((1, 2), (3,))
    cache.hold(1)
    cache.clear_idle()
    assert hits(cache, 1, 2) == 1
    assert (cache.used_tokens, cache.idle_tokens) == (10, 0)
