"""Speed, jitter and parts of a workload."""

import random
from typing import Any

import pytest

from broker.sim.request import Request, Workload
from broker.sim.workload.shaping import first_half, head, scaled, second_half
from broker.sim.workload.stream import Stream


def a_request(index: int, at_s: float, **changes: Any) -> Request:
    """Return a request."""
    values: dict[str, Any] = {
        "index": index,
        "at_s": at_s,
        "prompt_tokens": 600,
        "output_tokens": 5,
        "output_tokens_max": 8,
        "block_tokens": 512,
    }
    return Request(**(values | changes))


def a_workload(*arrivals_s: float) -> Workload:
    """Return a workload with these arrivals."""
    requests = [a_request(index, at_s) for index, at_s in enumerate(arrivals_s)]
    return Workload(name="w", requests=requests, source="a test")


def a_session_workload() -> Workload:
    """Return two sessions, of three turns and of two."""
    requests = [
        a_request(0, 1.0, session="a"),
        a_request(1, 4.0, session="a", after=0),
        a_request(2, 6.0, session="a", after=1),
        a_request(3, 3.0, session="b"),
        a_request(4, 8.0, session="b", after=3),
    ]
    return Workload(name="w", requests=requests, source="a test")


def arrivals_s(workload: Workload) -> list[float]:
    """Return each request's `at_s`."""
    return [request.at_s for request in workload.requests]


def test_speed_divides_arrivals_and_delays() -> None:
    """Twice the speed is half of every instant and of every pause between turns."""
    assert arrivals_s(scaled(a_workload(0, 1, 4), speed=2, rng=random.Random(1))) == [0, 0.5, 2]
    sessions = scaled(a_session_workload(), speed=2, rng=random.Random(1))
    assert arrivals_s(sessions) == [0.5, 2.0, 3.0, 1.5, 4.0]


def test_jitter_moves_each_gap_within_its_bound() -> None:
    """Each gap stays within 10 % of itself, is moved on its own, and keeps the order."""
    before_s = [0.0, 1.0, 1.0, 5.0, 5.5]
    after_s = arrivals_s(scaled(a_workload(*before_s), jitter=0.1, rng=random.Random(1)))
    factors = [(after_s[i] - after_s[i - 1]) / (before_s[i] - before_s[i - 1]) for i in (1, 3, 4)]
    assert all(0.9 <= factor <= 1.1 for factor in factors)
    assert len({round(factor, 6) for factor in factors}) == 3
    assert after_s[1] == after_s[2]


def test_jitter_keeps_the_rate() -> None:
    """Over many arrivals the jitter cancels out."""
    long = scaled(a_workload(*range(10_000)), jitter=0.1, rng=random.Random(1))
    assert arrivals_s(long)[-1] == pytest.approx(10_000, rel=0.005)


def test_same_seed_gives_the_same_arrivals() -> None:
    """The random source decides all."""
    one, again, other = (
        arrivals_s(scaled(a_workload(0, 1, 2), jitter=0.1, rng=random.Random(seed)))
        for seed in (1, 1, 2)
    )
    assert one == again != other


def test_lazy_workload_stays_lazy_and_repeats_itself() -> None:
    """A stream is scaled as it is read, in the same way every time."""
    stream = Stream(3, lambda: (a_request(i, float(i)) for i in range(3)))
    lazy = Workload(name="w", requests=stream, source="a test")
    result = scaled(lazy, speed=2, jitter=0.1, rng=random.Random(1))
    assert isinstance(result.requests, Stream)
    assert arrivals_s(result) == arrivals_s(result)
    eager = scaled(a_workload(0, 1, 2), speed=2, jitter=0.1, rng=random.Random(1))
    assert list(result.requests) == eager.requests


def test_halves_are_all_of_it() -> None:
    """No request is lost or twice; the second half starts at 0 s and index 0."""
    whole = a_workload(0, 1, 4, 6, 9)
    first, second = first_half(whole), second_half(whole)
    assert arrivals_s(first) == [0, 1]
    assert arrivals_s(second) == [0, 2, 5]
    assert [request.index for request in second.requests] == [0, 1, 2]
    assert (first.name, second.name) == ("w-first-half", "w-second-half")


def test_cut_keeps_a_session_whole() -> None:
    """The cut moves on to where the next session starts, and links move with it."""
    whole = a_session_workload()
    assert [r.session for r in first_half(whole).requests] == ["a", "a", "a"]
    second = second_half(whole).requests
    assert [(r.index, r.at_s, r.after) for r in second] == [(0, 0.0, None), (1, 8.0, 0)]


@pytest.mark.parametrize(("asked", "given"), [(0, 1), (1, 1), (2, 2), (9, 3)])
def test_head_is_bounded_by_what_is_there(*, asked: int, given: int) -> None:
    """At least one request, at most all."""
    assert len(head(a_workload(0, 1, 2), asked).requests) == given


def test_stream_is_a_sequence() -> None:
    """Index, negative index, slice, length and bound, as of a list."""
    stream = Stream(4, lambda: (a_request(i, float(i)) for i in range(9)))
    assert len(stream) == 4
    assert [request.index for request in stream] == [0, 1, 2, 3]
    assert (stream[0].index, stream[-1].index) == (0, 3)
    assert [request.index for request in stream[1:3]] == [1, 2]
    with pytest.raises(IndexError):
        stream[4]
