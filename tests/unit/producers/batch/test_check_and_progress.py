"""What is told of a batch before and while it runs."""

import asyncio
import gzip
import io
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from broker.wire.messages import LaneOffer
from producers.batch import progress
from producers.batch.check import FAULTS_SHOWN_MAX, check_batch
from producers.batch.errors import InputUnusable
from producers.batch.plan import Bounds
from producers.batch.progress import Pace, duration, one_line, show
from producers.batch.runner import Tally
from producers.batch.session import Session
from tests.batches import a_line, a_plan, lines


def test_check_takes_aliases_for_their_models(tmp_path: Path) -> None:
    """As a run would: counted under the model that does the work."""
    plan = a_plan(tmp_path, [a_line("a", body={"model": "gpt-4o-mini"}), a_line("b")])
    offer = LaneOffer(lane="acme", models=("tiny",), aliases={"gpt-4o-mini": "tiny"})
    findings = check_batch(plan.input, offer=offer)
    assert findings.models == {"tiny": 2}
    assert not findings.faults


def test_check_finds_what_a_run_would_find(tmp_path: Path) -> None:
    """Faults by code and number, models, tokens, and what neighbouring lines share."""
    shared = [a_line(f"id-{number}", system="s" * 2560) for number in range(10)]
    plan = a_plan(tmp_path, [*shared, b"bad", a_line("id-3"), a_line("x", body={"model": "huge"})])
    findings = check_batch(plan.input, offer=LaneOffer(lane="acme", models=("tiny",)))
    assert findings.requests == 10
    assert dict(findings.faults) == {
        "invalid_json_line": 1,
        "duplicate_custom_id": 1,
        "model_not_found": 1,
    }
    assert [fault.number for fault in findings.first_faults] == [11, 12, 13]
    assert dict(findings.models) == {"tiny": 10}
    assert findings.output_tokens_max == 160
    assert findings.prompt_tokens == pytest.approx(10 * 645, rel=0.02)
    assert findings.shared_tokens == 9 * 640
    assert findings.hours(1.0) == (findings.prompt_tokens + 160) / 3600


def test_check_tells_only_the_first_faults_one_by_one(tmp_path: Path) -> None:
    """FAULTS_SHOWN_MAX bounds what is told; all are counted."""
    plan = a_plan(tmp_path, [b"bad"] * (FAULTS_SHOWN_MAX + 5))
    findings = check_batch(plan.input)
    assert len(findings.first_faults) == FAULTS_SHOWN_MAX
    assert findings.faults.total() == FAULTS_SHOWN_MAX + 5


def test_check_finds_doubles_across_windows(tmp_path: Path) -> None:
    """Ids far apart are compared too, also in compressed input."""
    content = [*lines(50), a_line("id-0"), a_line("id-49")]
    plan = a_plan(tmp_path, gzip.compress(b"\n".join(content)))
    findings = check_batch(plan.input, bounds=replace(Bounds(), lookahead_lines=7))
    assert dict(findings.faults) == {"duplicate_custom_id": 2}


def test_a_name_that_is_no_utf_8_is_a_name(tmp_path: Path) -> None:
    """As file systems keep those of old encodings; a run notes that there is none to note."""
    plan = a_plan(tmp_path, lines(2))
    source = tmp_path / os.fsdecode(b"caf\xe9.jsonl")
    Path(plan.input).rename(source)
    assert check_batch(str(source)).requests == 2
    with Session(replace(plan, input=str(source))) as session:
        assert session.identity.input == ""


def test_check_of_nothing_is_told(tmp_path: Path) -> None:
    """An empty file is unusable, and so is no name at all."""
    with pytest.raises(InputUnusable, match="no input is named"):
        check_batch("")
    with pytest.raises(InputUnusable, match="empty_file"):
        check_batch(a_plan(tmp_path, b"\n").input)


def test_the_rate_follows_the_last_half_minute() -> None:
    """Steady, soon right after a change, and finite from the start."""
    pace, tally = Pace(at_s=0.0), Tally(lines=1000)
    assert pace.left_s(tally) is None
    for second in range(1, 61):
        tally.completed += 10 if second <= 30 else 2
        pace.note(tally, at_s=float(second))
    assert pace.lines_s == pytest.approx(2.0, rel=0.2)
    assert pace.left_s(tally) == pytest.approx((1000 - 360) / pace.lines_s)


def test_time_left_counts_only_what_is_left() -> None:
    """Lines that ended in earlier runs are done."""
    pace, tally = Pace(at_s=0.0), Tally(lines=100, before=80)
    tally.completed = 10
    pace.note(tally, at_s=10.0)
    assert pace.left_s(tally) == 10.0
    assert "90 of 100 lines" in one_line(tally, pace)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(None, "?"), (0.4, "0:00"), (61, "1:01"), (3600, "1:00:00"), (1e9, "?")],
)
def test_durations_read_as_people_write_them(seconds: float | None, told: str) -> None:
    """Hours only where there are some; what is no estimate is a question mark."""
    assert duration(seconds) == told


async def test_without_a_terminal_a_line_is_told_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A log gets lines, never control characters."""
    monkeypatch.setattr(progress, "LINE_S", 0.01)
    out = io.StringIO()
    await _show_for_a_moment(Tally(lines=10, completed=3), Console(file=out))
    first = out.getvalue().splitlines()[0]
    assert first.startswith("3 of 10 lines, 0 failed")
    assert "\x1b" not in out.getvalue()


async def test_on_a_terminal_a_bar_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts, rate and time left stand in it."""
    monkeypatch.setattr(progress, "REFRESH_S", 0.01)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    await _show_for_a_moment(Tally(lines=10, completed=3, inflight=2), console)
    assert "3/10" in out.getvalue()
    assert "2 in the cluster" in out.getvalue()


async def test_quiet_shows_nothing() -> None:
    """--quiet."""
    out = io.StringIO()
    await show(Tally(), quiet=True, console=Console(file=out))
    assert not out.getvalue()


async def _show_for_a_moment(tally: Tally, console: Console) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await show(tally, quiet=False, console=console)
