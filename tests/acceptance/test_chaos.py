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

from ops.chaos.history import Told, read
from ops.chaos.producer import chat_of
from ops.chaos.setting import BATCH_LINES, BATCH_PRODUCER
from tests.acceptance.conftest import StartCluster

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

ENDED = ("leader", "worker", "producer", "nats")
"""Whose processes are killed, or ended in good order."""

MUST_BE_0 = (
    "lost",
    "duplicate_results",
    "stuck",
    "quota_overshoots",
    "reruns_unexplained",
    "out_of_fence",
    "miscounted",
)

CHATS_COMPARED_MIN = 100

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


def clean(run: Run) -> dict[str, int]:
    """Figures that must be 0."""
    return {name: run.report[name] for name in MUST_BE_0}


@pytest.mark.timeout(175)
async def test_a_short_plan_loses_nothing(tmp_path: Path) -> None:
    """Leader, worker, producer and NATS killed in their work, and more: each job ends once."""
    kinds = [flag for kind in SHORT for flag in ("--kind", kind)]
    count = len(SHORT)
    run = await chaos(
        tmp_path, *("--faults", str(count), "--jobs", "500", "--seed", "20261"), *kinds
    )
    report = run.report
    assert clean(run) == dict.fromkeys(MUST_BE_0, 0), run.out
    assert run.code == 0, run.out
    assert report["jobs"] >= 500
    assert report["faults"] == dict.fromkeys(sorted(SHORT), 1)
    assert report["reruns"] >= 1
    assert report["not_calm"] == []
    assert report["inflight_at_fault_min"] >= 50
    assert processes_in(tmp_path) == []


@pytest.mark.timeout(120)
async def test_three_message_servers_lose_their_leaders_and_no_job(tmp_path: Path) -> None:
    """The server that leads the cluster and the one that leads a stream, as the servers say."""
    kinds = ("--kind", "kill_meta_nats", "--kind", "kill_stream_nats")
    flags = ("--nats-nodes", "3", "--faults", "2", "--jobs", "200", "--seed", "20263")
    run = await chaos(tmp_path, *flags, *kinds)
    assert clean(run) == dict.fromkeys(MUST_BE_0, 0), run.out
    assert run.code == 0, run.out
    assert run.report["jobs"] >= 200
    hit = [fault["member"] for fault in run.report["plan"]]
    assert set(hit) <= {"node-1", "node-2", "node-3"}
    assert len(hit) == 2


def answers(folder: Path) -> dict[str, tuple[int, str]]:
    """What stands in the outputs of a run's batches: status and text of each line, by its name."""
    found: dict[str, tuple[int, str]] = {}
    for path in folder.glob("cluster/batch-*.out*.jsonl"):
        for line in path.read_bytes().splitlines():
            said = orjson.loads(line)
            answer = said["response"]
            text = answer["body"]["choices"][0]["message"]["content"]
            found[said["custom_id"]] = (answer["status_code"], text)
    return found


def ends(folder: Path) -> dict[str, str]:
    """How each chat of a run ended, but those whose end hangs on the moment.

    A deadline may pass or not; and a stream that was seen is not begun anew on another worker where
    its caller did not ask for that.
    """
    found: dict[str, str] = {}
    for event in read(folder / "cluster"):
        if isinstance(event, Told) and event.by != BATCH_PRODUCER:
            _, wish = chat_of(event.job.partition(".")[2])
            if wish.deadline_s is None and (wish.restart_visible or not wish.stream):
                found[event.job] = event.kind
    return found


@pytest.mark.timeout(240)
async def test_sigterm_and_sigkill_end_with_the_same_results(tmp_path: Path) -> None:
    """The same plan, once with kill -9 and once in good order: each job has the same answer."""
    plans: list[list[str]] = []
    for how in ("kill", "term"):
        folder = tmp_path / how
        kinds = [flag for part in ENDED for flag in ("--kind", f"{how}_{part}")]
        run = await chaos(folder, "--faults", f"{len(ENDED)}", "--jobs", "600", *kinds)
        assert clean(run) == dict.fromkeys(MUST_BE_0, 0), run.out
        plans.append([fault["kind"].partition("_")[2] for fault in run.report["plan"]])
    assert plans[0] == plans[1]
    killed, ended = (answers(tmp_path / how) for how in ("kill", "term"))
    both = killed.keys() & ended.keys()
    assert len(both) >= BATCH_LINES
    assert [name for name in sorted(both) if killed[name] != ended[name]] == []
    killed_chats, ended_chats = (ends(tmp_path / how) for how in ("kill", "term"))
    names = killed_chats.keys() & ended_chats.keys()
    assert len(names) >= CHATS_COMPARED_MIN
    pairs = {(killed_chats[name], ended_chats[name]) for name in names}
    assert pairs == {("completed", "completed")}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("plant", "figure"),
    [
        ("lose", "lost"),
        ("double", "duplicate_results"),
        ("stuck", "stuck"),
        ("overshoot", "quota_overshoots"),
        ("fence", "out_of_fence"),
        ("rerun", "reruns_unexplained"),
        ("miscount", "miscounted"),
    ],
)
async def test_a_planted_fault_is_found(tmp_path: Path, plant: str, figure: str) -> None:
    """The product is broken on purpose, and no other finding is made of it."""
    flags = ("--faults", "1", "--kind", "malformed", "--jobs", "300", "--patience-s", "10")
    run = await chaos(tmp_path, *flags, "--plant", plant)
    assert run.code == 1
    assert [name for name in MUST_BE_0 if run.report[name]] == [figure]
    assert not run.report["ok"]


@pytest.mark.timeout(120)
async def test_a_cluster_of_others_is_joined(tmp_path: Path, start_cluster: StartCluster) -> None:
    """Its load ends there, our producers are hit, and the owner's commands run; no job is lost."""
    theirs, _ = await start_cluster()
    pids = {member.pid for member in theirs.members.values()}
    hit = tmp_path / "hit"
    flags = ("--faults", "6", "--jobs", "200", "--url", theirs.url, "--patience-s", "20")
    run = await chaos(tmp_path / "ours", *flags, "--hit", f"disk=touch {hit}", "--yes")
    assert run.code == 0, run.out
    assert hit.exists()
    names = ("cut_producer", "hit_yours", "kill_producer", "malformed")
    assert run.report["faults"] == dict.fromkeys((*names, "pause_producer", "term_producer"), 1)
    assert run.report["jobs"] >= 200
    assert [run.report[name] for name in ("lost", "duplicate_results", "stuck")] == [0, 0, 0]
    assert run.report["reruns"] is None
    assert {member.pid for member in theirs.members.values() if member.running} == pids
    assert processes_in(tmp_path / "ours") == []


@pytest.mark.timeout(120)
async def test_ctrl_c_ends_all_processes_and_tells_what_was_found(tmp_path: Path) -> None:
    """Also while a process is stopped, which can't end by itself."""
    flags = ("--faults", "5", "--kind", "silence_worker", "--jobs", "100000")
    run = await chaos(tmp_path, *flags, interrupt_at="silence_worker\n")
    assert run.code == -signal.SIGINT
    assert run.report["interrupted"]
    assert run.report["jobs"] > 0
    assert "jobs accepted" in run.out
    assert processes_in(tmp_path) == []
