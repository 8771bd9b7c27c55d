"""The mutation sampler finds the changes it should, and leaves alone what it should."""

import ast
from textwrap import dedent

import pytest

from tests.mutants import (
    Equivalent,
    Mutant,
    Outcome,
    Result,
    mutants_of,
    reason_equivalent,
    report_of,
)


def changed(code: str) -> set[str]:
    """Apply each mutant of the code by itself; return the results, normalised."""
    source = dedent(code).encode()
    return {ast.unparse(ast.parse(m.apply(source))) for m in mutants_of("m.py", source)}


def function(*bodies: str) -> set[str]:
    """Normalise functions with these bodies, as `changed` does."""
    return {ast.unparse(ast.parse(f"def f(a, b):\n    {body}")) for body in bodies}


@pytest.mark.parametrize(
    ("body", "mutants"),
    [
        ("x = a < b", {"x = a <= b", "x = a >= b"}),
        ("x = a is not b", {"x = a is b"}),
        ("x = 0 <= a < b", {"x = 0 < a < b", "x = 0 > a < b", "x = 0 <= a <= b",
                            "x = 0 <= a >= b", "x = 1 <= a < b", "x = -1 <= a < b"}),
        ("x = a + b * a", {"x = a - b * a", "x = a + b / a"}),
        ("x = a and b", {"x = a or b"}),
        ("x = not a", {"x = a"}),
        ("x = True", {"x = False"}),
        ("x = 2", {"x = 3", "x = 1"}),
        ("x = min(a, b)", {"x = max(a, b)"}),
        ("return a", {"return None"}),
        ("a.b = b", {"pass"}),
        ("a += b", {"pass", "a -= b"}),
        ("a(b)", {"pass"}),
        ("raise a", {"pass"}),
        ("x = a | b", {"x = a & b"}),
        ("x = [y for y in a if y]", {"x = [y for y in a if not y]"}),
        ("while a: break", {"while not a: break", "while a: pass"}),
    ],
)  # fmt: skip
def test_change_is_made(body: str, mutants: set[str]) -> None:
    """Each kind of change is offered, alone, and nothing else is touched."""
    assert changed(f"def f(a, b):\n    {body}\n") == function(*mutants)


@pytest.mark.parametrize(
    "code",
    [
        "def f(a: int = b) -> A | None:\n    assert a > 1",
        "LIMIT = 64\nType = A | B",
        "@cached(1)\nclass A(B, frozen=True):\n    limit: int = 64",
        "def f(a):\n    match a:\n        case 1 | A(b=2):\n            pass",
        "def f(a):\n    x = f'{a + 1}'",
        "def f(a):\n    x = isinstance(a, int | None)",
        "def f(a):\n    assert_never(a)",
        "def f(a):\n    return None",
    ],
)
def test_what_says_nothing_of_the_tests_is_left_alone(code: str) -> None:
    """Annotations, knobs, decorators, patterns, f-strings, type unions and assertions stay."""
    assert changed(code) == set()


def test_mutants_are_valid_python_whatever_surrounds_them() -> None:
    """A change inside a larger expression, over lines and beside wide characters still parses."""
    code = """
        def f(a, b):
            '''Ωmega'''
            return g("π ×", a - (b
                - a), key=lambda x: -x, *[1 if a else 2])[0] ** 2
    """
    assert len(changed(code)) >= 10


def test_order_is_that_of_the_text() -> None:
    """The list does not depend on hashing, so that a seed names the same sample anywhere."""
    source = b"def f(a):\n    if a > 1:\n        return a + 2\n    return 0\n"
    starts = [mutant.start for mutant in mutants_of("m.py", source)]
    assert starts == sorted(starts)


def test_equivalent_is_known_by_its_lines() -> None:
    """An entry matches the same change on any line of its file, and no other change."""
    known = [Equivalent("m.py", "return a", "return None", "why")]
    assert reason_equivalent("m.py", ["-    return a", "+    return None"], known) == "why"
    assert reason_equivalent("n.py", ["-    return a", "+    return None"], known) is None
    assert reason_equivalent("m.py", ["-    return a", "+    pass"], known) is None


def test_report_lists_survivors_with_place_change_and_reason() -> None:
    """A reader sees the figure, and for each survivor what to do about it."""
    mutant = Mutant("m.py", "return", line=7, start=0, end=1, text="x")
    results = [
        Result(mutant, Outcome.KILLED, [], None),
        Result(mutant, Outcome.HUNG, [], None),
        Result(mutant, Outcome.SURVIVED, ["-return a", "+return None"], None),
        Result(mutant, Outcome.SURVIVED, ["-b", "+c"], "No caller reads it."),
    ]
    report = report_of(results, seed=3, candidates=40)
    assert "2 of 4 killed (50%); sampled from 40 with seed 3." in report
    assert "### m.py:7 (return)\nno reason given" in report
    assert "```diff\n-return a\n+return None\n```" in report
    assert "### m.py:7 (return)\nNo caller reads it." in report
