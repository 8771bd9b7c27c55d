"""The log is lines of JSON on standard error, whatever is logged."""

import json

import pytest
import structlog

from broker.bus import logs


def test_a_line_is_json_with_worker_time_and_what_was_said(
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    """Objects that JSON does not know are shown, exceptions told, debug left out."""
    before = structlog.get_config()
    try:
        logs.set_up(worker="gpu1")
        logger = structlog.get_logger("test")
        logger.debug("unseen")
        logger.info("seen", what={1}, number=3)
        logger.error("failed", exc_info=ZeroDivisionError("bug"))
    finally:
        structlog.configure(**before)
    seen, failed = (json.loads(line) for line in capsysbinary.readouterr().err.splitlines())
    assert (seen["worker"], seen["event"], seen["level"]) == ("gpu1", "seen", "info")
    assert (seen["what"], seen["number"]) == ("{1}", 3)
    assert seen["timestamp"].endswith("Z")
    assert "ZeroDivisionError: bug" in failed["exception"]
