"""Texts of the broker's own endings: each says what happened and what to do."""

import pytest

from broker.service.texts import CAUSE_CHARS_MAX, TEXT_CHARS_MAX, ending_text
from broker.wire.messages import Attempt, Failure, Kind, Reason


def a_failure(detail: str, *, reason: Reason = Reason.ENGINE_FAILED) -> Failure:
    """An attempt on gpu-2 that came to nothing."""
    return Failure(Attempt(1, 1), "gpu-2", reason, 1.0, detail)


def test_a_dead_letter_says_what_failed_last_and_how_it_is_run_again() -> None:
    """Whoever reads only this one line knows where to go on."""
    failures = [a_failure("first"), a_failure("HTTP 500: out of memory.")]
    text = ending_text("acme.j1", Kind.DEAD_LETTERED, Reason.ENGINE_FAILED, failures=failures)
    assert text == (
        "Given up after 2 failed attempts, the last on gpu-2: HTTP 500: out of memory. Submit it "
        "again under a new id, or run it again as an operator: `inferlane dlq replay acme.j1`."
    )


def test_a_broken_stream_says_what_broke_it() -> None:
    """A lost worker and a failed engine are told apart; a takeover may know neither."""
    lost = [a_failure("", reason=Reason.WORKER_LOST)]
    text = ending_text("acme.j1", Kind.FAILED, Reason.WORKER_LOST, failures=lost)
    assert "the last on gpu-2: worker lost. What was streamed is no answer" in text
    unknown = ending_text("acme.j1", Kind.FAILED, Reason.WORKER_LOST)
    assert "its worker was lost." in unknown


def test_a_detail_follows_its_text() -> None:
    """A row, or what can't be read, comes after the general text."""
    text = ending_text("acme.j1", Kind.REJECTED, Reason.QUEUE_FULL, detail="Row all: 4 of 4 used.")
    assert text == "The queue is full; try again after retry_after_s. Row all: 4 of 4 used."


def test_texts_are_bounded() -> None:
    """An engine's page of errors neither fills the record nor hides what to do."""
    failures = [a_failure("x" * 5000)]
    text = ending_text("acme.j1", Kind.DEAD_LETTERED, Reason.ENGINE_FAILED, failures=failures)
    assert "x" * CAUSE_CHARS_MAX in text
    assert len(text) < 1000
    endless = ending_text("acme.j1", Kind.REJECTED, Reason.MALFORMED, detail="x" * 5000)
    assert len(endless) == TEXT_CHARS_MAX


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_a_text(reason: Reason) -> None:
    """None is empty, and none is only the reason's name."""
    assert len(ending_text("acme.j1", Kind.REJECTED, reason)) > 20
