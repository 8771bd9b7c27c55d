"""A large batch whose runner is killed again and again: is a line lost, doubled, run twice?

    python -m tests.bench.batch_200k --lines 20000 --kills 5 --seed 1

A real NATS server, two gateways at a time, and a responder in place of broker and workers, each a
process of its own. The input comes and the output goes over HTTP, and the command line watches and
fetches. At points drawn at random, of the lines and then of a second, the gateway that runs the
batch is ended by `kill -9`; the other one takes over, and a third begins to stand by. One line in a
thousand is no JSON, and one in a thousand fails in its engine.

Fails unless each custom_id stands once in output and errors together, each bad line once in the
errors, and every process stayed under --mb-max (peaks are the kernel's own, VmHWM).
"""

import argparse
import asyncio
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import openai
import orjson

from broker.bus.base import Bus
from broker.bus.files import Files
from broker.bus.nats import connect
from ops.nats.server import NatsServer
from producers.batches.desk import Desk
from producers.batches.records import Batch
from producers.batches.shelf import Shelf
from tests.bench.batch_memory import (
    CONFIG,
    INFERLANE,
    command,
    lines,
    peak_mb,
    set_up,
    start,
)
from tests.builders import LANE

ENDPOINT = "/v1/chat/completions"

BAD_EVERY = 1000
"""One line in so many is no JSON."""

FAULTS = '{"fails": 0.001, "seed": 5}'
"""Of the responder: as many fail in their engine."""

KEY = "sk-of-the-bench"


class _Line(msgspec.Struct):
    """What is looked at of a result line."""

    id: str
    custom_id: str | None


def given(count: int) -> Iterator[bytes]:
    """An input's lines."""
    for number, line in enumerate(lines(count)):
        yield b"{no json\n" if number % BAD_EVERY == BAD_EVERY - 1 else line


@dataclass
class Gateways:
    """The one that runs the batch, and one that stands by."""

    config: Path
    alive: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])
    urls: list[str] = field(default_factory=list[str])
    peaks_mb: list[float] = field(default_factory=list[float])

    def add(self) -> None:
        """Start one; it is ready then."""
        process, said = start("ops.cli.main", "gateway", "--config", str(self.config))
        self.alive.append(process)
        self.urls.append(orjson.loads(said)["http"])

    def kill_first(self) -> None:
        """End the one that runs the batch as the kernel does."""
        self._note(process := self.alive.pop(0))
        self.urls.pop(0)
        process.kill()
        process.communicate()

    def close(self) -> None:
        """End all."""
        for process in self.alive:
            self._note(process)
            process.terminate()
            process.communicate()

    def _note(self, process: subprocess.Popen[bytes]) -> None:
        self.peaks_mb.append(peak_mb(process.pid))


async def brought_to_end(
    bus: Bus, batch: Batch, gateways: Gateways, watching: subprocess.Popen[bytes], points: list[int]
) -> float:
    """Kill whoever runs the batch at each point; return the peak of the command that watches."""
    chance = random.Random(len(points))
    peak = 0.0
    runner = 0
    async for now in Desk(bus, LANE).changes(batch.id):
        if watching.poll() is None:
            peak = max(peak, peak_mb(watching.pid))
        lease = now.lease.number if now.lease else runner
        if lease <= runner:
            continue  # The dead one's lease still runs.
        if len(gateways.alive) == 1 and runner:
            await asyncio.to_thread(gateways.add)
        if points and now.counts.ended >= points[0]:
            await asyncio.sleep(chance.random())
            runner = lease
            gateways.kill_first()
            found = await Shelf(bus, LANE, Files(bus, LANE)).get(batch.id)
            print(f"kill -9 at {found.counts.ended:,} lines, {found.status}", flush=True)
            points.pop(0)
    return peak


def check(paths: Iterable[Path], count: int) -> Counter[str]:
    """Each line once, in whatever file; return how many stand in which."""
    found: Counter[str] = Counter()
    ids: set[str] = set()
    wanted = {f"id-{number}" for number in range(count) if number % BAD_EVERY != BAD_EVERY - 1}
    for path in paths:
        with path.open("rb") as file:
            for text in file:
                line = msgspec.json.decode(text, type=_Line)
                assert line.id not in ids, f"{line.id} stands twice"
                ids.add(line.id)
                found[path.name] += 1
                if line.custom_id is None:
                    found["bad"] += 1
                else:
                    wanted.remove(line.custom_id)
    assert not wanted, f"{len(wanted)} lines are lost, one of them {min(wanted)}"
    assert found["bad"] == count // BAD_EVERY
    return found


