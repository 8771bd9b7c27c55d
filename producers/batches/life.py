"""A batch's states and what leads from one to the next. Pure: time is given.

    validating → in_progress → finalizing → completed
    validating → failed                       the input is unusable, nothing ran
    in_progress → expired                     the window was over before its last line ended
    validating, in_progress → cancelling → cancelled
    any that has not ended → failed           no runner can bring it to its end

At every end but `failed`, each line of the input stands exactly once in the output or the error
file. A state is never left backwards, and an ended batch never changes.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from producers.batches.records import Batch, Counts, Fault, Status

FAULTS_MAX = 100
"""Faults kept of an input that is unusable; a million of the same kind say no more."""

INPUT_GONE = Fault(
    code="input_file_gone", message="the input file was removed before all of it ran"
)
LANE_GONE = Fault(
    code="lane_gone",
    message="the lane was taken out of the cluster's configuration before all of the input ran",
)


def begin(batch: Batch, *, total: int, at_s: float) -> Batch:
    """The input was looked over: its lines may run (or, when cancelled meanwhile, be closed)."""
    assert batch.status in (Status.VALIDATING, Status.CANCELLING), batch.status
    counted = replace(batch, counts=Counts(total=total))
    if batch.status is Status.CANCELLING:
        return counted
    return replace(counted, status=Status.IN_PROGRESS, in_progress_at_s=at_s)


def fail(batch: Batch, faults: Sequence[Fault], *, at_s: float) -> Batch:
    """The input is unusable. One that was cancelled meanwhile is cancelled."""
    assert batch.status in (Status.VALIDATING, Status.CANCELLING), batch.status
    kept = replace(batch, errors=tuple(faults[:FAULTS_MAX]), lease=None, forecast=None)
    if batch.status is Status.CANCELLING:
        return replace(kept, status=Status.CANCELLED, cancelled_at_s=at_s)
    return replace(kept, status=Status.FAILED, failed_at_s=at_s)


def lose(batch: Batch, fault: Fault, *, at_s: float) -> Batch:
    """No runner can bring it to its end: its input aged away, or its lane was taken out.

    What ended stands in its files; no other way leads from a running batch to `failed`.
    """
    lost = replace(batch, errors=(fault,), lease=None, forecast=None)
    return replace(lost, status=Status.FAILED, failed_at_s=at_s)


def cancel(batch: Batch, *, at_s: float) -> Batch:
    """Ask for its end; a batch whose lines have all ended, or that was asked before, stays."""
    if batch.status not in (Status.VALIDATING, Status.IN_PROGRESS):
        return batch
    return replace(batch, status=Status.CANCELLING, cancelling_at_s=at_s)


def finalize(batch: Batch, *, at_s: float) -> Batch:
    """All its lines ran, and stand in its files; a batch that is being cancelled stays so."""
    if batch.status is not Status.IN_PROGRESS:
        return batch
    return replace(batch, status=Status.FINALIZING, finalizing_at_s=at_s)


def finish(batch: Batch, *, at_s: float) -> Batch:
    """All its lines stand in its files, and these are whole."""
    assert batch.counts.ended == batch.counts.total, "a line is missing"
    ended = replace(batch, lease=None, forecast=None)
    match batch.status:
        case Status.FINALIZING:
            return replace(ended, status=Status.COMPLETED, completed_at_s=at_s)
        case Status.CANCELLING:
            return replace(ended, status=Status.CANCELLED, cancelled_at_s=at_s)
        case Status.IN_PROGRESS:
            return replace(ended, status=Status.EXPIRED, expired_at_s=at_s)
        case _:
            message = f"a batch that is {batch.status} can't finish"
            raise AssertionError(message)
