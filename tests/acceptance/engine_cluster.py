"""A real cluster whose workers stand beside engines that the test itself serves, and may spoil."""

import asyncio
import re
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from broker.bus.nats import NatsBus, connect
from broker.wire import subjects
from broker.wire.codec import decode
from broker.wire.messages import Kind, TerminalRecord
from ops.cluster import LocalCluster, Member
from ops.demo.run import until_ready
from producers.client import Client
from producers.config import ClientConfig
from producers.ticket import Ticket
from tests.acceptance.audit import Audit
from tests.engines import BadEngine, Behaviour, a_bad_engine

LANE = "online"
NARROW = "narrow"
"""A lane with one job in flight at a time, and no band 0."""

SCARCE = "scarce"
"""A lane whose results may take SCARCE_BYTES."""

SCARCE_BYTES = 8000

ODD_LANE = "JOBS_x"
"""A lane called as if it were a stream."""

ODD_MODEL = "org/Big-Model:70b.v2"
WORKERS = 2
SLOTS = 4
WINDOW_JOBS = 8
STALL_S = 1.5
FAILURES_MAX = 3

IMPATIENT = ClientConfig(watchdog_s=0.5, sweep_s=0.1, lookup_retry_s=0.2)

_CONFIG = """
[nats]
url = "{url}"

[broker]
name = "broker-1"
state_dir = "{folder}/state"
http_port = 0
leader_ttl_s = 2.0
window_online_jobs = {window}

[policy]
models = ["tiny", "{odd_model}"]

[policy.leases]
stall_s = {stall_s}
retry_base_s = {rest_s}
retry_s_max = {rest_s_max}
failures_max = {failures_max}

[policy.breaker]
failures_max = {breaker_failures_max}

[[policy.lanes]]
name = "{lane}"

[[policy.lanes]]
name = "{odd_lane}"

[[policy.lanes]]
name = "{narrow}"
models = ["tiny"]
bands = [1, 2, 3]

[[policy.lanes]]
name = "{scarce}"

[[policy.quotas]]
lane = "{narrow}"
inflight_jobs_max = 1

[[policy.quotas]]
lane = "{scarce}"
result_bytes_max = {scarce_bytes}
"""


def a_chat(content: str = "hello", **fields: object) -> dict[str, Any]:
    """A chat; `behaviour` says what the engine makes of it, `tag` finds it there."""
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 8,
        **fields,
    }


@dataclass(slots=True)
class EngineCluster:
    """The cluster, its engines, and an auditor."""

    cluster: LocalCluster
    bus: NatsBus
    audit: Audit
    engines: tuple[BadEngine, ...]

    @asynccontextmanager
    async def client(self, lane: str = LANE, **fields: Any) -> AsyncGenerator[Client]:
        """Open a client of a lane."""
        async with Client(self.bus, lane=lane, config=IMPATIENT, **fields) as client:
            yield client

    async def counts(self) -> Counter[str]:
        """Read the broker's /metrics: `name{label="value"}` to number."""
        url = str(self.cluster.members["broker-1"].said["http"])
        async with aiohttp.ClientSession(url) as session, session.get("/metrics") as answer:
            text = await answer.text()
        found = re.findall(r"^(inferlane_\S+) ([0-9.e+-]+)$", text, re.MULTILINE)
        return Counter({name: int(float(value)) for name, value in found})

    async def until_counted(self, before: Counter[str], name: str, more: int = 1) -> None:
        """Wait until a counter has risen by `more`, and check that it rose no further."""
        async with asyncio.timeout(10):
            while (await self.counts())[name] < before[name] + more:
                await asyncio.sleep(0.05)
        assert (await self.counts())[name] == before[name] + more, name

    async def record(self, lane: str, job_id: str) -> TerminalRecord:
        """Wait for the terminal record under this id."""
        stream, subject = subjects.results_stream(lane), subjects.result(lane, job_id)
        async with asyncio.timeout(20):
            while not await self.bus.subject_counts(stream, subject=subject):
                await asyncio.sleep(0.02)
        return decode((await self.bus.last_message(stream, subject)).data, TerminalRecord)

    async def unpulled(self, lane: str, band: int, model: str) -> int:
        """Count a queue's messages that the broker has not pulled."""
        stream, consumer = subjects.jobs_stream(lane, band), subjects.job_consumer(band, model)
        return (await self.bus.consumer_state(stream, consumer)).pending

    async def lives_on(self, *lanes: str) -> None:
        """Check that a good job completes right now, that queues are empty, records single."""
        for lane in lanes or (LANE,):
            async with self.client(lane) as client, asyncio.timeout(20):
                ticket = await client.submit(a_chat("are you well?"))
                record = await ticket.result()
            assert record.kind is Kind.COMPLETED, record.message
            await self.audit.until_empty(lane)
        counts = await self.counts()
        assert not [name for name in counts if name.startswith("inferlane_loop_errors_total")]

    def runs(self, tag: str) -> int:
        """Count the engines' requests that carry this tag."""
        return len(self.seen(tag))

    def seen(self, tag: str) -> list[dict[str, Any]]:
        """Bodies of the engines' requests that carry this tag."""
        bodies = [seen.body for engine in self.engines for seen in engine.seen]
        return [body for body in bodies if body.get("tag") == tag]

    @property
    def aborted(self) -> int:
        """Requests whose caller went away before the end, in all engines."""
        return sum(engine.aborted for engine in self.engines)

    async def until_idle(self) -> None:
        """Wait until no engine has a request."""
        for engine in self.engines:
            await engine.until(lambda engine=engine: engine.running == 0)

    @contextmanager
    def all_engines(self, behaviour: Behaviour) -> Generator[None]:
        """Spoil all engines for a while."""
        for engine in self.engines:
            engine.behaviour = behaviour
        try:
            yield
        finally:
            for engine in self.engines:
                engine.behaviour = Behaviour.FINE

    @contextmanager
    def one_engine(self, number: int, behaviour: Behaviour) -> Generator[None]:
        """Spoil one engine for a while."""
        self.engines[number].behaviour = behaviour
        try:
            yield
        finally:
            self.engines[number].behaviour = Behaviour.FINE

    @asynccontextmanager
    async def talking(self, *, tokens: int = 1_000_000) -> AsyncGenerator[None]:
        """Let SLOW answers go on, ten tokens a second, so that they never stall."""

        async def talk() -> None:
            while True:
                for engine in self.engines:
                    for _ in range(engine.running):
                        engine.let_token_go()
                await asyncio.sleep(0.1)

        for engine in self.engines:
            engine.tokens = tokens
        async with asyncio.TaskGroup() as group:
            talker = group.create_task(talk())
            try:
                yield
            finally:
                talker.cancel()
                for engine in self.engines:
                    engine.tokens = 4
                    engine.hold_tokens()

    def talk_to_the_end(self, *, tokens: int) -> None:
        """Let SLOW answers send so many tokens at once."""
        for engine in self.engines:
            for _ in range(tokens):
                engine.let_token_go()


