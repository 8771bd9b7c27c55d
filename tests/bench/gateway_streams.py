"""Two hundred streams of 20 tokens a second through one gateway: stalls, memory, added first token.

Real processes with a modelled engine: client → gateway → NATS → broker → agent, and back. The
streams' readers are a process of their own (`stream_readers`), their starts are spread; this one
only probes. Its probes come at random instants and ask by turns over HTTP and over NATS with the
client library: both kinds meet the same load, broker and engine, so what differs is the gateway.
After that all readers ask at once, in rounds by turns over HTTP and over NATS.

Added is the quantile over HTTP less the same quantile over NATS, not a quantile of differences: the
probes are no pairs. Beside it stands what the kernel says of each process: processor time a token
(that of the requests included), and how long it stood ready to run and had no core, in all and, of
the gateway, during a probe: a machine with a core for each would not have added that.

    python -m tests.bench.gateway_streams [--streams 200] [--seconds 60] [--rounds 5]
"""

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec
import uvloop

from broker.bus import logs
from broker.bus.nats import connect
from ops.cluster import LocalCluster, Member
from ops.demo.run import until_ready
from producers.client import Client
from producers.config import ClientConfig
from tests.bench.processes import Taken, resident_mib, taken_by, waited_s
from tests.bench.stream_readers import Bursts, Seen, a_body, first_direct_s

_T = TypeVar("_T")

