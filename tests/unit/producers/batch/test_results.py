"""Result files after crashes: torn ends cut, whole lines taken over, strangers' files left
alone.
"""

import contextlib
import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from producers.batch.errors import OutputUnusable
from producers.batch.lines import BadLine, Code
from producers.batch.outcome import Ended, of_bad_line
from producers.batch.results import Results
from producers.batch.state import Counts, LineState, Marks, State, id_hash


class Files:
    """Result files and state of a batch of lines `id-1` to `id-20`."""

    def __init__(self, folder: Path) -> None:
        self.output = folder / "out.jsonl"
        self.errors = folder / "err.jsonl"
        self.state_path = folder / "out.jsonl.state"
        with self.state() as state, state.transaction():
            for number in range(1, 21):
                state.add(number, number, id_hash(f"id-{number}"))

    def state(self) -> State:
        return State(self.state_path)

    def results(self) -> Results:
        return Results(self.output, self.errors)

    def recover(self) -> Counts:
        """Open as the next run does; return what counts as ended."""
        with self.results() as results, self.state() as state:
            results.recover(state)
            return state.counts()


def a_result(number: int) -> Ended:
    """The result of a line that completed."""
    text = b'{"id":"r%d","custom_id":"id-%d","response":{},"error":null}\n' % (number, number)
    return Ended(number, text, ok=True)


def an_error(number: int, code: Code = Code.BATCH_EXPIRED) -> Ended:
    """The error of a line."""
    return of_bad_line(BadLine(number, f"id-{number}", code, "told"), batch_id="b")


def test_lines_beyond_the_mark_are_taken_over(tmp_path: Path) -> None:
    """A run died after writing and before noting: what it wrote counts."""
    files = Files(tmp_path)
    with files.results() as results:
        results.write([a_result(1), an_error(2), an_error(3, Code.INVALID_REQUEST), a_result(4)])
    assert files.recover() == Counts(open=16, completed=2, failed=1, bad=1)
    assert files.recover() == Counts(open=16, completed=2, failed=1, bad=1)


def test_a_torn_end_is_cut_off(tmp_path: Path) -> None:
    """A last line without its end, or garbage from a power cut, goes; all before it stays."""
    files = Files(tmp_path)
    with files.results() as results:
        results.write([a_result(1), a_result(2)])
    whole = files.output.read_bytes()
    for torn in (b'{"id":"r3","cust', b"\x00" * 50, b"\x00" * 50 + b"\n{}\n", b"\n"):
        files.output.write_bytes(whole + torn)
        assert files.recover() == Counts(open=18, completed=2)
        assert files.output.read_bytes() == whole


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(marked=st.integers(0, 5), cut=st.integers(0, 2000))
def test_cut_anywhere_beyond_the_mark_exactly_the_whole_lines_count(
    tmp_path: Path, marked: int, cut: int
) -> None:
    """Kill -9 can tear a write at any byte."""
    for path in tmp_path.iterdir():
        path.unlink()
    files = Files(tmp_path)
    with files.results() as results, files.state() as state:
        results.write(a_result(number) for number in range(1, marked + 1))
        with state.transaction():
            state.marks = results.checkpoint()
            state.end((LineState.COMPLETED, number) for number in range(1, marked + 1))
        length = files.output.stat().st_size
        results.write(a_result(number) for number in range(marked + 1, 11))
    data = files.output.read_bytes()[: max(length, cut)]
    files.output.write_bytes(data)
    assert files.recover().completed == data.count(b"\n")
    assert files.output.read_bytes() == data[: data.rfind(b"\n") + 1]


def test_a_file_shorter_than_its_mark_is_read_anew(tmp_path: Path) -> None:
    """Somebody took results away: what is there counts, and the rest is open again."""
    files = Files(tmp_path)
    with files.results() as results, files.state() as state:
        results.write([a_result(1), a_result(2), an_error(3)])
        with state.transaction():
            state.marks = results.checkpoint()
            state.end([(LineState.COMPLETED, 1), (LineState.COMPLETED, 2), (LineState.FAILED, 3)])
    files.output.write_bytes(a_result(2).text)
    with files.results() as results, files.state() as state:
        assert results.recover(state)
        assert state.counts() == Counts(open=18, completed=1, failed=1)
        assert state.is_open(1)


