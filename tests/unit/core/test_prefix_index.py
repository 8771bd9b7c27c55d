"""Who holds which prefix: exact, and gone at once when a cache is lost."""

import random
from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from broker.core.prefix_index import (
    CHANGES_MAX,
    UNWRITTEN_CHAINS_MAX,
)
from tests.unit.core.index_builders import WORKERS, Naive, a_tree, an_index, depths, subtree
from tests.unit.core.routing_builders import chain


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_random_history_of_closed_caches_is_told_exactly(seed: int) -> None:
    """Whatever is dispatched, reported, removed, lost or written, and in whatever order, each
    worker's depth is what a plain walk over its own blocks finds.
    """
    rng = random.Random(seed)
    chains, naive, index = a_tree(rng), Naive(), an_index()
    for _ in range(80):
        worker, blocks = rng.randrange(WORKERS), rng.choice(chains)
        match rng.randrange(6):
            case 0 | 1:
                index.hold(worker, blocks, start=naive.depth(worker, blocks))
                naive.held[worker].update(blocks)
            case 2:
                part = blocks[: rng.randrange(len(blocks) + 1)]
                index.store(worker, array("Q", part))
                naive.held[worker].update(part)
            case 3:
                removed = subtree(chains, blocks, rng.randrange(len(blocks)))
                index.drop(worker, sorted(removed))
                naive.held[worker] -= removed
            case 4:
                index.write(rng.randrange(1, 30))
            case _:
                if rng.random() < 0.3:
                    index.forget(worker)
                    naive.held[worker].clear()
        asked = rng.choice(chains)
        assert depths(index, asked) == naive.depths(asked)
    index.write()
    assert index.blocks_count <= index.entries_count


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_an_answer_brought_up_to_date_equals_a_new_one(seed: int) -> None:
    """`update` of an old answer is None, or says of every worker what `match` says now."""
    rng = random.Random(seed)
    chains, index = a_tree(rng), an_index()
    asked = chains[-1]
    levels, dated = index.match(asked), index.changes_count
    for _ in range(60):
        worker, blocks = rng.randrange(WORKERS), rng.choice(chains)
        match rng.randrange(6):
            case 0:
                index.drop(worker, sorted(subtree(chains, blocks, rng.randrange(len(blocks)))))
            case 1:
                index.store(worker, blocks[: rng.randrange(len(blocks))])
            case 2 if rng.random() < 0.5:
                index.forget(worker)
            case _:
                index.hold(worker, blocks, start=0)
        if rng.random() < 0.5:
            continue
        now = index.match(asked)
        renewed = index.update(asked, levels, since=dated)
        levels = now if renewed is None else renewed
        assert levels == now
        dated = index.changes_count
        assert index.update(asked, levels, since=dated) is levels


def test_an_answer_older_than_the_kept_changes_must_be_asked_anew() -> None:
    """Changes are kept up to a bound; beyond it nobody can say whether an answer stands."""
    index = an_index()
    asked = chain(("a", 4))
    levels, dated = index.match(asked), index.changes_count
    for number in range(CHANGES_MAX):
        index.hold(0, chain((f"x{number}", 2)), start=0)
    assert index.update(asked, levels, since=dated) is levels
    index.hold(0, chain(("y", 2)), start=0)
    assert index.update(asked, levels, since=dated) is None


def test_a_report_elsewhere_leaves_an_answer_alone() -> None:
    """A report of a worker that holds nothing of a chain changes nothing for it; of a holder, it
    may.
    """
    index = an_index()
    asked = chain(("a", 4))
    index.store(0, asked)
    levels, dated = index.match(asked), index.changes_count
    index.store(1, chain(("b", 4)))
    assert index.update(asked, levels, since=dated) is levels
    index.drop(0, asked[2:])
    assert index.update(asked, levels, since=dated) is None


def test_a_loss_after_a_dispatch_is_noticed() -> None:
    """A worker that was given the chain and then lost its cache holds none of it."""
    index = an_index()
    asked = chain(("a", 4))
    levels, dated = index.match(asked), index.changes_count
    index.hold(1, asked, start=0)
    index.forget(1)
    assert index.update(asked, levels, since=dated) is None


