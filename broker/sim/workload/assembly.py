"""Makes a workload of a trace's requests: in order, indexed, from 0 s, with one output limit."""

from collections.abc import Iterable
from operator import attrgetter

from msgspec.structs import replace

from broker.sim.errors import TraceError
from broker.sim.request import Request, Workload

MS_PER_S = 1000.0
UNKNOWN_OUTPUT_MAX = 0
"""Stands in `output_tokens_max` until `assembled` knows the largest output of all."""


def output_limit(output_tokens_max: int) -> int:
    """Return what every sender of a trace allows, where the trace doesn't say.

    The largest output rounded up to a power of two, the same for all: senders set a round limit
    once, so that a router learns nothing of one request's length.
    """
    return 1 << (output_tokens_max - 1).bit_length()


def assembled(requests: Iterable[Request], *, name: str, source: str) -> Workload:
    """Make a workload of requests without `after` in any order; equal arrivals keep theirs.

    Raises:
        TraceError: there is none.
    """
    ordered = sorted(requests, key=attrgetter("at_s"))
    if not ordered:
        raise TraceError(name, "has no request: nothing to run")
    start_s = ordered[0].at_s
    limit = output_limit(max(request.output_tokens for request in ordered))
    return Workload(
        name=name,
        source=source,
        requests=[
            replace(
                request,
                index=index,
                at_s=request.at_s - start_s,
                output_tokens_max=request.output_tokens_max or limit,
            )
            for index, request in enumerate(ordered)
        ],
    )
