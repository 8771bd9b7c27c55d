"""Three servers: producers, broker and agents ride through the death of the one that leads."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import orjson
import pytest
from msgspec.structs import replace

from broker.bus.base import BusError
from broker.bus.nats import NatsBus, connect
from broker.core.policy import LanePolicy
from broker.engine_model.profile import DEMO
from broker.service.decision_log import DecisionLog
from broker.service.main import Broker
from broker.service.metrics import Metrics
from broker.wire import subjects
from broker.wire.messages import Kind
from ops.nats.server import NatsServer
from producers.client import Client
from producers.ticket import Ticket
from tests.agents import a_config as a_worker_config
from tests.builders import LANE, MODEL
from tests.clusters import a_chat
from tests.integration.test_nats_cluster import NODES, a_node, eventually, free_ports
from tests.leaders import a_config
from worker_agent.agent import Agent
from worker_agent.engine.base import EngineOutput, EngineRequest
from worker_agent.engine.fake import FakeEngine
from worker_agent.heartbeat import Pulse, Report

JOBS = 24
"""Submitted before the kill, and as many right after it."""

LEADER_TTL_S = 15.0
"""As design and configuration say for three servers: their own elections take 4 to 9 s."""


class CountingEngine(FakeEngine):
    """A modelled engine that counts how often each job runs."""

    runs: Counter[str]

    def run(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """Count, and run."""
        self.runs[request.request_id] += 1
        return super().run(request)


class Cluster:
    """Three servers, and what runs on them in this process."""

    def __init__(self, stack: AsyncExitStack, servers: list[NatsServer], folder: Path) -> None:
        self._stack = stack
        self.servers = servers
        self._folder = folder
        self.runs: Counter[str] = Counter()

    async def bus(self, name: str) -> NatsBus:
        """A connection that knows all servers."""
        bus = await connect([one.url for one in self.servers], name=name)
        self._stack.push_async_callback(bus.close)
        return bus

    async def broker(self) -> Broker:
        """Start a broker, and wait until it leads."""
        config = a_config(lanes=(LanePolicy(name=LANE),), leader_ttl_s=LEADER_TTL_S)
        config = replace(config, nats=replace(config.nats, replicas=NODES))
        log = DecisionLog(self._folder, file_bytes_max=0, files_max=1)
        metrics = Metrics(lanes=[LANE], models=[MODEL])
        broker = Broker(await self.bus("broker"), config, metrics=metrics, log=log)
        await broker.prepare()
        self._keep(asyncio.create_task(broker.run()))
        async with asyncio.timeout(30):
            while broker.leadership is None or not broker.leadership.ready:
                await asyncio.sleep(0.02)
        return broker

    async def worker(self, name: str) -> None:
        """Start an agent with a modelled engine."""
        engine = CountingEngine(DEMO, models=(MODEL,), slots=4, speed=4.0)
        engine.runs = self.runs
        await engine.start()
        self._stack.push_async_callback(engine.stop)
        agent = Agent(
            config=a_worker_config(worker=name, heartbeat_s=0.5, retry_s_max=0.5),
            bus=await self.bus(name),
            engine=engine,
        )

        async def fetch(sent_number: int) -> Report:
            return agent.report(sent_number)

        beat = await self.bus(f"{name}-beat")
        pulse = Pulse(beat, fetch, worker=name, interval_s=0.5, stuck_s_max=60.0)
        agent.on_urgent = pulse.wake
        self._keep(asyncio.create_task(agent.run()))
        self._keep(asyncio.create_task(pulse.run()))
        await agent.up.wait()

    def _keep(self, task: asyncio.Task[None]) -> None:
        async def end() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self._stack.push_async_callback(end)


@asynccontextmanager
async def a_cluster(folder: Path) -> AsyncGenerator[Cluster]:
    """Three servers that know each other; all ends with the block."""
    ports = free_ports(NODES)
    servers = [a_node(number, ports) for number in range(NODES)]
    await asyncio.gather(*(asyncio.to_thread(server.start) for server in servers))
    try:
        async with AsyncExitStack() as stack:
            yield Cluster(stack, servers, folder)
    finally:
        for server in servers:
            server.kill()
            server.close()


async def leader_of(bus: NatsBus, stream: str) -> int:
    """Number of the server that leads a stream."""
    told = orjson.loads((await bus.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout_s=5)).data)
    return int(told["cluster"]["leader"].removeprefix("node-"))


async def submitted(client: Client, first: int) -> list[Ticket]:
    """Submit jobs under ids of their own, all at once: each goes on until it is stored."""
    ids = [f"job-{number}" for number in range(first, first + JOBS)]
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(client.submit(a_chat(max_tokens=60), band=2, job_id=one))
            for one in ids
        ]
    return [task.result() for task in tasks]


@pytest.mark.timeout(120)
async def test_the_death_of_the_leading_server_costs_no_job_and_no_second_run(
    tmp_path: Path,
) -> None:
    """The server that leads the lane's jobs is killed while half run and half are submitted.

    Each is sent under the same message id until its word comes, each ends once, none runs twice,
    and the broker keeps its lead: the election is shorter than its key's life.
    """
    async with a_cluster(tmp_path) as cluster:
        broker = await cluster.broker()
        for name in ("w1", "w2"):
            await cluster.worker(name)
        leadership = broker.leadership
        bus = await cluster.bus("test")
        async with Client(await cluster.bus("client"), lane=LANE) as client:
            tickets = await submitted(client, 0)
            number = await leader_of(bus, subjects.jobs_stream(LANE, 2))
            await asyncio.to_thread(cluster.servers[number].kill)
            tickets += await submitted(client, JOBS)
            async with asyncio.timeout(60):
                kinds = {(await ticket.result(raise_for_kind=False)).kind for ticket in tickets}
        assert kinds == {Kind.COMPLETED}
        assert {ticket.submission for ticket in tickets} == {0}
        assert set(cluster.runs.values()) == {1}
        assert len(cluster.runs) == 2 * JOBS
        assert broker.leadership is leadership

        async def is_empty() -> bool:
            return (await bus.stream_state(subjects.jobs_stream(LANE, 2))).messages == 0

        await eventually(is_empty)
        records = await _records(bus)
        assert sorted(records) == sorted(f"job-{number}" for number in range(2 * JOBS))


async def _records(bus: NatsBus) -> list[str]:
    async with asyncio.timeout(20):
        while True:
            try:
                found = [one async for one in bus.messages(subjects.results_stream(LANE))]
            except BusError:
                await asyncio.sleep(0.1)
            else:
                return [one.subject.rpartition(".")[2] for one in found]
