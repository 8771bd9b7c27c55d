"""A connection to NATS for a producer: as its configuration says, and with words that help."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from broker.bus.base import Bus, BusError
from producers.config import NatsLink
from producers.errors import Unreachable


@asynccontextmanager
async def connect_bus(link: NatsLink, *, name: str) -> AsyncGenerator[Bus]:
    """Connect to NATS for the time of a `with`. Raises Unreachable."""
    from broker.bus import nats  # noqa: PLC0415 - an in-process user needs no NATS.

    credentials = nats.Credentials(
        user=link.user,
        password=link.password,
        creds_file=Path(link.creds_file) if link.creds_file else None,
    )
    try:
        bus = await nats.connect(link.url, name=name, credentials=credentials)
    except BusError as error:
        message = f"no NATS server can be used at {link.url} ({error}); start one or name it"
        raise Unreachable(message) from error
    try:
        yield bus
    finally:
        await bus.close()
