"""The mutation sampler from end to end, on a small project of its own."""

from pathlib import Path

import pytest

from tests.mutants import Equivalent, Outcome, Result, mutants_of, run_sample

MODULE = """
def wait_s(position, slots):
    if position < slots:
        return 0
    return position - slots


def count_down(n):
    while n > 0:
        n -= 1
    return n
"""
TESTS = """
import queueing

def test_free_slot_is_no_wait():
    assert queueing.wait_s(1, 2) == 0

def test_wait_is_what_stands_before():
    assert queueing.wait_s(5, 2) == 3

def test_ends():
    assert queueing.count_down(3) == 0
"""
NO_DIFFERENCE = Equivalent(
    "queueing.py",
    "if position < slots:",
    "if (position <= slots):",
    "At position == slots both ways give 0.",
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Lay out a project of one module and its tests."""
    (tmp_path / "queueing.py").write_text(MODULE)
    (tmp_path / "test_queueing.py").write_text(TESTS)
    return tmp_path


def run(project: Path, lines: set[str]) -> dict[str, Result]:
    """Run the mutants whose added line is among `lines`; return the results by that line."""
    source = (project / "queueing.py").read_bytes()
    sample = [
        mutant
        for mutant in mutants_of("queueing.py", source)
        if mutant.diff(source)[-1][1:].strip() in lines
    ]
    results = run_sample(
        sample, root=project, tests=["test_queueing.py"], equivalents=[NO_DIFFERENCE], jobs=2
    )
    return {result.diff[-1][1:].strip(): result for result in results}


def test_sample_tells_killed_from_surviving_and_leaves_the_tree_alone(project: Path) -> None:
    """A wrong result is killed, a change without effect survives and is explained."""
    results = run(project, {"return (position + slots)", "if (position <= slots):"})
    assert results["return (position + slots)"].outcome is Outcome.KILLED
    assert results["if (position <= slots):"].outcome is Outcome.SURVIVED
    assert results["if (position <= slots):"].reason == NO_DIFFERENCE.reason
    assert (project / "queueing.py").read_text() == MODULE


def test_endless_loop_counts_as_noticed(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant that never ends is stopped when its time is over."""
    monkeypatch.setattr("tests.mutants.RUN_S_MIN", 0.0)
    assert run(project, {"pass"})["pass"].outcome is Outcome.HUNG


def test_failing_baseline_is_refused(project: Path) -> None:
    """Tests that fail on unchanged code end the run: every mutant would look killed."""
    (project / "test_queueing.py").write_text("def test_a(): assert False")
    with pytest.raises(SystemExit, match="fail on unchanged code"):
        run(project, {"pass"})