def test_a_report_of_something_else_leaves_an_unknown_chain_unknown() -> None:
    """While nobody holds a chain, reports of other chains change nothing for it, whoever sends
    them.
    """
    index = an_index()
    asked = chain(("a", 4))
    levels, dated = index.match(asked), index.changes_count
    for worker in range(3):
        index.store(worker, chain(("b", 4)))
    assert index.update(asked, levels, since=dated) is levels


def test_a_newcomer_on_the_first_block_is_noticed() -> None:
    """A report of a worker that now holds the first block calls for a new answer."""
    index = an_index()
    asked = chain(("a", 4))
    levels, dated = index.match(asked), index.changes_count
    index.store(1, asked[:2])
    assert index.update(asked, levels, since=dated) is None


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_arbitrary_removals_never_hide_what_is_held(seed: int) -> None:
    """Where a parent was removed under its child, a depth may be too deep, never too shallow; and a
    dispatch of the chain there makes it true.
    """
    rng = random.Random(seed)
    blocks = chain(("a", 50))
    index, naive = an_index(), Naive()
    for worker in range(WORKERS):
        index.store(worker, blocks)
        removed = set(rng.sample(blocks, rng.randrange(5)))
        index.drop(worker, sorted(removed))
        naive.held[worker] = set(blocks) - removed
    for worker, depth in naive.depths(blocks).items():
        assert depths(index, blocks)[worker] >= depth
    index.hold(0, blocks, start=0)
    index.write()
    assert depths(index, blocks)[0] == len(blocks)


def test_nothing_is_held_of_an_empty_chain_or_by_nobody() -> None:
    """No blocks, no holders; an unknown chain, none either."""
    index = an_index()
    assert index.match([]) == []
    assert index.match(chain(("a", 3))) == []
    index.hold(0, [], start=0)
    index.store(0, [])
    index.drop(0, [])
    index.drop(3, chain(("a", 3)))
    assert index.match(chain(("a", 3))) == []
    assert (index.entries_count, index.changes_count, index.probes_count) == (0, 0, 1 + 1)


def test_a_dispatch_counts_before_it_is_written() -> None:
    """A chain given to a worker is credited at once, at its full depth and for its branches."""
    index = an_index()
    given_chain = chain(("system", 20), ("ask", 5))
    index.hold(2, given_chain, start=0)
    assert index.blocks_count == 0
    assert depths(index, given_chain) == {2: 25}
    assert depths(index, chain(("system", 20), ("other", 5))) == {2: 20}
    index.write(7)
    assert index.blocks_count == 7
    assert depths(index, given_chain) == {2: 25}
    index.write()
    assert index.blocks_count == 25
    assert depths(index, given_chain) == {2: 25}


def test_a_full_queue_of_unwritten_chains_is_written() -> None:
    """The queue is bounded: one more chain writes the oldest whole, and no other."""
    index = an_index()
    for number in range(UNWRITTEN_CHAINS_MAX):
        index.hold(0, chain((f"c{number}", 10 - number)), start=0)
    assert index.blocks_count == 0
    index.hold(0, chain(("last", 10)), start=0)
    assert index.blocks_count == 10
    assert depths(index, chain(("c0", 10))) == {0: 10}


def test_a_removed_block_of_an_unwritten_chain_is_gone() -> None:
    """A removal reported after a dispatch counts, even if the dispatch was not written yet."""
    index = an_index()
    blocks = chain(("a", 10))
    index.hold(0, blocks, start=0)
    index.drop(0, blocks[4:])
    assert depths(index, blocks) == {0: 4}


def test_a_lost_cache_has_no_credit_at_once() -> None:
    """All credit of a worker is gone in one step, written or not, and its neighbours keep
    theirs.
    """
    index = an_index()
    blocks = chain(("a", 10))
    index.store(0, blocks)
    index.store(1, blocks[:5])
    index.hold(0, chain(("b", 4)), start=0)
    index.forget(0)
    assert depths(index, blocks) == {1: 5}
    assert depths(index, chain(("b", 4))) == {}
    index.store(0, blocks[:2])
    assert depths(index, blocks) == {0: 2, 1: 5}
