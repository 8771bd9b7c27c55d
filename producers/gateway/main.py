"""The gateway's process: connect, listen, answer, and on SIGTERM let streams end before it goes.

One line of JSON on standard output says that it is up and where; the log goes to standard error.
"""

import asyncio
import signal
import sys
from collections.abc import Sequence
from typing import cast

import orjson
import structlog
import uvloop

from broker.bus import garbage, logs
from broker.bus.base import Bus
from producers.connecting import connect_bus
from producers.errors import ProducerError
from producers.gateway.app import RouteModule, make_app
from producers.gateway.config import GatewayConfig
from producers.gateway.connections import AddressUnavailable, Listener
from producers.gateway.gateway import Gateway
from producers.gateway.routes import MODULES

_log = structlog.get_logger(__name__)


async def serve(config: GatewayConfig) -> None:
    """Serve until SIGTERM or SIGINT; a second one cuts off what is under way.

    Raises Unreachable, AddressUnavailable.
    """
    stop = Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.ask)
    async with connect_bus(config.nats, name="inferlane-gateway") as bus:
        await serve_on(bus, config, stop)


class Stop:
    """What a signal sets: stop, and at the second one at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.urged = asyncio.Event()

    def ask(self) -> None:
        """Take one signal."""
        (self.urged if self.asked.is_set() else self.asked).set()


async def serve_on(
    bus: Bus, config: GatewayConfig, stop: Stop, *, modules: Sequence[RouteModule] = MODULES
) -> None:
    """Serve over a bus until told to stop. Raises AddressUnavailable."""
    async with Gateway(bus, config) as gateway:
        listener = Listener(make_app(gateway, modules), gateway)
        url = await listener.start()
        _say_ready(url)
        try:
            await stop.asked.wait()
            _log.info("gateway.stopping", requests=gateway.under_way.count)
        finally:
            await _stop(listener, stop)


async def _stop(listener: Listener, stop: Stop) -> None:
    """Let what is under way end, unless a second signal comes."""
    async with asyncio.TaskGroup() as group:
        stopping = group.create_task(listener.stop())
        urging = group.create_task(_urge(listener, stop))
        await asyncio.wait([stopping])
        urging.cancel()


async def _urge(listener: Listener, stop: Stop) -> None:
    await stop.urged.wait()
    listener.hurry()


def _say_ready(url: str) -> None:
    """Tell a launcher, on standard output, where requests are taken."""
    sys.stdout.write(orjson.dumps({"event": "ready", "http": url}).decode() + "\n")
    sys.stdout.flush()


def run(config: GatewayConfig) -> None:
    """Run a gateway until it is told to stop. Raises Unreachable, AddressUnavailable."""
    logs.set_up(role="gateway")
    garbage.leave_program_out()
    try:
        uvloop.run(serve(config))
    except* (ProducerError, AddressUnavailable) as errors:
        # One sentence for whoever started it, not a tree of groups.
        raise _first(errors) from None


def _first(error: BaseException) -> BaseException:
    if not isinstance(error, BaseExceptionGroup):
        return error
    return _first(cast("BaseException", error.exceptions[0]))
