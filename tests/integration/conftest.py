"""Real servers for every test in this folder."""

from tests.servers import connections, nats_bus, nats_server

__all__ = ["connections", "nats_bus", "nats_server"]
