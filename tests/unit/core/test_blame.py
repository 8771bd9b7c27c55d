"""Who killed the worker."""

import pytest

from broker.core.blame import death_marks, is_charged, is_ended, is_suspect
from broker.core.policy import LeasePolicy
from broker.wire.messages import Failure, Reason
from tests.builders import an_attempt


def a_failure(reason: Reason = Reason.WORKER_LOST, *, charged: bool = True) -> Failure:
    """A failure of the first attempt."""
    return Failure(an_attempt(), "w1", reason, 1000.0, charged=charged)


DEATH = a_failure()
MARK = a_failure(charged=False)
ERROR = a_failure(Reason.ENGINE_FAILED)
BACK = a_failure(Reason.HANDED_BACK, charged=False)


def test_only_deaths_are_marks() -> None:
    """Charged or not, a dead worker marks; other failures don't."""
    assert death_marks(()) == 0
    assert death_marks((DEATH, MARK, ERROR, BACK)) == 2


@pytest.mark.parametrize(
    ("failures_max", "failures", "suspect"),
    [
        (3, (), False),
        (3, (MARK,), False),
        (3, (MARK, ERROR), False),
        (3, (MARK, MARK), True),
        (3, (DEATH, DEATH, DEATH), True),
        (2, (MARK,), True),
        (1, (), False),
        (1, (ERROR,), False),
        (1, (MARK,), True),
    ],
)
def test_a_suspect_is_a_job_that_one_more_death_would_end(
    failures_max: int, failures: tuple[Failure, ...], *, suspect: bool
) -> None:
    """One mark short of the cap; never without any mark."""
    assert is_suspect(failures, LeasePolicy(failures_max=failures_max)) is suspect


@pytest.mark.parametrize(
    ("marks", "all_marks", "charged"),
    [
        (0, [0], True),
        (2, [2], True),
        (0, [0, 0], False),
        (1, [1, 0, 0], True),
        (0, [1, 0, 0], False),
        (1, [1, 1], False),
        (2, [2, 1, 1], True),
        (1, [2, 1, 1], False),
    ],
)
def test_a_death_is_charged_to_the_one_it_must_be(
    marks: int, all_marks: list[int], *, charged: bool
) -> None:
    """The only one there, or the only one with most marks."""
    assert is_charged(marks, all_marks=all_marks) is charged


@pytest.mark.parametrize(
    ("failures", "ended"),
    [
        ((DEATH, DEATH), False),
        ((MARK, DEATH, DEATH), True),
        ((DEATH, DEATH, MARK), False),
        ((MARK, MARK, MARK), False),
        ((MARK, MARK, MARK, DEATH), True),
        ((ERROR, ERROR), False),
        ((ERROR, ERROR, ERROR), True),
        ((ERROR, ERROR, BACK), False),
        ((ERROR, ERROR, BACK, ERROR), True),
        ((DEATH, ERROR, ERROR), True),
        ((MARK, ERROR, ERROR), False),
        ((ERROR, ERROR, DEATH), True),
        ((ERROR, DEATH), False),
        ((MARK, MARK, ERROR), False),
    ],
)
def test_a_job_ends_after_three_charged_failures_or_three_deaths_of_its_own(
    failures: tuple[Failure, ...], *, ended: bool
) -> None:
    """A neighbour's mark never ends a job; errors and charged deaths add up to errors' cap."""
    assert is_ended(failures, LeasePolicy(failures_max=3)) is ended
