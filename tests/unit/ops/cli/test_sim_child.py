"""Processes of a pool whose parent is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[4]

PARENT = """
import os, time
from multiprocessing import get_context
from ops.cli.sim_child import end_with_parent

if __name__ == "__main__":
    with get_context("spawn").Pool(1, initializer=end_with_parent) as pool:
        print(pool.apply(os.getpid), flush=True)
        pool.apply(time.sleep, (600,))
"""


def test_a_killed_command_leaves_no_process(tmp_path: Path) -> None:
    """After kill -9 of the parent, a process in the middle of its work is gone at once."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, env=environment
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    deadline_s = time.monotonic() + 20
    while _runs(child):
        assert time.monotonic() < deadline_s, f"process {child} outlived its parent"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
