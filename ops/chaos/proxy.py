"""A TCP proxy that can do to a connection what networks do: freeze, delay, cut, refuse, garble."""

import asyncio
from types import TracebackType
from typing import Self

CHUNK_BYTES = 65_536


class Proxy:
    """Forwards to a port, on loopback where no host is named, until told otherwise."""

    def __init__(self, target_port: int, *, host: str = "127.0.0.1") -> None:
        self._target = (host, target_port)
        self._server: asyncio.Server | None = None
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: list[asyncio.StreamWriter] = []
        self._clients: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._severed = False
        self.delay_s = 0.0
        """How long each chunk is held back, either way. In order: a busy link gets slow, too."""
        self.accepted = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.thaw()
        self.cut()
        if self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def url(self) -> str:
        """Where clients connect."""
        assert self._server is not None
        return f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def freeze(self) -> None:
        """Forward nothing more, in either direction; connections stay open."""
        self._flowing.clear()

    def thaw(self) -> None:
        """Forward again, what was held back first."""
        self._flowing.set()

    def cut(self) -> None:
        """Abort all connections. What was held back is lost."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        self._clients.clear()

    def sever(self) -> None:
        """Abort all connections and let nobody through until `mend`."""
        self._severed = True
        self.cut()

    def mend(self) -> None:
        """Let connections through again."""
        self._severed = False

    def inject(self, data: bytes) -> None:
        """Send bytes to the clients that the server never sent."""
        for client in self._clients:
            client.write(data)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._severed:
            writer.transport.abort()
            return
        self.accepted += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            up_reader, up_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        if self._severed:
            writer.transport.abort()
            up_writer.transport.abort()
            return
        self._writers += [writer, up_writer]
        self._clients.append(writer)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward(reader, up_writer))
                group.create_task(self._forward(up_reader, writer))
        finally:
            writer.transport.abort()
            up_writer.transport.abort()
            self._forget(writer, up_writer)

    def _forget(self, writer: asyncio.StreamWriter, up_writer: asyncio.StreamWriter) -> None:
        self._writers = [one for one in self._writers if one not in (writer, up_writer)]
        self._clients = [one for one in self._clients if one is not writer]

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(CHUNK_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._flowing.wait()
                if writer.is_closing():
                    break  # Cut from the other side, while this chunk came.
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.transport.abort()
