"""Jobs a second through one broker process, every decision on, as a share of a bare relay's.

Beside it, the processor time that the broker's process takes for a job (user and system): what else
runs here changes that far less than jobs a second.

Relay and broker take turns on the same machine with the same server settings, and the medians are
compared:
what else runs here slows both.

    python -m tests.bench.throughput [--jobs 30000] [--rounds 5]
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from pathlib import Path

import uvloop

from broker.bus import logs
from broker.bus.nats import connect
from broker.wire import subjects
from broker.wire.codec import encode
from broker.wire.messages import Job
from broker.wire.prefix import block_hashes, pack_hashes, seed
from ops.nats.server import NatsServer
from tests.bench import null_agent, relay

LANE, BAND, MODEL = "bench", 2, "tiny"

CONFIG = """
[nats]
url = "{url}"
[broker]
state_dir = "{folder}"
http_port = 0
window_online_jobs = 2048
[streams]
jobs_per_subject_max = 10_000_000
[policy]
models = ["tiny"]
[[policy.bands]]
guaranteed_share = 0.0
[[policy.bands]]
guaranteed_share = 0.2
[[policy.bands]]
guaranteed_share = 0.1
[[policy.bands]]
guaranteed_share = 0.05
[[policy.lanes]]
name = "bench"
[[policy.quotas]]
band = 2
inflight_jobs_max = 1024
"""


def jobs_of(count: int, *, body_bytes: int) -> list[bytes]:
    """Make encoded jobs that share twenty prefixes, as a real load does."""
    start = seed(model=MODEL, scope=LANE)
    prefixes = [
        pack_hashes(block_hashes(bytes([number]) * body_bytes, seed=start)) for number in range(20)
    ]
    return [
        encode(
            Job(
                id=f"j{number}",
                lane=LANE,
                band=BAND,
                model=MODEL,
                client="bench",
                body=b"x" * body_bytes,
                blocks=prefixes[number % 20],
                prompt_tokens=body_bytes // 4,
                output_tokens_max=16,
            )
        )
        for number in range(count)
    ]


async def measure_broker(*, jobs: int, body_bytes: int) -> tuple[float, float]:
    """Run broker and null agent once on a server of their own.

    Returns jobs a second, and the broker's processor seconds for each job.
    """
    with NatsServer() as server, tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "inferlane.toml"
        config.write_text(CONFIG.format(url=server.url, folder=folder))
        broker = await _start_broker(config)
        try:
            await relay.heard(broker)
            bus = await connect(server.url, name="bench")
            filled = jobs_of(jobs, body_bytes=body_bytes)
            await relay.fill(bus, subjects.jobs(LANE, BAND, MODEL), filled)
            await bus.close()
            agent = await relay.start_role("tests.bench.throughput", "agent", server.url, jobs)
            try:
                before_s = cpu_s(broker.pid)
                await relay.heard(agent)
                told = await relay.heard(agent)
                job_cpu_s = (cpu_s(broker.pid) - before_s) / jobs
            finally:
                await relay.end_role(agent)
        finally:
            broker.terminate()
            await broker.wait()
    return float(str(told["jobs_s"])), job_cpu_s


def cpu_s(pid: int) -> float:
    """Return the processor seconds that a process of ours has taken so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _start_broker(config: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "broker.service.main", str(config)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )


async def compare(*, jobs: int, body_bytes: int, rounds: int) -> None:
    """Alternate both and print the medians."""
    relayed: list[float] = []
    brokered: list[float] = []
    cpu: list[float] = []
    for number in range(rounds):
        relayed.append(await relay.measure(jobs=jobs, body_bytes=body_bytes))
        jobs_s, job_cpu_s = await measure_broker(jobs=jobs, body_bytes=body_bytes)
        brokered.append(jobs_s)
        cpu.append(job_cpu_s)
        print(
            f"round {number + 1}: bare relay {relayed[-1]:,.0f} jobs/s, "
            f"broker {brokered[-1]:,.0f} jobs/s, {cpu[-1] * 1e6:.0f} µs of processor time a job"
        )
    base, ours = statistics.median(relayed), statistics.median(brokered)
    print(
        f"median of {rounds} at {body_bytes} bytes: bare relay {base:,.0f} jobs/s, "
        f"broker {ours:,.0f} jobs/s, ratio {ours / base:.2f}, "
        f"{statistics.median(cpu) * 1e6:.0f} µs of processor time a job"
    )


def main() -> None:
    """Run the bench, or its null agent."""
    parser = argparse.ArgumentParser(description="Measure the broker against a bare relay.")
    parser.add_argument("--jobs", type=int, default=30_000)
    parser.add_argument("--bytes", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--role", choices=("agent",))
    parser.add_argument("--url", default="")
    given = parser.parse_args()
    logs.set_up(role=given.role or "bench")
    if given.role == "agent":
        uvloop.run(null_agent.serve(given.url, given.jobs))
    else:
        uvloop.run(compare(jobs=given.jobs, body_bytes=given.bytes, rounds=given.rounds))


if __name__ == "__main__":
    main()
