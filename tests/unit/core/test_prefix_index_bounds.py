"""The index stays within its bounds: entries, time to live, logs, bits, memory, and work a call."""

import random
import tracemalloc
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.core import prefix_index
from broker.core.prefix_index import (
    GENERATIONS_MAX,
    SHARES,
    SWEEP_BLOCKS_MAX,
    TTL_TURNS,
)
from tests.unit.core.index_builders import TTL_S, WORKERS, a_tree, an_index, depths
from tests.unit.core.routing_builders import chain


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_eviction_leaves_is_closed(seed: int) -> None:
    """However little room there is, children go before their parents: a block is never left without
    the one before it.
    """
    rng = random.Random(seed)
    index = an_index(entries_max=120)
    chains = a_tree(rng)
    parents = {
        block: blocks[place - 1] for blocks in chains for place, block in enumerate(blocks) if place
    }
    for _ in range(60):
        index.hold(rng.randrange(WORKERS), rng.choice(chains), start=0)
        if rng.random() < 0.5:
            index.write()
        assert index.entries_count <= 120
    index.write()
    kept = index._blocks
    orphans = [block for block in kept if block in parents and parents[block] not in kept]
    assert orphans == []


def test_losing_a_cache_costs_the_same_however_much_it_held() -> None:
    """A restart looks at no block: the sum of a large cache is hidden, not walked."""
    index = an_index()
    index.store(0, chain(("a", 3000)))
    kept = dict(index._blocks)
    index.forget(0)
    assert index._blocks == kept
    assert index.match(chain(("a", 3000))) == []


def test_a_retired_bit_is_used_again_once_its_traces_are_gone() -> None:
    """Restarts don't make sets grow without end: a life's bit returns when the blocks of its time
    have left, and one that never held anything returns at once.
    """
    index = an_index(entries_max=40)
    first = index.bit(0)
    index.forget(0)
    assert index.bit(0) == first
    index.store(0, chain(("a", 10)))
    index.forget(0)
    second = index.bit(0)
    assert second != first
    for number in range(12):
        index.store(0, chain((f"x{number}", 10)))
    index.forget(0)
    assert index.bit(0) == first
    assert depths(index, chain(("a", 10))) == {}
    index.forget(0)
    assert index.bit(0) == first


def test_a_retired_bit_is_not_used_while_its_last_blocks_live() -> None:
    """The bit of a lost cache stays out of use as long as blocks of the time of the loss are kept:
    no newcomer inherits them.
    """
    index = an_index()
    index.store(1, chain(("before", 3)))
    index.sweep(TTL_S / 2)
    index.store(0, chain(("a", 3)))
    lost = index.bit(0)
    index.forget(0)
    for _ in range(3):
        index.sweep(TTL_S * 1.5)
    assert index.match(chain(("before", 3))) == []
    assert chain(("a", 3))[0] in index._blocks
    assert index.bit(7) != lost
    assert index.match(chain(("a", 3))) == []


def test_a_block_used_again_by_others_loses_the_traces_of_a_lost_cache() -> None:
    """A lost worker's entries no longer count once a shared block is used in a later generation."""
    index = an_index(entries_max=1000)
    blocks = chain(("a", 10))
    index.store(0, blocks)
    index.store(1, blocks)
    assert index.entries_count == 20
    index.forget(0)
    assert index.entries_count == 20
    index._turn()
    index.store(1, blocks)
    assert index.entries_count == 10
    assert depths(index, blocks) == {1: 10}


def test_no_bit_is_left_while_too_many_lives_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the bound of lingering lives a restarted worker has no credit, until traces have
    left.
    """
    monkeypatch.setattr(prefix_index, "RETIRED_BITS_MAX", 2)
    index = an_index(entries_max=40)
    for number in range(2):
        index.store(0, chain((f"a{number}", 3)))
        index.forget(0)
    assert index.bit(0) == 0
    index.store(0, chain(("b", 3)))
    index.hold(0, chain(("b", 3)), start=0)
    index.forget(0)
    assert depths(index, chain(("b", 3))) == {}
    index._turn()
    index.sweep(0.0)
    index._at_s = TTL_S * 2
    for _ in range(3):
        index.sweep(TTL_S * 2)
    assert index.bit(0) != 0


def test_the_bound_on_entries_holds_and_the_least_recently_used_go() -> None:
    """Beyond `entries_max` what was used lately stays and what was not goes."""
    index = an_index(entries_max=400)
    hot = chain(("hot", 20))
    for number in range(100):
        index.hold(0, hot, start=0)
        index.hold(0, chain((f"cold{number}", 10)), start=0)
        index.write()
        assert index.entries_count <= 400
    assert depths(index, hot) == {0: 20}
    assert depths(index, chain(("cold99", 10))) == {0: 10}
    assert depths(index, chain(("cold0", 10))) == {}
    assert index.entries_count > 400 * (1 - 1 / SHARES) - 30


def test_entries_count_each_holder() -> None:
    """The bound is on (block, worker) pairs: shared blocks count once for each holder."""
    index = an_index(entries_max=100)
    blocks = chain(("a", 30))
    for worker in range(3):
        index.store(worker, blocks)
    assert (index.entries_count, index.blocks_count) == (90, 30)
    index.store(3, blocks)
    assert index.entries_count <= 100
    index.drop(3, blocks)
    assert index.entries_count <= 90


def test_a_chain_longer_than_the_index_is_kept_from_its_front() -> None:
    """A chain that can't be held whole is held as far as there is room; no room holds nothing."""
    index = an_index(entries_max=10)
    index.store(0, chain(("a", 30)))
    assert depths(index, chain(("a", 30))) == {0: 10}
    none = an_index(entries_max=0)
    none.store(0, chain(("a", 3)))
    none.sweep(1.0)
    assert none.match(chain(("a", 3))) == []


