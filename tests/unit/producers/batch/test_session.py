"""What a run refuses to begin with, and what it takes up."""

import os
from pathlib import Path
from typing import Any

import pytest

from producers.batch.errors import InputUnusable, OutputUnusable
from producers.batch.outcome import Ended
from producers.batch.session import Session, Stored
from producers.batch.state import Counts, LineState, State, id_hash, read_identity
from tests.batches import a_plan, lines


def begin(folder: Path, **fields: Any) -> None:
    """Begin a batch of three lines, read them, and leave."""
    with (
        Session(a_plan(folder, lines(3), **fields)) as session,
        session.state.transaction(),
    ):
        for number in range(1, 4):
            session.state.add(number, number, id_hash(f"id-{number - 1}"))


def refused(folder: Path, error: type[Exception], said: str, **fields: Any) -> None:
    """A run with these arguments is refused with this sentence."""
    with pytest.raises(error, match=said):
        Session(a_plan(folder, **fields))


def test_a_batch_is_known_again(tmp_path: Path) -> None:
    """Id, start and window stay; a window given anew counts from the same start."""
    begin(tmp_path)
    first = read_identity(tmp_path / "out.jsonl")
    with Session(a_plan(tmp_path)) as session:
        assert session.identity == first
        assert first.window_s == 86_400.0
        assert first.lines == 3
    with Session(a_plan(tmp_path, window_s=60.0)) as session:
        assert session.identity.deadline_at_s == first.created_at_s + 60.0
    with Session(a_plan(tmp_path)) as session:
        assert session.identity.window_s == 60.0


def test_an_output_belongs_to_one_lane_endpoint_and_input(tmp_path: Path) -> None:
    """Another one is told, with the way out."""
    begin(tmp_path, endpoint="/v1/chat/completions")
    refused(tmp_path, OutputUnusable, "begun for lane 'acme'", lane="other")
    refused(tmp_path, OutputUnusable, "begun for /v1/chat", endpoint="/v1/embeddings")
    (tmp_path / "in.jsonl").write_bytes(b"other")
    refused(tmp_path, InputUnusable, "another --output")


def test_files_of_others_are_never_written_to(tmp_path: Path) -> None:
    """An output or error file without a state beside it, a folder, a device, the input."""
    a_plan(tmp_path, lines(1))
    for name in ("out.jsonl", "out.errors.jsonl"):
        (tmp_path / name).write_bytes(b"mine\n")
        refused(tmp_path, OutputUnusable, "no state stands beside")
        assert (tmp_path / name).read_bytes() == b"mine\n"
        (tmp_path / name).unlink()
    refused(tmp_path, OutputUnusable, "regular file", output=tmp_path)
    refused(tmp_path, OutputUnusable, "regular file", output=Path("/dev/null"))
    refused(tmp_path, OutputUnusable, "no folder", output=tmp_path / "absent" / "out")
    refused(tmp_path, OutputUnusable, "is the input itself", output=tmp_path / "in.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    ("output", "errors"),
    [
        ("out.jsonl", "out.jsonl.state"),
        ("out.jsonl", "out.jsonl.state-wal"),
        ("out.jsonl", "out.jsonl.state-shm"),
        ("errors.new", "errors"),
    ],
)
def test_results_stand_in_no_file_that_a_run_needs_beside(
    tmp_path: Path, output: str, errors: str
) -> None:
    """The state would be written over with error lines, the output be taken away by a retry."""
    a_plan(tmp_path, lines(1))
    fields = {"output": tmp_path / output, "errors": tmp_path / errors}
    refused(tmp_path, OutputUnusable, "needs beside its results", **fields)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("name", ["out.jsonl.state", "out.jsonl.state-wal", "out.errors.jsonl.new"])
def test_the_input_is_no_file_that_a_run_writes(tmp_path: Path, name: str) -> None:
    """The state would not open on it; a retry would take it away."""
    source = tmp_path / name
    source.write_bytes(lines(1)[0])
    refused(tmp_path, OutputUnusable, "is the input itself", input=str(source))
    assert source.read_bytes() == lines(1)[0]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_error_file_is_the_one_it_was_begun_with(tmp_path: Path) -> None:
    """In another one its failed lines would stand a second time; both files may move together."""
    output, failed = tmp_path / "out.jsonl", tmp_path / "failed"
    begin(tmp_path, errors=failed)
    assert read_identity(output).errors_of(output) == failed
    with Session(a_plan(tmp_path, errors=failed)) as session:
        session.write([Ended(1, b'{"id":"r","custom_id":"id-0"}\n', ok=False)])
        session.checkpoint({})
    refused(tmp_path, OutputUnusable, f"stand in {failed}")
    assert not (tmp_path / "out.errors.jsonl").exists()
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in (output, failed, tmp_path / "out.jsonl.state"):
        path.rename(moved / path.name)
    output = moved / "out.jsonl"
    assert read_identity(output).errors_of(output) == moved / "failed"
    (moved / "failed").rename(moved / "out.errors.jsonl")
    default = moved / "out.errors.jsonl"
    with Session(a_plan(tmp_path, output=output, errors=default)) as session:
        assert session.counts.failed == 1
        assert not session.results_were_missing
    assert read_identity(output).errors_of(output) == default


@pytest.mark.parametrize("field", ["input", "output", "errors"])
def test_a_place_that_can_not_be_looked_at(tmp_path: Path, field: str) -> None:
    """A name too long, a folder that may not be entered: told as the place it is."""
    a_plan(tmp_path, lines(1))
    place = tmp_path / ("x" * 300)
    value = str(place) if field == "input" else place
    refused(tmp_path, OutputUnusable, "x can't be written or read", **{field: value})
    with pytest.raises(OutputUnusable, match="can't be read"):
        read_identity(place)


def test_a_named_pipe_is_read_once(tmp_path: Path) -> None:
    """No survey: it would eat the input."""
    os.mkfifo(tmp_path / "pipe")
    plan = a_plan(tmp_path, input=str(tmp_path / "pipe"))
    assert plan.is_pipe
    assert plan.input_name == "-"
    with Session(plan) as session:
        assert session.identity.digest == ""


def test_only_a_checkpoint_makes_ends_and_places_count(tmp_path: Path) -> None:
    """What was written before it is found in the file instead."""
    begin(tmp_path)
    text = b'{"id":"r","custom_id":"id-1","response":{},"error":null}\n'
    with Session(a_plan(tmp_path)) as session:
        session.write([Ended(2, text, ok=True)])
        assert session.counts == Counts(open=3)
        session.checkpoint({1: Stored(2, 77)})
        assert session.counts == Counts(open=2, completed=1)
        known = session.state.known(1, 3)
        assert (known[1].submission, known[1].sequence) == (2, 77)
        assert known[2].state is LineState.COMPLETED
    with Session(a_plan(tmp_path)) as session:
        assert not session.results_were_missing
        assert session.counts == Counts(open=2, completed=1)


def test_an_output_of_no_batch_has_no_identity(tmp_path: Path) -> None:
    """`batch retry` of any file says so, and makes no state file."""
    with pytest.raises(OutputUnusable, match="no batch"):
        read_identity(tmp_path / "out.jsonl")
    assert not list(tmp_path.iterdir())


def test_a_state_of_another_version_is_told(tmp_path: Path) -> None:
    """Rather than misread."""
    begin(tmp_path)
    with State(tmp_path / "out.jsonl.state") as state, state.transaction():
        state._set_meta("version", 99)
    refused(tmp_path, OutputUnusable, "another version")
