"""What the routes of one gateway share: settings, keys, lanes, bounds, counts."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any, Self

import structlog
from aiohttp import web
from msgspec import structs

from broker.bus.base import Bus
from producers.gateway.auth import Caller, Keys
from producers.gateway.bodies import Bodies
from producers.gateway.config import GatewayConfig
from producers.gateway.lanes import LaneClients
from producers.gateway.metrics import GatewayMetrics
from producers.gateway.turn import Turn

_log = structlog.get_logger(__name__)

CALLER = web.RequestKey("caller", Caller)
"""Whose request it is; set on all but the open paths."""

REQUEST_ID = web.RequestKey("request_id", str)


class UnderWay:
    """Counts what is under way, and tells when nothing is."""

    def __init__(self) -> None:
        self.count = 0
        self.none = asyncio.Event()
        """Set while nothing is under way."""
        self.none.set()

    def enter(self) -> None:
        """One more."""
        self.count += 1
        self.none.clear()

    def leave(self) -> None:
        """One less."""
        self.count -= 1
        if not self.count:
            self.none.set()


class Gateway:
    """One gateway while it runs: `async with Gateway(...) as gateway`."""

    def __init__(self, bus: Bus, config: GatewayConfig) -> None:
        self.bus = bus
        self.config = config
        self.keys = Keys(config.keys)
        self.bodies = Bodies(
            body_bytes_max=config.body_bytes_max,
            bodies_bytes_max=config.bodies_bytes_max,
            body_s_max=config.body_s_max,
        )
        self.metrics = GatewayMetrics()
        self.stack = AsyncExitStack()
        """What route modules opened; closed after the last request."""
        self.leaving = False
        """It was told to stop: what is under way may end, and nothing new begins."""
        self.under_way = UnderWay()
        """Requests."""
        self.errands = UnderWay()
        """What `do` does. An errand ends by itself; what goes on for ever has a task of its own."""
        self.turn = Turn()
        self.streams = 0
        """Streamed answers under way."""
        self.connections: Callable[[], int] = lambda: 0
        """Connections open now, as whoever listens tells."""
        self._group = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self.tasks = await self._group.enter_async_context(asyncio.TaskGroup())
        patience = structs.replace(
            self.config.client, stream_bytes_max=self.config.stream_bytes_max
        )
        self.lanes = LaneClients(self.bus, patience, self.tasks)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leaving = True
        await self.stack.aclose()
        # Jobs whose callers were cut off are cancelled before their lanes' clients close.
        with suppress(TimeoutError):
            async with asyncio.timeout(self.config.client.cancel_s):
                await self.errands.none.wait()
        self.lanes.stop()
        # Not told of an error in the body: the task group would wrap it in a group of its own.
        await self._group.aclose()

    def expose(self) -> bytes:
        """Write the metrics as Prometheus text."""
        self.metrics.streams.set(self.streams)
        self.metrics.giving_up.set(self.errands.count)
        self.metrics.body_bytes.set(self.bodies.held_bytes)
        self.metrics.connections.set(self.connections())
        return self.metrics.expose()

    def do(self, work: Coroutine[Any, Any, object], *, what: str) -> None:
        """Do something that no request waits for; trouble in it is logged and ends nothing else."""

        async def guarded() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 - the edge of one errand: the gateway goes on
                _log.warning("gateway.errand_failed", what=what, error=str(error))
            finally:
                self.errands.leave()

        self.errands.enter()
        self.tasks.create_task(guarded())
