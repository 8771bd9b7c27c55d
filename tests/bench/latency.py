"""What the broker adds to an online job at low load, over calling the engine directly.

One client, one job at a time; direct calls and brokered jobs take turns, so that what else runs
here slows both. The engine answers at once: what is left is the way there and back, in real
processes
(client → NATS → broker → NATS → agent → engine, and back with a durable record).

    python -m tests.bench.latency [--jobs 400]
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import aiohttp
import uvloop

from broker.bus import logs
from broker.bus.nats import connect
from ops.cluster import LocalCluster
from ops.demo.run import until_ready
from producers.client import Client
from tests.engines import a_bad_engine

WARM_UP = 20

CONFIG = """
[nats]
url = "{url}"
[broker]
state_dir = "{folder}"
http_port = 0
[policy]
models = ["tiny"]
[[policy.lanes]]
name = "bench"
[worker]
worker = "worker"
engine = "openai"
base_url = "{engine}"
slots = 8
models = {{ tiny = "tiny" }}
"""

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


async def measure(jobs: int) -> None:
    """Measure and print."""
    async with a_bad_engine() as engine:
        with tempfile.TemporaryDirectory() as folder:
            async with LocalCluster(Path(folder)) as cluster:
                config = Path(folder) / "inferlane.toml"
                text = CONFIG.format(url=cluster.url, folder=folder, engine=engine.url)
                config.write_text(text)
                members = [cluster.add_broker("b", config), cluster.add_worker("w", config)]
                await cluster.start(*members)
                bus = await connect(cluster.url, name="bench")
                await until_ready(bus, workers=1)
                async with Client(bus, lane="bench") as client, aiohttp.ClientSession() as session:
                    url = f"{engine.url}/v1/chat/completions"
                    direct, brokered = await _take_turns(client, session, url, jobs)
                await bus.close()
    _tell(direct, brokered)


async def _take_turns(
    client: Client, session: aiohttp.ClientSession, url: str, jobs: int
) -> tuple[list[float], list[float]]:
    direct: list[float] = []
    brokered: list[float] = []
    for number in range(jobs + WARM_UP):
        began_s = time.perf_counter()
        async with session.post(url, json={**BODY, "stream": True}) as response:
            await response.read()
        between_s = time.perf_counter()
        ticket = await client.submit(BODY, band=1)
        await ticket.result()
        if number >= WARM_UP:
            direct.append(between_s - began_s)
            brokered.append(time.perf_counter() - between_s)
    return direct, brokered


def _tell(direct: list[float], brokered: list[float]) -> None:
    for name, share in (("p50", 50), ("p99", 99)):
        base, ours = (
            statistics.quantiles(values, n=100)[share - 1] * 1000 for values in (direct, brokered)
        )
        print(f"{name}: engine alone {base:.2f} ms, through the broker {ours:.2f} ms, "
              f"added {ours - base:.2f} ms")  # fmt: skip


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description="Measure what the broker adds at low load.")
    parser.add_argument("--jobs", type=int, default=400)
    given = parser.parse_args()
    logs.set_up(role="bench")
    uvloop.run(measure(given.jobs))


if __name__ == "__main__":
    main()
