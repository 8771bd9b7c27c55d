"""A log that can't be written is nobody else's trouble."""

import io
import sys

import pytest
import structlog

from broker.bus import logs


class Broken:
    """A logger whose stream is gone."""

    def __getattr__(self, level: str) -> object:
        raise OSError(level)


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_log_of_the_bus_never_raises(level: str) -> None:
    """Whatever the level, and whoever set logging up."""
    log = logs.Log("test")
    log._log = Broken()
    getattr(log, level)("event", field=1)


def test_log_of_a_program_follows_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are JSON, say whose they are, go where standard error is; a closed one is let go."""
    before = structlog.get_config()
    first, second = io.BytesIO(), io.BytesIO()
    try:
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(first))
        logs.set_up(broker="b1")
        log = structlog.get_logger("test-logs")
        log.info("hello", number=1)
        line = first.getvalue()
        sys.stderr.close()
        log.info("lost")
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(second))
        log.error("again")
    finally:
        structlog.configure(**before)
    assert b'"broker":"b1"' in line
    assert b'"event":"hello"' in line
    assert b'"number":1' in line
    assert b'"event":"again"' in second.getvalue()
