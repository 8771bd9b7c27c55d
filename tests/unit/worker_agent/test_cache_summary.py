"""What is told of a cache, and that a reader who applies all reports ends with the same set."""

from hypothesis import given
from hypothesis import strategies as st

from broker.wire.messages import CacheSummary
from broker.wire.prefix import unpack_hashes
from worker_agent.cache_summary import SummaryFeed


def a_feed(**fields: float) -> SummaryFeed:
    """A feed that refreshes after 60 s."""
    blocks = int(fields.get("blocks_max", 1000))
    return SummaryFeed(bytes_max=blocks * 8, refresh_s=60.0)


class Reader:
    """A broker's side: applies reports as they come, and checks what must hold of them."""

    def __init__(self, parents: dict[int, int] | None = None) -> None:
        self.blocks: set[int] = set()
        self.parents = parents or {}
        self.sequence = 0

    def read(self, summary: CacheSummary | None) -> None:
        if summary is None:
            return
        assert summary.sequence == self.sequence + 1
        self.sequence = summary.sequence
        if summary.full:
            self.blocks.clear()
        self.blocks.difference_update(unpack_hashes(summary.removed))
        for block in unpack_hashes(summary.added):
            parent = self.parents.get(block)
            assert parent is None or parent in self.blocks, "a parent comes before its child"
            self.blocks.add(block)


def read_all(feed: SummaryFeed, reader: Reader) -> int:
    """Take reports until there is nothing to tell; returns how many there were."""
    count = 0
    while (summary := feed.take()) is not None:
        reader.read(summary)
        count += 1
    return count


def test_the_first_report_is_full_even_when_empty() -> None:
    """A reader learns at once that an agent's cache is empty."""
    feed = a_feed()
    first = feed.take()
    assert first is not None
    assert (first.full, first.added, first.removed) == (True, b"", b"")
    assert feed.take() is None


def test_a_delta_tells_what_changed_and_nothing_else() -> None:
    """Stored, then gone: each once."""
    feed = a_feed()
    feed.take()
    feed.stored([1, 2, 3], at_s=0.0)
    delta = feed.take()
    assert delta is not None
    assert not delta.full
    assert list(unpack_hashes(delta.added)) == [1, 2, 3]
    feed.dropped([3, 99])
    delta = feed.take()
    assert delta is not None
    assert (delta.added, list(unpack_hashes(delta.removed))) == (b"", [3])


def test_a_block_stored_and_dropped_between_reports_ends_as_gone() -> None:
    """The latest word on a block is the one that is told."""
    feed = a_feed()
    feed.take()
    feed.stored([1, 2], at_s=0.0)
    feed.dropped([2])
    reader = Reader()
    reader.sequence = 1
    read_all(feed, reader)
    assert reader.blocks == {1}


def test_use_is_told_again_only_after_a_while() -> None:
    """A block in use is refreshed each `refresh_s`, not at each request."""
    feed = a_feed()
    feed.stored([1, 2], at_s=1000.0)
    feed.take()
    feed.stored([1, 2], at_s=1059.0)
    assert feed.take() is None
    feed.stored([1, 2], at_s=1060.0)
    again = feed.take()
    assert again is not None
    assert list(unpack_hashes(again.added)) == [1, 2]


def test_a_large_cache_is_told_in_several_reports() -> None:
    """No report is above the bound; the first is full, the others go on from it."""
    feed = a_feed(blocks_max=128)
    chain = list(range(1, 301))
    feed.stored(chain, at_s=0.0)
    parents = dict(zip(chain[1:], chain, strict=False))
    reader = Reader(parents)
    assert read_all(feed, reader) == 3
    assert reader.blocks == set(chain)


def test_a_full_report_on_demand_tells_all_again() -> None:
    """After `ask_full` a reader that knows nothing knows all."""
    feed = a_feed()
    feed.stored([1, 2, 3], at_s=0.0)
    feed.take()
    feed.dropped([3])
    feed.ask_full()
    reader = Reader({2: 1, 3: 2})
    reader.sequence = 1
    read_all(feed, reader)
    assert reader.blocks == {1, 2}


def test_a_muted_feed_takes_all_back() -> None:
    """An engine that reuses nothing gets no credit, until it does."""
    feed = a_feed()
    feed.stored([1, 2], at_s=0.0)
    reader = Reader()
    read_all(feed, reader)
    feed.mute(muted=True)
    feed.stored([3], at_s=1.0)
    read_all(feed, reader)
    assert reader.blocks == set()
    feed.mute(muted=False)
    feed.stored([3], at_s=2.0)
    read_all(feed, reader)
    assert reader.blocks == {3}


PARENTS = {2: 1, 3: 2, 4: 3, 12: 11, 13: 12, 21: 2}
CHAINS = ([1, 2, 3, 4], [1, 2], [11, 12, 13], [1, 2, 21])


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("store"), st.integers(0, 3)),
            st.tuples(st.just("drop"), st.integers(0, 21)),
            st.tuples(st.just("take"), st.just(0)),
            st.tuples(st.just("full"), st.just(0)),
        )
    )
)
def test_whatever_happens_a_reader_ends_with_the_same_blocks(
    steps: list[tuple[str, int]],
) -> None:
    """In any order of changes and reports, with leaves dropped first as the stores do."""
    feed = a_feed(blocks_max=2)
    reader, held = Reader(PARENTS), set[int]()
    for at_s, (what, number) in enumerate(steps):
        match what:
            case "store":
                feed.stored(CHAINS[number], at_s=float(at_s))
                held.update(CHAINS[number])
            case "drop":
                if number in held and not any(PARENTS.get(child) == number for child in held):
                    feed.dropped([number])
                    held.discard(number)
            case "take":
                reader.read(feed.take())
            case _:
                feed.ask_full()
    read_all(feed, reader)
    assert reader.blocks == held


def test_what_another_account_does_not_hold_is_reported_gone() -> None:
    """Children first; the rest stays as it was told."""
    feed = a_feed()
    feed.stored([1, 2, 3, 4], at_s=0.0)
    feed.take()
    feed.kept(lambda block: block in (1, 2))
    report = feed.take()
    assert report is not None
    assert list(unpack_hashes(report.removed)) == [4, 3]
    assert not report.added
