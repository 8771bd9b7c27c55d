"""Mutation sampler: changes the core in one place at a time and asks whether the tests notice.

A seeded sample of all mutants of the target folder is run, each in a copy of the tree, never in the
working tree. A mutant that no test notices is a rule that no test holds, or a change that makes no
difference; the latter are listed, with the reason, in `tests/mutants_equivalent.toml`.

Left alone are annotations, decorators, patterns and f-strings (a broken one says nothing about the
tests), assertions (they state what can't happen) and the numbers that module and class attributes
are set to: those are knobs, whose values are a choice and which tests use by name.

    python -m tests.mutants --seed 1 --count 100 --jobs 2 --report out/mutants.md
"""

import argparse
import ast
import difflib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[1]
EQUIVALENT_FILE = Path(__file__).with_name("mutants_equivalent.toml")

KILLED_SHARE_MIN = 0.85
"""Fewer killed than this share of the sample fails the run."""

RUN_S_MIN = 30.0
RUN_BASELINES_MAX = 5.0
"""A run may take this many times as long as the tests do on unchanged code, and RUN_S_MIN at least;
beyond it the mutant hangs, which counts as noticed."""

NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "out", "docs", "bench")

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


class Outcome(StrEnum):
    """What the tests said of a mutant."""

    KILLED = "killed"
    HUNG = "killed (ran out of time)"
    SURVIVED = "survived"


@dataclass(frozen=True)
class Mutant:
    """One change: the bytes [start, end) of a file become `text`."""

    path: str
    kind: str
    line: int
    start: int
    end: int
    text: str

    def apply(self, source: bytes) -> bytes:
        """Return the changed source."""
        return source[: self.start] + self.text.encode() + source[self.end :]

    def diff(self, source: bytes) -> list[str]:
        """Return the removed and added lines, each with its sign."""
        before, after = (raw.decode().splitlines() for raw in (source, self.apply(source)))
        lines = difflib.unified_diff(before, after, n=0, lineterm="")
        return [line for line in lines if line[:3] not in {"---", "+++"} and line[0] in "-+"]


@dataclass(frozen=True)
class Equivalent:
    """A mutant known to make no difference: the lines it removes and adds, stripped, and why."""

    path: str
    before: str
    after: str
    reason: str


@dataclass(frozen=True)
class Result:
    """A mutant that was run."""

    mutant: Mutant
    outcome: Outcome
    diff: list[str]
    reason: str | None


# ---- which changes there are ----


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """List every mutant of a module, in the order of the text."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: set[Mutant] = set()
    for node in _code(ast.parse(source)):
        for kind, place, text in _edits(node):
            end_line, end_column = place.end_lineno, place.end_col_offset
            assert end_line is not None
            assert end_column is not None
            start = starts[place.lineno - 1] + place.col_offset
            end = starts[end_line - 1] + end_column
            found.add(Mutant(path, kind, place.lineno, start, end, text))
    return sorted(found, key=lambda mutant: (mutant.start, mutant.end, mutant.kind, mutant.text))


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Walk what runs: see the module docstring for what is left alone."""
    yield node
    for child in _children(node):
        yield from _code(child)


def _children(node: ast.AST) -> Iterable[ast.AST]:
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.pattern():
            return ()
        case ast.Module() | ast.ClassDef():
            return [child for child in node.body if not _is_knob(child)]
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
            return [*defaults, *node.body]
        case ast.Lambda():
            return (node.body,)
        case ast.AnnAssign():
            return filter(None, (node.target, node.value))
        case _:
            return ast.iter_child_nodes(node)


def _is_knob(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign | ast.AnnAssign)


Edit = tuple[str, ast.expr | ast.stmt, str]
"""Kind, node to replace, replacement text."""


def _edits(node: ast.AST) -> Iterator[Edit]:
    """Yield (kind, node to replace, replacement text)."""
    match node:
        case ast.stmt():
            yield from _statement_edits(node)
        case ast.expr():
            for kind, new in _expression_edits(node):
                yield kind, node, f"({ast.unparse(new)})"
        case _:
            pass
    match node:
        case ast.If() | ast.While() | ast.IfExp():
            yield from _negations([node.test])
        case ast.comprehension():
            yield from _negations(node.ifs)
        case _:
            pass


