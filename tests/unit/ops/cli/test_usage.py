"""`usage`: days by name or age, rows added up, and three ways to print them."""

import csv
import io
import time

import orjson
import pytest

from broker.wire.usage import UsageDay, UsageRow, day_of
from ops.cli.errors import Misused
from ops.cli.usage import ALL_NAMES, _day, grouped, show

ALICE = UsageRow("alice", "tiny", completed=2, prompt_tokens=20, cached_tokens=8, output_tokens=6)
BOB = UsageRow("", "tiny", completed=1, expired=1, rejected=1, prompt_tokens=1000)
DAYS = (
    UsageDay(lane="acme", day="2026-11-30", rows=(ALICE, BOB)),
    UsageDay(lane="acme", day="2026-11-29", rows=(ALICE,)),
    UsageDay(lane="beta", day="2026-11-30", rows=(ALICE,)),
)
ROWS = [(day, row) for day in DAYS for row in day.rows]


def test_a_day_is_named_or_so_long_ago() -> None:
    """Nothing stays nothing; anything else is told as misuse."""
    assert (_day("", flag="--since"), _day("2026-02-28", flag="--since")) == ("", "2026-02-28")
    assert _day("2d", flag="--since") == day_of(time.time() - 2 * 86_400)
    for wrong in ("2026-02-30", "yesterday", "2026-2-1"):
        with pytest.raises(Misused, match="--until"):
            _day(wrong, flag="--until")


def test_rows_are_added_up_by_what_is_asked_for() -> None:
    """In order, and each number once."""
    found = grouped(ROWS, ("lane", "key"))
    assert [names for names, _ in found] == [("acme", ""), ("acme", "alice"), ("beta", "alice")]
    assert found[1][1]["completed"] == 4
    assert found[1][1]["prompt_tokens"] == 40
    ((names, total),) = grouped(ROWS, ())
    assert (names, total["output_tokens"], total["rejected"]) == ((), 18, 1)


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    """With a total below, unless there is one row."""
    show(grouped(ROWS, ("lane", "key")), ("lane", "key"), form="table")
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[2] == ["acme", "-", "3", "1", "0", "2", "1,000", "0", "0"]
    assert lines[-1] == ["total", "9", "7", "0", "2", "1,060", "24", "18"]
    show(grouped(ROWS, ("model",)), ("model",), form="table")
    assert "total" not in capsys.readouterr().out
    show([], ("model",), form="table")
    assert capsys.readouterr().out == "No usage.\n"


def test_exports(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON lines and CSV have all names and numbers under theirs."""
    show(grouped(ROWS, ALL_NAMES), ALL_NAMES, form="json")
    lines = [orjson.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == {
        "day": "2026-11-30",
        "lane": "acme",
        "key": "",
        "model": "tiny",
        "jobs": 3,
        "completed": 1,
        "failed": 0,
        "cancelled": 0,
        "expired": 1,
        "dead_lettered": 0,
        "rejected": 1,
        "prompt_tokens": 1000,
        "cached_tokens": 0,
        "output_tokens": 0,
    }
    show(grouped(ROWS, ALL_NAMES), ALL_NAMES, form="csv")
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [{name: str(value) for name, value in line.items()} for line in lines] == rows
    show([], ALL_NAMES, form="csv")
    assert capsys.readouterr().out.startswith("day,lane,key,model,jobs,completed,")
