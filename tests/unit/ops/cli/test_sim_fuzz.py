"""`inferlane sim fuzz` over several processes: one that dies, and Ctrl-C, end it at once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ops.cli import sim_fuzz
from ops.cli.main import main

ROOT = Path(__file__).parents[4]

WAIT_S = 60.0


def test_several_processes_come_to_what_one_comes_to(capsys: pytest.CaptureFixture[str]) -> None:
    """Each seed once, more processes than there is work for."""
    assert main(["sim", "fuzz", "--seeds", "17", "--jobs", "1"]) == 0
    alone = capsys.readouterr()
    assert main(["sim", "fuzz", "--seeds", "17", "--jobs", "200"]) == 0
    assert capsys.readouterr() == alone
    assert alone.err == ""


def test_seeds_are_told_in_order() -> None:
    """The window of work in flight loses and doubles none."""
    seeds = range(5, 5 + 3 * sim_fuzz.CHUNK_SEEDS * sim_fuzz.CHUNKS_AHEAD + 3)
    assert [one.seed for one in sim_fuzz._run_all(seeds, jobs=2)] == list(seeds)


def a_fuzz() -> "subprocess.Popen[bytes]":
    """Start an endless one with two processes, and see both begin."""
    command = [sys.executable, "-m", "ops.cli.main", "sim", "fuzz", "--seeds", "1000000"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    fuzz = subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
    )
    deadline_s = time.monotonic() + WAIT_S
    while len(children(fuzz.pid)) < 2:
        assert fuzz.poll() is None
        assert time.monotonic() < deadline_s, "its processes never came"
        time.sleep(0.02)
    return fuzz


def children(pid: int) -> list[int]:
    """Find the processes of its pool."""
    found = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [one for one in found if b"spawn_main" in Path(f"/proc/{one}/cmdline").read_bytes()]


def test_a_process_that_dies_ends_it() -> None:
    """It waited for ever for the seeds that the dead one had."""
    with a_fuzz() as fuzz:
        os.kill(children(fuzz.pid)[0], signal.SIGKILL)
        _, err = fuzz.communicate(timeout=WAIT_S)
    assert fuzz.returncode == 1
    assert err.decode().startswith("inferlane: a process of the simulation died")


def test_ctrl_c_is_one_line() -> None:
    """All of its processes hear it, as from a terminal, and only the first speaks."""
    with a_fuzz() as fuzz:
        os.killpg(fuzz.pid, signal.SIGINT)
        _, err = fuzz.communicate(timeout=WAIT_S)
    assert fuzz.returncode == -signal.SIGINT, "it dies of the signal, so that a shell's loop ends"
    assert err.decode() == "inferlane: interrupted\n"


def test_a_second_ctrl_c_is_one_line_too() -> None:
    """It comes while the processes end, which it makes them do at once."""
    with a_fuzz() as fuzz:
        for _ in range(3):
            os.killpg(fuzz.pid, signal.SIGINT)
            time.sleep(0.01)
        _, err = fuzz.communicate(timeout=WAIT_S)
    assert fuzz.returncode == -signal.SIGINT
    assert err.decode() == "inferlane: interrupted\n"
