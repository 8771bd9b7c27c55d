"""The fake engine behind the HTTP that real routers speak to an SGLang worker.

Answers are the engine model's, in real time. What a router asks before it sends work (health,
models, facts of server and model) is answered on the paths that SGLang has, old and new.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager

import orjson
from aiohttp import web

from tests.builders import MODEL
from worker_agent.engine.base import Chunk, Completed, EngineError, EngineOutput, EngineRequest
from worker_agent.engine.fake import FakeEngine

BODY_BYTES_MAX = 16_000_000


class HttpEngine:
    """A running server around one engine, which may be stopped and started under it."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.url = ""
        self.requests = 0
        """Requests for text so far."""

    async def restart(self) -> None:
        """Empty the cache, as a restart does."""
        await self.engine.stop()
        await self.engine.start()

    def app(self) -> web.Application:
        """Return the routes."""
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._list_models)
        for path in ("/get_server_info", "/get_model_info", "/server_info", "/model_info"):
            app.router.add_get(path, self._tell_facts)
        app.router.add_post("/v1/chat/completions", self._answer)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        readiness = await self.engine.ready()
        return web.Response(status=200 if readiness.ready else 503)

    async def _list_models(self, _: web.Request) -> web.Response:
        readiness = await self.engine.ready()
        data = [{"id": name, "object": "model"} for name in readiness.models]
        return _json(orjson.dumps({"object": "list", "data": data}))

    async def _tell_facts(self, _: web.Request) -> web.Response:
        # No `model_path`: a router would ask a model hub for that model's tokenizer.
        return _json(orjson.dumps({"served_model_name": MODEL}))

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        body = await request.read()
        asked = EngineRequest(
            request_id=f"{self.requests}",
            endpoint=request.path,
            body=body,
            stream_to_client=bool(orjson.loads(body).get("stream")),
        )
        try:
            async with aclosing(self.engine.run(asked)) as outputs:
                if asked.stream_to_client:
                    return await _streamed(request, outputs)
                return await _whole(outputs)
        except EngineError as error:
            return _json(error.body or b"{}", error.status_code or 503)


async def _whole(outputs: AsyncGenerator[EngineOutput]) -> web.Response:
    async for output in outputs:
        if isinstance(output, Completed):
            return _json(output.body, output.status_code)
    raise AssertionError


async def _streamed(
    request: web.Request, outputs: AsyncGenerator[EngineOutput]
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    async for output in outputs:
        if not response.prepared:  # Only now: a refusal comes before the first output.
            await response.prepare(request)
        data = output.data if isinstance(output, Chunk) else b"[DONE]"
        await response.write(b"data: " + data + b"\n\n")
    return response


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


@asynccontextmanager
async def an_http_engine(engine: FakeEngine) -> AsyncGenerator[HttpEngine]:
    """Start the engine and serve it on a free port."""
    served = HttpEngine(engine)
    await engine.start()
    runner = web.AppRunner(
        served.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        served.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield served
    finally:
        await runner.cleanup()
        await engine.stop()
