"""How loaded a cluster is at a point, measured by what round robin can do there.

Load = tokens offered a second ÷ round robin's capacity. Its capacity is the tokens a second it
serves of the same requests, on the same fleet, when all of them are there from the start: nothing
ever idles for want of work, and batches are as full as memory allows. Where workers join or go, it
is the fleet that a run begins with: a change at an instant has no place in a run without arrivals.
Tokens are prompt and output tokens; the mix is the same in both, so their different costs cancel. A
share of time in use would not do: an engine that decodes a single request is busy all the time and
loaded by a fraction. The end of a run, when workers fall idle one by one, is part of both; on a
short trace it takes from the capacity, so the load is overstated there, never understated.

Sessions wait for their own answers, so they offer no rate of their own: what round robin served
stands for it, and such a workload can't overload anything. The turns of the longest session follow
each other even when all sessions begin at once, which overstates the load as a short trace does.
"""

from msgspec import Struct

from broker.sim.figures import Figures
from broker.sim.request import Workload

ITL_LOAD_RATIO_MAX = 0.8
"""Inter-token latency is compared below this load: above, it tells how long the backlog is."""

ALL_AT_ONCE_SPEED = 1e6
"""So fast that a day of arrivals takes a tenth of a second."""

OVERLOADED_TTFT_S = 10.0
"""A cluster that is offered more than it can do, and lets a request wait this long on average, has
a backlog that grows. Precedent: the longest wait of interactive jobs (`BandPolicy`, band 0). The
rate alone would also name a trace whose last minutes happen to be its busiest."""


class Load(Struct, frozen=True, kw_only=True):
    """Of a point."""

    load_ratio: float
    offered_tokens_s: float
    capacity_tokens_s: float
    round_robin_ttft_s_mean: float
    overloaded: bool
    """Round robin exceeds the cluster's capacity: results are listed apart."""

    @property
    def itl_comparable(self) -> bool:
        """Whether inter-token latencies may be compared."""
        return self.load_ratio < ITL_LOAD_RATIO_MAX


def load_of(workload: Workload, *, speed: float, at_point: Figures, all_at_once: Figures) -> Load:
    """Return the load, from two runs of round robin: at the point, and with all there at once."""
    offered = offered_tokens_s(workload, speed=speed) or at_point.throughput_tokens_s
    capacity = all_at_once.throughput_tokens_s
    ratio = offered / capacity if capacity else 0.0
    return Load(
        load_ratio=ratio,
        offered_tokens_s=offered,
        capacity_tokens_s=capacity,
        round_robin_ttft_s_mean=at_point.ttft_s.mean,
        overloaded=ratio > 1 and at_point.ttft_s.mean > OVERLOADED_TTFT_S,
    )


def offered_tokens_s(workload: Workload, *, speed: float) -> float:
    """Return the rate that arrives, 0 where arrivals wait for answers or come all at once."""
    tokens = 0
    last_at_s = 0.0
    for request in workload.requests:
        if request.after is not None:
            return 0.0
        tokens += request.prompt_tokens + request.output_tokens
        last_at_s = request.at_s
    return tokens * speed / last_at_s if last_at_s else 0.0
