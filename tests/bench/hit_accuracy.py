"""How many prompt tokens we say are cached, and how many real llama.cpp engines find cached.

A whole cluster (NATS, broker, workers with llama.cpp on the tiny model) under several loads. What
is told is the broker's prediction at dispatch, of jobs that ran once, after the warm-up: summed
over the load, and the sum of the differences whichever their sign.

    python -m tests.bench.hit_accuracy [--loads demo,chats,...]
"""

import argparse
import asyncio
import random
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import uvloop

from broker.bus import logs
from broker.bus.nats import connect
from broker.sim.decisions import LoggedJob, Tally, read_jobs
from broker.wire.prefix import CLUSTER_SCOPE
from ops.cluster import LocalCluster
from ops.demo import setting
from ops.demo.run import start_members, until_ready
from ops.demo.scenario import load_scenario, plan_load
from producers.client import Client

WORKERS = 4
SLOTS = 6
BAND = 2
"""Standard: on a busy machine a request may wait for minutes, and the run goes on."""

TEXT = "abcdefghijklmnopqrstuvwxyz     "


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One load's outcome."""

    jobs: int
    prompt_tokens: int
    predicted_tokens: int
    cached_tokens: int
    error_tokens: int
    """Sum of the differences, whichever their sign."""

    @property
    def ratio(self) -> float:
        """Predicted ÷ cached; 0 where nothing was cached."""
        return self.predicted_tokens / self.cached_tokens if self.cached_tokens else 0.0

    @property
    def error_ratio(self) -> float:
        """Error ÷ cached; 0 where nothing was cached."""
        return self.error_tokens / self.cached_tokens if self.cached_tokens else 0.0


class Callers:
    """Whoever sends a load's requests."""

    def __init__(self, client: Client, rng: random.Random) -> None:
        self._client = client
        self.rng = rng

    def text(self, tokens: int) -> str:
        """Make text of so many tokens, which are bytes to the tiny model."""
        return "".join(self.rng.choices(TEXT, k=tokens))

    async def ask(self, messages: list[dict[str, str]], *, tokens_max: int = 32) -> str:
        """Send one chat and return its answer's text."""
        body = {"model": setting.MODEL, "messages": messages, "max_tokens": tokens_max}
        ticket = await self._client.submit(orjson.dumps(body), band=BAND, cache_scope=CLUSTER_SCOPE)
        record = await ticket.result(raise_for_kind=True)
        answer: dict[str, Any] = orjson.loads(record.body)
        return str(answer["choices"][0]["message"]["content"])


async def demo(callers: Callers) -> None:
    """Send the demo's requests at its times: 20 system prompts, of which a worker holds 6."""
    plan = plan_load(load_scenario(), model=setting.MODEL, bytes_per_token=1.0)
    async with asyncio.TaskGroup() as group:
        began_s = asyncio.get_running_loop().time()
        for chat in plan.chats:
            await asyncio.sleep(began_s + chat.at_s - asyncio.get_running_loop().time())
            group.create_task(callers.ask(orjson.loads(chat.body)["messages"]))


async def chats(callers: Callers, *, sessions: int = 16, turns: int = 12) -> None:
    """Hold conversations: each turn sends all before it, our answers too."""

    async def converse() -> None:
        messages = [{"role": "system", "content": callers.text(800)}]
        for _ in range(turns):
            messages.append({"role": "user", "content": callers.text(callers.rng.randint(20, 200))})
            answer = await callers.ask(messages, tokens_max=callers.rng.randint(8, 64))
            messages.append({"role": "assistant", "content": answer})
            await asyncio.sleep(callers.rng.expovariate(4.0))

    async with asyncio.TaskGroup() as group:
        for _ in range(sessions):
            group.create_task(converse())


async def crowded_chats(callers: Callers) -> None:
    """Hold more conversations than there are slots: most are pushed out between two turns."""
    await chats(callers, sessions=48, turns=8)


async def evictions(callers: Callers, *, requests: int = 300) -> None:
    """Send 60 prompts of various length and popularity, more than fit, among short ones."""
    prompts = [callers.text(callers.rng.randint(300, 2500)) for _ in range(60)]
    weights = [1 / (number + 1) for number in range(60)]
    async with asyncio.TaskGroup() as group:
        for _ in range(requests):
            await asyncio.sleep(callers.rng.expovariate(10.0))
            system = callers.rng.choices(prompts, weights)[0]
            if callers.rng.random() < 0.2:
                system = callers.text(40)
            question = callers.text(callers.rng.randint(10, 150))
            messages = [
                {"role": "system", "content": system},
                {"role": "user", "content": question},
            ]
            group.create_task(callers.ask(messages, tokens_max=callers.rng.randint(4, 48)))


