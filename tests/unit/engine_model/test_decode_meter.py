"""How fast answers grow, reading by reading."""

import pytest

from broker.engine_model.decode_meter import DECODE_S_MIN, DecodeMeter


def test_a_reading_is_of_what_came_since_the_last() -> None:
    """Nothing is smoothed, and nothing is told twice."""
    meter = DecodeMeter()
    meter.add(tokens=10, seconds=1.0)
    meter.add(tokens=10, seconds=3.0)
    assert meter.read() == 5.0
    assert meter.read() == 0.0
    meter.add(tokens=20, seconds=1.0)
    assert meter.read() == 20.0


def test_what_is_too_little_is_kept_for_the_next_reading() -> None:
    """A few gaps say nothing alone; with those that follow they do."""
    meter = DecodeMeter()
    meter.add(tokens=3, seconds=0.9 * DECODE_S_MIN)
    assert meter.read() == 0.0
    meter.add(tokens=1, seconds=0.1 * DECODE_S_MIN)
    assert meter.read() == pytest.approx(4 / DECODE_S_MIN)
