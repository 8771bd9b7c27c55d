"""Two hundred streams of 20 tokens a second through one gateway: stalls, memory, added first token.

Real processes with a modelled engine: client → gateway → NATS → broker → agent, and back. While the
streams run, probes take turns: one asks over HTTP, the next one over NATS with the client library.
Both wait for the same broker and engine and are timed in the same loop, so what differs is the
gateway.

    python -m tests.bench.gateway_streams [--streams 200] [--seconds 60]
"""

import argparse
import asyncio
import itertools
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from broker.bus import logs
from broker.bus.nats import connect
from ops.cluster import LocalCluster
from ops.demo.run import until_ready
from producers.client import Client
from producers.config import ClientConfig

TOKENS_S = 20.0
ANSWER_TOKENS = 200
PROBE_TOKENS = 1
PROBE_PAUSE_S = 0.02
RAMP_S = 5.0
"""Over which the streams begin, so that they don't all end together."""

STALL_S = 1.0
"""A pause between two tokens that a reader would call a stall: twenty of its own."""

CONFIG = """
[nats]
url = "{url}"
[broker]
state_dir = "{folder}"
http_port = 0
decision_log_bytes_max = 0
[policy]
models = ["tiny"]
[[policy.lanes]]
name = "bench"
[gateway]
port = 0
[gateway.keys.bench]
lane = "bench"
key = "sk-bench"
[worker]
worker = "worker"
engine = "fake"
# 18.4 ms a token, slowed to {pace} a second.
profile = "h100x2-llama-70b"
speed = {speed}
slots = 256
models = {{ tiny = "tiny" }}
"""


@dataclass
class Seen:
    """What came of the run."""

    tokens: int = 0
    ended: int = 0
    failed: int = 0
    gaps_s: list[float] = field(default_factory=list[float])
    over_http_s: list[float] = field(default_factory=list[float])
    direct_s: list[float] = field(default_factory=list[float])
    memory_mib: list[float] = field(default_factory=list[float])
    cpu_s: float = 0.0
    """Of the gateway, while its memory was looked at."""
    cpu_tokens: int = 0
    """Tokens that passed it meanwhile."""


def a_body(number: int, tokens: int) -> dict[str, Any]:
    """A short question, each another."""
    messages = [{"role": "user", "content": f"Question {number}: why?"}]
    return {"model": "tiny", "messages": messages, "max_tokens": tokens, "stream": True}


async def measure(streams: int, seconds: float) -> Seen:
    """Run once."""
    with tempfile.TemporaryDirectory() as folder:
        async with LocalCluster(Path(folder)) as cluster:
            config = Path(folder) / "inferlane.toml"
            text = CONFIG.format(
                url=cluster.url, folder=folder, pace=TOKENS_S, speed=0.0184 * TOKENS_S
            )
            config.write_text(text)
            gateway = cluster.add_gateway("gateway", config)
            await cluster.start(
                cluster.add_broker("broker", config), cluster.add_worker("worker", config), gateway
            )
            bus = await connect(cluster.url, name="bench")
            await until_ready(bus, workers=1)
            url = str(gateway.said["http"])
            auth = {"Authorization": "Bearer sk-bench"}
            connector = aiohttp.TCPConnector(limit=0)
            try:
                async with (
                    aiohttp.ClientSession(url, headers=auth, connector=connector) as session,
                    Client(bus, lane="bench", config=ClientConfig()) as client,
                ):
                    return await _under_load(session, client, gateway.pid, streams, seconds)
            finally:
                await bus.close()


async def _under_load(
    session: aiohttp.ClientSession, client: Client, pid: int, streams: int, seconds: float
) -> Seen:
    seen = Seen()
    numbers = itertools.count()
    async with asyncio.TaskGroup() as group:
        readers = [
            group.create_task(_read_on(session, seen, numbers, RAMP_S * index / streams))
            for index in range(streams)
        ]
        await asyncio.sleep(RAMP_S)
        looking = group.create_task(_look(pid, seen))
        ends_at_s = time.perf_counter() + seconds
        while time.perf_counter() < ends_at_s:
            seen.over_http_s.append(await _probe_http(session, next(numbers)))
            await asyncio.sleep(PROBE_PAUSE_S)
            seen.direct_s.append(await _probe_direct(client, next(numbers)))
            await asyncio.sleep(PROBE_PAUSE_S)
        for task in (looking, *readers):
            task.cancel()
    return seen


