"""/v1/models: what the caller's lane offers, other names and adapters included."""

from collections.abc import Iterable

import orjson
from aiohttp import web

from broker.wire.messages import LaneOffer
from producers.gateway.errors import ApiError
from producers.gateway.gateway import CALLER, Gateway
from producers.naming import resolve

OWNER = "inferlane"


def routes(gateway: Gateway) -> Iterable[web.RouteDef]:
    """Name the list, and one model by its name, which may have slashes."""

    async def offered(request: web.Request) -> list[str]:
        lane = request[CALLER].lane
        client = await gateway.lanes.of(lane)
        await gateway.lanes.refresh_offer(lane)
        return [] if client.offer is None else names_of(client.offer)

    async def every(request: web.Request) -> web.Response:
        data = [_model(name) for name in await offered(request)]
        return _json({"object": "list", "data": data})

    async def one(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in await offered(request):
            message = f"The model {name[:80]!r} does not exist here."
            raise ApiError(404, "model_not_found", message, param="model")
        return _json(_model(name))

    return (web.get("/v1/models", every), web.get("/v1/models/{name:.+}", one))


def names_of(offer: LaneOffer) -> list[str]:
    """List every name that a request may carry: models, their other names, their adapters."""
    aliases = [name for name in offer.aliases if resolve(name, "", offer)[0] in offer.models]
    adapters = [name for names in offer.adapters.values() for name in names]
    return list(dict.fromkeys((*offer.models, *sorted(aliases), *sorted(adapters))))


def _model(name: str) -> dict[str, object]:
    """Describe a model. No gateway knows when it was made, and all say the same."""
    return {"id": name, "object": "model", "created": 0, "owned_by": OWNER}


def _json(value: object) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")
