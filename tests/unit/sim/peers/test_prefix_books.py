"""The books of past choices: holders by block, order of use by worker."""

from broker.sim.peers.prefix_books import PrefixBooks


def test_the_longest_run_names_its_first_holder() -> None:
    """Whoever was given the last matched block first is named; nobody where nothing matches."""
    books = PrefixBooks()
    books.put((1, 2), worker_id=7)
    books.put((1, 2, 3), worker_id=4)
    assert books.longest((1, 2, 9)) == (2, 7)
    assert books.longest((1, 2, 3)) == (3, 4)
    assert books.longest((9,)) == (0, None)
    assert books.longest(()) == (0, None)


def test_trimming_forgets_the_least_lately_used() -> None:
    """A block used again stays, and others' holdings are not touched."""
    books = PrefixBooks()
    books.put((1, 2, 3), worker_id=0)
    books.put((2,), worker_id=1)
    books.put((1,), worker_id=0)
    books.trim(worker_id=0, blocks_max=2)
    assert books.size_blocks(0) == 2
    assert books.held_blocks((1, 2, 3), worker_id=0) == 1
    assert books.longest((2,)) == (1, 1)
    books.trim(worker_id=5, blocks_max=0)


def test_a_lost_worker_is_forgotten_everywhere() -> None:
    """The next holder takes its place; a block without holders is gone."""
    books = PrefixBooks()
    books.put((1, 2), worker_id=0)
    books.put((1,), worker_id=1)
    books.lost(0)
    books.lost(0)
    assert books.longest((1, 2)) == (1, 1)
    assert books.held_blocks((1, 2), worker_id=0) == 0
    assert books.worker_ids() == (1,)
