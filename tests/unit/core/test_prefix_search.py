"""What a look-up costs, and what it tells apart."""

from broker.core.prefix_search import LEVELS_MAX, common_blocks
from tests.unit.core.index_builders import an_index, depths
from tests.unit.core.routing_builders import chain


def test_a_look_up_costs_the_logarithm_of_the_depth() -> None:
    """Ten times the blocks cost a few probes more, not ten times as many."""
    index = an_index(entries_max=1_000_000)

    def probes(count: int) -> int:
        blocks = chain((f"a{count}", count))
        index.store(0, blocks)
        before = index.probes_count
        assert depths(index, blocks) == {0: count}
        return index.probes_count - before

    assert 8 <= probes(160) <= 16
    assert 11 <= probes(1_600) <= 22
    assert 14 <= probes(8_192) <= 27


def test_a_search_doubles_its_steps_and_halves_what_is_left() -> None:
    """Blocks 0, 1, 3, 7, ... are looked up until one is missing, then the middle of what is
    left.
    """

    def probes(held: int, count: int) -> int:
        index = an_index()
        blocks = chain(("a", count))
        index.store(0, blocks[:held])
        index.match(blocks)
        return index.probes_count

    assert probes(1, 1) == 1
    assert probes(1, 2) == 2
    assert probes(2, 4) == 4
    assert probes(4, 4) == 3
    assert probes(8, 8) == 4
    assert probes(8, 9) == 5
    assert probes(0, 9) == 1


def test_a_look_up_costs_the_same_with_any_number_of_workers() -> None:
    """Case 10, in probes: holders at one depth cost nothing more, be they 2 or 2,000."""

    def probes(workers: int) -> int:
        index = an_index(entries_max=10_000_000)
        blocks = chain(("a", 64))
        for worker in range(workers):
            index.store(worker, blocks)
        before = index.probes_count
        [level] = index.match(blocks)
        assert level.workers.bit_count() == workers
        return index.probes_count - before

    assert probes(2_000) == probes(2)


def test_only_the_deepest_levels_are_told_apart() -> None:
    """Of many depths the deepest few are returned, deepest first."""
    index = an_index()
    blocks = chain(("a", 40))
    for worker in range(20):
        index.store(worker, blocks[: worker + 5])
    levels = index.match(blocks)
    assert [one.depth_blocks for one in levels] == list(range(24, 24 - LEVELS_MAX, -1))
    index.hold(0, blocks, start=0)
    assert [one.depth_blocks for one in index.match(blocks)] == [40, *range(24, 17, -1)]


def test_common_blocks_is_the_shared_prefix() -> None:
    """Two chains share what is equal from their first block on."""
    stem = chain(("s", 9))
    assert common_blocks(stem, stem) == 9
    assert common_blocks(stem, chain(("s", 9), ("x", 3))) == 9
    assert common_blocks(chain(("s", 4), ("y", 5)), stem) == 4
    assert common_blocks(chain(("z", 4)), stem) == 0
    assert common_blocks([], stem) == 0
