"""What a run reads of the batches it began: lines without a result, and with more than one."""

from pathlib import Path

import orjson

from ops.chaos.run import lines
from producers.batch.plan import Plan, default_errors
from producers.batch.state import State, new_identity, read_identity


def a_batch(folder: Path, *, names: str = "abc", results: str = "", errors: str = "") -> Plan:
    """A batch that was begun, with lines and results of these names."""
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    source.write_bytes(named(names))
    plan = Plan(input=str(source), output=output, errors=default_errors(output), lane="offline")
    with State(plan.state) as state, state.transaction():
        state.identity = new_identity(input_name=plan.input, lane=plan.lane, band=3, window_s=60.0)
    output.write_bytes(named(results))
    plan.errors.write_bytes(named(errors))
    return plan


def named(names: str) -> bytes:
    """A line for each letter."""
    return b"".join(orjson.dumps({"custom_id": name}) + b"\n" for name in names)


def test_each_line_has_one_result_wherever_it_stands(tmp_path: Path) -> None:
    """In the output or among the errors."""
    assert lines([a_batch(tmp_path, results="ca", errors="b")]) == ((), ())


def test_a_line_without_result_is_lost(tmp_path: Path) -> None:
    """The batch's user has no answer."""
    assert lines([a_batch(tmp_path, results="ca")]) == (("b",), ())


def test_a_line_with_two_results_is_doubled(tmp_path: Path) -> None:
    """Also with one in each file."""
    assert lines([a_batch(tmp_path, results="abb", errors="ac")]) == ((), ("a", "b"))


def test_a_line_whose_job_is_stuck_is_not_lost(tmp_path: Path) -> None:
    """It is told of where stuck jobs are."""
    plan = a_batch(tmp_path, results="ca")
    stuck = f"offline.{read_identity(plan.output).job_id(2, 0)}"
    assert lines([plan], {stuck}) == ((), ())


def test_a_batch_without_files_of_results_has_lost_all(tmp_path: Path) -> None:
    """It was killed before it began."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(named("ab"))
    plan = Plan(input=str(source), output=output, errors=default_errors(output), lane="offline")
    assert lines([plan]) == (("a", "b"), ())
