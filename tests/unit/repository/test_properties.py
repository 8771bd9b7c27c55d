"""The page of properties is true: what it names exists, and what should stand on it does."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "ops/docs/properties.md"
HOLDER = re.compile(r"`([\w/]+\.py)::(\w+)`")
CASE = re.compile(r"(\d+): ")
CASES_OF_THE_MIND = {*range(1, 20), 39, 40}
"""Those that are tried with more of their kind."""

TRIED_MIN = 3
"""Tests of each: the case, and two that nobody reported."""

MACHINE = "RuleBasedStateMachine"
"""Hypothesis' base of state machines: each of ours holds some property."""


@cache
def names_in(path: Path) -> frozenset[str]:
    """Name the functions and classes that a module defines, at any depth."""
    return frozenset(
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    )


def rows_of(text: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return each row of the page's tables: the property, and who holds it."""
    cells = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    bodies = [row for row in cells if row[1].strip() not in ("held by", "noticed by")]
    return [(row[0].strip(), HOLDER.findall(row[1])) for row in bodies]


def missing_in(rows: list[tuple[str, list[tuple[str, str]]]]) -> list[str]:
    """List properties that nobody holds, and holders that do not exist."""
    missing: list[str] = []
    for said, holders in rows:
        if not holders:
            missing.append(f"nobody holds: {said}")
        for path, name in holders:
            if not (ROOT / path).is_file() or name not in names_in(ROOT / path):
                missing.append(f"{path}::{name}")
    return missing


def test_every_property_is_held_by_something_that_exists() -> None:
    """A test that is renamed, or taken out, is renamed or missed here too."""
    rows = rows_of(PAGE.read_text())
    assert missing_in(rows) == []
    assert len(rows) >= 30


def test_a_row_without_a_holder_is_found() -> None:
    """The page could not go stale unseen."""
    text = "| all is well | our word |\n| more | `tests/views.py::never` `no/such.py::test` |"
    assert missing_in(rows_of(text)) == [
        "nobody holds: all is well",
        "tests/views.py::never",
        "no/such.py::test",
    ]


def test_every_state_machine_of_the_core_stands_on_the_page() -> None:
    """What a new one holds is told where people look for it."""
    named = {path for _, holders in rows_of(PAGE.read_text()) for path, _ in holders}
    machines = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests/unit/core").glob("test_*.py")
        if f"({MACHINE})" in path.read_text()
    }
    assert machines
    assert machines <= named


def test_every_case_of_other_systems_has_its_tests() -> None:
    """Each once; those of the mind with two more of the same kind."""
    rows = [(CASE.match(said), holders) for said, holders in rows_of(PAGE.read_text())]
    held = [(int(case[1]), len(holders)) for case, holders in rows if case is not None]
    numbers = [number for number, _ in held]
    assert len(set(numbers)) == len(numbers)
    assert set(numbers) >= CASES_OF_THE_MIND
    assert [n for n, tests in held if n in CASES_OF_THE_MIND and tests < TRIED_MIN] == []