TOKENS_S = 20.0
PROBE_TOKENS = 1
PROBES_S = 16.0
"""Probes a second, of both kinds: few beside 200 streams, and a p99 of hundreds in a minute."""
RAMP_S = 8.0
"""Over which the streams begin; an answer takes 10 s."""

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
class Probes:
    """Times to the first token, and how long the gateway waited for a core meanwhile."""

    http_s: list[float] = field(default_factory=list[float])
    waits_s: list[float] = field(default_factory=list[float])
    direct_s: list[float] = field(default_factory=list[float])


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the processes."""

    at_s: float
    taken: dict[str, Taken]
    memory_mib: float
    """Of the gateway."""


@dataclass
class Found:
    """What came of the run."""

    seen: Seen
    probes: Probes
    bursts: Bursts
    seconds: float
    looks: list[Look]


async def measure(streams: int, seconds: float, rounds: int) -> Found:
    """Run once."""
    with tempfile.TemporaryDirectory() as folder:
        async with LocalCluster(Path(folder)) as cluster:
            config = Path(folder) / "inferlane.toml"
            text = CONFIG.format(
                url=cluster.url, folder=folder, pace=TOKENS_S, speed=0.0184 * TOKENS_S
            )
            config.write_text(text)
            gateway = cluster.add_gateway("gateway", config)
            broker, worker = (
                cluster.add_broker("broker", config),
                cluster.add_worker("worker", config),
            )
            await cluster.start(broker, worker, gateway)
            bus = await connect(cluster.url, name="bench")
            await until_ready(bus, workers=1)
            url = str(gateway.said["http"])
            about = ("--port", url.rpartition(":")[2], "--nats", cluster.url)
            about = (*about, "--streams", str(streams), "--ramp", str(RAMP_S))
            spread = _readers(cluster, "spread", *about, "--seconds", str(seconds))
            pids = {"nats-server": cluster.server.pid, "broker": broker.pid, "agent": worker.pid}
            pids["gateway"] = gateway.pid
            auth = {"Authorization": "Bearer sk-bench"}
            try:
                async with (
                    aiohttp.ClientSession(
                        url, headers=auth, connector=aiohttp.TCPConnector(limit=0)
                    ) as session,
                    Client(bus, lane="bench", config=ClientConfig()) as client,
                ):
                    found = await _under_load(session, client, spread, pids, seconds)
                bursts = _readers(cluster, "burst", *about, "--rounds", str(rounds))
                if rounds:
                    await bursts.start()
                    found.bursts = await _said(bursts, Bursts)
                return found
            finally:
                await bus.close()


def _readers(cluster: LocalCluster, mode: str, *args: str) -> Member:
    command = (sys.executable, "-m", "tests.bench.stream_readers", mode, *args)
    return cluster.add(f"readers-{mode}", command)


async def _said(readers: Member, kind: type[_T]) -> _T:
    """Read what some readers say at their end."""
    assert readers.process is not None
    assert readers.process.stdout is not None
    pieces = [piece async for piece in _pieces(readers.process.stdout)]
    code = await readers.ended()
    assert code == 0, readers.log.read_text()
    return msgspec.json.decode(b"".join(pieces), type=kind)


async def _pieces(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    # It is one line, longer than a reader of lines would take.
    while piece := await stream.read(65536):
        yield piece


async def _under_load(
    session: aiohttp.ClientSession,
    client: Client,
    readers: Member,
    pids: dict[str, int],
    seconds: float,
) -> Found:
    await readers.start()
    pids = {**pids, "readers": readers.pid}
    looks: list[Look] = []
    async with asyncio.TaskGroup() as group:
        looking = group.create_task(_look(pids, looks))
        said = group.create_task(_said(readers, Seen))
        said.add_done_callback(lambda _: looking.cancel())
        probes = await _probe(session, client, pids["gateway"], seconds)
        seen = await said
    return Found(seen, probes, Bursts(), seconds, looks)


async def _probe(
    session: aiohttp.ClientSession, client: Client, gateway: int, seconds: float
) -> Probes:
    """Probe at random instants, without waiting for the answers of earlier probes."""
    probes = Probes()
    drawn = random.Random(2)
    loop = asyncio.get_running_loop()
    ends_at_s = loop.time() + seconds
    async with asyncio.TaskGroup() as group:
        for number in itertools.count(1_000_000):
            await asyncio.sleep(drawn.expovariate(PROBES_S))
            if loop.time() >= ends_at_s:
                return probes
            body = a_body(number, PROBE_TOKENS)
            if number % 2:
                group.create_task(_probe_http(session, body, gateway, probes))
            else:
                group.create_task(_probe_direct(client, body, probes))
    return probes


async def _probe_http(
    session: aiohttp.ClientSession, body: dict[str, object], gateway: int, probes: Probes
) -> None:
    waited_before_s, began_s = waited_s(gateway), time.perf_counter()
    async with session.post("/v1/chat/completions", json=body) as answer:
        await answer.content.readline()
        probes.http_s.append(time.perf_counter() - began_s)
        probes.waits_s.append(waited_s(gateway) - waited_before_s)
        assert answer.status == 200, await answer.text()
        await answer.read()


async def _probe_direct(client: Client, body: dict[str, object], probes: Probes) -> None:
    probes.direct_s.append(await first_direct_s(client, body))


async def _look(pids: dict[str, int], looks: list[Look]) -> None:
    """Look at all processes each second, while they live."""
    with suppress(FileNotFoundError):  # The readers have ended.
        while True:
            look = Look(time.perf_counter(), taken_by(pids), resident_mib(pids["gateway"]))
            looks.append(look)
            await asyncio.sleep(1.0)


def _tell(found: Found, streams: int) -> None:
    seen, seconds = found.seen, found.seconds
    load = Path("/proc/loadavg").read_text().split()[0]
    print(f"{streams} streams, {seconds:.0f} s, load {load}")
    print(f"tokens a second and stream: {seen.tokens / seconds / streams:.1f}; "
          f"answers ended {seen.ended}, not whole: {seen.failed}")  # fmt: skip
    gaps = statistics.quantiles(seen.gaps_s, n=1000)
    stalls = sum(gap > STALL_S for gap in seen.gaps_s)
    print(f"between two tokens: p50 {gaps[499] * 1000:.0f} ms, p99 {gaps[989] * 1000:.0f} ms, "
          f"longest {max(seen.gaps_s) * 1000:.0f} ms; over {STALL_S:g} s: {stalls}")  # fmt: skip
    probes = found.probes
    _tell_added("spread", probes.http_s, probes.direct_s)
    waits = statistics.quantiles(probes.waits_s, n=100)
    print(f"the gateway had no core during a probe: p50 {waits[49] * 1000:.1f} ms, "
          f"p99 {waits[98] * 1000:.1f} ms")  # fmt: skip
    if found.bursts.http_s:
        _tell_added("all at once", found.bursts.http_s, found.bursts.direct_s)
    _tell_processes(found.looks, seen.tokens / seconds)


def _tell_processes(looks: Sequence[Look], tokens_s: float) -> None:
    first, last = looks[0], looks[-1]
    seconds = last.at_s - first.at_s
    for name in first.taken:
        taken = last.taken[name].since(first.taken[name])
        print(f"{name:>12}: {taken.cpu_s / seconds / tokens_s * 1e6:5.1f} us a token, "
              f"{taken.cpu_s / seconds * 100:5.1f} % of a core, "
              f"waited for one {taken.waited_s / seconds * 1000:5.0f} ms a second")  # fmt: skip
    memory = [look.memory_mib for look in looks]
    half = len(memory) // 2
    print(f"gateway's memory: {statistics.mean(memory[:half]):.1f} MiB at first, "
          f"{statistics.mean(memory[half:]):.1f} later, at most {max(memory):.1f}")  # fmt: skip


def _tell_added(name: str, http_s: Sequence[float], direct_s: Sequence[float]) -> None:
    for share in (50, 99):
        http, direct = (
            statistics.quantiles(values, n=100)[share - 1] * 1000 for values in (http_s, direct_s)
        )
        print(f"first token p{share}, {name}: over HTTP {http:.1f} ms, direct {direct:.1f} ms, "
              f"added {http - direct:.1f} ms ({len(http_s)} and {len(direct_s)})")  # fmt: skip


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description="Measure many streams through one gateway.")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    logs.set_up(role="bench")
    found = uvloop.run(measure(given.streams, given.seconds, given.rounds))
    _tell(found, given.streams)


if __name__ == "__main__":
    main()