async def ends(tickets: Sequence[Ticket], *, timeout_s: float = 30.0) -> list[TerminalRecord]:
    """Wait for the records of all."""
    async with asyncio.timeout(timeout_s):
        return [await ticket.result(raise_for_kind=False) for ticket in tickets]


@asynccontextmanager
async def an_engine_cluster(
    folder: Path, *, rest_s: float = 0.1, stall_s: float = STALL_S, breaker_failures_max: int = 0
) -> AsyncGenerator[EngineCluster]:
    """Run NATS, a broker and two workers until the block ends.

    `rest_s` passes between a job's first failure and its next try. Workers have no breakers unless
    told otherwise: with them, jobs that spoil their engines would wait for each other.
    """
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(a_bad_engine()) for _ in range(WORKERS)]
        cluster = await stack.enter_async_context(LocalCluster(folder))
        times = {"rest_s": rest_s, "stall_s": stall_s}
        config = _write_config(
            folder, cluster.url, **times, breaker_failures_max=breaker_failures_max
        )
        members = [cluster.add_broker("broker-1", config)]
        for number, engine in enumerate(engines, start=1):
            engine.models = ("tiny", ODD_MODEL)
            members.append(_add_worker(cluster, f"worker-{number}", config, engine))
        await cluster.start(*members)
        bus = await connect(cluster.url, name="test")
        stack.push_async_callback(bus.close)
        await until_ready(bus, workers=len(engines))
        audit = await Audit(bus).begin()
        stage = EngineCluster(cluster, bus, audit, tuple(engines))
        yield stage


def _write_config(
    folder: Path, url: str, *, rest_s: float, stall_s: float, breaker_failures_max: int
) -> Path:
    path = folder / "inferlane.toml"
    path.write_text(
        _CONFIG.format(
            url=url,
            folder=folder,
            window=WINDOW_JOBS,
            odd_model=ODD_MODEL,
            stall_s=stall_s,
            rest_s=rest_s,
            rest_s_max=5 * rest_s,
            failures_max=FAILURES_MAX,
            breaker_failures_max=breaker_failures_max,
            lane=LANE,
            odd_lane=ODD_LANE,
            narrow=NARROW,
            scarce=SCARCE,
            scarce_bytes=SCARCE_BYTES,
        )
    )
    return path


def _add_worker(cluster: LocalCluster, name: str, config: Path, engine: BadEngine) -> Member:
    command = (sys.executable, "-m", "worker_agent.main", "--config", str(config))
    flags = ("--worker", name, "--engine", "openai", "--base-url", engine.url)
    return cluster.add(name, (*command, *flags, "--slots", str(SLOTS)))
