"""Subjects, patterns and time on the in-process server."""

from hypothesis import given
from hypothesis import strategies as st

from broker.bus.memory_clock import ManualClock
from broker.bus.memory_streams import MemoryStream, patterns_overlap, subject_matches
from tests.buses import SUBJECT, a_stream

tokens = st.sampled_from(["a", "b", "c"])
subjects = st.lists(tokens, min_size=1, max_size=4).map(".".join)
patterns = st.builds(
    lambda body, tail: ".".join([*body, *tail]),
    st.lists(st.sampled_from(["a", "b", "*"]), min_size=1, max_size=3),
    st.sampled_from([[], [">"]]),
)


@given(patterns, patterns, subjects)
def test_a_common_subject_means_overlap(left: str, right: str, subject: str) -> None:
    """Two patterns that match one subject overlap, whichever is asked about first."""
    if subject_matches(left, subject) and subject_matches(right, subject):
        assert patterns_overlap(left, right)
    assert patterns_overlap(left, right) == patterns_overlap(right, left)


@given(subjects)
def test_a_subject_matches_itself(subject: str) -> None:
    """Exactly, and under the widest pattern."""
    assert subject_matches(subject, subject)
    assert subject_matches(">", subject)
    assert not subject_matches(f"{subject}.>", subject)


def test_ids_are_forgotten_and_not_hoarded() -> None:
    """A stream remembers ids for their window only."""
    clock = ManualClock()
    stream = MemoryStream(a_stream(duplicate_window_s=10.0), clock)
    for number in range(100):
        stream.append(SUBJECT, b"", message_id=f"j{number}", headers={})
        clock.advance(1.0)
    assert len(stream._ids) <= 10


def test_manual_clock_runs_timers_in_order_at_their_own_instants() -> None:
    """`advance` passes through each instant; a cancelled timer is silent; timers may set timers."""
    clock = ManualClock(100.0)
    ran: list[tuple[str, float]] = []
    clock.call_at(103.0, lambda: ran.append(("late", clock.now_s())))

    def set_another() -> None:
        clock.call_at(102.0, lambda: ran.append(("new", clock.now_s())))

    clock.call_at(101.0, set_another)
    gone = clock.call_at(102.5, lambda: ran.append(("cancelled", clock.now_s())))
    gone.cancel()
    clock.call_at(999.0, lambda: ran.append(("never", clock.now_s())))
    clock.advance(5.0)
    assert ran == [("new", 102.0), ("late", 103.0)]
    assert clock.now_s() == 105.0