def _negations(tests: Iterable[ast.expr]) -> Iterator[Edit]:
    for test in tests:
        # The opposite of a comparison, and of a `not`, is among their own edits.
        if not isinstance(test, ast.Compare | ast.UnaryOp | ast.Constant):
            yield "negation", test, f"(not ({ast.unparse(test)}))"


def _expression_edits(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Compare():
            for index, operator in enumerate(node.ops):
                for other in _COMPARISONS[type(operator)]:
                    ops = [*node.ops[:index], other(), *node.ops[index + 1 :]]
                    yield "comparison", ast.Compare(node.left, ops, node.comparators)
        case ast.BinOp() if type(node.op) in _ARITHMETIC and not _is_type_union(node):
            yield "arithmetic", ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right)
        case ast.BoolOp(op=ast.And()):
            yield "and/or", ast.BoolOp(ast.Or(), node.values)
        case ast.BoolOp():
            yield "and/or", ast.BoolOp(ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield "negation", node.operand
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", ast.Constant(value + 1)
            yield "constant", ast.Constant(value - 1)
        case ast.Call(func=ast.Name(id=name)) if name in _CALLS:
            yield "call", ast.Call(ast.Name(_CALLS[name]), node.args, node.keywords)
        case _:
            pass


def _is_type_union(node: ast.BinOp) -> bool:
    """Tell `A | B` and `A | None` from a union of bits or sets."""
    match node.op, node.right:
        case ast.BitOr(), ast.Name(id=name) | ast.Attribute(attr=name):
            return name[0].isupper()
        case ast.BitOr(), ast.Constant(value=None):
            return True
        case _:
            return False


def _statement_edits(node: ast.stmt) -> Iterator[Edit]:
    match node:
        case ast.AugAssign():
            yield "deletion", node, "pass"
            if other := _ARITHMETIC.get(type(node.op)):
                swapped = ast.AugAssign(node.target, other(), node.value)
                yield "arithmetic", node, ast.unparse(swapped)
        case ast.Expr(value=ast.Call(func=ast.Name(id="assert_never"))):
            return
        case ast.Expr(value=ast.Call()) | ast.Delete() | ast.Raise() | ast.Continue() | ast.Break():
            yield "deletion", node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "deletion", node, "pass"
        case ast.Return(value=ast.Constant(value=None | bool())):
            return
        case ast.Return(value=ast.expr()):
            yield "return", node, "return None"
        case _:
            pass


# ---- running them ----


def run_sample(
    sample: Sequence[Mutant],
    *,
    root: Path,
    tests: Sequence[str],
    equivalents: Sequence[Equivalent],
    jobs: int,
) -> list[Result]:
    """Run each mutant in a copy of the tree under `root`; `jobs` copies work side by side."""
    trees: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [Path(folder) / str(number) for number in range(jobs)]
        for tree in copies:
            shutil.copytree(root, tree, ignore=NOT_COPIED)
            trees.put(tree)
        run_s = _baseline_s(copies[0], tests)

        def run(mutant: Mutant) -> Result:
            tree = trees.get()
            try:
                return _run_mutant(mutant, tree, tests, run_s, equivalents)
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(run, sample))


def _baseline_s(tree: Path, tests: Sequence[str]) -> float:
    """Time the tests on unchanged code, where they must pass; return what a run may take."""
    began_s = time.monotonic()
    if _run_tests(tree, tests, run_s=600) is not Outcome.SURVIVED:
        message = "the tests fail on unchanged code: nothing to learn from mutants"
        raise SystemExit(message)
    return max(RUN_S_MIN, RUN_BASELINES_MAX * (time.monotonic() - began_s))


def _run_mutant(
    mutant: Mutant,
    tree: Path,
    tests: Sequence[str],
    run_s: float,
    equivalents: Sequence[Equivalent],
) -> Result:
    file = tree / mutant.path
    source = file.read_bytes()
    mirror = _mirror_tests(mutant, tree, tests)
    file.write_bytes(mutant.apply(source))
    try:
        outcome = _run_tests(tree, [*mirror, *tests], run_s)
    finally:
        file.write_bytes(source)
    diff = mutant.diff(source)
    reason = reason_equivalent(mutant.path, diff, equivalents)
    return Result(mutant, outcome, diff, reason)


