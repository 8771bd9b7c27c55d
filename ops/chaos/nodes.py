"""The message servers of a chaos run: one, or three that are one cluster."""

import asyncio
import socket
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Self

from ops.chaos.proxy import Proxy
from ops.nats.monitor import MonitorUnavailable, read_leaders
from ops.nats.server import NatsServer, ServerOptions


def make_servers(folder: Path, count: int) -> list[NatsServer]:
    """Prepare servers that know each other."""
    if count == 1:
        return [NatsServer(folder / "nats")]
    ports = _free_ports(count)
    routes = ", ".join(f"nats-route://127.0.0.1:{port}" for port in ports)
    return [
        NatsServer(
            folder / f"nats-{number}",
            options=ServerOptions(
                name=f"node-{number}", monitor=True, extra=_cluster(port, routes)
            ),
        )
        for number, port in enumerate(ports, start=1)
    ]


def _cluster(port: int, routes: str) -> str:
    # Not advertised: clients would learn of the servers behind the links that are to be cut.
    settings = f"name: chaos, listen: 127.0.0.1:{port}, no_advertise: true"
    return f"cluster {{ {settings}, routes: [{routes}] }}"


def _free_ports(count: int) -> list[int]:
    """Find ports that nobody listens on: servers must know each other's before they start."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


async def leading(servers: Sequence[NatsServer], stream: str = "") -> NatsServer | None:
    """Ask the servers which of them leads a stream, or all of the cluster; None: nobody says.

    During an election there is none.
    """
    by_name = {server.options.name: server for server in servers}
    for server in servers:
        if not (server.running and server.monitor_url):
            continue
        try:
            meta, streams = await read_leaders(server.monitor_url)
        except MonitorUnavailable:
            continue
        name = streams.get(stream, "") if stream else meta
        if name in by_name:
            return by_name[name]
    return None


async def start(servers: list[NatsServer], environment: Mapping[str, str]) -> None:
    """Start servers at once. Raises ServerUnavailable."""
    for server in servers:
        server.environment = dict(environment)
    async with asyncio.TaskGroup() as group:
        for server in servers:
            group.create_task(asyncio.to_thread(server.start))


class Link:
    """What lies between one process and the servers: a proxy for each."""

    def __init__(self, addresses: list[tuple[str, int]], *, login: str = "") -> None:
        """Lead to these hosts and ports. `login` is what stands before the host, `user:word@`."""
        self._proxies = [Proxy(port, host=host) for host, port in addresses]
        self._login = login
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for proxy in self._proxies:
            await self._stack.enter_async_context(proxy)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    @property
    def url(self) -> str:
        """Where its process connects."""
        urls = (proxy.url.replace("://", f"://{self._login}", 1) for proxy in self._proxies)
        return ",".join(urls)

    def sever(self) -> None:
        """Cut it until `mend`."""
        for proxy in self._proxies:
            proxy.sever()

    def mend(self) -> None:
        """Let connections through again."""
        for proxy in self._proxies:
            proxy.mend()

    def delay(self, delay_s: float) -> None:
        """Hold back each chunk for so long, either way."""
        for proxy in self._proxies:
            proxy.delay_s = delay_s
