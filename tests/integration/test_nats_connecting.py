"""Connecting: every way it can fail is told, in bounded time."""

import asyncio
import sys
from collections import Counter
from pathlib import Path

import pytest

from broker.bus import nats_wire
from broker.bus.base import (
    BusError,
    LinkDown,
)
from broker.bus.nats import connect
from broker.bus.nats_wire import Credentials, RefusedCredentials, Wire
from ops.chaos.proxy import Proxy
from ops.nats.server import NatsServer, ServerOptions
from tests.buses import (
    until,
)
from tests.servers import relinked


class TestConnecting:
    """Connecting with a wrong password and infinite reconnects never returns."""

    async def test_wrong_password(self) -> None:
        """It is a clear error, at once."""
        with NatsServer(options=ServerOptions(user="lane", password="right")) as server:
            async with asyncio.timeout(2):
                with pytest.raises(RefusedCredentials, match="refused our credentials"):
                    await connect(
                        server.url,
                        name="t",
                        credentials=Credentials(user="lane", password="wrong"),
                    )
                with pytest.raises(RefusedCredentials):
                    await connect(server.url, name="t")
            url = server.url.replace("//", "//lane:right@")
            bus = await connect(url, name="t")
            await bus.rtt_s()
            await bus.close()

    async def test_password_that_changed(self) -> None:
        """A link whose credentials are refused later keeps trying, and is back when they hold."""
        options = ServerOptions(user="lane", password="right")
        with NatsServer(options=options) as server:
            url = server.url.replace("//", "//lane:right@")
            bus = await connect(url, name="t")
            server.kill()
            server.options = ServerOptions(user="lane", password="other")
            server.start()
            await until(lambda: bus.counts["dials_failed"] >= 3)
            assert not bus.connected
            server.kill()
            server.options = options
            server.start()
            await relinked(bus)
            await bus.close()

    async def test_nobody_there(self, nats_server: NatsServer) -> None:
        """An unreachable server is an error that names it, in bounded time."""
        nats_server.stop()
        async with asyncio.timeout(2):
            with pytest.raises(LinkDown, match=nats_server.url):
                await connect(nats_server.url, name="t", connect_timeout_s=0.5)

    async def test_server_that_comes_up_meanwhile(self, nats_server: NatsServer) -> None:
        """A client that starts before its server waits for it, within its time-out."""
        nats_server.stop()
        connecting = asyncio.ensure_future(
            connect(nats_server.url, name="t", connect_timeout_s=5.0)
        )
        await asyncio.to_thread(nats_server.start)
        bus = await connecting
        assert bus.connected
        await bus.close()

    @pytest.mark.parametrize(
        ("offers", "heard"), [(b"", b""), (b', "tls_available": true', b"\x16")]
    )
    async def test_tls_is_never_left_out(self, offers: bytes, heard: bytes) -> None:
        """tls:// to a server without TLS sends nothing, no password; where TLS may be, it begins.

        The client alone encrypts only where the server insists.
        """
        info = b'INFO {"version": "2.15.1", "auth_required": true, "max_payload": 8000000%s}\r\n'
        sent: asyncio.Queue[bytes] = asyncio.Queue()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(info % offers)
            sent.put_nowait(await reader.read(1))
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            with pytest.raises(LinkDown, match=None if offers else "has no TLS"):
                await connect(f"tls://lane:hush@127.0.0.1:{port}", name="t", connect_timeout_s=0.3)
            assert await sent.get() == heard

    async def test_something_that_is_no_nats(self) -> None:
        """A port that says nothing, or something else, is an error in bounded time."""

        async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)

        async def talking(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        writers: list[asyncio.StreamWriter] = []
        for handler in (silent, talking):
            async with await asyncio.start_server(handler, "127.0.0.1", 0) as server:
                port = server.sockets[0].getsockname()[1]
                async with asyncio.timeout(3):
                    with pytest.raises(LinkDown):
                        await connect(f"127.0.0.1:{port}", name="t", connect_timeout_s=0.5)
                for writer in writers:
                    writer.transport.abort()

    async def test_old_server(self) -> None:
        """A server that would silently ignore our stream settings is refused."""

        async def old(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b'INFO {"version":"2.10.4","max_payload":1048576,"headers":true}\r\n')
            while line := await reader.readline():
                if line.startswith(b"PING"):
                    writer.write(b"PONG\r\n")
            writer.close()

        async with await asyncio.start_server(old, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(BusError, match=r"2\.10\.4 is too old: 2\.12"):
                await connect(f"nats://127.0.0.1:{port}", name="t")

    async def test_url_that_is_none(self) -> None:
        """A URL of another kind is named."""
        with pytest.raises(BusError, match="not a NATS URL"):
            await connect("http://127.0.0.1:4222", name="t")

    async def test_credentials_file_that_is_not_there(
        self, nats_server: NatsServer, tmp_path: Path
    ) -> None:
        """A missing file is named, and not taken for a missing server."""
        credentials = Credentials(creds_file=tmp_path / "none.creds")
        with pytest.raises(BusError, match=r"no credentials file .*none\.creds"):
            await connect(nats_server.url, name="t", credentials=credentials)

    async def test_credentials_file_without_its_package(
        self, nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A package that only credentials files need is named when it is missing."""
        file = tmp_path / "lane.creds"
        file.touch()
        monkeypatch.setitem(sys.modules, "nkeys", None)
        with pytest.raises(BusError, match="pip install nkeys"):
            await connect(nats_server.url, name="t", credentials=Credentials(creds_file=file))

    async def test_close_is_bounded(self, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
        """A server that reads nothing more does not hold up a close."""
        monkeypatch.setattr(nats_wire, "FLUSH_S_MAX", 0.1)
        bus = await connect(proxy.url, name="t")
        proxy.freeze()
        for _ in range(100):
            await bus.publish("big", bytes(100_000))
        async with asyncio.timeout(2):
            await bus.close()

    async def test_second_server_is_tried(self, nats_server: NatsServer) -> None:
        """Of several URLs, one that answers is enough."""
        bus = await connect(f"127.0.0.1:1, {nats_server.url}", name="t")
        assert bus.connected
        await bus.close()

    async def test_failed_dial_leaves_nothing(self, nats_server: NatsServer) -> None:
        """A dial that is cancelled closes its socket."""
        async with Proxy(nats_server.port) as proxy:
            proxy.freeze()
            wire = Wire(counts=Counter(), lost=lambda *_: None)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await wire.dial(proxy.url, name="t", credentials=Credentials())
            assert wire.is_closed
