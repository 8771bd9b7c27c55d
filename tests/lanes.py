"""A lane to test producers on: a client and a responder on one in-process server."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

from broker.bus.memory import MemoryBus
from producers.client import Client
from producers.config import ClientConfig
from tests.builders import LANE
from tests.responder import Responder

QUICK = ClientConfig(
    watchdog_s=0.05,
    watchdog_s_max=0.1,
    lookup_retry_s=0.02,
    sweep_s=0.02,
    reconnect_spread_s=0.01,
    retry_after_s_min=0.02,
    no_stream_s=0.1,
    submit_s=0.2,
    cancel_s=0.2,
)
"""Impatient, so that no test has to wait."""


@asynccontextmanager
async def a_lane(
    *, config: ClientConfig = QUICK, client_id: str = "client-1", **fields: Any
) -> AsyncGenerator[tuple[Client, Responder]]:
    """A client and its responder, each on a connection of its own."""
    bus = MemoryBus()
    own = bus.connection()
    async with (
        Responder(bus, **fields) as responder,
        Client(own, lane=LANE, client_id=client_id, config=config) as client,
    ):
        yield client, responder
    await own.close()
    await bus.close()


def link_of(client: Client) -> MemoryBus:
    """The client's connection, to cut and mend."""
    bus = client._bus
    assert isinstance(bus, MemoryBus)
    return bus


def listeners_of(client: Client) -> int:
    """Wildcard subscriptions at the client's server."""
    return len(link_of(client).server._wild)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that no event tells of: a counter of the code under test."""
    while not condition():
        await asyncio.sleep(0.002)
