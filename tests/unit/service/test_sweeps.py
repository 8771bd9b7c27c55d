"""What is pulled of a lane that is being cancelled."""

import time

import pytest

from broker.service import sweeps
from broker.service.sweeps import SWEEPS_MAX, Sweeps
from broker.wire.control import LaneCancelRequest, StreamSpan
from broker.wire.ids import BATCH_BAND
from broker.wire.subjects import JobAddress, jobs_stream
from tests.builders import LANE, MODEL

LINE = JobAddress(LANE, BATCH_BAND, MODEL)
STREAM = jobs_stream(LANE, BATCH_BAND)
ALL = LaneCancelRequest()


def a_span(stream: str = STREAM, last_sequence: int = 10) -> StreamSpan:
    """The rest of a stream."""
    return StreamSpan(stream=stream, next_sequence=1, last_sequence=last_sequence)


def begun(request: LaneCancelRequest = ALL, span: StreamSpan | None = None) -> Sweeps:
    """A cancellation whose step is under way."""
    made = Sweeps()
    made.begin(request, span or a_span(), for_s=9.0)
    return made


def test_what_is_meant_ends_and_is_counted_once() -> None:
    """Each message by its sequence, step by step."""
    made = begun()
    assert [made.takes(LINE, sequence=number) for number in (3, 4, 4, 10)] == [True] * 4
    assert made.has_ended(STREAM, 4)
    assert not made.has_ended(STREAM, 5)
    assert made.end_step(STREAM, is_last=False) == 3
    assert made.takes(LINE, sequence=5)  # Between two steps.
    made.begin(ALL, a_span(), for_s=9.0)
    assert made.end_step(STREAM, is_last=True) == 1
    assert not made.takes(LINE, sequence=6)
    assert made.end_step(STREAM, is_last=True) == 0


def test_a_job_that_the_walk_ended_and_the_door_saw_counts_once() -> None:
    """Its message was on its way when it was ended where it stood, in this step or the last."""
    made = begun()
    assert made.count(STREAM, 3)
    assert made.takes(LINE, sequence=3)
    assert made.takes(LINE, sequence=4)
    assert not made.count(STREAM, 4)
    assert made.end_step(STREAM, is_last=False) == 1
    made.begin(ALL, a_span(), for_s=9.0)
    assert made.takes(LINE, sequence=3)
    assert not made.count(STREAM, 4)
    assert made.end_step(STREAM, is_last=True) == 0
    assert made.count(STREAM, 5), "of no sweep, the walk counts alone"


@pytest.mark.parametrize(
    ("request_", "address", "sequence"),
    [
        (ALL, LINE, 11),
        (ALL, JobAddress("other", BATCH_BAND, MODEL), 1),
        (ALL, JobAddress(LANE, 2, MODEL), 1),
        (LaneCancelRequest(bands=(2,)), LINE, 1),
        (LaneCancelRequest(model="another"), LINE, 1),
    ],
    ids=["published later", "another lane", "another stream", "another band", "another model"],
)
def test_what_is_not_meant_stays(
    request_: LaneCancelRequest, address: JobAddress, sequence: int
) -> None:
    """As the walk itself chooses."""
    assert not begun(request_).takes(address, sequence=sequence)


def test_without_a_cancellation_nothing_ends() -> None:
    """The usual case."""
    assert not Sweeps().takes(LINE, sequence=1)
    assert not Sweeps().has_ended(STREAM, 1)


def test_who_does_not_come_again_ends_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """SWEEP_S after its last step; and while a step is under way, only that much later."""
    now_s = time.monotonic()
    monkeypatch.setattr(sweeps.time, "monotonic", lambda: now_s)
    made = begun()
    now_s += 9.0 + sweeps.SWEEP_S - 0.1
    assert made.takes(LINE, sequence=1)
    made.end_step(STREAM, is_last=False)
    now_s += sweeps.SWEEP_S
    assert not made.takes(LINE, sequence=2)


def test_sweeps_are_bounded() -> None:
    """Of too many at once the oldest one's jobs are pulled as usual: its walk finds them."""
    made = begun()
    for number in range(SWEEPS_MAX):
        made.begin(ALL, a_span(f"BATCH_{number}"), for_s=9.0)
    assert not made.takes(LINE, sequence=1)
    assert made.takes(JobAddress(str(SWEEPS_MAX - 1), BATCH_BAND, MODEL), sequence=1)
