"""What the broker says over HTTP: is it alive, is it ready, its metrics, and a page for people.

No password, so it listens on loopback unless told otherwise, changes nothing, and takes nothing but
short GET requests.

    /healthz   200 while the loop turns; a supervisor restarts the process on anything else
    /readyz    200 as leader at work or standby; 503 with the reason
    /metrics   Prometheus text
    /          workers, queues and quota rows, refreshed by itself
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import orjson
from aiohttp import web

from broker.service.loop_watch import STALL_S
from broker.service.metrics import CONTENT_TYPE, Metrics
from broker.service.snapshot import SnapshotSource
from broker.service.status_page import page

HEADER_BYTES_MAX = 4096
"""Longest request line, and longest header."""

HEADERS_MAX = 32
"""Headers of a request; browsers send some fifteen."""

RENDERS_MAX = 4
"""Pages and scrapes in the making at once; a further one is told to come back."""

STOP_S_MAX = 1.0
"""How long stopping waits for answers under way."""

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
}


class PageUnavailable(Exception):
    """The address can't be listened on; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Health:
    """How the process is, as its own code sees it."""

    role: str
    """`leader`, `standby` or `starting`."""
    ready: bool
    reason: str
    """Why it is not ready; for a standby, who leads. May be empty."""
    epoch: int = 0
    turned_ago_s: float = 0.0
    """Since the loop last turned; 0 while there is no loop to turn."""


class StatusServer:
    """The HTTP server."""

    def __init__(
        self, metrics: Metrics, source: SnapshotSource, *, health: Callable[[], Health]
    ) -> None:
        self._metrics = metrics
        self._source = source
        self._health = health
        self._renders = 0
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._bounded(self._scrape))
        app.router.add_get("/", self._bounded(self._page))
        self._runner = web.AppRunner(
            app,
            access_log=None,
            max_line_size=HEADER_BYTES_MAX,
            max_field_size=HEADER_BYTES_MAX,
            max_headers=HEADERS_MAX,
            shutdown_timeout=STOP_S_MAX,
        )

    async def start(self, host: str, port: int) -> str:
        """Listen; return the page's URL. Raises PageUnavailable."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            await self._runner.cleanup()
            why = (error.strerror or str(error)).lower()
            message = (
                f"can't serve the status page on {host}:{port}: {why};"
                " set broker.http_host and broker.http_port (0: any free port)"
            )
            raise PageUnavailable(message) from error
        bound_host, bound_port = self._runner.addresses[0][:2]
        return f"http://{f'[{bound_host}]' if ':' in bound_host else bound_host}:{bound_port}"

    async def stop(self) -> None:
        """Stop listening. Idempotent."""
        await self._runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        health = self._health()
        if health.turned_ago_s <= STALL_S:
            return _json({"alive": True})
        stalled = f"the loop has not turned for {health.turned_ago_s:.1f} s"
        return _json({"alive": False, "reason": stalled}, status=503)

    async def _readyz(self, _: web.Request) -> web.Response:
        health = self._health()
        told = {
            "ready": health.ready,
            "role": health.role,
            "epoch": health.epoch,
            "reason": health.reason,
        }
        return _json(told, status=200 if health.ready else 503)

    async def _scrape(self, _: web.Request) -> web.Response:
        body = await self._metrics.expose()
        return web.Response(body=body, headers={**_HEADERS, "Content-Type": CONTENT_TYPE})

    async def _page(self, _: web.Request) -> web.Response:
        health = self._health()
        text = await page(self._source, role=health.role, reason=health.reason)
        return web.Response(text=text, content_type="text/html", headers=_HEADERS)

    def _bounded(
        self, answer: Callable[[web.Request], Awaitable[web.Response]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def bounded(request: web.Request) -> web.Response:
            if self._renders >= RENDERS_MAX:
                busy = "too many pages at once; try again in a second\n"
                return web.Response(text=busy, status=503, headers={"Retry-After": "1"})
            self._renders += 1
            try:
                return await answer(request)
            finally:
                self._renders -= 1

        return bounded


def _json(value: Mapping[str, object], *, status: int = 200) -> web.Response:
    headers = {**_HEADERS, "Content-Type": "application/json"}
    return web.Response(body=orjson.dumps(value) + b"\n", status=status, headers=headers)
