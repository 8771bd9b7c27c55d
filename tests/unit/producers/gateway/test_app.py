"""What stands around every route: keys, request ids, errors, health."""

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from aiohttp import web

from broker.bus.memory import MemoryBus
from producers.errors import QueueFull
from producers.gateway import health
from producers.gateway.errors import ApiError
from producers.gateway.gateway import CALLER, REQUEST_ID, Gateway
from tests.gateways import AUTH, Front, a_gateway


def _routes(gateway: Gateway) -> Iterable[web.RouteDef]:
    """A part of the API that does what a test needs."""

    async def whoami(request: web.Request) -> web.Response:
        caller = request[CALLER]
        told = f"{caller.name} {caller.lane} {caller.band} {request[REQUEST_ID]}"
        return web.Response(text=told)

    async def fails(request: web.Request) -> web.Response:
        match request.match_info["how"]:
            case "api":
                raise ApiError(409, "busy", "Busy.", param="p")
            case "producer":
                message = "full"
                raise QueueFull(message, retry_after_s=2.0)
            case "http":
                raise web.HTTPConflict
            case _:
                message = "a fault of ours"
                raise RuntimeError(message)

    async def breaks(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        message = "a fault of ours"
        raise RuntimeError(message)

    async def body(request: web.Request) -> web.Response:
        async with gateway.bodies.json(request) as read:
            return web.json_response({"bytes": len(read), "held": gateway.bodies.held_bytes})

    return (
        web.get("/v1/whoami", whoami),
        web.get("/v1/fails/{how}", fails),
        web.get("/v1/breaks", breaks),
        web.post("/v1/body", body),
    )


MODULES = (health.routes, _routes)


def _front(**fields: Any) -> Any:
    return a_gateway(MemoryBus(), modules=MODULES, **fields)


async def test_a_key_names_the_caller() -> None:
    """Lane and band come from the key, and the caller's request id is kept."""
    sent = {"X-Request-Id": "r-1"}
    async with _front() as front, front.session.get("/v1/whoami", headers=sent) as answer:
        assert await answer.text() == "tester acme 1 r-1"
        assert answer.headers["X-Request-Id"] == "r-1"


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "ü"])
async def test_a_request_id_that_fits_no_log_is_replaced(given: str) -> None:
    """Each request has an id, and each answer tells it."""
    sent = {"X-Request-Id": given}
    async with _front() as front, front.session.get("/v1/whoami", headers=sent) as answer:
        made = answer.headers["X-Request-Id"]
        assert (await answer.text()).endswith(made)
    assert made.startswith("req_")


async def test_without_a_key_only_health_is_told() -> None:
    """All else is 401, unknown paths too: what there is is told to nobody else."""
    async with _front() as front:
        no_key = {"Authorization": ""}
        for path in ("/healthz", "/readyz"):
            status, told = await front.ask(path, headers=no_key)
            assert status == 200, told
        for path in ("/v1/whoami", "/v1/none", "/"):
            status, told = await front.ask(path, headers=no_key)
            assert (status, told["error"]["code"]) == (401, "missing_api_key")


@pytest.mark.parametrize(
    ("path", "status", "code", "headers"),
    [
        ("/v1/fails/api", 409, "busy", {"x-should-retry": "false"}),
        ("/v1/fails/producer", 429, "queue_full", {"Retry-After": "2", "retry-after-ms": "2000"}),
        ("/v1/fails/http", 409, "invalid_request", {}),
        ("/v1/fails/else", 503, "internal_error", {"x-should-retry": "false"}),
        ("/v1/none", 404, "not_found", {"x-should-retry": "false"}),
        ("/v1/body", 405, "method_not_allowed", {"Allow": "POST"}),
    ],
)
async def test_whatever_goes_wrong_has_openais_form(
    path: str, status: int, code: str, headers: dict[str, str]
) -> None:
    """A status, all four keys, a request id; never a 500."""
    async with _front() as front:
        found, told, all_headers = await front.ask_all(path)
    assert (found, told["error"]["code"]) == (status, code)
    assert set(told["error"]) == {"message", "type", "param", "code"}
    assert all_headers["X-Request-Id"].startswith("req_")
    assert {name: all_headers[name] for name in headers} == headers


async def test_an_answer_that_has_begun_is_cut_off() -> None:
    """A second answer in its midst would be read as a part of the first."""
    async with _front() as front:
        with pytest.raises(Exception, match=r"(?i)payload|disconnected"):
            async with front.session.get("/v1/breaks") as answer:
                await answer.read()
        status, _ = await front.ask("/v1/whoami/none")
        assert status == 404, "it goes on"


@pytest.mark.parametrize(
    ("headers", "data", "status"),
    [
        ({"Content-Type": "application/json"}, b"{}", 200),
        ({"Content-Type": "application/problem+json; charset=utf-8"}, b"{}", 200),
        ({"Content-Type": "text/plain"}, b"{}", 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, b"{}", 415),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, b"{}", 415),
        ({"Content-Type": "application/json"}, b"x" * 2000, 413),
    ],
)
async def test_bodies_that_are_taken(headers: dict[str, str], data: bytes, status: int) -> None:
    """JSON as it is, up to `body_bytes_max`."""
    async with _front(body_bytes_max=1024) as front:
        async with front.session.post("/v1/body", data=data, headers=headers) as answer:
            assert answer.status == status
        assert front.gateway.bodies.held_bytes == 0


async def _pieces(*pieces: bytes) -> Any:
    for piece in pieces:
        yield piece


