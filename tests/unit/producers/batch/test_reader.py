"""Windows of lines: checked, known again, put in the order of their prefixes."""

from pathlib import Path

import msgspec
import pytest

from broker.wire.messages import Job
from producers.batch.errors import InputUnusable
from producers.batch.lines import BadLine, Code, Request
from producers.batch.reader import STRANDS, Reader, Work
from producers.batch.source import Line
from producers.batch.state import LineState, State, new_identity
from producers.request import Wish, build_job
from tests.batches import a_line

IDENTITY = new_identity(input_name="x", lane="acme", band=3, window_s=10.0)


def build(request: Request, job_id: str) -> Job:
    """The job of a request."""
    return build_job(request.body, Wish(job_id=job_id), lane="acme", client="c")


def a_reader(state: State) -> Reader:
    """A reader over this state."""
    return Reader(state, IDENTITY, build=build, models=None)


def numbered(*texts: bytes, first: int = 1) -> list[Line]:
    """Lines with digests by their text."""
    return [Line(first + at, text, hash(text)) for at, text in enumerate(texts)]


def test_lines_of_one_prefix_stand_together_whatever_their_order(tmp_path: Path) -> None:
    """Also nested: a longer shared beginning is closer."""
    systems = ["a" * 600 + "x" * 600, "b" * 900, "a" * 600 + "y" * 600]
    texts = [a_line(f"id-{n}", system=systems[n % 3]) for n in range(12)]
    with State(tmp_path / "s") as state:
        work = a_reader(state).read(numbered(*texts)).work
    order = [int(item.custom_id[3:]) % 3 for item in work]
    assert [order[at] for at in (0, 4, 8)] == [order[at + 3] for at in (0, 4, 8)]
    assert order[4:8] != [1, 1, 1, 1], "the two that share 600 bytes are neighbours"


def test_many_prefixes_are_taken_in_turns(tmp_path: Path) -> None:
    """So workers that are free at once find different ones; each one's lines still come in a row
    of their strand, and none is lost.
    """
    prefixes, lines_each = 2 * STRANDS, 6
    count = prefixes * lines_each
    texts = [a_line(f"id-{n}", system=f"{n % prefixes:04d}" * 300) for n in range(count)]
    with State(tmp_path / "s") as state:
        work = a_reader(state).read(numbered(*texts)).work
    order = [int(item.custom_id[3:]) % prefixes for item in work]
    assert sorted(item.number for item in work) == list(range(1, count + 1))
    for start in range(0, count, STRANDS):
        assert len(set(order[start : start + STRANDS])) == STRANDS
    for strand in range(STRANDS):
        in_strand = order[strand::STRANDS]
        assert in_strand == [in_strand[0]] * lines_each + [in_strand[-1]] * lines_each


def test_a_line_is_known_with_where_it_was_stored(tmp_path: Path) -> None:
    """Open lines come again as known, ended ones not at all."""
    texts = [a_line(f"id-{n}") for n in range(4)]
    with State(tmp_path / "s") as state:
        first = a_reader(state).read(numbered(*texts)).work
        assert not any(work.known for work in first)
        with state.transaction():
            state.end([(LineState.COMPLETED, 1), (LineState.BAD, 2)])
            state.submitted([(2, 99, 3)])
        again = {work.number: work for work in a_reader(state).read(numbered(*texts)).work}
        assert set(again) == {3, 4}
        assert all(work.known for work in again.values())
        assert (again[3].sequence, again[3].job.submission) == (99, 2)
        assert again[3].job.id == f"{IDENTITY.batch_id}-3"


def test_a_line_put_back_is_another_job(tmp_path: Path) -> None:
    """The failed job's record stands under the old id for as long as results are kept."""
    with State(tmp_path / "s") as state:
        a_reader(state).read(numbered(a_line()))
        for expected in ("-1-r1", "-1-r2"):
            with state.transaction():
                state.end([(LineState.FAILED, 1)])
                state.reopen_failed()
            (work,) = a_reader(state).read(numbered(a_line())).work
            assert work.job.id == f"{IDENTITY.batch_id}{expected}"


def test_doubles_are_found_again_on_a_later_run(tmp_path: Path) -> None:
    """The first owner stays the owner, also when the run died before the error was written."""
    texts = [a_line("same"), a_line("other"), a_line("same")]
    with State(tmp_path / "s") as state:
        for _ in range(2):
            window = a_reader(state).read(numbered(*texts))
            assert [work.number for work in window.work] == [1, 2]
            assert [(bad.number, bad.code) for bad in window.bad] == [(3, Code.DUPLICATE_CUSTOM_ID)]


def test_a_bad_line_owns_its_id_too(tmp_path: Path) -> None:
    """A good line after it with the same id is the double: each id stands once."""
    texts = [a_line("same", method="GET"), a_line("same")]
    with State(tmp_path / "s") as state:
        window = a_reader(state).read(numbered(*texts))
    assert not window.work
    assert [(bad.custom_id, bad.code) for bad in window.bad] == [
        ("same", Code.INVALID_REQUEST),
        (None, Code.DUPLICATE_CUSTOM_ID),
    ]


def test_another_input_is_noticed_line_by_line(tmp_path: Path) -> None:
    """As it must be for a pipe: changed, inserted, left out, cut short."""
    texts = [a_line(f"id-{n}") for n in range(4)]
    with State(tmp_path / "s") as state:
        a_reader(state).read(numbered(*texts))
        other = numbered(*texts[:2], a_line("new"), texts[3])
        with pytest.raises(InputUnusable, match="line 3 differs"):
            a_reader(state).read(other)
        gap = numbered(*texts)
        del gap[1]
        with pytest.raises(InputUnusable, match="line 2 differs"):
            a_reader(state).read(gap)
        reader = a_reader(state)
        reader.read(numbered(*texts[:3]))
        with pytest.raises(InputUnusable, match="line 4 is gone"):
            reader.end()
        longer = a_reader(state)
        longer.read(numbered(*texts, a_line("id-4")))
        longer.end()


def test_a_line_where_a_blank_was_is_noticed(tmp_path: Path) -> None:
    """Blank lines leave gaps in the numbers."""
    with State(tmp_path / "s") as state:
        lines = [*numbered(a_line("a")), *numbered(a_line("b"), first=3)]
        a_reader(state).read(lines)
        with pytest.raises(InputUnusable, match="line 2 was not there"):
            a_reader(state).read(numbered(a_line("a"), a_line("x"), a_line("b")))


def test_a_line_too_long_to_hold_has_no_id(tmp_path: Path) -> None:
    """It is one error with its number."""
    with State(tmp_path / "s") as state:
        window = a_reader(state).read([Line(1, b"", 5, too_long=True)])
    assert [(bad.number, bad.custom_id) for bad in window.bad] == [(1, None)]
    assert "longer than" in window.bad[0].message


def test_the_first_good_line_tells_the_endpoint_for_all_runs(tmp_path: Path) -> None:
    """A later run judges by the same one, wherever it begins."""
    texts = [a_line("a", url="/v1/completions"), a_line("b")]
    with State(tmp_path / "s") as state:
        window = a_reader(state).read(numbered(*texts))
        assert isinstance(window.work[0], Work)
        assert isinstance(window.bad[0], BadLine)
        assert window.bad[0].code is Code.URL_MISMATCH
        stored = state.identity
        assert stored == msgspec.structs.replace(IDENTITY, endpoint="/v1/completions")
