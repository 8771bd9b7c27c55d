"""Rules of the tree that no linter holds: no trace of one machine, sizes a reader can take in."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = ("broker", "worker_agent", "producers", "ops")

FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 500

_MACHINE_PATH = re.compile(r"(?<![\w./~-])/(?:home|Users|root|work|opt/pypi|mnt|private)/[\w.-]+")
_INDEX_HOST = re.compile(
    r"(?:pypi|pythonhosted|test\.pypi|piwheels|anaconda)\.(?:org|io|com|python)"
)


def tracked_texts() -> Iterator[tuple[str, str]]:
    """Yield (path, text) of each file that git tracks and that is text and still there."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout
    for name in filter(None, listing.split("\0")):
        path = ROOT / name
        if path.is_file() and b"\0" not in (raw := path.read_bytes()):
            yield name, raw.decode()


def modules() -> Iterator[tuple[str, str]]:
    """Yield (path, source) of each Python module that git tracks."""
    return ((name, text) for name, text in tracked_texts() if name.endswith(".py"))


def hits(pattern: re.Pattern[str]) -> list[str]:
    """List `path:line: match` for each match in a tracked file."""
    return [
        f"{name}:{number}: {match[0]}"
        for name, text in tracked_texts()
        for number, line in enumerate(text.splitlines(), start=1)
        for match in pattern.finditer(line)
    ]


def test_patterns_find_what_they_are_for() -> None:
    """The two patterns see a home folder and an index, and let URLs and plain words be."""
    home = "/" + "home/someone/src"
    assert _MACHINE_PATH.search(f"open('{home}')")
    assert not _MACHINE_PATH.search("see docs/home/index and ../shared/traces")
    assert _INDEX_HOST.search("https://" + "pypi" + ".org/simple")
    assert not _INDEX_HOST.search("pip install from PyPI")


def test_no_machine_path_in_the_tree() -> None:
    """No tracked file names a folder of one developer's or CI's machine."""
    assert hits(_MACHINE_PATH) == []


def test_no_index_host_in_the_tree() -> None:
    """No tracked file names a package index: each machine has its own."""
    assert hits(_INDEX_HOST) == []


def test_package_init_files_hold_a_docstring_only() -> None:
    """Importing a package runs nothing and re-exports nothing."""
    for name, source in modules():
        if name.startswith(PACKAGES) and name.endswith("__init__.py"):
            (only,) = ast.parse(source).body
            assert isinstance(only, ast.Expr), name
            assert isinstance(only.value, ast.Constant), name


def test_modules_stay_readable() -> None:
    """A module has at most MODULE_LINES_MAX lines."""
    long = {name: len(source.splitlines()) for name, source in modules()}
    assert {name: lines for name, lines in long.items() if lines > MODULE_LINES_MAX} == {}


def test_functions_stay_readable() -> None:
    """A function has at most FUNCTION_LINES_MAX lines, its docstring included."""
    long = [
        f"{name}:{node.lineno} {node.name}: {lines} lines"
        for name, source in modules()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]
    assert long == []
