"""The guard in tests/conftest.py, shown on small suites of its own."""

from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[2] / "conftest.py"
INI = "[pytest]\nmarkers = trace\nasyncio_default_fixture_loop_scope = function\n"


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Make a suite that is under the guard, in CI, on a machine without traces."""
    pytester.makeini(INI)
    pytester.makeconftest(CONFTEST.read_text())
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("INFERLANE_TRACES", str(pytester.path / "none"))
    return pytester


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_skipped_test_fails_ci(suite: pytest.Pytester, workers: tuple[str, ...]) -> None:
    """A test that skips for want of a server fails the run, and is named."""
    suite.makepyfile("import pytest\ndef test_a(): pytest.skip('no server')\ndef test_b(): pass")
    result = suite.runpytest_subprocess("-p", "no:randomly", *workers)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["FAILED *test_a: skipped, which CI forbids"])


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_skipped_module_fails_ci(suite: pytest.Pytester, workers: tuple[str, ...]) -> None:
    """So does a module that skips itself at import."""
    suite.makepyfile(test_a="import pytest\npytest.importorskip('no_such_engine')")
    suite.makepyfile(test_b="def test_b(): pass")
    result = suite.runpytest_subprocess("-p", "no:randomly", *workers)
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_absent_trace_is_the_one_allowed_skip(suite: pytest.Pytester) -> None:
    """A test of a trace that is not here skips, and the run stays green."""
    suite.makepyfile(
        "import pytest\n@pytest.mark.trace('azure/x.csv')\ndef test_a(): assert False\n"
        "def test_b(): pass"
    )
    result = suite.runpytest_subprocess("-p", "no:randomly")
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=1, skipped=1)


def test_present_trace_is_run(suite: pytest.Pytester) -> None:
    """The same test runs where the folder has the file."""
    (suite.mkdir("none") / "x.csv").touch()
    suite.makepyfile("import pytest\n@pytest.mark.trace('x.csv')\ndef test_a(): assert False")
    suite.runpytest_subprocess("-p", "no:randomly").assert_outcomes(failed=1)


def test_skip_is_free_outside_ci(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a developer's machine a skip is only reported."""
    monkeypatch.delenv("CI")
    suite.makepyfile("import pytest\ndef test_a(): pytest.skip('no server')\ndef test_b(): pass")
    assert suite.runpytest_subprocess("-p", "no:randomly").ret == pytest.ExitCode.OK


def test_async_tests_run_on_the_products_loop(suite: pytest.Pytester) -> None:
    """A coroutine test finds itself on uvloop."""
    suite.makepyfile(
        "import asyncio, pytest\n@pytest.mark.asyncio\nasync def test_a():\n"
        "    assert type(asyncio.get_running_loop()).__module__.startswith('uvloop')"
    )
    suite.runpytest_subprocess("-p", "no:randomly").assert_outcomes(passed=1)
