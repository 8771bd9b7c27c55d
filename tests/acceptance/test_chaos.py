"""`inferlane chaos` as people run it: a short fixed plan finds nothing, a planted fault is found.

The long plan is `just chaos`.
"""

import asyncio
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

SHORT = (
    "kill_leader",
    "kill_worker",
    "kill_producer",
    "kill_nats",
    "zombie_leader",
    "replace_worker",
    "crash_engine",
    "cut_worker",
    "full_results",
    "malformed",
)

ENDS_S_MAX = 40.0
"""Longest wait for the end of a run that was told to end."""


@dataclass(frozen=True, slots=True)
class Run:
    """How a run ended."""

    code: int
    out: str
    report: dict[str, Any]


async def chaos(folder: Path, *flags: str, interrupt_at: str = "") -> Run:
    """Run the command; with `interrupt_at`, Ctrl-C once it said that."""
    report = folder / "report.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ops.cli.main", "chaos", "--report", str(report)),
        *("--folder", str(folder / "cluster"), *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    if interrupt_at:
        await _until(process, interrupt_at)
        process.send_signal(signal.SIGINT)
    out, err = await process.communicate()
    assert report.exists(), err.decode()
    assert process.returncode is not None
    return Run(process.returncode, out.decode(), orjson.loads(report.read_bytes()))


async def _until(process: asyncio.subprocess.Process, said: str) -> None:
    assert process.stderr is not None
    async with asyncio.timeout(ENDS_S_MAX):
        async for line in process.stderr:
            if said in line.decode():
                return


def processes_in(folder: Path) -> list[str]:
    """Commands of all processes that name a folder, but our own."""
    found: list[str] = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(folder) in command and entry.parent.name != str(os.getpid()):
            found.append(command)
    return found


@pytest.mark.timeout(175)
async def test_a_short_plan_loses_nothing(tmp_path: Path) -> None:
    """Leader, worker, producer and NATS killed in their work, and more: each job ends once."""
    kinds = [flag for kind in SHORT for flag in ("--kind", kind)]
    count = len(SHORT)
    run = await chaos(
        tmp_path, *("--faults", str(count), "--jobs", "500", "--seed", "20261"), *kinds
    )
    report = run.report
    found = {name: report[name] for name in ("lost", "duplicate_results", "stuck")}
    assert found == {"lost": 0, "duplicate_results": 0, "stuck": 0}, run.out
    found = {name: report[name] for name in ("quota_overshoots", "reruns_unexplained")}
    assert found == {"quota_overshoots": 0, "reruns_unexplained": 0}, run.out
    assert report["out_of_fence"] == 0, run.out
    assert run.code == 0
    assert report["jobs"] >= 500
    assert report["faults"] == dict.fromkeys(sorted(SHORT), 1)
    assert report["reruns"] >= 1
    assert report["not_calm"] == []
    assert report["inflight_at_fault_min"] >= 50
    assert processes_in(tmp_path) == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("plant", "figure"),
    [
        ("lose", "lost"),
        ("double", "duplicate_results"),
        ("stuck", "stuck"),
        ("overshoot", "quota_overshoots"),
    ],
)
async def test_a_planted_fault_is_found(tmp_path: Path, plant: str, figure: str) -> None:
    """The product is broken on purpose, and no other finding is made of it."""
    flags = ("--faults", "1", "--kind", "malformed", "--jobs", "300", "--patience-s", "10")
    run = await chaos(tmp_path, *flags, "--plant", plant)
    assert run.code == 1
    names = ("lost", "duplicate_results", "stuck", "quota_overshoots", "reruns_unexplained")
    assert [name for name in names if run.report[name]] == [figure]
    assert not run.report["ok"]


@pytest.mark.timeout(120)
async def test_ctrl_c_ends_all_processes_and_tells_what_was_found(tmp_path: Path) -> None:
    """Also while a process is stopped, which can't end by itself."""
    flags = ("--faults", "5", "--kind", "silence_worker", "--jobs", "100000")
    run = await chaos(tmp_path, *flags, interrupt_at="silence_worker\n")
    assert run.code == 130
    assert run.report["interrupted"]
    assert run.report["jobs"] > 0
    assert "jobs accepted" in run.out
    assert processes_in(tmp_path) == []
