"""A whole cluster in one process: brokers, agents with modelled engines, clients, one server.

    async with a_cluster(tmp_path) as cluster:
        broker = await cluster.start_broker("b1")
        await cluster.start_worker("w1")
        async with cluster.client() as client: ...

Everything runs on real time, impatiently. A broker that is killed is gone as after `kill -9`: its
link is cut before its task ends, so nothing of its end reaches anybody.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from broker.bus.base import BusError, NotFound
from broker.bus.memory import MemoryBus
from broker.service.config import Config
from broker.service.decision_log import DecisionLog
from broker.service.leadership import Leadership
from broker.service.main import Broker
from broker.service.metrics import Metrics
from broker.wire import subjects
from broker.wire.codec import decode
from broker.wire.messages import TerminalRecord
from producers.client import Client
from producers.config import ClientConfig
from tests.agents import ScriptedEngine, a_fake_engine
from tests.agents import a_config as a_worker_config
from tests.builders import LANE, MODEL
from tests.crashing import Fault, faulty
from tests.lanes import QUICK
from tests.leaders import QUICK_LEASES, a_config
from worker_agent.agent import Agent
from worker_agent.engine.base import Engine
from worker_agent.heartbeat import Pulse, Report

LEADER_TTL_S = 1.0
"""The shortest that the configuration allows."""

PATIENCE_S = 15.0


async def until(condition: Callable[[], bool], *, patience_s: float = PATIENCE_S) -> None:
    """Wait for something in real time that no event tells of."""
    async with asyncio.timeout(patience_s):
        while not condition():
            await asyncio.sleep(0.005)


@dataclass
class Member:
    """One broker."""

    broker: Broker
    link: MemoryBus
    task: asyncio.Task[None]
    metrics: Metrics
    log: DecisionLog

    @property
    def leader(self) -> Leadership:
        """Its leadership; there must be one."""
        assert self.broker.leadership is not None
        return self.broker.leadership

    @property
    def is_ready(self) -> bool:
        """Whether it leads and dispatches."""
        return self.broker.leadership is not None and self.broker.leadership.ready

    async def ready(self) -> None:
        """Wait until it leads."""
        await until(lambda: self.is_ready)

    async def stop(self) -> None:
        """End it as SIGTERM does."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def kill(self) -> None:
        """End it as `kill -9` does: nothing more of it reaches the server."""
        self.link.disconnect()
        await self.stop()


@dataclass
class Hand:
    """One worker."""

    agent: Agent
    link: MemoryBus
    pulse_link: MemoryBus
    task: asyncio.Task[None]
    beating: asyncio.Task[None]

    async def kill(self) -> None:
        """End it as `kill -9` does."""
        self.link.disconnect()
        self.pulse_link.disconnect()
        await self.stop()

    async def stop(self) -> None:
        """End it at once."""
        for task in (self.beating, self.task):
            task.cancel()
        await asyncio.gather(self.beating, self.task, return_exceptions=True)
        await self.link.close()
        await self.pulse_link.close()


