"""What the proxy does to a link: nothing, a delay, a cut that lasts."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from ops.chaos.proxy import Proxy

DELAY_S = 0.05


@asynccontextmanager
async def an_echo_behind_a_proxy() -> AsyncGenerator[Proxy]:
    """A server that says what it is told, and a proxy before it."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server, Proxy(server.sockets[0].getsockname()[1]) as proxy:
        yield proxy


async def said_back(proxy: Proxy, words: bytes) -> bytes:
    """Say something on a connection of its own; empty when nobody answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(proxy.url).port)
    try:
        writer.write(words)
        return await reader.readexactly(len(words))
    except (OSError, asyncio.IncompleteReadError):
        return b""
    finally:
        writer.close()


async def test_words_go_through_both_ways() -> None:
    """Untouched, a link carries what is said."""
    async with an_echo_behind_a_proxy() as proxy:
        assert await said_back(proxy, b"hello") == b"hello"


async def test_a_severed_link_lets_nobody_through_until_it_is_mended() -> None:
    """A cut lasts: a client that connects again at once is turned away, too."""
    async with an_echo_behind_a_proxy() as proxy:
        proxy.sever()
        assert await said_back(proxy, b"hello") == b""
        proxy.mend()
        assert await said_back(proxy, b"hello") == b"hello"


async def test_what_is_on_the_way_is_lost_by_a_cut() -> None:
    """A connection that stood is aborted."""
    async with an_echo_behind_a_proxy() as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(proxy.url).port)
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
        proxy.sever()
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()


async def test_a_delayed_link_holds_back_each_way() -> None:
    """Words and their echo each take the delay (clocks of loops count in milliseconds)."""
    async with an_echo_behind_a_proxy() as proxy:
        proxy.delay_s = DELAY_S
        began_s = asyncio.get_running_loop().time()
        assert await said_back(proxy, b"hello") == b"hello"
        assert asyncio.get_running_loop().time() - began_s >= 1.9 * DELAY_S
