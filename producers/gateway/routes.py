"""Every part of the API, in one list."""

from collections.abc import Iterable

from aiohttp import web

from producers.gateway import batches, files, generate, health, models
from producers.gateway.app import RouteModule
from producers.gateway.asking import Desk
from producers.gateway.gateway import Gateway
from producers.gateway.jobs import LaterJobs


def _jobs(gateway: Gateway) -> Iterable[web.RouteDef]:
    """Name what makes jobs, and what asks for them later; both know of the same jobs."""
    desk = Desk(gateway)
    later = LaterJobs(gateway, desk)
    return (*generate.routes(gateway, desk, later.accept), *later.routes())


MODULES: tuple[RouteModule, ...] = (
    health.routes,
    models.routes,
    _jobs,
    files.routes,
    batches.routes,
)
