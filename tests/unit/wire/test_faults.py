"""How many jobs an engine failed in a row, as its agent counts them."""

from typing import Any

from broker.wire.faults import FAULTS_TOLD_MAX, FaultRun
from broker.wire.messages import Finished, Kind, Outcome, Reason, Usage
from tests.builders import an_attempt


def failed(name: str, reason: Reason = Reason.ENGINE_FAILED, **fields: Any) -> Finished:
    """An attempt that came to nothing."""
    return Finished(name, an_attempt(1), Outcome.RETRY, reason=reason, **fields)


def settled(name: str, kind: Kind = Kind.COMPLETED, **fields: Any) -> Finished:
    """A job that has its record."""
    return Finished(name, an_attempt(1), Outcome.SETTLED, kind=kind, usage=Usage(1, 0, 1), **fields)


def test_different_jobs_in_a_row_count_until_one_completes() -> None:
    """The same job again is no other one."""
    run = FaultRun()
    for name in ("a", "b", "a", "c"):
        run.ended(failed(name))
    assert run.jobs == 3
    run.ended(settled("d"))
    assert run.jobs == 0


def test_what_says_nothing_of_the_engine_changes_nothing() -> None:
    """Busy, handed back, the caller's own error, a record that stood already."""
    run = FaultRun()
    run.ended(failed("a"))
    run.ended(failed("b", charged=False))
    run.ended(failed("c", Reason.HANDED_BACK))
    run.ended(failed("d", Reason.RUN_TIME_EXCEEDED))
    run.ended(settled("e", Kind.FAILED))
    run.ended(settled("f", ran=False))
    assert run.jobs == 1


def test_the_count_is_bounded_and_ends_with_the_engine() -> None:
    """A day of failures takes no more room; a new engine has none."""
    run = FaultRun()
    for number in range(2 * FAULTS_TOLD_MAX):
        run.ended(failed(f"j{number}"))
    assert run.jobs == FAULTS_TOLD_MAX
    run.clear()
    assert run.jobs == 0
