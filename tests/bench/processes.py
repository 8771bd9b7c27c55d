"""What a process has taken of the machine: processor time, and time it waited for a core.

Both are the kernel's own sums over all threads. The second is what tells a slow program from a busy
machine: a process that could run and had no core is late through no work of its own.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
"""Of `/proc/<pid>/stat`; 10 ms on most kernels, so only sums over seconds mean something."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Since the process began."""

    cpu_s: float
    waited_s: float
    """Ready to run, without a core; counted for the threads that live."""

    def since(self, earlier: "Taken") -> "Taken":
        """Return what was taken between two looks."""
        return Taken(self.cpu_s - earlier.cpu_s, self.waited_s - earlier.waited_s)


def taken(pid: int) -> Taken:
    """Look at a process now. Raises OSError when it is no more."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    waited_ns = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):  # It ended between the two looks.
            waited_ns += int((thread / "schedstat").read_text().split()[1])
    return Taken((int(fields[11]) + int(fields[12])) * TICK_S, waited_ns / 1e9)


def taken_by(pids: Mapping[str, int]) -> dict[str, Taken]:
    """Look at several processes now, by name."""
    return {name: taken(pid) for name, pid in pids.items()}


def waited_s(pid: int) -> float:
    """Tell how long a process's first thread has waited for a core; cheap enough for each probe."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def resident_mib(pid: int) -> float:
    """Tell how much memory a process holds."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024
