"""What tests/conftest.py does about tests that hang, shown on a small suite of its own."""

from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[2] / "conftest.py"
INI = """
[pytest]
markers = trace
asyncio_mode = auto
asyncio_default_fixture_loop_scope = function
timeout_method = thread
"""
SUITE = """
import asyncio, time, pytest

@pytest.fixture
async def server():
    yield
    print("server stopped")

async def spin():
    while True:
        await asyncio.sleep(0)

async def test_waits_for_ever(server):
    await asyncio.Event().wait()

async def test_spins():
    await spin()

async def test_something_else_spins():
    spinning = asyncio.ensure_future(spin())
    await asyncio.Event().wait()

@pytest.mark.timeout(1)
def test_blocks():
    time.sleep(60)

async def test_after_all_that():
    pass
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    """Make a suite of hanging tests."""
    pytester.makeini(INI)
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(SUITE)
    return pytester


def test_hanging_coroutine_fails_alone(suite: pytest.Pytester) -> None:
    """Waiting, spinning or starved, it is cancelled, its fixtures end, and the next test runs."""
    result = suite.runpytest_subprocess("-p", "no:randomly", "--timeout=3", "-k", "not blocks")
    result.assert_outcomes(passed=1, failed=3)
    result.stdout.fnmatch_lines(["*server stopped*"])


def test_blocked_process_is_replaced(suite: pytest.Pytester) -> None:
    """A test that blocks its thread ends its process, is named, and the rest is run by another."""
    result = suite.runpytest_subprocess("-p", "no:randomly", "-n", "1", "-k", "blocks or after")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["worker 'gw0' crashed while running *test_blocks*"])
