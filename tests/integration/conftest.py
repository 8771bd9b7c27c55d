"""Real servers for every test in this folder."""

from tests.servers import bus, connections, nats_bus, nats_server, proxy

__all__ = ["bus", "connections", "nats_bus", "nats_server", "proxy"]