@pytest.mark.parametrize(
    "foreign",
    [
        b'{"id":"x","custom_id":"stranger","error":null}\n',
        b'{"id":"x","custom_id":"id-1","error":null}\n',
        b'{"id":"x","custom_id":null,"error":{"code":"a","line":99}}\n',
    ],
)
def test_whole_lines_of_somebody_else_are_never_cut_off(tmp_path: Path, foreign: bytes) -> None:
    """An unknown line, or a second result of a line, is told with its place, and left as it is."""
    files = Files(tmp_path)
    with files.results() as results:
        results.write([a_result(1)])
    files.recover()
    data = files.output.read_bytes() + foreign
    files.output.write_bytes(data)
    with pytest.raises(OutputUnusable, match=f"at byte {len(a_result(1).text)} "):
        files.recover()
    assert files.output.read_bytes() == data


def test_another_file_in_the_outputs_place_is_left_alone(tmp_path: Path) -> None:
    """Shorter than the mark and not ours: nothing of it is cut."""
    files = Files(tmp_path)
    with files.results() as results, files.state() as state:
        results.write([a_result(1)])
        with state.transaction():
            state.marks = results.checkpoint()
    files.output.write_bytes(b"my notes\nmore\n")
    with pytest.raises(OutputUnusable, match="at byte 0"):
        files.recover()
    assert files.output.read_bytes() == b"my notes\nmore\n"


def test_a_write_that_fails_leaves_the_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After half a write the disk is full: the half is taken back."""
    files = Files(tmp_path)
    real = os.write

    def half(descriptor: int, data: memoryview) -> int:
        if len(data) < len(a_result(2).text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data[: len(data) // 2])

    with files.results() as results:
        results.write([a_result(1)])
        monkeypatch.setattr(os, "write", half)
        with pytest.raises(OutputUnusable, match="No space left"):
            results.write([a_result(2)])
        monkeypatch.undo()
        assert files.output.read_bytes() == a_result(1).text
        results.write([a_result(3)])
    assert files.recover() == Counts(open=18, completed=2)


def test_rewriting_leaves_only_lines_that_are_not_open(tmp_path: Path) -> None:
    """And a new run finishes a rewriting that was begun; doing it twice changes nothing."""
    files = Files(tmp_path)
    with files.results() as results, files.state() as state:
        results.write([an_error(1), an_error(2, Code.INVALID_REQUEST), an_error(3)])
        results.recover(state)
        with state.transaction():
            assert state.reopen_failed() == 2
            state.marks = Marks(0, state.marks.errors, rewriting=True)
    assert files.recover() == Counts(open=19, bad=1)
    assert files.errors.read_bytes() == an_error(2, Code.INVALID_REQUEST).text
    assert files.recover() == Counts(open=19, bad=1)
    assert not (tmp_path / "err.jsonl.new").exists()


def test_an_error_file_without_errors_goes_away(tmp_path: Path) -> None:
    """Its being there means that something failed."""
    files = Files(tmp_path)
    with files.results() as results:
        results.write([a_result(1)])
    assert not files.errors.exists()


def test_output_and_errors_may_not_be_the_same_file(tmp_path: Path) -> None:
    """By name or by link."""
    files = Files(tmp_path)
    files.output.touch()
    files.errors.symlink_to(files.output)
    with pytest.raises(OutputUnusable, match="can't both"):
        files.results()


def test_a_damaged_state_file_is_told(tmp_path: Path) -> None:
    """One sentence, not a trace."""
    files = Files(tmp_path)
    files.state_path.write_bytes(b"no database" * 1000)
    with pytest.raises(OutputUnusable, match="state file"):
        files.state()


@pytest.mark.parametrize("dies_at", range(8))
def test_a_run_that_dies_while_it_takes_over_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int
) -> None:
    """Whatever was noted by then: a line that ended is in the part that is accounted for."""
    files = Files(tmp_path)
    with files.results() as results:
        results.write([a_result(n) for n in range(1, 6)] + [an_error(n) for n in range(6, 11)])
    monkeypatch.setattr("producers.batch.results.RECOVER_LINES", 2)
    steps = 0
    transaction = State.transaction

    @contextmanager
    def dying(self: State) -> Generator[None, None, None]:
        nonlocal steps
        steps += 1
        if steps > dies_at:
            raise KeyboardInterrupt
        with transaction(self):
            yield

    with monkeypatch.context() as patch:
        patch.setattr(State, "transaction", dying)
        with contextlib.suppress(KeyboardInterrupt):
            files.recover()
    assert files.recover() == Counts(open=10, completed=5, failed=5)