class Cluster:
    """The server, and who was started on it."""

    def __init__(self, folder: Path, config: Config, *, log_bytes_max: int = 0) -> None:
        """Without `log_bytes_max`, no decision log."""
        self.bus = MemoryBus()
        self.config = config
        self._log_bytes_max = log_bytes_max
        self._folder = folder
        self.members: list[Member] = []
        self.hands: list[Hand] = []
        self._engines: list[Engine] = []

    async def start_broker(
        self, name: str = "b1", *, fault: Fault | None = None, config: Config | None = None
    ) -> Member:
        """Start a broker that stands for election."""
        link = self.bus.connection()
        config = config or self.config
        config = replace(config, broker=replace(config.broker, name=name))
        metrics = Metrics(lanes=[LANE], models=[MODEL])
        log = DecisionLog(self._folder, file_bytes_max=self._log_bytes_max, files_max=1)
        broker = Broker(faulty(link, fault) if fault else link, config, metrics=metrics, log=log)
        await broker.prepare()
        member = Member(broker, link, asyncio.create_task(broker.run()), metrics, log)
        self.members.append(member)
        return member

    async def start_worker(
        self, name: str = "w1", *, engine: Engine | None = None, **fields: Any
    ) -> Hand:
        """Start an agent with a modelled engine."""
        engine = engine or a_fake_engine()
        await engine.start()
        self._engines.append(engine)
        link, pulse_link = self.bus.connection(), self.bus.connection()
        agent = Agent(config=a_worker_config(worker=name, **fields), bus=link, engine=engine)

        async def fetch(sent_number: int) -> Report:
            return agent.report(sent_number)

        pulse = Pulse(pulse_link, fetch, worker=name, interval_s=0.05, stuck_s_max=60.0)
        agent.on_urgent = pulse.wake
        hand = Hand(
            agent,
            link,
            pulse_link,
            asyncio.create_task(agent.run()),
            asyncio.create_task(pulse.run()),
        )
        await agent.up.wait()
        self.hands.append(hand)
        return hand

    @asynccontextmanager
    async def client(
        self, client_id: str = "client-1", *, config: ClientConfig = QUICK, lane: str = LANE
    ) -> AsyncGenerator[Client]:
        """A client of a lane."""
        link = self.bus.connection()
        async with Client(link, lane=lane, client_id=client_id, config=config) as client:
            yield client
        await link.close()

    async def queued(self, lane: str = LANE) -> int:
        """Job messages in a lane's streams."""
        streams = (f"JOBS_{lane}", f"BATCH_{lane}")
        return sum([(await self.bus.stream_state(name)).messages for name in streams])

    async def until_empty(self, lane: str = LANE) -> None:
        """Wait until every job's message has left its stream."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.queued(lane):
                await asyncio.sleep(0.005)

    async def records(self, lane: str = LANE) -> dict[str, TerminalRecord]:
        """A lane's records; a second one for a job fails."""
        found: dict[str, TerminalRecord] = {}
        async for stored in self.bus.messages(subjects.results_stream(lane)):
            record = decode(stored.data, TerminalRecord)
            assert record.job not in found, f"{record.job} has two records"
            found[record.job] = record
        return found

    async def record(self, job_id: str, lane: str = LANE) -> TerminalRecord | None:
        """A job's record, if it stands."""
        try:
            stored = await self.bus.last_message(
                subjects.results_stream(lane), subjects.result(lane, job_id)
            )
        except (NotFound, BusError):
            return None
        return decode(stored.data, TerminalRecord)

    async def close(self) -> None:
        """End all."""
        for member in self.members:
            await member.stop()
            await member.link.close()
        for hand in self.hands:
            await hand.stop()
        for engine in self._engines:
            await engine.stop()
        await self.bus.close()


@asynccontextmanager
async def a_cluster(
    folder: Path,
    *,
    brokers: int = 1,
    workers: int = 1,
    engine: ScriptedEngine | None = None,
    policy: dict[str, Any] | None = None,
    log_bytes_max: int = 0,
    **broker: Any,
) -> AsyncGenerator[Cluster]:
    """A cluster whose first broker leads; `engine` is that of its first worker."""
    wanted = {"leases": QUICK_LEASES, **(policy or {})}
    ours: dict[str, Any] = {"leader_ttl_s": LEADER_TTL_S, **broker}
    config = a_config(policy=wanted, **ours)
    cluster = Cluster(folder, config, log_bytes_max=log_bytes_max)
    try:
        for number in range(brokers):
            member = await cluster.start_broker(f"b{number + 1}")
            if number == 0:
                await member.ready()
        for number in range(workers):
            await cluster.start_worker(f"w{number + 1}", engine=engine if number == 0 else None)
        if brokers:
            await until(lambda: len(list(cluster.members[0].broker.snapshots.workers())) == workers)
        yield cluster
    finally:
        await cluster.close()


def a_chat(user: str = "hello", **fields: Any) -> dict[str, Any]:
    """A short chat."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": user}],
        "max_tokens": 8,
        **fields,
    }
