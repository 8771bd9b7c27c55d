"""A log through a night without a server: it says so, and stays short."""

import json

import pytest
import structlog

from broker.bus import logs
from broker.bus.log_repeats import KINDS_MAX, LINES_MAX, PERIOD_S, Repeats


class Night:
    """A log and its clock."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self.repeats = Repeats(now=lambda: self.at_s)

    def say(self, event: str = "failed", level: str = "warning", **fields: object) -> object:
        """Log a line; what becomes of it, None when it is left out."""
        try:
            return self.repeats(None, level, {"event": event, **fields})
        except structlog.DropEvent:
            return None


def test_the_same_trouble_is_told_a_few_times_a_minute_and_counted() -> None:
    """Four tries a second for ten minutes are ten times LINES_MAX lines, and none is forgotten."""
    night, told = Night(), list[object]()
    for number in range(2400):
        night.at_s = number / 4
        told.append(night.say(error="not connected"))
    lines = [line for line in told if line is not None]
    assert len(lines) == 10 * LINES_MAX
    night.at_s = 600.0
    last = night.say(error="not connected")
    counted = sum(line.get("left_out", 0) for line in (*lines, last) if isinstance(line, dict))
    assert len(lines) + 1 + counted == 2401


def test_another_trouble_is_told_at_once() -> None:
    """Another error of the same event, and another event with the same error."""
    night = Night()
    while night.say(error="not connected"):
        pass
    assert night.say(error="no answer")
    assert night.say("another", error="not connected")


@pytest.mark.parametrize(("level", "fields"), [("error", {"error": "x"}), ("warning", {})])
def test_what_is_never_left_out(level: str, fields: dict[str, str]) -> None:
    """Errors; and lines that tell of something else each time."""
    night = Night()
    assert all(night.say("failed", level, **fields) for _ in range(10 * LINES_MAX))


def test_kinds_are_bounded() -> None:
    """Texts that differ each time take no more room; the oldest may be told anew."""
    night = Night()
    while night.say(error="first"):
        pass
    for number in range(KINDS_MAX):
        assert night.say(error=f"job {number}")
    assert len(night.repeats._kinds) == KINDS_MAX
    assert night.say(error="first")


def test_a_pause_lets_it_be_told_again() -> None:
    """Each period anew."""
    night = Night()
    while night.say(error="x"):
        pass
    night.at_s = PERIOD_S - 0.1
    assert night.say(error="x") is None
    night.at_s = PERIOD_S
    assert night.say(error="x") == {"event": "failed", "error": "x", "left_out": 2}


def test_a_programs_log_does_so(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    """As `set_up` makes it."""
    before = structlog.get_config()
    try:
        logs.set_up(worker="gpu1")
        for _ in range(3 * LINES_MAX):
            structlog.get_logger("test").warning("record not confirmed yet", error="down")
    finally:
        structlog.configure(**before)
    lines = capsysbinary.readouterr().err.splitlines()
    assert len(lines) == LINES_MAX
    assert json.loads(lines[0])["error"] == "down"
