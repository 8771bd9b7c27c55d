"""The wire to one engine: its address, its connections, and what goes wrong on them.

Each request has a connection of its own. Closing it is how engines learn that a request is given
up, and an engine that ends idle connections after seconds (llama.cpp: 5) can't break the next one.
"""

import asyncio
import io
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp

from worker_agent.engine.base import (
    EngineAway,
    EngineDisconnected,
    EngineGarbage,
    EngineTimeout,
)
from worker_agent.engine.sse import SseReader

CONNECT_S_MAX = 5.0
"""Longest wait for a connection: the engine is on this host or beside it."""

PAGE_S_MAX = 2.0
"""Longest wait for an engine's word on itself: two heartbeats."""

PAGE_BYTES_MAX = 4_000_000
"""Most that is read of an engine's word on itself; vLLM's metrics have some 100 kB."""

SOCKET_PATH_BYTES_MAX = 107
"""Longest path of a Unix socket: Linux keeps 108 bytes, one of them for the end."""

UNIX_PREFIX = "unix:"

_DONE = b"[DONE]"
_START_HEADER = "Process-Start-Time-Unix"


@dataclass(frozen=True, slots=True)
class Page:
    """What the engine answered to a GET."""

    status_code: int
    body: bytes
    started: str
    """When its process says it started, in units of its own; empty when it doesn't say."""
    location: str = ""
    """Where a redirect points; none is followed."""


class HttpClient:
    """HTTP to `http://host:port` or `unix:/path/of.sock`."""

    def __init__(self, base_url: str, *, api_key: str = "") -> None:
        """Raises ValueError when the address is none."""
        self._url, self._socket_path = address(base_url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Make ready to connect; nothing is sent."""
        assert self._session is None
        connector = (
            aiohttp.UnixConnector(self._socket_path, force_close=True, limit=0)
            if self._socket_path
            else aiohttp.TCPConnector(force_close=True, limit=0)  # The agent's slots bound it.
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S_MAX),
        )

    async def close(self) -> None:
        """Close all connections, which aborts what runs."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def page(self, path: str) -> Page:
        """Get a page, cut at PAGE_BYTES_MAX. Raises EngineError."""
        with _translated():
            try:
                async with (
                    asyncio.timeout(PAGE_S_MAX),
                    self._opened().get(self._url + path, allow_redirects=False) as response,
                ):
                    started = response.headers.get(_START_HEADER, "")
                    location = response.headers.get("Location", "")
                    body = await read(response, PAGE_BYTES_MAX)
                    return Page(response.status, body, started, location)
            except TimeoutError as error:
                message = f"{path} gave no answer within {PAGE_S_MAX:g} s"
                raise EngineTimeout(message) from error

    @asynccontextmanager
    async def post(
        self, path: str, body: bytes, *, request_id: str, header_s_max: float
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Post JSON and give the answer once its headers are there. Raises EngineError.

        The connection is closed at the end, whatever the end is.
        """
        headers = {"Content-Type": "application/json", "X-Request-Id": header_text(request_id)}
        with _translated():
            try:
                async with asyncio.timeout(header_s_max):
                    response = await self._opened().post(
                        self._url + path,
                        data=io.BytesIO(body),  # Plain bytes would be sent in one go.
                        headers=headers,
                        allow_redirects=False,
                    )
            except aiohttp.ServerTimeoutError as error:
                message = f"no connection within {CONNECT_S_MAX:g} s"
                raise EngineAway(message) from error
            except TimeoutError as error:
                message = f"no answer within {header_s_max:g} s"
                raise EngineTimeout(message) from error
            try:
                yield response
            finally:
                response.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            message = "the engine's client is not open"
            raise EngineDisconnected(message)
        return self._session


async def read(response: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    """Read a body, cut at `bytes_max`."""
    pieces: list[bytes] = []
    size = 0
    while size < bytes_max and (piece := await _piece(response)):
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces)[:bytes_max]


async def events(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
    """Yield the data of each server-sent event until the stream says it is done, or ends."""
    reader = SseReader()
    while piece := await _piece(response):
        for data in reader.feed(piece):
            if data == _DONE:
                return
            yield data
    for data in reader.flush():
        if data != _DONE:
            yield data


async def _piece(response: aiohttp.ClientResponse) -> bytes:
    """Return what has come of the body since the last piece; empty at its end."""
    try:
        return await response.content.readany()
    except RuntimeError as error:  # What aiohttp says to a reader whose session was closed.
        message = "the engine's client was closed"
        raise EngineDisconnected(message) from error


def header_text(text: str) -> str:
    """Return what of `text` may stand in an HTTP header: it comes from a caller."""
    return "".join(char for char in text if "!" <= char <= "~")


def address(base_url: str) -> tuple[str, str]:
    """Return the URL to put before each path, and the Unix socket's path ("" for TCP).

    Raises ValueError.
    """
    if base_url.startswith(UNIX_PREFIX):
        path = base_url.removeprefix(UNIX_PREFIX).removeprefix("//")
        if not path.startswith("/") or len(path.encode()) > SOCKET_PATH_BYTES_MAX:
            message = (
                f"{base_url!r}: a Unix socket is unix:/absolute/path "
                f"of at most {SOCKET_PATH_BYTES_MAX} bytes"
            )
            raise ValueError(message)
        return "http://engine", path
    message = f"{base_url!r}: an engine is at http://host:port or unix:/path/of.sock"
    try:
        parts = urlsplit(base_url)
        port = parts.port
    except ValueError as error:
        raise ValueError(message) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ValueError(message)
    return base_url.rstrip("/").removesuffix("/v1"), ""


@contextmanager
def _translated() -> Generator[None]:
    """Turn what aiohttp raises into the engine's errors."""
    try:
        yield
    except aiohttp.ClientPayloadError as error:
        message = f"the answer broke off: {error}"
        raise EngineDisconnected(message) from error
    except aiohttp.ClientResponseError as error:
        message = f"not HTTP: {error.message}"
        raise EngineGarbage(message) from error
    except aiohttp.ClientConnectorError as error:
        message = f"{type(error).__name__}: {error}"
        raise EngineAway(message) from error
    except (aiohttp.ClientError, ConnectionError) as error:
        message = f"{type(error).__name__}: {error}"
        raise EngineDisconnected(message) from error
