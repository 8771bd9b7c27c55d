"""A gateway to test on: over a bus in this process, listening on a free port of loopback."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from broker.bus.base import Bus
from broker.bus.memory import MemoryBus
from producers.gateway.app import RouteModule, make_app
from producers.gateway.config import GatewayConfig, KeyConfig
from producers.gateway.connections import Listener
from producers.gateway.gateway import Gateway
from producers.gateway.routes import MODULES
from tests.builders import LANE
from tests.lanes import QUICK
from tests.responder import Responder

KEY = "sk-of-the-tests"
AUTH = {"Authorization": f"Bearer {KEY}"}

CONFIG = GatewayConfig(
    port=0,
    keys={
        "tester": KeyConfig(lane=LANE, key=KEY),
        "other": KeyConfig(lane="bolt", key="sk-bolt-1"),
    },
    client=QUICK,
    drain_s_max=2.0,
)


@dataclass
class Front:
    """A gateway that listens."""

    gateway: Gateway
    listener: Listener
    url: str
    session: aiohttp.ClientSession
    """Sends the tester's key."""

    async def ask(self, path: str, body: object = None, **fields: Any) -> tuple[int, Any]:
        """Ask (POST with a body, else GET); return status and JSON."""
        status, told, _ = await self.ask_all(path, body, **fields)
        return status, told

    async def ask_all(
        self, path: str, body: object = None, *, method: str = "", **fields: Any
    ) -> tuple[int, Any, Any]:
        """Ask; return status, JSON and headers."""
        verb = method or ("GET" if body is None else "POST")
        if body is not None:
            fields["json"] = body
        async with self.session.request(verb, path, **fields) as answer:
            return answer.status, await answer.json(), answer.headers


@asynccontextmanager
async def a_gateway(
    bus: Bus, *, modules: Sequence[RouteModule] = MODULES, **fields: Any
) -> AsyncGenerator[Front]:
    """A gateway on a bus."""
    config = msgspec.structs.replace(CONFIG, **fields)
    async with Gateway(bus, config) as gateway:
        listener = Listener(make_app(gateway, modules), gateway)
        url = await listener.start()
        try:
            async with aiohttp.ClientSession(url, headers=AUTH) as session:
                yield Front(gateway, listener, url, session)
        finally:
            await listener.stop()


@asynccontextmanager
async def a_front(
    *, responder: dict[str, Any] | None = None, **fields: Any
) -> AsyncGenerator[tuple[Front, Responder]]:
    """A gateway before a lane whose broker and workers are played by a responder."""
    bus = MemoryBus()
    own = bus.connection()
    async with Responder(bus, **(responder or {})) as played, a_gateway(own, **fields) as front:
        yield front, played
    await own.close()
    await bus.close()
