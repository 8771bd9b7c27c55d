"""How long a full lane takes to cancel, and what the broker's other work feels of it.

    python -m tests.bench.cancel_lane --jobs 100000

One real cluster with a modelled engine: so many batch jobs of one lane wait, jobs of another lane
come all the while, and the first lane is cancelled. Prints jobs a second, the broker's loop lag by
its own metrics, and the online jobs' latency without and with the cancellation beside them.
"""

import argparse
import asyncio
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from broker.bus.nats import NatsBus, connect
from broker.wire import subjects
from broker.wire.codec import encode
from broker.wire.ids import BATCH_BAND
from ops.cluster import LocalCluster, Member
from ops.demo.run import until_ready
from ops.demo.setting import Setting, write_config
from producers.client import Client
from tests.builders import a_job

LANE, OTHER_LANE = "offline", "online"
AT_ONCE = 512
Counts = dict[str, dict[str, float]]
_LAG = re.compile(r'inferlane_loop_(lag|held)_seconds_bucket\{le="([^"]+)"\} ([0-9.e+]+)')


async def fill(bus: NatsBus, jobs: int) -> None:
    """Queue batch jobs of about 2 KB."""
    room = asyncio.Semaphore(AT_ONCE)
    template = a_job(lane=LANE, band=BATCH_BAND, output_tokens_max=2000)
    body = template.body + b" " * 1500

    async def one(number: int) -> None:
        async with room:
            job = a_job(id=f"line-{number}", lane=LANE, band=BATCH_BAND, body=body)
            await bus.append(subjects.jobs(LANE, BATCH_BAND, "tiny"), encode(job))

    for begin in range(0, jobs, 5000):
        await asyncio.gather(*(one(number) for number in range(begin, min(begin + 5000, jobs))))


async def lag_counts(url: str) -> Counts:
    """The broker's looks at its loop so far, by upper bound: how late, and held by itself."""
    counts: Counts = {"lag": {}, "held": {}}
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        for kind, bound, count in _LAG.findall(await answer.text()):
            counts[kind][bound] = float(count)
    return counts


def lag(before: Counts, after: Counts) -> str:
    """Shares of the loop's looks by how late they came, and by how much of that was its own work.

    The latter is on the processor time of the loop's thread, the former on the clock: on a machine
    that others use too they differ.
    """
    told = ""
    for kind, counts in after.items():
        looks = {bound: count - before[kind][bound] for bound, count in counts.items()}
        total = max(1.0, looks["+Inf"])
        shares = [f"{100 * count / total:.2f} % <= {bound} s" for bound, count in looks.items()]
        told += f"\n  {kind:>5}: {total:.0f} looks, {', '.join(shares[-7:-1])}"
    return told


async def online_ms(client: Client, stop: asyncio.Event) -> list[float]:
    """Latencies of small online jobs, one after the other, until told to stop."""
    took_ms: list[float] = []
    while not stop.is_set():
        began_s = time.perf_counter()
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        ticket = await client.submit(body, band=1)
        await ticket.result(30)
        took_ms.append((time.perf_counter() - began_s) * 1e3)
    return sorted(took_ms)


async def beside(client: Client, work: "asyncio.Task[Any]") -> list[float]:
    """Online latencies while something else is done."""
    stop = asyncio.Event()
    measuring = asyncio.create_task(online_ms(client, stop))
    await work
    stop.set()
    return await measuring


def told(took_ms: list[float]) -> str:
    """Median, p99 and worst."""
    p50_ms, p99_ms = (took_ms[int((len(took_ms) - 1) * share)] for share in (0.5, 0.99))
    worst_ms = took_ms[-1]
    return f"{len(took_ms)} jobs, p50 {p50_ms:.1f}, p99 {p99_ms:.1f}, worst {worst_ms:.1f} ms"


async def measure(jobs: int) -> None:
    """Fill, cancel, and print what it took."""
    with tempfile.TemporaryDirectory() as folder:
        async with LocalCluster(Path(folder)) as cluster:
            setting = Setting(folder=Path(folder), url=cluster.url, engine="fake")
            config = write_config(setting)
            broker = cluster.add_broker("broker-1", config)
            await cluster.start(broker, cluster.add_worker("worker-1", config))
            bus = await connect(cluster.url, name="bench")
            await until_ready(bus, workers=1)
            began_s = time.perf_counter()
            await fill(bus, jobs)
            filled_s = jobs / (time.perf_counter() - began_s)
            url = str(broker.said["http"])
            async with (
                Client(bus, lane=LANE) as owner,
                Client(bus, lane=OTHER_LANE) as online,
            ):
                at_first = await lag_counts(url)
                alone_ms = await beside(online, asyncio.create_task(asyncio.sleep(10.0)))
                before = await lag_counts(url)
                began_s = time.perf_counter()
                cancelling = asyncio.create_task(_cancel(owner))
                beside_ms = await beside(online, cancelling)
                took_s = time.perf_counter() - began_s
                after = await lag_counts(url)
            ended_s = await until_empty(bus) + took_s
            records = (await bus.stream_state(subjects.results_stream(LANE))).messages
            print(
                f"stored {filled_s:,.0f} jobs/s, cancelled {jobs / took_s:,.0f}/s in {took_s:.1f} s"
            )
            print(f"told {cancelling.result():,} jobs; {records:,} records, one a job")
            print(f"the last message left after {ended_s:.1f} s; broker {broker_mb(broker)} MB")
            print(f"loop lag alone:  {lag(at_first, before)}")
            print(f"loop lag beside: {lag(before, after)}")
            print(f"online alone:  {told(alone_ms)}")
            print(f"online beside: {told(beside_ms)}")
            await bus.close()


async def _cancel(owner: Client) -> int:
    return (await owner.cancel_jobs()).jobs


async def until_empty(bus: NatsBus) -> float:
    """Wait until no job of the lane has a message any more; return how long that took."""
    began_s = time.perf_counter()
    stream = subjects.jobs_stream(LANE, BATCH_BAND)
    while (await bus.stream_state(stream)).messages:
        await asyncio.sleep(0.1)
    return time.perf_counter() - began_s


def broker_mb(broker: Member) -> int:
    """Most memory that the broker had so far."""
    status = Path(f"/proc/{broker.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Cancel a full lane.")
    parser.add_argument("--jobs", type=int, default=100_000)
    uvloop.run(measure(parser.parse_args().jobs))