async def full_slots(
    callers: Callers, *, requests: int = 400, callers_count: int = 40, prompts_count: int = 10
) -> None:
    """Ask with more callers than there are slots, so that a prompt takes what slot is left."""
    prompts = [callers.text(1500) for _ in range(prompts_count)]
    left = iter(range(requests))

    async def caller() -> None:
        for _ in left:
            messages = [
                {"role": "system", "content": callers.rng.choice(prompts)},
                {"role": "user", "content": callers.text(60)},
            ]
            await callers.ask(messages, tokens_max=callers.rng.randint(8, 64))

    async with asyncio.TaskGroup() as group:
        for _ in range(callers_count):
            group.create_task(caller())


LOADS: dict[str, Callable[[Callers], Awaitable[None]]] = {
    "demo": demo,
    "chats": chats,
    "crowded_chats": crowded_chats,
    "evictions": evictions,
    "full_slots": full_slots,
}


async def jobs_of(
    load: Callable[[Callers], Awaitable[None]],
    folder: Path,
    *,
    skip_jobs: int,
    workers: int = WORKERS,
    slots: int = SLOTS,
) -> list[LoggedJob]:
    """Run a load on a cluster of its own; returns its jobs after the first `skip_jobs`."""
    async with LocalCluster(folder) as cluster:
        wanted = setting.Setting(folder=folder, url=cluster.url, slots=slots)
        await start_members(cluster, wanted, workers=workers)
        bus = await connect(cluster.url, name="accuracy")
        try:
            await until_ready(bus, workers=workers)
            async with Client(bus, lane=setting.ONLINE_LANE) as client:
                await load(Callers(client, random.Random(11)))
        finally:
            await bus.close()
    return logged_jobs(folder)[skip_jobs:]


def logged_jobs(folder: Path) -> list[LoggedJob]:
    """Read the broker's decision log: jobs that ran once, to their end, in order of their end."""
    paths = sorted((folder / "state-broker-1").glob("decisions*.jsonl"))
    lines = (line for path in paths for line in path.read_bytes().splitlines())
    jobs = read_jobs(lines, Tally())
    return [job for job in jobs if job.counted_prompt_tokens and job.dispatches == 1]


def figures_of(jobs: list[LoggedJob]) -> Figures:
    """Add up."""
    return Figures(
        jobs=len(jobs),
        prompt_tokens=sum(job.counted_prompt_tokens for job in jobs),
        predicted_tokens=sum(job.predicted_hit_tokens for job in jobs),
        cached_tokens=sum(job.cached_tokens for job in jobs),
        error_tokens=sum(abs(job.predicted_hit_tokens - job.cached_tokens) for job in jobs),
    )


async def measure(names: list[str], *, skip_jobs: int, folder: Path | None = None) -> None:
    """Run loads and print their figures, and those of all together."""
    print(f"{'load':14} {'jobs':>5} {'prompt':>9} {'predicted':>9} {'cached':>9} ratio  error")
    all_jobs: list[LoggedJob] = []
    for name in names:
        with tempfile.TemporaryDirectory() as temporary:
            place = folder / name if folder else Path(temporary)
            jobs = await jobs_of(LOADS[name], place, skip_jobs=skip_jobs)
        all_jobs += jobs
        show(name, figures_of(jobs))
    show("all", figures_of(all_jobs))


def show(name: str, found: Figures) -> None:
    """Print a line of figures."""
    print(
        f"{name:14} {found.jobs:5} {found.prompt_tokens:9,} {found.predicted_tokens:9,}"
        f" {found.cached_tokens:9,} {found.ratio:5.2f} {found.error_ratio:6.1%}",
        flush=True,
    )


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description="Compare predicted with real cached tokens.")
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--skip", type=int, default=40, help="jobs of the warm-up")
    parser.add_argument("--folder", type=Path, help="keep logs there")
    given = parser.parse_args()
    logs.set_up(role="bench")
    uvloop.run(measure(given.loads.split(","), skip_jobs=given.skip, folder=given.folder))


if __name__ == "__main__":
    main()
