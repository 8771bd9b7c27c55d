"""A workload at another speed, with its arrivals jittered, or a part of it."""

import random
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from broker.sim.request import Request, Workload
from broker.sim.workload.stream import Stream


def scaled(
    workload: Workload, *, rng: random.Random, speed: float = 1.0, jitter: float = 0.0
) -> Workload:
    """Return the workload `speed` times as fast, with every gap between arrivals jittered.

    What is drawn: for each request without `after`, the gap to the arrival before it is multiplied
    by a factor of its own, uniform in 1 ± `jitter` (0..1); arrivals are the sums of these gaps. So
    the order is kept, requests that came at once still do, and the mean rate stays. With `after`,
    the delay is divided by `speed` too and multiplied by such a factor. Lazy if the workload is.
    """
    assert speed > 0
    assert 0 <= jitter <= 1
    seed = rng.getrandbits(64)

    def make() -> Iterator[Request]:
        return _scaled(workload.requests, rng=random.Random(seed), speed=speed, jitter=jitter)

    if isinstance(workload.requests, Stream):
        return replace(workload, requests=Stream(len(workload.requests), make))
    return replace(workload, requests=list(make()))


def _scaled(
    requests: Iterable[Request], *, rng: random.Random, speed: float, jitter: float
) -> Iterator[Request]:
    before_s = at_s = 0.0
    for request in requests:
        factor = rng.uniform(1 - jitter, 1 + jitter) / speed
        if request.after is not None:
            yield replace(request, at_s=request.at_s * factor)
            continue
        at_s += (request.at_s - before_s) * factor
        before_s = request.at_s
        yield replace(request, at_s=at_s)


def head(workload: Workload, requests: int) -> Workload:
    """Return the first requests, at least one; a session that has begun is kept whole."""
    return _part(workload, 0, _session_start(workload, max(1, requests)), "head")


def first_half(workload: Workload) -> Workload:
    """Return the first half by number of requests; a session that has begun is kept whole."""
    return _part(workload, 0, _session_start(workload, len(workload.requests) // 2), "first-half")


def second_half(workload: Workload) -> Workload:
    """Return what `first_half` leaves, from 0 s on: it meets empty caches, as every run does."""
    start = _session_start(workload, len(workload.requests) // 2)
    return _part(workload, start, len(workload.requests), "second-half")


def _session_start(workload: Workload, index: int) -> int:
    requests = workload.requests
    while index < len(requests) and requests[index].after is not None:
        index += 1
    return index


def _part(workload: Workload, start: int, end: int, label: str) -> Workload:
    chosen = workload.requests[start:end]
    start_s = chosen[0].at_s if chosen else 0.0
    moved = [
        replace(request, index=request.index - start, at_s=request.at_s - start_s)
        if request.after is None
        else replace(request, index=request.index - start, after=request.after - start)
        for request in chosen
    ]
    return replace(workload, name=f"{workload.name}-{label}", requests=moved)
