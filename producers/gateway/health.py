"""Is the gateway alive, can it take requests, what has it counted: without a key."""

from collections.abc import Iterable, Mapping

import orjson
from aiohttp import web

from producers.gateway.gateway import Gateway
from producers.gateway.metrics import CONTENT_TYPE


def routes(gateway: Gateway) -> Iterable[web.RouteDef]:
    """Name /healthz, /readyz and /metrics."""

    async def healthz(_: web.Request) -> web.Response:
        return _json({"alive": True})

    async def readyz(_: web.Request) -> web.Response:
        reason = ""
        if gateway.leaving:
            reason = "stopping"
        elif not gateway.bus.connected:
            reason = "the message server can't be reached"
        told = {"ready": not reason, "reason": reason}
        return _json(told, status=503 if reason else 200)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=gateway.expose(), headers={"Content-Type": CONTENT_TYPE})

    return (
        web.get("/healthz", healthz),
        web.get("/readyz", readyz),
        web.get("/metrics", metrics),
    )


def _json(value: Mapping[str, object], *, status: int = 200) -> web.Response:
    body = orjson.dumps(value) + b"\n"
    return web.Response(body=body, status=status, content_type="application/json")
