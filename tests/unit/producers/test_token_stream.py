"""Chunks in order, attempts never mixed, bounds that are reached, and nothing papered over."""

from hypothesis import given
from hypothesis import strategies as st

from broker.wire.messages import Attempt, Kind, TerminalRecord, Tokens
from producers.token_stream import Chunk, TokenStream

FIRST, SECOND = Attempt(1, 1), Attempt(1, 2)


def a_stream(
    *, chunks_max: int = 100, bytes_max: int = 10_000, reorder_max: int = 8
) -> TokenStream:
    """A stream with roomy bounds."""
    return TokenStream(chunks_max=chunks_max, bytes_max=bytes_max, reorder_max=reorder_max)


def a_piece(index: int, *, attempt: Attempt = FIRST, data: bytes = b"x") -> Tokens:
    """A chunk as it is heard."""
    return Tokens(job="j", attempt=attempt, index=index, data=data)


def an_end(*, attempt: Attempt | None = FIRST, kind: Kind = Kind.COMPLETED) -> TerminalRecord:
    """The record of the job."""
    return TerminalRecord(
        job="j", lane="l", kind=kind, ended_at_s=1.0, body=b"whole", attempt=attempt
    )


def read_all(stream: TokenStream) -> list[Chunk]:
    """All that can be read now."""
    chunks: list[Chunk] = []
    while (chunk := stream.pop()) is not None:
        chunks.append(chunk)
    return chunks


def test_chunks_that_overtook_each_other_are_put_in_order() -> None:
    """Within the reorder bound, order of arrival doesn't matter."""
    stream = a_stream()
    assert not stream.add(a_piece(1))
    assert not stream.add(a_piece(2))
    assert stream.add(a_piece(0))
    stream.finish(an_end())
    assert [chunk.index for chunk in read_all(stream)] == [0, 1, 2]


def test_a_chunk_heard_twice_is_given_once() -> None:
    """Neither before its turn nor after it is a second copy of use."""
    stream = a_stream()
    for index in (0, 0, 2, 2, 1, 1, 2):
        stream.add(a_piece(index))
    assert [chunk.index for chunk in read_all(stream)] == [0, 1, 2]


def test_a_new_attempt_before_the_first_read_is_silent() -> None:
    """What nobody read of the older attempt is dropped, and the reader learns nothing of it."""
    stream = a_stream()
    stream.add(a_piece(0, data=b"old"))
    stream.add(a_piece(0, attempt=SECOND, data=b"new"))
    assert [(chunk.data, chunk.restart) for chunk in read_all(stream)] == [(b"new", False)]


def test_a_new_attempt_after_the_first_read_is_marked_once() -> None:
    """The reader is told that what he has is void, with the first chunk of the new attempt."""
    stream = a_stream()
    stream.add(a_piece(0))
    read_all(stream)
    stream.add(a_piece(0, attempt=SECOND))
    stream.add(a_piece(1, attempt=SECOND))
    assert [chunk.restart for chunk in read_all(stream)] == [True, False]


def test_an_older_attempt_says_nothing_any_more() -> None:
    """A zombie's late chunks never mix with the newer attempt's."""
    stream = a_stream()
    stream.add(a_piece(0, attempt=SECOND))
    assert not stream.add(a_piece(1))
    stream.finish(an_end(attempt=SECOND))
    assert [chunk.attempt for chunk in read_all(stream)] == [SECOND]


def test_too_many_early_chunks_count_as_a_loss() -> None:
    """`reorder_max` bounds what is kept while an earlier chunk is missing."""
    stream = a_stream(reorder_max=3)
    for index in range(1, 4):
        stream.add(a_piece(index))
    assert not stream.lost
    stream.add(a_piece(4))
    assert stream.lost
    stream.add(a_piece(0))
    stream.finish(an_end())
    assert [chunk.whole for chunk in read_all(stream)] == [True]


def test_the_buffer_is_bounded_in_chunks() -> None:
    """`chunks_max` chunks are kept for a reader that doesn't come; then the whole answer."""
    stream = a_stream(chunks_max=2)
    for index in range(3):
        stream.add(a_piece(index))
    stream.finish(an_end())
    assert [chunk.whole for chunk in read_all(stream)] == [False, False, True]


def test_the_buffer_is_bounded_in_bytes() -> None:
    """`bytes_max` bounds chunks in order and early ones together."""
    stream = a_stream(bytes_max=10)
    stream.add(a_piece(0, data=b"x" * 6))
    stream.add(a_piece(2, data=b"x" * 5))
    assert stream.lost


def test_reading_makes_room() -> None:
    """A reader that keeps up never loses a chunk, however long the answer."""
    stream = a_stream(chunks_max=2, bytes_max=2)
    for index in range(100):
        stream.add(a_piece(index))
        assert [chunk.index for chunk in read_all(stream)] == [index]
    stream.finish(an_end())
    assert not read_all(stream)


def test_a_restart_frees_what_the_old_attempt_held() -> None:
    """Bounds count the current attempt only."""
    stream = a_stream(bytes_max=4)
    stream.add(a_piece(0, data=b"xxx"))
    stream.add(a_piece(2, data=b"x"))
    stream.add(a_piece(0, attempt=SECOND, data=b"xxxx"))
    assert not stream.lost


def test_an_end_with_an_early_chunk_left_over_gives_the_whole() -> None:
    """The gap before it will not be filled any more."""
    stream = a_stream()
    stream.add(a_piece(0))
    stream.add(a_piece(2))
    stream.finish(an_end())
    assert [chunk.whole for chunk in read_all(stream)] == [False, True]


def test_an_end_of_another_attempt_gives_the_whole() -> None:
    """The chunks here are of a run that didn't win."""
    stream = a_stream()
    stream.add(a_piece(0))
    stream.finish(an_end(attempt=SECOND))
    assert [chunk.whole for chunk in read_all(stream)] == [False, True]


def test_doubt_gives_the_whole() -> None:
    """After a lost link the last chunks may be missing unseen."""
    stream = a_stream()
    stream.add(a_piece(0))
    stream.doubt()
    stream.finish(an_end())
    assert [chunk.whole for chunk in read_all(stream)] == [False, True]


def test_a_failed_job_has_no_whole_answer() -> None:
    """There is no answer to fall back to."""
    stream = a_stream()
    stream.add(a_piece(1))
    stream.finish(an_end(kind=Kind.FAILED))
    assert not read_all(stream)


@given(st.lists(st.tuples(st.sampled_from([FIRST, SECOND]), st.integers(0, 12)), max_size=60))
def test_whatever_is_lost_doubled_or_reordered_the_reader_is_never_misled(
    heard: list[tuple[Attempt, int]],
) -> None:
    """What is read since the last restart is a gapless run of one attempt, or a whole follows."""
    stream = a_stream(reorder_max=4, chunks_max=6)
    read: list[Chunk] = []
    for attempt, index in heard:
        stream.add(a_piece(index, attempt=attempt))
        if index % 3 == 0:
            read += read_all(stream)
    stream.finish(an_end(attempt=max((attempt for attempt, _ in heard), default=FIRST)))
    read += read_all(stream)
    last = max((at for at, chunk in enumerate(read) if chunk.restart), default=0)
    valid = [chunk for chunk in read[last:] if not chunk.whole]
    assert [chunk.index for chunk in valid] == list(range(len(valid)))
    assert len({chunk.attempt for chunk in valid}) <= 1
    reached = {index for attempt, index in heard if valid and attempt == valid[0].attempt}
    complete = bool(valid) and reached == set(range(len(valid)))
    assert complete or read[-1].whole