async def _read_on(
    session: aiohttp.ClientSession, seen: Seen, numbers: "itertools.count[int]", delay_s: float
) -> None:
    """Read one stream after the other."""
    await asyncio.sleep(delay_s)
    while True:
        body = a_body(next(numbers), ANSWER_TOKENS)
        async with session.post("/v1/chat/completions", json=body) as answer:
            last_s = 0.0
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                now_s = time.perf_counter()
                if last_s:
                    seen.gaps_s.append(now_s - last_s)
                last_s = now_s
                seen.tokens += 1
            seen.ended += 1
            seen.failed += answer.status != 200


async def _probe_http(session: aiohttp.ClientSession, number: int) -> float:
    began_s = time.perf_counter()
    body = a_body(number, PROBE_TOKENS)
    async with session.post("/v1/chat/completions", json=body) as answer:
        await answer.content.readline()
        first_s = time.perf_counter() - began_s
        await answer.read()
    return first_s


async def _probe_direct(client: Client, number: int) -> float:
    began_s = time.perf_counter()
    ticket = await client.submit(a_body(number, PROBE_TOKENS), band=1)
    await ticket.next_chunk()
    first_s = time.perf_counter() - began_s
    await ticket.result()
    return first_s


async def _look(pid: int, seen: Seen) -> None:
    """Note the gateway's memory and processor time each second."""
    began_s, began_tokens = _cpu_s(pid), seen.tokens
    while True:
        seen.cpu_s, seen.cpu_tokens = _cpu_s(pid) - began_s, seen.tokens - began_tokens
        status = Path(f"/proc/{pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
        seen.memory_mib.append(int(line.split()[1]) / 1024)
        await asyncio.sleep(1.0)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _tell(seen: Seen, streams: int, seconds: float) -> None:
    load = Path("/proc/loadavg").read_text().split()[0]
    print(f"{streams} streams, {seconds:g} s, load {load}")
    rate = seen.tokens / (seconds + RAMP_S) / streams
    print(f"tokens a second and stream: {rate:.1f}; answers ended {seen.ended}, not 200: "
          f"{seen.failed}")  # fmt: skip
    gaps = statistics.quantiles(seen.gaps_s, n=1000)
    stalls = sum(gap > STALL_S for gap in seen.gaps_s)
    print(f"between two tokens: p50 {gaps[499] * 1000:.0f} ms, p99 {gaps[989] * 1000:.0f} ms, "
          f"longest {max(seen.gaps_s) * 1000:.0f} ms; over {STALL_S:g} s: {stalls}")  # fmt: skip
    for name, share in (("p50", 50), ("p99", 99)):
        http, direct = (
            statistics.quantiles(values, n=100)[share - 1] * 1000
            for values in (seen.over_http_s, seen.direct_s)
        )
        print(f"first token {name}: over HTTP {http:.1f} ms, direct {direct:.1f} ms, "
              f"added {http - direct:.1f} ms ({len(seen.direct_s)} each)")  # fmt: skip
    memory = seen.memory_mib
    half = len(memory) // 2
    print(f"gateway's processor time: {seen.cpu_s / seen.cpu_tokens * 1e6:.0f} us a token")
    print(f"gateway's memory: {statistics.mean(memory[:half]):.1f} MiB at first, "
          f"{statistics.mean(memory[half:]):.1f} later, at most {max(memory):.1f}")  # fmt: skip


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description="Measure many streams through one gateway.")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    logs.set_up(role="bench")
    seen = uvloop.run(measure(given.streams, given.seconds))
    _tell(seen, given.streams, given.seconds)


if __name__ == "__main__":
    main()