def measure(server: NatsServer, folder: Path, options: argparse.Namespace) -> None:
    """Run one batch, and print what became of it."""
    count: int = options.lines
    asyncio.run(set_up(server.url))
    source, output, errors = (folder / f"{name}.jsonl" for name in ("in", "out", "err"))
    with source.open("wb") as file:
        file.writelines(given(count))
    config = folder / "inferlane.toml"
    config.write_text(CONFIG.format(url=server.url))
    chance = random.Random(options.seed)
    points = sorted(chance.randrange(count) for _ in range(options.kills))
    responder, _ = start("tests.responding", server.url, FAULTS)
    gateways = Gateways(config)
    gateways.add()
    at = ("--nats", server.url, "--lane", LANE)
    try:
        began_s = time.monotonic()
        client = openai.OpenAI(base_url=f"{gateways.urls[0]}/v1", api_key=KEY)
        with source.open("rb") as data:
            made = client.files.create(file=data, purpose="batch")
        uploaded_s = time.monotonic() - began_s
        batch = client.batches.create(
            input_file_id=made.id, endpoint=ENDPOINT, completion_window="24h"
        )
        size_mb = source.stat().st_size / 1e6
        print(f"{count:,} lines, {size_mb:.0f} MB, uploaded in {uploaded_s:.1f} s", flush=True)
        watch = [*INFERLANE, "batch", "watch", batch.id, "--quiet", *at]
        watching = subprocess.Popen(watch, stdout=subprocess.PIPE)
        cli_mb = asyncio.run(_run(server.url, batch.id, gateways, watching, points))
        run_s = time.monotonic() - began_s - uploaded_s
        watching.communicate()
        _, fetch_mb, fetch_s = command(
            "batch",
            "results",
            batch.id,
            "--output",
            str(output),
            "--errors",
            str(errors),
            *at,
            code=1,
        )
        found = check((output, errors), count)
        client = openai.OpenAI(base_url=f"{gateways.urls[0]}/v1", api_key=KEY)
        ended = client.batches.retrieve(batch.id)
        assert ended.output_file_id
        over_http = folder / "http.jsonl"
        with client.files.with_streaming_response.content(ended.output_file_id) as content:
            content.stream_to_file(over_http)
        assert over_http.read_bytes() == output.read_bytes()
    finally:
        gateways.close()
        responder.terminate()
        said = responder.communicate()[0]
    ran = orjson.loads(said.splitlines()[-1])
    print(
        f"{ended.status}: {found['out.jsonl']:,} in the output, {found['err.jsonl']:,} in the "
        f"errors, each once; {ran['runs']:,} runs of {ran['jobs']:,} jobs\n"
        f"run {run_s:.0f} s, {count / run_s:,.0f} lines/s; fetched in {fetch_s:.1f} s\n"
        f"peaks: gateways {', '.join(f'{peak:.0f}' for peak in gateways.peaks_mb)} MB; command "
        f"line {cli_mb:.0f} MB watching, {fetch_mb:.0f} MB fetching; nats-server "
        f"{peak_mb(server.pid):.0f} MB"
    )
    assert max(*gateways.peaks_mb, cli_mb, fetch_mb) < options.mb_max
    assert ran["runs"] == ran["jobs"], "a line was run twice"


async def _run(
    url: str,
    batch_id: str,
    gateways: Gateways,
    watching: subprocess.Popen[bytes],
    points: list[int],
) -> float:
    bus = await connect(url, name="bench")
    await asyncio.to_thread(gateways.add)
    batch = await Shelf(bus, LANE, Files(bus, LANE)).get(batch_id)
    try:
        return await brought_to_end(bus, batch, gateways, watching, points)
    finally:
        await bus.close()


def main() -> None:
    """Measure one size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mb-max", type=float, default=300.0)
    options = parser.parse_args()
    with NatsServer() as server, tempfile.TemporaryDirectory() as folder:
        measure(server, Path(folder), options)


if __name__ == "__main__":
    main()
