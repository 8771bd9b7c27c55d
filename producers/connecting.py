"""A connection to NATS for a producer: as its configuration says, and with words that help."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from broker.bus.base import BadLink as BusBadLink
from broker.bus.base import Bus, BusError
from producers.config import NatsLink
from producers.errors import BadLink, Unreachable


@asynccontextmanager
async def connect_bus(link: NatsLink, *, name: str) -> AsyncGenerator[Bus]:
    """Connect to NATS for the time of a `with`. Raises Unreachable, BadLink."""
    from broker.bus import nats  # noqa: PLC0415 - an in-process user needs no NATS.

    credentials = nats.Credentials(
        user=link.user,
        password=link.password,
        creds_file=Path(link.creds_file) if link.creds_file else None,
    )
    try:
        bus = await nats.connect(link.url, name=name, credentials=credentials)
    except BusBadLink as error:
        message = f"{error}; say nats://host:port, and of a credentials file where it is"
        raise BadLink(message) from error
    except BusError as error:
        message = f"no NATS server can be used at {link.url} ({error}); start one or name it"
        raise Unreachable(message) from error
    try:
        yield bus
    finally:
        await bus.close()
