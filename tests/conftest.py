"""What pytest itself needs: the product's event loop, an end to hangs, no skipping in CI.

Only a public trace that is not in the repository may be missing: a test marked
`trace("azure/x.csv")` skips where INFERLANE_TRACES names no folder that holds the file. Any other
skip fails the run when CI is set, so that a missing server or engine can't turn the suite green.
"""

import asyncio
import functools
import inspect
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import structlog
import uvloop
from pytest_asyncio.plugin import LoopFactory

pytest_plugins = ["pytester"]

TRACE_ABSENT = "trace absent: "
"""How the reason of the one allowed skip begins."""


COROUTINE_SHARE = 0.9
"""Share of its time after which a coroutine test is cancelled; at the end its process is killed."""


def pytest_asyncio_loop_factories() -> Mapping[str, LoopFactory]:
    """Run tests on uvloop, as the programs do."""
    return {"uvloop": uvloop.new_event_loop}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose trace is not on this machine."""
    folder = Path(os.environ.get("INFERLANE_TRACES", "traces"))
    for marker in item.iter_markers("trace"):
        for name in marker.args:
            if not (folder / name).exists():
                pytest.skip(TRACE_ABSENT + name)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Bound a coroutine test by its own loop, so that a hang fails alone and its fixtures end.

    An alarm signal can't do it: uvloop waits in C, where Python sees no signal, and an exception
    raised by one in some background task is swallowed with that task. What this bound can't end
    (a blocked loop, a fixture) the timeout's thread does, with the process.
    """
    if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
        item.obj = _bounded(item.obj, COROUTINE_SHARE * _timeout_s(item))


def _timeout_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    if marker is None:
        return float(item.config.getoption("timeout") or item.config.getini("timeout") or 0)
    return float(marker.args[0] if marker.args else marker.kwargs["timeout"])


def _bounded(
    test: Callable[..., Awaitable[None]], bound_s: float
) -> Callable[..., Awaitable[None]]:
    """Wrap a test so that it is cancelled after `bound_s`; 0 means no bound."""

    @functools.wraps(test)
    async def bounded(**fixtures: Any) -> None:
        async with asyncio.timeout(bound_s if bound_s > 0 else None):
            await test(**fixtures)

    return bounded


@pytest.fixture(autouse=True)
def log_setup_ends_with_its_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo the log's set-up after each test.

    A module's logger that is cached on first use would keep writing to the standard error of the
    test that made it, which pytest has closed by then.
    """
    configure = structlog.configure

    def configure_uncached(**settings: Any) -> None:
        settings["cache_logger_on_first_use"] = False
        configure(**settings)

    monkeypatch.setattr(structlog, "configure", configure_uncached)
    yield
    structlog.reset_defaults()


class SkipGuard:
    """Collects skips other than of absent traces, and fails a CI run that has any."""

    def __init__(self) -> None:
        self.forbidden: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that was skipped when it ran; an expected failure is not one."""
        if not hasattr(report, "wasxfail"):
            self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a module that was skipped as a whole."""
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and TRACE_ABSENT not in str(report.longrepr):
            self.forbidden.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Turn a green run red."""
        if self.forbidden and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say which skips failed the run."""
        for node_id in self.forbidden:
            terminalreporter.write_line(f"FAILED {node_id}: skipped, which CI forbids", red=True)


def pytest_configure(config: pytest.Config) -> None:
    """Put the guard on duty where CI is set; under xdist in the process that sees all reports."""
    if os.environ.get("CI") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SkipGuard())
