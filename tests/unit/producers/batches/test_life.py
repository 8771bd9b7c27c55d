"""A batch's states: no way back, and no way out of the last."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from producers.batches import life
from producers.batches.records import ENDED, Batch, Counts, Fault, Status
from tests.stored_batches import a_batch

ORDER = [
    Status.VALIDATING,
    Status.IN_PROGRESS,
    Status.CANCELLING,
    Status.FINALIZING,
    *sorted(ENDED),
]

FAULT = Fault(code="empty_file", message="no lines")


def all_stand(batch: Batch) -> Batch:
    """As a runner leaves it whose last line stands."""
    return replace(batch, counts=replace(batch.counts, failed=batch.counts.total))


STEPS: dict[str, Callable[[Batch, float], Batch]] = {
    "begin": lambda batch, at_s: life.begin(batch, total=3, at_s=at_s),
    "fail": lambda batch, at_s: life.fail(batch, [FAULT], at_s=at_s),
    "cancel": lambda batch, at_s: life.cancel(batch, at_s=at_s),
    "finalize": lambda batch, at_s: life.finalize(batch, at_s=at_s),
    "finish": lambda batch, at_s: life.finish(all_stand(batch), at_s=at_s),
}


@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=8))
def test_states_only_go_forward(steps: list[str]) -> None:
    """Any order of steps: what can't be is refused, and no state comes back or follows an end."""
    batch = a_batch()
    for at_s, step in enumerate(steps, start=1):
        try:
            after = STEPS[step](batch, float(at_s))
        except AssertionError:
            continue
        assert ORDER.index(after.status) >= ORDER.index(batch.status)
        if batch.has_ended:
            assert after.status == batch.status
        if after.status is not batch.status:
            assert getattr(after, f"{after.status}_at_s") == at_s
        batch = after


def test_cancel_in_every_state() -> None:
    """Asked for while lines may be left; never undone, and never of what has ended."""
    for status in Status:
        after = life.cancel(a_batch(status=status), at_s=5.0)
        cancels = status in (Status.VALIDATING, Status.IN_PROGRESS)
        assert (after.status is Status.CANCELLING) == (cancels or status is Status.CANCELLING)
        assert (after.cancelling_at_s == 5.0) == cancels


def test_a_cancelled_batch_without_lines_is_cancelled() -> None:
    """Not failed: somebody asked for its end."""
    batch = life.fail(life.cancel(a_batch(), at_s=1.0), [FAULT], at_s=2.0)
    assert (batch.status, batch.errors) == (Status.CANCELLED, (FAULT,))


def test_no_batch_ends_while_a_line_is_missing() -> None:
    """Whatever its state."""
    running = life.begin(a_batch(), total=3, at_s=1.0)
    with pytest.raises(AssertionError):
        life.finish(replace(running, counts=Counts(total=3, completed=2)), at_s=2.0)


def test_faults_are_bounded() -> None:
    """A million bad lines say no more than the first hundred."""
    failed = life.fail(a_batch(), [FAULT] * (life.FAULTS_MAX + 1), at_s=1.0)
    assert len(failed.errors) == life.FAULTS_MAX
