"""A gateway that runs batches, in this process, and the unmodified OpenAI client before it."""

import io
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import openai

from broker.bus import topology
from broker.bus.memory import MemoryBus
from broker.bus.topology import DEFAULTS, Bounds, LanePlan
from producers.batches.config import BatchesConfig
from tests.builders import LANE, MODEL
from tests.gateways import KEY, Front, a_gateway
from tests.responder import Responder
from tests.stored_batches import SMALL, Place, count_all

ENDPOINT = "/v1/chat/completions"
OTHER_LANE = "bolt"


@asynccontextmanager
async def a_shop(
    *, batches: BatchesConfig = SMALL, bounds: Bounds = DEFAULTS, **fields: Any
) -> AsyncGenerator[tuple[openai.AsyncOpenAI, Place, Front]]:
    """A gateway that runs batches, and a client of it."""
    bus = MemoryBus()
    plans = [LanePlan(LANE, (MODEL,)), LanePlan(OTHER_LANE, (MODEL,))]
    await topology.apply(bus, topology.of(plans, bounds))
    await count_all(bus)
    async with Responder(bus) as responder, a_gateway(bus, batches=batches, **fields) as front:
        place = Place(bus, responder)
        async with openai.AsyncOpenAI(api_key=KEY, base_url=f"{front.url}/v1") as client:
            yield client, place, front
    await bus.close()


async def uploaded(client: openai.AsyncOpenAI, content: list[bytes]) -> str:
    """Id of an uploaded input."""
    data = io.BytesIO(b"\n".join(content))
    return (await client.files.create(file=("in.jsonl", data), purpose="batch")).id
