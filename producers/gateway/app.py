"""The HTTP application: routes come in modules, and what all of them need stands around them.

A route module is a function that takes the gateway and names its routes. Whatever a handler raises
becomes an answer in OpenAI's form; every request has an id; every path but a few needs a key.
"""

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence

import structlog
from aiohttp import HttpVersion11, web

from broker.wire.ids import new_job_id
from producers.errors import ProducerError
from producers.gateway.errors import ApiError, of_producer
from producers.gateway.gateway import CALLER, REQUEST_ID, Gateway

RouteModule = Callable[[Gateway], Iterable[web.RouteDef]]
"""Names the routes of one part of the API."""

OPEN_PATHS = frozenset(("/healthz", "/readyz", "/metrics"))
"""Asked without a key: by supervisors, balancers and Prometheus, who have none."""

REQUEST_ID_HEADER = "X-Request-Id"

CLIENT_LEFT = 499
"""Counted for a request whose client left; nobody reads it."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

_CONTINUE = "100-continue"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Expected = Callable[[web.Request], Awaitable[web.StreamResponse | None]]

_log = structlog.get_logger(__name__)

_PREPARED = web.RequestKey("prepared", bool)
"""Its answer has begun: an error can no longer have a status of its own."""


def make_app(gateway: Gateway, modules: Sequence[RouteModule]) -> web.Application:
    """Make the application of a gateway that runs."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID] = _request_id(request)
        status = CLIENT_LEFT
        gateway.under_way.enter()
        try:
            response = await _answered(gateway, request, handler)
            status = response.status
        finally:
            gateway.under_way.leave()
            gateway.metrics.requests.labels(_route(request), status).inc()
        return response

    # Bodies are bounded where they are read: each route has a bound of its own.
    app = web.Application(middlewares=(guard,), client_max_size=0)
    app.on_response_prepare.append(_on_prepare)
    expect = _expecting(gateway)
    for module in modules:
        for route in module(gateway):
            fields = {"expect_handler": expect, **route.kwargs}
            app.add_routes([web.RouteDef(route.method, route.path, route.handler, fields)])
    return app


def _expecting(gateway: Gateway) -> _Expected:
    """Make what answers `Expect`, which is asked before any middleware."""

    async def expect(request: web.Request) -> web.StreamResponse | None:
        """Let the body come, or refuse the request while it is not sent yet."""
        wish = request.headers.get("Expect", "").lower()
        if request.version < HttpVersion11:
            return None
        request[REQUEST_ID] = _request_id(request)
        if wish != _CONTINUE:
            return _unexpected(request).response()
        try:
            if request.path not in OPEN_PATHS:
                gateway.keys.caller(request.headers.get("Authorization"))
        except ApiError as error:
            return error.response()
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # The answer itself has not begun.
        request.writer.output_size = 0
        return None

    return expect


def outermost(handler: Handler) -> Handler:
    """Stand around the application itself: what it raises before any of ours has OpenAI's form too.

    That is the answer to an `Expect` on a path that is not served.
    """

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:
            request[REQUEST_ID] = _request_id(request)
            return _of_http(request, error).response()

    return answer


async def _answered(gateway: Gateway, request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let the handler answer; what it raises becomes an answer too."""
    try:
        if request.path not in OPEN_PATHS:
            request[CALLER] = gateway.keys.caller(request.headers.get("Authorization"))
        return await handler(request)
    except ConnectionError:
        raise
    except ApiError as error:
        return _begun(request) or error.response()
    except ProducerError as error:
        return _begun(request) or of_producer(error).response()
    except web.HTTPException as error:
        return _begun(request) or _of_http(request, error).response()
    except Exception:  # noqa: BLE001 - the edge of one request: the others go on
        gateway.metrics.surprises.inc()
        _log.exception("gateway.surprise", path=request.path, request_id=request[REQUEST_ID])
        message = "The gateway failed at this request; its log says why."
        return _begun(request) or ApiError(503, "internal_error", message).response()


def _begun(request: web.Request) -> None:
    """Cut the connection where an answer has begun: a second one must not follow in its midst."""
    if request.get(_PREPARED):
        message = "the answer could not be finished"
        raise ConnectionResetError(message)


def _of_http(request: web.Request, error: web.HTTPException) -> ApiError:
    """Put one of aiohttp's own answers into OpenAI's form."""
    match error:
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            message = f"{request.path} takes {allowed}, not {request.method}."
            headers = {"Allow": allowed}
            return ApiError(405, "method_not_allowed", message, headers=headers)
        case web.HTTPNotFound():
            message = f"{request.path} is not served here."
            return ApiError(404, "not_found", message)
        case web.HTTPExpectationFailed():
            return _unexpected(request)
        case _:
            status = error.status if 400 <= error.status < 500 else 400  # noqa: PLR2004 - 4xx
            return ApiError(status, "invalid_request", error.reason)


def _unexpected(request: web.Request) -> ApiError:
    wish = request.headers.get("Expect", "")
    message = f"Expect: {wish[:40]!r} is not known; send `{_CONTINUE}` or nothing."
    return ApiError(417, "expectation_failed", message)


async def _on_prepare(request: web.Request, response: web.StreamResponse) -> None:
    request[_PREPARED] = True
    response.headers[REQUEST_ID_HEADER] = request.get(REQUEST_ID, "")
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers.setdefault("Cache-Control", "no-store")


def _request_id(request: web.Request) -> str:
    """Return the caller's id where it can stand in a log, else a new one."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    return given if _REQUEST_ID.fullmatch(given) else f"req_{new_job_id()}"


def _route(request: web.Request) -> str:
    """Name the route, not the path: paths are without end, and each would be a time series."""
    resource = request.match_info.route.resource
    return "none" if resource is None else resource.canonical
