"""How long a small batch takes that is handed in just after a large one of its lane.

    python -m tests.bench.batch_beside --large 10000 --small 100

A real cluster (NATS server, broker, two workers with modelled engines of six slots, a gateway).
Hands a small batch in two seconds after a large one; with `--alone` the large one runs alone first.
Prints when each ended, counted from its own creation, and what its forecast said then.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import openai
from openai.types import Batch

from broker.bus.nats import connect
from ops.cluster import LocalCluster
from ops.demo.run import until_ready
from ops.demo.setting import Setting, write_config
from tests.batches import lines
from tests.cluster_batches import client_of, created, until_ended

LATER_S = 2.0
"""The small one comes so long after the large one."""

PATIENCE_S = 1800.0


async def ended(client: openai.AsyncOpenAI, batch: Batch, name: str) -> None:
    """Wait for a batch's end, and print how long it took since its creation."""
    began_s = time.monotonic()
    done = await until_ended(client, batch.id, patience_s=PATIENCE_S)
    took_s = time.monotonic() - began_s
    counts = done.request_counts
    assert counts is not None
    assert counts.completed == counts.total
    said = (batch.metadata or {}).get("inferlane_takes_s", "-")
    print(f"{name}: {counts.total:,} lines in {took_s:.1f} s (told {said} s)", flush=True)


async def measure(folder: Path, large: int, small: int, *, speed: float, alone: bool) -> None:
    """Print when both ended."""
    async with LocalCluster(folder) as cluster:
        config = write_config(Setting(folder=folder, url=cluster.url, engine="fake", speed=speed))
        members = [cluster.add_broker("broker-1", config)]
        members += [cluster.add_worker(f"worker-{number}", config) for number in (1, 2)]
        await cluster.start(*members)
        gateway = cluster.add_gateway("gateway-1", config)
        await gateway.start()
        bus = await connect(cluster.url, name="bench")
        await until_ready(bus, workers=2)
        async with client_of(gateway.said) as client:
            if alone:
                await ended(client, await created(client, lines(large)), "the large one alone")
            async with asyncio.TaskGroup() as group:
                first = await created(client, lines(large))
                group.create_task(ended(client, first, "the large one, with a small one beside it"))
                await asyncio.sleep(LATER_S)
                second = await created(client, lines(small))
                group.create_task(ended(client, second, "the small one"))
        await bus.close()


def main() -> None:
    """Measure one pair of sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", type=int, default=10_000)
    parser.add_argument("--small", type=int, default=100)
    parser.add_argument("--speed", type=float, default=1.0, help="of the modelled engines")
    parser.add_argument("--alone", action="store_true", help="run the large one alone first")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        running = measure(
            Path(folder), asked.large, asked.small, speed=asked.speed, alone=asked.alone
        )
        asyncio.run(running)


if __name__ == "__main__":
    main()
