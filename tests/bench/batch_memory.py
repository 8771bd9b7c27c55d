"""What a large batch takes: memory of gateway, runner and command line, and lines a second.

    python -m tests.bench.batch_memory --lines 20000

A real NATS server, a gateway that runs the batch, and a responder in place of broker and workers,
each a process of its own; the command line hands the file in, watches, and fetches the results. The
peaks are the kernel's own (VmHWM), read at the end of each process. One file of so many lines of
about 700 bytes, a thousand prefixes.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from broker.bus import topology
from broker.bus.nats import connect
from broker.bus.topology import Bounds, LanePlan
from ops.nats.server import NatsServer
from tests.batches import a_line, results
from tests.builders import LANE, MODEL
from tests.stored_batches import count_all

INFERLANE = [sys.executable, "-m", "ops.cli.main"]

CONFIG = """
[nats]
url = "{url}"
[gateway]
port = 0
[gateway.keys.bench]
lane = "acme"
key = "sk-of-the-bench"
"""


def lines(count: int) -> Iterator[bytes]:
    """Lines of about 700 bytes."""
    for number in range(count):
        system = f"You are helper {number % 1000}. " + "Be brief and kind. " * 20
        yield a_line(f"id-{number}", system=system) + b"\n"


def peak_mb(pid: int) -> float:
    """Most memory that a process had so far."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def cpu_s(pid: int) -> float:
    """Processor seconds that a process used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def command(*arguments: str, code: int = 0) -> tuple[str, float, float]:
    """Run a command that exits with `code`; return its output, peak memory in MB, and seconds."""
    began_s = time.monotonic()
    with subprocess.Popen([*INFERLANE, *arguments], stdout=subprocess.PIPE, text=True) as process:
        peak = 0.0
        while process.poll() is None:
            try:
                peak = max(peak, peak_mb(process.pid))
            except (FileNotFoundError, ProcessLookupError):
                break
            time.sleep(0.02)
        assert process.stdout is not None
        said = process.stdout.read()
    assert process.returncode == code, said
    return said.strip(), peak, time.monotonic() - began_s


async def set_up(url: str) -> None:
    """Make the lane's streams."""
    bus = await connect(url, name="bench")
    await topology.apply(bus, topology.of([LanePlan(LANE, (MODEL,))], Bounds()))
    await count_all(bus)
    await bus.close()


def start(*arguments: str) -> tuple[subprocess.Popen[bytes], bytes]:
    """Start a process that says when it is ready; return it, and what it said."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    said = process.stdout.readline()
    assert b"ready" in said
    return process, said


def measure(server: NatsServer, folder: Path, count: int) -> None:
    """Run one batch and print what it took."""
    asyncio.run(set_up(server.url))
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    with source.open("wb") as file:
        file.writelines(lines(count))
    config = folder / "inferlane.toml"
    config.write_text(CONFIG.format(url=server.url))
    responder, _ = start("tests.responding", server.url)
    gateway, _ = start("ops.cli.main", "gateway", "--config", str(config))
    at = ("--nats", server.url, "--lane", LANE)
    try:
        print(
            f"{count:,} lines, {source.stat().st_size / 1e6:.0f} MB; gateway at its start "
            f"{peak_mb(gateway.pid):.0f} MB"
        )
        batch_id, peak, seconds = command("batch", "submit", str(source), *at)
        print(f"submit   {seconds:7.1f} s, CLI peak {peak:4.0f} MB")
        _, peak, seconds = command("batch", "watch", batch_id, *at)
        print(f"run      {seconds:7.1f} s, {count / seconds:,.0f} lines/s, CLI peak {peak:4.0f} MB")
        used = {
            "gateway": gateway.pid,
            "responder": responder.pid,
            "nats-server": server.pid,
        }
        told = ", ".join(f"{name} {cpu_s(pid):.1f} s" for name, pid in used.items())
        print(f"gateway with its runner: peak {peak_mb(gateway.pid):4.0f} MB; processor: {told}")
        _, peak, seconds = command("batch", "results", batch_id, "--output", str(output), *at)
        print(
            f"results  {seconds:7.1f} s, {output.stat().st_size / 1e6:.0f} MB, "
            f"CLI peak {peak:4.0f} MB"
        )
        print(f"nats-server: peak {peak_mb(server.pid):4.0f} MB")
        assert len({line["custom_id"] for line in results(output)}) == count
    finally:
        for process in (gateway, responder):
            process.terminate()
            process.communicate()


def main() -> None:
    """Measure one size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=20_000)
    count = parser.parse_args().lines
    with NatsServer() as server, tempfile.TemporaryDirectory() as folder:
        measure(server, Path(folder), count)


if __name__ == "__main__":
    main()
