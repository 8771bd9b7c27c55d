"""Reading request bodies: whole, in time, and within what all of them together may take."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from aiohttp import web

from producers.gateway.errors import ApiError, bad_request, overloaded

JSON_TYPE = "application/json"


class Bodies:
    """Reads bodies, and knows what those of all requests under way take."""

    def __init__(self, *, body_bytes_max: int, bodies_bytes_max: int, body_s_max: float) -> None:
        self._body_bytes_max = body_bytes_max
        self._bodies_bytes_max = bodies_bytes_max
        self._body_s_max = body_s_max
        self.held_bytes = 0
        """Of all bodies under way."""

    @asynccontextmanager
    async def json(self, request: web.Request) -> AsyncGenerator[bytes]:
        """Read a JSON body; its room is kept until the block ends, since its job holds it so long.

        Raises ApiError: 408 when it takes too long, 413 too large, 415 of another type, 503 without
        room, 400 when it breaks off.
        """
        _check_type(request)
        held = [0]
        try:
            yield await self._read(request, held)
        finally:
            self.held_bytes -= held[0]

    async def _read(self, request: web.Request, held: list[int]) -> bytes:
        self._grow(held, request.content_length or 0)
        pieces: list[bytes] = []
        read_bytes = 0
        try:
            async with asyncio.timeout(self._body_s_max):
                while piece := await request.content.readany():
                    pieces.append(piece)
                    read_bytes += len(piece)
                    self._grow(held, read_bytes)
        except TimeoutError as error:
            message = f"The body did not come within {self._body_s_max:g} s."
            raise ApiError(408, "body_timeout", message) from error
        except (web.RequestPayloadError, web.PayloadAccessError) as error:
            message = "The body broke off."
            raise bad_request(message) from error
        return b"".join(pieces)

    def _grow(self, held: list[int], body_bytes: int) -> None:
        """Make room for a body of so many bytes, where it has less."""
        if body_bytes > self._body_bytes_max:
            message = (
                f"The body is larger than {self._body_bytes_max} bytes; "
                "shorten the prompt or send images by URL."
            )
            raise ApiError(413, "payload_too_large", message)
        more = body_bytes - held[0]
        if more <= 0:
            return
        if self.held_bytes + more > self._bodies_bytes_max:
            message = "The gateway holds as many request bodies as it may; try again."
            raise overloaded(message)
        held[0] += more
        self.held_bytes += more


def _check_type(request: web.Request) -> None:
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        message = f"Content-Encoding {encoding!r} is not taken; send the body as it is."
        raise ApiError(415, "unsupported_media_type", message)
    kind = request.content_type
    if kind != JSON_TYPE and not kind.endswith("+json"):
        message = f"Content-Type {kind!r} is not taken here; send {JSON_TYPE}."
        raise ApiError(415, "unsupported_media_type", message)
