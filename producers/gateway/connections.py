"""The listening side: how many connections there may be, and errors before there is a request.

What aiohttp itself answers to a request that can't be parsed is given OpenAI's form; a connection
beyond the bound is told 503 in a few bytes and closed, without a parser or a task of its own.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

from aiohttp import web
from aiohttp.http import StreamWriter

from producers.gateway.app import Handler, outermost
from producers.gateway.errors import ApiError, overloaded
from producers.gateway.gateway import Gateway

BACKLOG = 1024
"""Connections that the kernel keeps until they are taken: a burst of clients at their start."""

LINGERING_S = 2.0
"""How long the rest of a body that was refused is read and dropped, so that its sender, who writes
before he reads, gets to see why."""


CUT_OFF_S_MAX = 1.0
"""How long a request that is cut off may take to notice."""


class AddressUnavailable(Exception):
    """The address can't be listened on; the text says why and what to do."""


class Connection(web.RequestHandler):
    """One HTTP connection, cut off when its peer takes nothing of what is written to it."""

    __slots__ = ("_unsent_bytes", "_watch", "_write_s_max")

    def __init__(
        self,
        manager: web.Server,
        *,
        write_s_max: float,
        loop: asyncio.AbstractEventLoop,
        handler_args: Mapping[str, Any],
    ) -> None:
        super().__init__(manager, loop=loop, **handler_args)
        self._write_s_max = write_s_max
        self._watch: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Take what came; a body whose rest can't be read ends here, and not by its time."""
        waiting = len(self._messages)
        super().data_received(data)
        request = self._current_request
        if request is None or len(self._messages) <= waiting or request.content.is_eof():
            return
        # No request begins within a body: what came is the word that it can't be read.
        self._messages.pop()
        self.close()
        request.content.set_exception(web.RequestPayloadError("its chunks can't be read"))

    def pause_writing(self) -> None:
        """Begin to watch whether the peer takes anything."""
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        """He has taken most of it."""
        super().resume_writing()
        self._watch_no_more()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Nothing is left to watch."""
        self._watch_no_more()
        super().connection_lost(exc)

    def _watch_writing(self) -> None:
        if self.transport is not None:
            self._look_later(self.transport)

    def _look_later(self, transport: asyncio.Transport) -> None:
        self._unsent_bytes = transport.get_write_buffer_size()
        loop = asyncio.get_running_loop()
        self._watch = loop.call_later(self._write_s_max, self._judge, transport)

    def _judge(self, transport: asyncio.Transport) -> None:
        """Cut off a peer who has taken nothing since the last look: a close would wait for him."""
        # A stream adds to what is unsent only once he has taken some.
        if transport.get_write_buffer_size() >= self._unsent_bytes:
            transport.abort()
        else:
            self._look_later(transport)

    def _watch_no_more(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is no HTTP, or has headers beyond the bounds."""
        del exc
        if request.writer.output_size > 0:
            text = "the answer could not be finished"
            raise ConnectionError(text)
        # What follows on this connection can't be told apart from the broken request.
        self.close()
        known = status if 400 <= status < 500 else 400  # noqa: PLR2004 - 4xx
        first = (message or "this is no HTTP request").strip().splitlines()[0]
        return ApiError(
            known, "malformed_request", f"The request can't be read: {first}"
        ).response()


class Outlet:
    """Writes to an answer that has begun, without waiting and past aiohttp's own writer.

    That costs 0.5 us instead of 2.3, for each token of each stream. What is written
    here counts for the connection's bounds all the same: its transport counts it.
    """

    __slots__ = ("_chunked", "_connection")

    def __init__(self, request: web.Request) -> None:
        """Only once something of the answer was written."""
        self._connection = request.protocol
        self._chunked = cast("StreamWriter", request.writer).chunked

    @property
    def is_open(self) -> bool:
        """Whether what is written leaves at once: the reader is there, and reads."""
        connection = self._connection
        transport = connection.transport
        return (
            transport is not None and not transport.is_closing() and not connection.writing_paused
        )

    def write(self, data: bytes) -> None:
        """Write, while it is open."""
        transport = self._connection.transport
        assert transport is not None, "only while it is open"
        # HTTP/1.0 has no chunks: there the connection's end is the answer's.
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)


