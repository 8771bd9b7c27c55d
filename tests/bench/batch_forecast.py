"""How well batches' forecasts come true: what was told, over what it took.

    python -m tests.bench.batch_forecast --lines 600

A real cluster (NATS server, broker, two workers with modelled engines of six slots, a gateway). One
batch after the other: the first on an idle cluster that has seen none, the next with its pace
known, one beside people who chat, one more beside them, and two short ones while a long one runs,
whose window ends later or first. The engines are slow, so that what else this machine does changes
little. For each: the forecast at its creation, and those when a tenth, a quarter and a half of its
lines had ended, each over the time it then took. 1.0 is exact; below, it took longer than was told.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import openai
from openai.types import Batch

from broker.bus.base import Bus
from broker.bus.nats import connect
from ops.cluster import LocalCluster
from ops.demo.run import until_ready
from ops.demo.setting import MODEL, ONLINE_LANE, Setting, write_config
from producers.client import Client
from tests.batches import lines
from tests.cluster_batches import ENDED, client_of, created

PEOPLE = 4
"""Chats at once: a third of the cluster's slots."""

SPEED = 0.3
"""Of the engines: so slow that they, and not this machine, are what is waited for."""

LOOK_S = 0.25

SHARES = (0.1, 0.25, 0.5)
"""Parts of a batch's lines after which its forecast is looked at."""


@dataclass(frozen=True, slots=True)
class Look:
    """What was told of a batch at a time."""

    at_s: float
    ended: int
    takes_s: float | None


def look_of(batch: Batch) -> Look:
    """What a batch tells now."""
    counts = batch.request_counts
    told = (batch.metadata or {}).get("inferlane_takes_s")
    ended = counts.completed + counts.failed if counts else 0
    return Look(time.monotonic(), ended, None if told is None else float(told))


async def followed(client: openai.AsyncOpenAI, batch: Batch) -> list[Look]:
    """All looks at a batch until its end."""
    looks = [look_of(batch)]
    while (now := await client.batches.retrieve(batch.id)).status not in ENDED:
        looks.append(look_of(now))
        await asyncio.sleep(LOOK_S)
    assert now.status == "completed"
    return [*looks, look_of(now)]


def told(name: str, count: int, looks: list[Look]) -> str:
    """A row of the table."""
    end_s = looks[-1].at_s
    points = [looks[0]]
    points += [next(look for look in looks if look.ended >= share * count) for share in SHARES]
    ratios = [
        "-" if look.takes_s is None else f"{look.takes_s / max(end_s - look.at_s, 0.001):.2f}"
        for look in points
    ]
    return f"| {name} | {count:,} | {end_s - looks[0].at_s:.0f} s | {' | '.join(ratios)} |"


@asynccontextmanager
async def people(bus: Bus) -> AsyncGenerator[None]:
    """Some chat all the time."""

    async def chat(client: Client, number: int) -> None:
        messages = [{"role": "user", "content": f"Hello, I am {number}."}]
        body: dict[str, object] = {"model": MODEL, "messages": messages, "max_tokens": 16}
        while True:
            await (await client.submit(body)).result()

    async with Client(bus, lane=ONLINE_LANE) as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(chat(client, number)) for number in range(PEOPLE)]
        yield
        for task in tasks:
            task.cancel()


async def rows(client: openai.AsyncOpenAI, bus: Bus, count: int) -> AsyncGenerator[str]:
    """Run all loads, one after the other."""

    async def run(name: str, size: int, *, window: str = "24h") -> str:
        batch = await created(client, lines(size), window=window)
        return told(name, size, await followed(client, batch))

    yield await run("idle, the first batch ever", count)
    yield await run("idle, the next", count)
    async with people(bus):
        yield await run(f"{PEOPLE} people chat; the batch before was alone", count)
        yield await run(f"{PEOPLE} people chat, as beside the batch before", count)
    ahead = await created(client, lines(2 * count))
    while look_of(await client.batches.retrieve(ahead.id)).ended < count / 10:
        await asyncio.sleep(LOOK_S)
    yield await run("a long one runs; its window ends later", count // 4, window="1h")
    yield await run("a long one runs; its window ends first", count // 4)


async def measure(folder: Path, count: int) -> None:
    """Print the table."""
    async with LocalCluster(folder) as cluster:
        config = write_config(Setting(folder=folder, url=cluster.url, engine="fake", speed=SPEED))
        members = [cluster.add_broker("broker-1", config)]
        members += [cluster.add_worker(f"worker-{number}", config) for number in (1, 2)]
        await cluster.start(*members)
        gateway = cluster.add_gateway("gateway-1", config)
        await gateway.start()
        bus = await connect(cluster.url, name="bench")
        await until_ready(bus, workers=2)
        heads = [f"at {share:.0%}" for share in SHARES]
        print(f"| load | lines | took | at creation | {' | '.join(heads)} |", flush=True)
        print("|---" * (4 + len(heads)) + "|")
        async with client_of(gateway.said) as client:
            async for row in rows(client, bus, count):
                print(row, flush=True)
        await bus.close()


def main() -> None:
    """Measure one size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=600)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder), parser.parse_args().lines))


if __name__ == "__main__":
    main()
