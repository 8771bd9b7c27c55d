"""Who served last: for a while, and for so many."""

import pytest

from broker.core.stickiness import Stickiness


def test_the_last_worker_counts_until_its_time_is_over() -> None:
    """A note counts from its dispatch for `sticky_s`, the last one only."""
    sticky = Stickiness(sticky_s=30.0)
    assert sticky.last(1, at_s=0.0) == ""
    sticky.note(1, "a", at_s=0.0)
    sticky.note(1, "b", at_s=10.0)
    assert sticky.last(1, at_s=39.9) == "b"
    assert sticky.last(1, at_s=40.0) == ""


def test_the_number_of_keys_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound the key noted longest ago is forgotten."""
    monkeypatch.setattr("broker.core.stickiness.STICKY_KEYS_MAX", 3)
    sticky = Stickiness(sticky_s=30.0)
    for key in (1, 2, 3, 1, 4):
        sticky.note(key, "a", at_s=0.0)
    assert len(sticky) == 3
    assert [key for key in range(1, 5) if sticky.last(key, at_s=1.0)] == [1, 3, 4]


def test_expiry_takes_a_bounded_number_and_stops_at_the_fresh() -> None:
    """Only keys whose time is over go, oldest first, so many at once."""
    sticky = Stickiness(sticky_s=30.0)
    for key in range(5):
        sticky.note(key, "a", at_s=float(key))
    sticky.expire(32.0, keys_max=2)
    assert len(sticky) == 3
    sticky.expire(32.0, keys_max=2)
    assert len(sticky) == 2
    sticky.expire(100.0, keys_max=9)
    assert len(sticky) == 0
