"""A batch with one bad line under which one of two workers dies: all others end well.

    python -m tests.bench.batch_spoiled --lines 10000

A real cluster (NATS server, broker, two workers with modelled engines, a gateway). Fails unless the
bad line is the one line of the error file, and each other one stands once in the output.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path

from broker.bus.nats import connect
from ops.cluster import LocalCluster
from ops.demo.run import until_ready
from ops.demo.setting import Setting, write_config
from tests.cluster_batches import spoil

SLOTS = 200
SPEED = 50.0
"""Of the engines: fast enough that they are not what is waited for."""


async def measure(folder: Path, count: int, patience_s: float) -> None:
    """Run one size."""
    async with LocalCluster(folder) as cluster:
        setting = Setting(folder=folder, url=cluster.url, engine="fake", slots=SLOTS, speed=SPEED)
        config = write_config(setting)
        members = [cluster.add_broker("broker-1", config)]
        members += [cluster.add_worker(f"worker-{number}", config) for number in (1, 2)]
        await cluster.start(*members)
        bus = await connect(cluster.url, name="bench")
        await until_ready(bus, workers=2)
        await bus.close()
        found = await spoil(cluster, count, patience_s=patience_s)
    print(
        f"{count:,} lines, a worker killed after {found.killed_at_line:,}: {found.results:,} "
        f"results, {found.errors} error line; {found.seconds:.0f} s, "
        f"{count / found.seconds:,.0f} lines/s"
    )


def main() -> None:
    """Measure one size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--patience-s", type=float, default=900.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder), options.lines, options.patience_s))


if __name__ == "__main__":
    main()