def _mirror_tests(mutant: Mutant, tree: Path, tests: Sequence[str]) -> list[str]:
    """Find the tests that mirror the changed module: run first, they find most mutants at once."""
    name = f"test_{Path(mutant.path).stem}*.py"
    return [str(file) for test in tests for file in sorted((tree / test).rglob(name))]


def _run_tests(tree: Path, tests: Sequence[str], run_s: float) -> Outcome:
    """Run the tests of a tree; its own code goes before any that is installed."""
    quick = ["-x", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *quick, *tests],
        cwd=tree,
        # Bytecode is dated by the second: a stale file would hide the next mutant.
        env=os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        code = process.wait(run_s)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return Outcome.HUNG
    if code in {3, 4, 5}:
        message = f"pytest ended with {code} (internal error, usage or no tests) on {tests}"
        raise SystemExit(message)
    return Outcome.KILLED if code else Outcome.SURVIVED


# ---- saying what came out ----


def reason_equivalent(
    path: str, diff: Sequence[str], equivalents: Sequence[Equivalent]
) -> str | None:
    """Say why this change makes no difference, if the list knows."""
    before = " ".join(line[1:].strip() for line in diff if line[0] == "-")
    after = " ".join(line[1:].strip() for line in diff if line[0] == "+")
    for known in equivalents:
        if (known.path, known.before, known.after) == (path, before, after):
            return known.reason
    return None


def read_equivalents(file: Path) -> list[Equivalent]:
    """Read the list of changes that make no difference."""
    entries = tomllib.loads(file.read_text()).get("equivalent", [])
    return [Equivalent(**entry) for entry in entries]


def report_of(results: Sequence[Result], *, seed: int, candidates: int) -> str:
    """Write the report: the figure first, then each survivor with its place, change and reason."""
    killed = sum(result.outcome is not Outcome.SURVIVED for result in results)
    share = f"{killed} of {len(results)} killed ({killed / len(results):.0%})"
    lines = [
        "# Mutants of the core",
        "",
        f"{share}; sampled from {candidates} with seed {seed}.",
        "",
        "| kind | sampled | killed |",
        "|---|---|---|",
    ]
    sampled = Counter(result.mutant.kind for result in results)
    dead = Counter(r.mutant.kind for r in results if r.outcome is not Outcome.SURVIVED)
    lines += [f"| {kind} | {sampled[kind]} | {dead[kind]} |" for kind in sorted(sampled)]
    lines += ["", "## Survivors"]
    for result in results:
        if result.outcome is Outcome.SURVIVED:
            place = f"{result.mutant.path}:{result.mutant.line}"
            why = result.reason or "no reason given: a test is missing, or an entry in the list"
            lines += ["", f"### {place} ({result.mutant.kind})", why, "", "```diff"]
            lines += [*result.diff, "```"]
    return "\n".join(lines) + "\n"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100, help="mutants in the sample")
    parser.add_argument("--jobs", type=int, default=2, help="copies of the tree at work")
    parser.add_argument("--report", type=Path, default=Path("out/mutants.md"))
    parser.add_argument("--target", default="broker/core", help="folder whose code is changed")
    parser.add_argument("--tests", nargs="+", default=["tests/unit/core"])
    return parser.parse_args()


def main() -> int:
    """Run a sample and write the report; return 1 when too few mutants were noticed."""
    arguments = _arguments()
    candidates = [
        mutant
        for file in sorted((ROOT / arguments.target).rglob("*.py"))
        for mutant in mutants_of(str(file.relative_to(ROOT)), file.read_bytes())
    ]
    chosen = random.Random(arguments.seed)
    sample = chosen.sample(candidates, min(arguments.count, len(candidates)))
    results = run_sample(
        sample,
        root=ROOT,
        tests=arguments.tests,
        equivalents=read_equivalents(EQUIVALENT_FILE),
        jobs=arguments.jobs,
    )
    report = report_of(results, seed=arguments.seed, candidates=len(candidates))
    arguments.report.parent.mkdir(parents=True, exist_ok=True)
    arguments.report.write_text(report)
    print(report)
    killed = sum(result.outcome is not Outcome.SURVIVED for result in results)
    return int(killed < KILLED_SHARE_MIN * len(results))


if __name__ == "__main__":
    sys.exit(main())
