"""An OpenAI-like server that misbehaves on order, to see what the agent makes of it.

What it does is set for all requests (`engine.behaviour`), or by one request's body in its field
`behaviour`, which also shows that unknown fields reach an engine.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from tests.builders import MODEL


class Behaviour(StrEnum):
    """What the server does with a request for text."""

    FINE = "fine"
    SLOW = "slow"
    """A token for each call of `BadEngine.let_token_go`."""
    BROKEN_JSON = "broken_json"
    WRONG_TYPE = "wrong_type"
    """HTML with status 200."""
    NOT_STREAMED = "not_streamed"
    """One piece of JSON, though a stream was asked for."""
    NO_USAGE = "no_usage"
    NO_CACHED_TOKENS = "no_cached_tokens"
    HALF_STREAM = "half_stream"
    """Ends in good order before the answer does."""
    DROPS = "drops"
    """Cuts the connection in mid-answer."""
    DROPS_AT_ONCE = "drops_at_once"
    SILENT = "silent"
    """Headers and one token, then nothing."""
    HANGS = "hangs"
    """Not even headers."""
    ERROR_IN_STREAM = "error_in_stream"
    REFUSES = "refuses"
    """400, as for too long a prompt."""
    NOT_FOUND = "not_found"
    """404 with a text that is no JSON."""
    FORBIDS = "forbids"
    BUSY = "busy"
    FAILS = "fails"
    FAILS_AT_LENGTH = "fails_at_length"
    """500 with a page of a megabyte."""
    TEXT_ONLY = "text_only"
    """500 for a chat with an image, as llama.cpp says that its model sees none."""
    UNAVAILABLE = "unavailable"
    REDIRECTS = "redirects"
    HUGE = "huge"
    """More bytes than an answer may have."""


_STATUS = {
    Behaviour.REFUSES: 400,
    Behaviour.FORBIDS: 401,
    Behaviour.BUSY: 429,
    Behaviour.FAILS: 500,
    Behaviour.UNAVAILABLE: 503,
}
_HUGE_BYTES = 9_000_000


@dataclass(slots=True)
class Seen:
    """A request as it arrived."""

    path: str
    headers: dict[str, str]
    """Names in lower case."""
    body: dict[str, Any]


@dataclass(slots=True)
class BadEngine:
    """The server's state, for tests to set and to look at."""

    url: str = ""
    behaviour: Behaviour = Behaviour.FINE
    tokens: int = 4
    models: tuple[str, ...] = (MODEL,)
    health_code: int = 200
    models_code: int = 200
    location: str = ""
    """Where answers with a code of 3xx point."""
    pages_hang: bool = False
    """The pages it tells of itself on are not answered."""
    metrics: str = ""
    """Empty: there is no metrics page."""
    seen: list[Seen] = field(default_factory=list[Seen])
    aborted: int = 0
    """Requests whose caller went away before the end."""
    running: int = 0
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _go: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    def let_token_go(self) -> None:
        """Let a SLOW answer send its next token."""
        self._go.release()

    def hold_tokens(self) -> None:
        """Take back what SLOW answers were let send and did not."""
        self._go = asyncio.Semaphore(0)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until requests have come, ended or been aborted so that `condition` holds."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def health(self, _: web.Request) -> web.Response:
        """Say how it is."""
        if self.pages_hang:
            await asyncio.Event().wait()
        return _json({}, self.health_code, self.location)

    async def list_models(self, _: web.Request) -> web.Response:
        """List the models."""
        data = [{"id": name, "object": "model"} for name in self.models]
        return _json({"object": "list", "data": data}, self.models_code, self.location)

    async def show_metrics(self, _: web.Request) -> web.Response:
        """Show the metrics, if there are any."""
        return web.Response(text=self.metrics, status=200 if self.metrics else 404)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer one request for text."""
        body = orjson.loads(await request.read())
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append(Seen(request.path, headers, body))
        behaviour = Behaviour(body.get("behaviour", self.behaviour))
        if behaviour is Behaviour.TEXT_ONLY:
            behaviour = Behaviour.FAILS if _has_image(body) else Behaviour.FINE
        self.running += 1
        await self._tell()
        try:
            return await self._behave(behaviour, body, request)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        finally:
            self.running -= 1
            await asyncio.shield(self._tell())

    async def _behave(
        self, behaviour: Behaviour, body: dict[str, Any], request: web.Request
    ) -> web.StreamResponse:
        match behaviour:
            case Behaviour.HANGS:
                await asyncio.Event().wait()
            case Behaviour.DROPS_AT_ONCE:
                assert request.transport is not None
                request.transport.abort()
            case Behaviour.WRONG_TYPE:
                return web.Response(text="<html>nginx</html>", content_type="text/html")
            case Behaviour.FAILS_AT_LENGTH:
                return web.Response(text="x" * 1_000_000, status=500)
            case Behaviour.NOT_FOUND:
                return web.Response(text="404 page not found", status=404)
            case Behaviour.REDIRECTS:
                return web.Response(status=307, headers={"Location": "http://127.0.0.1:1/"})
            case _ if behaviour in _STATUS:
                error = {"message": f"told to: {behaviour}", "type": "test", "code": None}
                return _json({"error": error}, _STATUS[behaviour])
            case Behaviour.HUGE if not body.get("stream"):
                return _json({"text": "x" * _HUGE_BYTES})
            case _ if body.get("stream") and behaviour is not Behaviour.NOT_STREAMED:
                return await self._stream(behaviour, request)
            case _:
                pass
        if behaviour is Behaviour.BROKEN_JSON:
            return web.Response(text='{"choices": [', content_type="application/json")
        return _json({**_top("chat.completion"), "choices": [_choice(self.tokens)], **_usage()})

    async def _stream(self, behaviour: Behaviour, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(event: object) -> None:
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")

        for index in range(self.tokens):
            if behaviour is Behaviour.SLOW:
                await self._go.acquire()
            await send(_delta({"content": f"t{index} "}))
            await self._tell()
            if index == 0:
                await self._first_token_out(behaviour, request, response)
            if index == 0 and behaviour is Behaviour.HALF_STREAM:
                return response
        await send(_delta({}, finish_reason="stop"))
        if behaviour is not Behaviour.NO_USAGE:
            known = behaviour is not Behaviour.NO_CACHED_TOKENS
            await send({**_top(), "choices": [], **_usage(cached=known)})
        await response.write(b"data: [DONE]\n\n")
        return response

    @staticmethod
    async def _first_token_out(
        behaviour: Behaviour, request: web.Request, response: web.StreamResponse
    ) -> None:
        match behaviour:
            case Behaviour.SILENT:
                await asyncio.Event().wait()
            case Behaviour.DROPS:
                assert request.transport is not None
                request.transport.close()
            case Behaviour.BROKEN_JSON:
                await response.write(b'data: {"choices": [\n\n')
            case Behaviour.ERROR_IN_STREAM:
                await response.write(b'data: {"error": {"message": "out of memory"}}\n\n')
            case Behaviour.HUGE:
                await response.write(b"data: " + b"x" * _HUGE_BYTES)
            case _:
                pass


@asynccontextmanager
async def a_bad_engine(
    behaviour: Behaviour = Behaviour.FINE, *, socket_path: Path | None = None
) -> AsyncGenerator[BadEngine]:
    """Run the server on a free port, or on a Unix socket."""
    engine = BadEngine(behaviour=behaviour)
    app = web.Application(client_max_size=16_000_000)
    app.router.add_get("/health", engine.health)
    app.router.add_get("/v1/models", engine.list_models)
    app.router.add_get("/metrics", engine.show_metrics)
    app.router.add_post("/{path:.*}", engine.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = (
        web.UnixSite(runner, str(socket_path))
        if socket_path
        else web.TCPSite(runner, "127.0.0.1", 0)
    )
    await site.start()
    engine.url = (
        f"unix:{socket_path}" if socket_path else f"http://127.0.0.1:{runner.addresses[0][1]}"
    )
    try:
        yield engine
    finally:
        await runner.cleanup()


def _has_image(body: dict[str, Any]) -> bool:
    contents = [message["content"] for message in body.get("messages", ())]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(part["type"] == "image_url" for part in parts)


def _json(value: object, status: int = 200, location: str = "") -> web.Response:
    headers = {"Location": location} if location else None
    return web.Response(
        body=orjson.dumps(value), status=status, content_type="application/json", headers=headers
    )


def _top(kind: str = "chat.completion.chunk") -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": MODEL}


def _delta(delta: dict[str, Any], *, finish_reason: str | None = None) -> dict[str, Any]:
    return {**_top(), "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def _choice(tokens: int) -> dict[str, Any]:
    text = "".join(f"t{index} " for index in range(tokens))
    message = {"role": "assistant", "content": text}
    return {"index": 0, "message": message, "finish_reason": "stop"}


def _usage(*, cached: bool = True) -> dict[str, Any]:
    details = {"prompt_tokens_details": {"cached_tokens": 7}} if cached else {}
    return {"usage": {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14, **details}}