async def test_a_body_of_unknown_length_has_the_same_bounds() -> None:
    """Chunks are counted as they come."""
    json = {"Content-Type": "application/json"}
    async with _front(body_bytes_max=1024) as front:
        for size, status in ((500, 200), (600, 413)):
            data = _pieces(b"x" * 500, b"x" * size)
            async with front.session.post("/v1/body", data=data, headers=json) as answer:
                assert answer.status == status
        assert front.gateway.bodies.held_bytes == 0


async def test_all_bodies_together_have_a_bound() -> None:
    """`bodies_bytes_max`: then 503 and when to come again, until there is room."""
    async with _front() as front:
        front.gateway.bodies.held_bytes = front.gateway.config.bodies_bytes_max - 5
        status, told, headers = await front.ask_all("/v1/body", {"much": 1})
        assert (status, told["error"]["code"]) == (503, "gateway_overloaded")
        assert headers["retry-after-ms"] == "1000"
        front.gateway.bodies.held_bytes = 0
        assert (await front.ask("/v1/body", {"much": 1})) == (200, {"bytes": 11, "held": 11})


async def _raw(front: Front, sent: bytes) -> bytes:
    """Send bytes; return all that comes until the gateway closes."""
    host, port = front.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    try:
        return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


HEAD = f"POST /v1/body HTTP/1.1\r\nHost: x\r\nAuthorization: {AUTH['Authorization']}\r\n"


async def test_a_body_that_does_not_come() -> None:
    """`body_s_max`: 408, and the connection is closed."""
    sent = f"{HEAD}Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{{".encode()
    async with _front(body_s_max=0.05) as front:
        told = await _raw(front, sent)
    assert told.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"body_timeout"' in told


async def test_a_body_that_asks_first() -> None:
    """`Expect: 100-continue`: it is let come; without a key it is refused before it is sent."""
    head = HEAD + "Content-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n"
    async with _front() as front:
        told = await _raw(front, f"{head}Expect: 100-continue\r\n\r\n{{}}".encode())
        assert told.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ")
        stranger = head.replace(AUTH["Authorization"], "Bearer none")
        told = await _raw(front, f"{stranger}Expect: 100-continue\r\n\r\n".encode())
        assert told.startswith(b"HTTP/1.1 401 ")
        told = await _raw(front, f"{head}Expect: tea\r\n\r\n".encode())
        assert told.startswith(b"HTTP/1.1 417 ")
        assert b'"code":"expectation_failed"' in told
        assert b"X-Request-Id: req_" in told


@pytest.mark.parametrize("path", ["/v1/none", "/", "/v1/whoami"])
async def test_an_expectation_on_any_path(path: str) -> None:
    """Where nothing is served, or not by this method, the answer has OpenAI's form as well."""
    head = HEAD.replace("/v1/body", path) + "Content-Length: 2\r\nConnection: close\r\n"
    wrong = 405 if path == "/v1/whoami" else 404
    async with _front() as front:
        told = await _raw(front, f"{head}Expect: tea\r\n\r\n".encode())
        assert told.startswith(b"HTTP/1.1 417 "), told
        assert b'"code":"expectation_failed"' in told
        assert b"X-Request-Id: req_" in told
        told = await _raw(front, f"{head}Expect: 100-continue\r\n\r\n{{}}".encode())
        assert told.startswith(f"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 {wrong} ".encode()), told
        assert b'"param":null' in told


async def test_headers_that_do_not_come() -> None:
    """`keepalive_s`: the connection is closed, whole headers or none."""
    async with _front(keepalive_s=0.05) as front:
        assert await _raw(front, b"") == b""
        assert await _raw(front, HEAD.encode()) == b""


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"y" * 9000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(200)) + b"\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    ],
    ids=["no HTTP", "long line", "long header", "many headers", "bad length"],
)
async def test_what_is_no_request(sent: bytes) -> None:
    """400 in OpenAI's form, and the connection is closed."""
    async with _front() as front:
        told = await _raw(front, sent)
    assert told.startswith(b"HTTP/1.0 400 "), told
    assert b'"code":"malformed_request"' in told


async def test_one_connection_too_many() -> None:
    """`connections_max`: 503 in OpenAI's form; when one ends there is room again."""
    async with _front(connections_max=1) as front:
        assert (await front.ask("/healthz"))[0] == 200, "its session keeps its connection"
        told = await _raw(front, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert told.startswith(b"HTTP/1.1 503 ")
        assert b"gateway_overloaded" in told
        assert b"Retry-After: 1\r\n" in told
        text = front.gateway.expose().decode()
    assert "inferlane_gateway_refused_connections_total 1.0" in text


async def test_readiness_follows_the_link() -> None:
    """Without the message server nothing can be asked; alive it is all the same."""
    bus = MemoryBus()
    link = bus.connection()
    async with a_gateway(link, modules=MODULES) as front:
        link.disconnect()
        assert await front.ask("/readyz") == (
            503,
            {"ready": False, "reason": "the message server can't be reached"},
        )
        assert (await front.ask("/healthz"))[0] == 200
        link.reconnect()
        assert (await front.ask("/readyz"))[0] == 200
        front.gateway.leaving = True
        assert (await front.ask("/readyz")) == (503, {"ready": False, "reason": "stopping"})
    await link.close()


async def test_metrics_name_routes_not_paths() -> None:
    """A caller can't make time series."""
    async with _front() as front:
        for path in ("/v1/none", "/v1/nothing", "/v1/fails/api"):
            await front.ask(path)
        async with front.session.get("/metrics") as answer:
            text = await answer.text()
    assert 'inferlane_gateway_requests_total{route="none",status="404"} 2.0' in text
    assert 'route="/v1/fails/{how}",status="409"} 1.0' in text
    assert "inferlane_gateway_connections 1.0" in text