def test_a_smaller_bound_is_reached_by_sweeping() -> None:
    """New knobs take effect in bounded steps."""
    index = an_index(entries_max=10_000)
    for number in range(20):
        index.store(0, chain((f"a{number}", 300)))
    index.reconfigure(entries_max=500, ttl_s=TTL_S)
    before = index.entries_count
    index.sweep(1.0)
    assert before - index.entries_count <= SWEEP_BLOCKS_MAX
    for _ in range(before // SWEEP_BLOCKS_MAX + 1):
        index.sweep(1.0)
    assert 0 < index.entries_count <= 500


def test_a_block_unused_for_its_time_to_live_is_forgotten() -> None:
    """Blocks live for the time to live since their last use, and for a quarter of it more at
    most.
    """
    index = an_index()
    used, unused = chain(("used", 5)), chain(("unused", 5))
    index.store(0, used)
    index.store(0, unused)
    at_s = 0.0
    while at_s < TTL_S * (1 + 1 / TTL_TURNS) + 30:
        index.sweep(at_s)
        if at_s < TTL_S:
            assert depths(index, unused) == {0: 5}
        index.hold(1, used, start=0)
        at_s += 10
    assert depths(index, unused) == {}
    assert depths(index, used) == {0: 5, 1: 5}


def test_forgetting_is_spread_over_sweeps() -> None:
    """One sweep forgets a bounded number of blocks, however many have expired."""
    index = an_index()
    count = SWEEP_BLOCKS_MAX * 2 + 100
    index.store(0, chain(("a", count)))
    index.sweep(1.0)
    index.sweep(TTL_S)
    at_s = TTL_S * 3
    left = [index.blocks_count]
    for _ in range(4):
        index.sweep(at_s)
        left.append(index.blocks_count)
    assert left == [count, count - SWEEP_BLOCKS_MAX, count - 2 * SWEEP_BLOCKS_MAX, 0, 0]


def test_a_sweep_writes_what_was_dispatched() -> None:
    """Dispatched chains are written by the next sweeps, a bounded number of blocks each."""
    index = an_index()
    index.hold(0, chain(("a", SWEEP_BLOCKS_MAX + 5)), start=0)
    index.sweep(1.0)
    assert index.blocks_count == SWEEP_BLOCKS_MAX
    index.sweep(1.0)
    assert index.blocks_count == SWEEP_BLOCKS_MAX + 5
    assert not index._unwritten


def test_a_chain_is_written_within_one_generation() -> None:
    """A generation does not end inside a chain, or its first blocks would go before its last."""
    index = an_index(entries_max=40)
    index.hold(0, chain(("a", 30)), start=0)
    index.hold(0, chain(("b", 3)), start=0)
    index.write(20)
    index._at_s = TTL_S
    index.store(0, chain(("c", 3)))
    index.write()
    numbers = {index._blocks[block].generation for block in chain(("a", 30))}
    assert len(numbers) == 1


def test_a_generation_ends_when_it_has_its_share() -> None:
    """Dispatches alone begin a new generation: once one has logged a quarter of the index, the next
    chain belongs to another, and so does one that comes a quarter of the time to live later.
    """
    index = an_index(entries_max=400)

    def generation(name: str, count: int) -> int:
        index.hold(0, chain((name, count)), start=0)
        index.write()
        return index._blocks[chain((name, count))[0]].generation

    assert generation("a", 99) == generation("b", 1) == 0
    later = generation("c", 1)
    assert later == 1
    index.sweep(TTL_S / TTL_TURNS - 1)
    assert generation("d", 1) == later
    index.sweep(TTL_S / TTL_TURNS)
    assert generation("e", 1) == later + 1


def test_use_alone_ends_a_generation_too() -> None:
    """A generation ends by what it logged, even if nothing was added: uses are what eviction goes
    by.
    """
    index = an_index(entries_max=400)
    blocks = chain(("a", 100))
    for generation in range(3):
        index.hold(0, blocks, start=100)
        index.write()
        assert index._blocks[blocks[0]].generation == generation


def test_as_many_generations_as_allowed_are_kept() -> None:
    """Only beyond the bound does the oldest generation go, with the next sweep."""
    index = an_index()
    for number in range(GENERATIONS_MAX):
        index.store(0, chain((f"x{number}", 3)))
        if number < GENERATIONS_MAX - 1:
            index._turn()
    index.sweep(1.0)
    assert len(index._generations) == GENERATIONS_MAX
    assert depths(index, chain(("x0", 3))) == {0: 3}
    index._turn()
    index.sweep(1.0)
    assert depths(index, chain(("x0", 3))) == {}
    assert depths(index, chain(("x1", 3))) == {0: 3}


def test_a_chain_as_large_as_the_index_takes_it_over() -> None:
    """One chain may push out all that was there, in the first generation as in any."""
    index = an_index(entries_max=100)
    index.store(0, chain(("a", 10)))
    index.store(0, chain(("b", 100)))
    assert depths(index, chain(("a", 10))) == {}
    assert depths(index, chain(("b", 100))) == {0: 100}
    index.store(0, chain(("a", 10)))
    assert depths(index, chain(("a", 10))) == {0: 10}


def test_an_idle_index_begins_its_generation_with_its_first_block() -> None:
    """Time without blocks does not age those that come after it."""
    index = an_index()
    index.sweep(TTL_S)
    index.store(0, chain(("a", 3)))
    index.sweep(TTL_S * (1 + 0.9 / TTL_TURNS))
    assert len(index._generations) == 1
    index.sweep(TTL_S * (1 + 1 / TTL_TURNS))
    assert len(index._generations) == 2


def test_blocks_that_come_and_go_don_t_let_the_logs_grow() -> None:
    """Blocks removed and stored over and over leave only bounded logs behind, and what was used
    longest ago goes with the oldest log.
    """
    index = an_index(entries_max=400)
    index.store(1, chain(("old", 10)))
    for number in range(300):
        blocks = chain((f"x{number}", 20))
        index.store(0, blocks)
        index.drop(0, blocks)
    assert len(index._generations) <= GENERATIONS_MAX + 1
    assert sum(len(one.log) for one in index._generations) <= 400 / SHARES * (GENERATIONS_MAX + 2)
    assert depths(index, chain(("old", 10))) == {}


def test_a_block_removed_and_stored_again_is_evicted_once() -> None:
    """A block that stands in a log twice is counted out once."""
    index = an_index(entries_max=60)
    blocks = chain(("a", 10))
    index.store(0, blocks)
    index.drop(0, blocks)
    index.store(0, blocks)
    assert index.entries_count == 10
    for number in range(12):
        index.store(0, chain((f"x{number}", 10)))
        assert index.entries_count == sum(one.count for one in index._blocks.values()) <= 60
    assert depths(index, blocks) == {}


def test_making_room_ends_even_if_everything_was_used_since() -> None:
    """Where the oldest logs hold only blocks that were used again, making room takes a bounded
    number of steps; what finds none is not credited, and the bound holds all the same.
    """
    index = an_index(entries_max=4000)
    hot = chain(("hot", 3990))
    for _ in range(3):
        index.store(0, hot)
        index._turn()
    for number in range(600):
        index.store(0, chain((f"x{number}", 20)))
        assert index.entries_count <= 4000
    assert depths(index, chain(("x599", 20))) == {0: 20}


def test_equal_sets_are_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks with the same holders share their set; past the bound of sets sharing starts anew."""
    monkeypatch.setattr(prefix_index, "HOLDER_SETS_MAX", 4)
    index = an_index()
    index.store(0, chain(("a", 50)))
    index.store(1, chain(("a", 50))[:20])
    assert len({id(one) for one in index._blocks.values()}) == 2
    for worker in range(2, 12):
        index.store(worker, chain(("a", 50))[:worker])
        assert len(index._sets) <= 4
    assert depths(index, chain(("a", 50)), 12)[1] == 20


def test_a_million_unique_prefixes_take_flat_memory() -> None:
    """Case 7: a million prefixes that never come back leave the index at its bound, and memory flat
    (here a tenth: 100,000 blocks through an index of 5,000).
    """
    index = an_index(entries_max=5_000)
    rng = random.Random(1)

    def pass_through(count: int) -> int:
        for _ in range(count):
            index.hold(rng.randrange(4), array("Q", rng.randbytes(8 * 20)), start=0)
            index.write()
            assert index.entries_count <= 5_000
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        early = pass_through(1_000)
        late = pass_through(4_000)
    finally:
        tracemalloc.stop()
    assert late < early * 1.25


@pytest.mark.parametrize(("holders", "bytes_max"), [(1, 200), (4, 100)])
def test_an_entry_takes_few_bytes(holders: int, bytes_max: int) -> None:
    """At most 200 bytes for a (block, worker) with one holder, less when blocks are shared."""
    rng = random.Random(2)
    packed = [rng.randbytes(8 * 200) for _ in range(250)]
    tracemalloc.start()
    try:
        index = an_index(entries_max=1_000_000)
        for number, blocks in enumerate(packed):
            for copy in range(holders):
                index.store((number + copy) % 8, array("Q", blocks))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert index.entries_count == 250 * 200 * holders
    assert used / index.entries_count <= bytes_max
