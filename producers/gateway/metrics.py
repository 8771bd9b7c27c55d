"""What the gateway counts. Labels come from its own routes and keys, never from a request."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class GatewayMetrics:
    """All of one gateway's metrics, with a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "inferlane_gateway_requests",
            "Requests answered, by route and status (499: the client left).",
            ("route", "status"),
            registry=self.registry,
        )
        self.jobs = Counter(
            "inferlane_gateway_jobs",
            "Jobs that were accepted, by lane and key.",
            ("lane", "key"),
            registry=self.registry,
        )
        self.left = Counter(
            "inferlane_gateway_left",
            "Callers that left before their answer was whole; their jobs were cancelled.",
            registry=self.registry,
        )
        self.caught_up = Counter(
            "inferlane_gateway_caught_up",
            "Streams whose rest came in one piece: a slow reader, or a lost link.",
            registry=self.registry,
        )
        self.refused_connections = Counter(
            "inferlane_gateway_refused_connections",
            "Connections beyond connections_max.",
            registry=self.registry,
        )
        self.surprises = Counter(
            "inferlane_gateway_surprises",
            "Requests that met a fault of the gateway itself; see its log.",
            registry=self.registry,
        )
        self.connections = Gauge(
            "inferlane_gateway_connections", "Connections open now.", registry=self.registry
        )
        self.streams = Gauge(
            "inferlane_gateway_streams", "Streamed answers under way.", registry=self.registry
        )
        self.giving_up = Gauge(
            "inferlane_gateway_giving_up",
            "Jobs that are being cancelled because their callers left.",
            registry=self.registry,
        )
        self.body_bytes = Gauge(
            "inferlane_gateway_body_bytes",
            "Request bodies held for requests under way.",
            registry=self.registry,
        )
        self.ttft_s = Histogram(
            "inferlane_gateway_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_TTFT_S,
            registry=self.registry,
        )

    def expose(self) -> bytes:
        """Write all in the Prometheus text format."""
        return generate_latest(self.registry)