class _Refusal(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say why, and close."""
        error = overloaded("The gateway has as many connections as it may; try again.")
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(len(error.body)),
            "Connection": "close",
            **error.headers,
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"HTTP/1.1 {error.status} Service Unavailable\r\n{lines}\r\n"
        writer = cast("asyncio.Transport", transport)
        writer.write(head.encode() + error.body)
        writer.close()


class BoundedSite(web.BaseSite):
    """Listens on one TCP address, for so many connections at once."""

    __slots__ = ("_gateway", "_handler_args", "_host", "_port")

    def __init__(
        self, runner: web.AppRunner, gateway: Gateway, handler_args: Mapping[str, Any]
    ) -> None:
        super().__init__(runner, backlog=BACKLOG)
        self._gateway = gateway
        self._handler_args = handler_args
        self._host = gateway.config.host
        self._port = gateway.config.port

    @property
    def name(self) -> str:
        """Where it listens, as configured."""
        return f"http://{self._host}:{self._port}"

    async def start(self) -> None:
        """Listen. Raises OSError."""
        await super().start()
        loop = asyncio.get_running_loop()
        server = self._runner.server
        assert server is not None, "the runner was set up"

        def connection() -> asyncio.Protocol:
            if len(server.connections) >= self._gateway.config.connections_max:
                self._gateway.metrics.refused_connections.inc()
                return _Refusal()
            return Connection(
                server,
                write_s_max=self._gateway.config.write_s_max,
                loop=loop,
                handler_args=self._handler_args,
            )

        self._server = await loop.create_server(
            connection, self._host, self._port, backlog=self._backlog
        )


class Listener:
    """An application that listens, and stops in good order."""

    def __init__(self, app: web.Application, gateway: Gateway) -> None:
        config = gateway.config
        self._gateway = gateway
        args: dict[str, Any] = {
            "access_log": None,
            "keepalive_timeout": config.keepalive_s,
            "lingering_time": LINGERING_S,
            "max_line_size": config.header_bytes_max,
            "max_field_size": config.header_bytes_max,
            "max_headers": config.headers_max,
            "auto_decompress": False,
        }
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            shutdown_timeout=CUT_OFF_S_MAX,
            handle_signals=False,
            **args,
        )
        self._args = args
        self._patience: asyncio.Timeout | None = None
        gateway.connections = self._connections

    def _connections(self) -> int:
        return 0 if self._runner.server is None else len(self._runner.server.connections)

    async def start(self) -> str:
        """Listen; return the URL. Raises AddressUnavailable."""
        config = self._gateway.config
        await self._runner.setup()
        server = self._runner.server
        assert server is not None, "the runner was set up"
        server.request_handler = cast("Any", outermost(cast("Handler", server.request_handler)))
        try:
            await BoundedSite(self._runner, self._gateway, self._args).start()
        except OSError as error:
            await self._runner.cleanup()
            why = (error.strerror or str(error)).lower()
            message = (
                f"can't listen on {config.host}:{config.port}: {why};"
                " set gateway.host and gateway.port (0: any free port)"
            )
            raise AddressUnavailable(message) from error
        host, port = self._runner.addresses[0][:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def stop(self) -> None:
        """Take nothing new; let what is under way end within `drain_s_max`, then cut it off."""
        self._gateway.leaving = True
        for site in self._runner.sites:
            await site.stop()
        if self._runner.server is not None:
            # Idle connections end now, the others with their answer.
            self._runner.server.pre_shutdown()
        under_way = self._gateway.under_way
        with suppress(TimeoutError):
            async with asyncio.timeout(self._gateway.config.drain_s_max) as self._patience:
                await under_way.none.wait()
        await self._runner.cleanup()

    def hurry(self) -> None:
        """Cut off what is under way now, instead of waiting for it. Only while it stops."""
        if self._patience is not None and not self._gateway.under_way.none.is_set():
            self._patience.reschedule(0.0)
