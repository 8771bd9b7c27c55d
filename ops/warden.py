"""Ends a cluster's processes when whoever started them is gone, however it went.

A process that is killed can't end its children, and a nats-server or a worker left behind keeps its
port, its store and its jobs. So a small process of its own reads what runs from a pipe, and when
the pipe ends, which the kernel sees to, it ends what is left: those of the highest rank first, in
good order, then hard. Processes that were started a moment before, and not told of yet, are found
by a mark in their environment (on Linux). Only the standard library is used, so that it starts in
milliseconds.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

ENDING_S_MAX = 10.0
"""Longest wait for processes of one rank to end in good order, as `Member.stop` waits."""

POLL_S = 0.05

MARK = "INFERLANE_WARDEN"
"""Variable of the environment that names a process's warden."""

_STARTED_FIELD = 19
"""Place of a process's start time in /proc/<pid>/stat, counted after its name."""


_ENDED_STATES = "ZX"
"""Ended, but not yet taken note of by its new parent."""


class Warden:
    """The starter's side. Each process it is told of must lead a session of its own."""

    def __init__(
        self, *, keep_open: Iterable[int] = (), ending_s_max: float = ENDING_S_MAX
    ) -> None:
        """Start it. `keep_open` are files it holds until all is ended, such as a lock."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(ending_s_max)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=tuple(keep_open),
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Its own process id."""
        return self._process.pid

    @property
    def mark(self) -> dict[str, str]:
        """What each process it watches is to have in its environment."""
        return {MARK: str(self.pid)}

    def watch(self, pid: int, *, rank: int) -> None:
        """End this process (and its group) when the starter is gone; higher ranks first."""
        self._say(f"+ {pid} {rank}")

    def forget(self, pid: int) -> None:
        """Leave a process alone that has ended."""
        self._say(f"- {pid} 0")

    def close(self) -> None:
        """End what is still watched, then itself."""
        assert self._process.stdin is not None, "it was started with a pipe"
        with suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None, "it was started with a pipe"
        with suppress(OSError):  # It was killed: then nobody is watched, and nothing is lost by it.
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()


def _stat(pid: int) -> list[str]:
    """What the kernel tells of a process after its name; nothing where it doesn't."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return stat.rpartition(")")[2].split()


def _started(pid: int) -> str:
    stat = _stat(pid)
    return stat[_STARTED_FIELD] if stat else ""


def _is_there(pid: int, known_start: str) -> bool:
    """Say whether a process, or its group, runs: and not another one that got its number."""
    stat = _stat(pid)
    is_ended = bool(stat) and stat[0] in _ENDED_STATES
    if is_ended or (stat and known_start and stat[_STARTED_FIELD] != known_start):
        return False
    try:
        os.killpg(pid, 0)
    except OSError:
        return False
    return True


def _end(pids: dict[int, str], *, ending_s_max: float) -> None:
    """End processes in good order, or hard after `ending_s_max`."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in [pid for pid, known_start in pids.items() if _is_there(pid, known_start)]:
            with suppress(OSError):
                os.killpg(pid, number)
        ends_at_s = time.monotonic() + ending_s_max
        while time.monotonic() < ends_at_s:
            if not any(_is_there(pid, known_start) for pid, known_start in pids.items()):
                return
            time.sleep(POLL_S)


def _marked(own_pid: int) -> list[int]:
    """Find the processes that carry our mark, oldest first; none where this can't be seen."""
    mark = f"{MARK}={own_pid}".encode()
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # It ended just now, or is somebody else's.
            if mark in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return sorted(found)


def main() -> None:
    """Read what runs until the pipe ends, then end it."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watched: dict[int, tuple[int, str]] = {}
    for line in sys.stdin:
        what, pid, rank = line.split()
        if what == "+":
            watched[int(pid)] = (int(rank), _started(int(pid)))
        else:
            watched.pop(int(pid), None)
    highest = max((rank for rank, _ in watched.values()), default=0)
    for pid in _marked(os.getpid()):
        watched.setdefault(pid, (highest, _started(pid)))
    for rank in sorted({rank for rank, _ in watched.values()}, reverse=True):
        chosen = {pid: start for pid, (own, start) in watched.items() if own == rank}
        _end(chosen, ending_s_max=float(sys.argv[1]))


if __name__ == "__main__":
    main()
