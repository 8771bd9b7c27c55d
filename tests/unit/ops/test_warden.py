"""The warden: what is left when its starter is gone, it ends, in order, and nobody else."""

import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ops.warden import MARK, Warden

SLEEPS = "import time; time.sleep(60)"
STUBBORN = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "sys.stdout.write('up\\n'); sys.stdout.flush(); time.sleep(60)"
)
WRITES = (
    "import signal, sys, time\n"
    "def end(*_):\n"
    "    open(sys.argv[1], 'a').write(sys.argv[2] + '\\n'); sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, end); sys.stdout.write('up\\n'); sys.stdout.flush()\n"
    "time.sleep(60)\n"
)


@contextmanager
def a_process(code: str, *arguments: str, **mark: str) -> Generator[subprocess.Popen[bytes]]:
    """Run Python code in a session of its own; killed at the end, if nobody ended it before."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code, *arguments],
        stdout=subprocess.PIPE,
        env={**os.environ, **mark},
        start_new_session=True,
    )
    try:
        if "'up" in code:
            assert process.stdout is not None
            process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def test_what_is_watched_ends_with_the_starter() -> None:
    """The pipe's end is the starter's: close() is what the kernel does for one that was killed."""
    warden = Warden()
    with a_process(SLEEPS) as process:
        warden.watch(process.pid, rank=0)
        warden.close()
        assert process.wait(10) == -15


def test_what_was_forgotten_lives_on() -> None:
    """A process that is no longer ours is left alone."""
    warden = Warden()
    with a_process(SLEEPS) as process:
        warden.watch(process.pid, rank=0)
        warden.forget(process.pid)
        warden.close()
        assert process.poll() is None


def test_higher_ranks_end_first(tmp_path: Path) -> None:
    """The server outlives its clients."""
    said = tmp_path / "ended"
    warden = Warden()
    with a_process(WRITES, str(said), "server") as server:
        warden.watch(server.pid, rank=0)
        with a_process(WRITES, str(said), "member") as member:
            warden.watch(member.pid, rank=1)
            warden.close()
            assert (member.wait(10), server.wait(10)) == (0, 0)
    assert said.read_text().split() == ["member", "server"]


def test_a_stubborn_process_is_killed() -> None:
    """One that won't end in good order is ended hard, after a bounded wait."""
    warden = Warden(ending_s_max=0.5)
    with a_process(STUBBORN) as process:
        warden.watch(process.pid, rank=0)
        began_s = time.monotonic()
        warden.close()
        assert process.wait(10) == -9
        assert time.monotonic() - began_s >= 0.5


@pytest.mark.skipif(sys.platform != "linux", reason="other systems don't show an environment")
def test_a_process_not_told_of_yet_is_found_by_its_mark() -> None:
    """Its starter was killed right after it started it."""
    warden = Warden()
    with a_process(SLEEPS, **warden.mark) as marked, a_process(SLEEPS, **{MARK: "1"}) as other:
        warden.close()
        assert marked.wait(10) == -15
        assert other.poll() is None


def test_a_warden_that_was_killed_disturbs_nobody() -> None:
    """Whatever is told it afterwards is told to nobody."""
    warden = Warden()
    os.kill(warden.pid, 9)
    with a_process(SLEEPS) as process:
        for _ in range(3):
            warden.watch(process.pid, rank=0)
        warden.close()
        assert process.poll() is None
