"""What pytest itself needs: the product's event loop, and the rule that CI may skip nothing.

Only a public trace that is not in the repository may be missing: a test marked
`trace("azure/x.csv")` skips where INFERLANE_TRACES names no folder that holds the file. Any other
skip fails the run when CI is set, so that a missing server or engine can't turn the suite green.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import uvloop
from pytest_asyncio.plugin import LoopFactory

pytest_plugins = ["pytester"]

TRACE_ABSENT = "trace absent: "
"""How the reason of the one allowed skip begins."""


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
