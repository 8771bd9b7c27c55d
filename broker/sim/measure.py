"""Takes the figures of a run: from its records, and from samples of the caches on the way."""

import statistics
from array import array
from collections.abc import Sequence

from broker.sim.figures import Figures, Spread, jain, quantiles, spread
from broker.sim.host import Host
from broker.sim.request import Request
from broker.sim.world import Change, World

PREFIX_TOKENS_MIN = 1000
"""A shorter common beginning is nobody's prefix: on some traces every request shares a block."""

HOT_SHARE = 0.1
"""Of prefixes by how often they are asked for: the tenth that counts as hot."""

CACHE_SAMPLES = 40
"""Looks at the caches in a run, evenly over the arrivals."""

DIP_WINDOW_S = 60.0
"""Time before and after a change of the fleet over which cached shares are compared."""


class CacheSampler:
    """Looks at all caches now and then: how much of what is cached is there more than once."""

    def __init__(self, world: World, *, until_s: float) -> None:
        self._world = world
        self._ratios: list[float] = []
        for number in range(1, CACHE_SAMPLES + 1):
            world.call_at(until_s * number / CACHE_SAMPLES, self._look)

    @property
    def duplicate_ratio(self) -> float:
        """Mean share of cached blocks of which another worker has a copy; 0 of nothing."""
        return statistics.fmean(self._ratios) if self._ratios else 0.0

    def _look(self, at_s: float) -> None:
        del at_s  # Called at the time it asked for.
        copies: dict[int, int] = {}
        for host in self._world.hosts:
            for block in host.model.kv.blocks():
                copies[block] = copies.get(block, 0) + 1
        total = sum(copies.values())
        if total:
            self._ratios.append(sum(n for n in copies.values() if n > 1) / total)


def measure(
    world: World, *, duplicate_kv_ratio: float = 0.0, decision_s: Spread | None = None
) -> Figures:
    """Sum a finished run up."""
    records, tally = world.records, _Tally(world)
    for request in world.requests:
        if not records.refused[request.index]:
            tally.add(request)
    span_s = max(records.ended_s, default=0.0) - min(records.arrived_s, default=0.0)
    shares = [share for host in world.hosts if (share := _busy_share(host, world.at_s)) >= 0]
    tokens = tally.prompt_tokens + tally.output_tokens
    switches, hot_switches = tally.prefixes.ratios()
    return Figures(
        requests=len(tally.ttft_s),
        refused=len(records) - len(tally.ttft_s),
        reruns=tally.reruns,
        ttft_s=spread(tally.ttft_s),
        itl_s=spread(tally.itl_s),
        e2e_s=spread(tally.e2e_s),
        queue_s=spread(tally.queue_s),
        cached_token_ratio=_ratio(tally.cached_tokens, tally.prompt_tokens),
        utilisation_mean=statistics.fmean(shares) if shares else 0.0,
        utilisation_std=statistics.pstdev(shares) if shares else 0.0,
        throughput_tokens_s=_ratio(tokens, span_s),
        span_s=span_s,
        prefix_switch_ratio=switches,
        hot_switch_ratio=hot_switches,
        duplicate_kv_ratio=duplicate_kv_ratio,
        hit_dip=tally.hit_dip(),
        jain_index=jain([speed / jobs for speed, jobs in tally.speeds.values()]),
        ttft_quantiles_s=quantiles(tally.ttft_s),
        decision_s=decision_s,
    )


class _Tally:
    """Adds up the requests that were answered, in the order of their indices."""

    def __init__(self, world: World) -> None:
        self._records = world.records
        self._profile = world.hosts[0].profile
        self.ttft_s, self.itl_s = array("d"), array("d")
        self.e2e_s, self.queue_s = array("d"), array("d")
        self.prompt_tokens = self.output_tokens = self.cached_tokens = self.reruns = 0
        self.prefixes = _Prefixes()
        self.speeds: dict[str, tuple[float, int]] = {}
        kinds = (Change.JOIN, Change.RESTART, Change.LOSE)
        self._changes = [change.at_s for change in world.changes if change.change in kinds]
        self._windows = [[0, 0, 0, 0] for _ in self._changes]
        """By change: cached and prompt tokens in the time before it, and after it."""

    def add(self, request: Request) -> None:
        """Add a request."""
        records, index = self._records, request.index
        arrived_s, first_s = records.arrived_s[index], records.first_token_s[index]
        e2e_s = records.ended_s[index] - arrived_s
        self.ttft_s.append(first_s - arrived_s)
        self.e2e_s.append(e2e_s)
        self.queue_s.append(records.given_s[index] - arrived_s)
        if request.output_tokens > 1:
            self.itl_s.append((records.ended_s[index] - first_s) / (request.output_tokens - 1))
        self.prompt_tokens += request.prompt_tokens
        self.output_tokens += request.output_tokens
        self.cached_tokens += records.cached_tokens[index]
        self.reruns += records.attempts[index] - 1
        self.prefixes.add(request, records.host[index])
        alone_s = self._profile.prefill_alone_s(request.prompt_tokens)
        alone_s += request.output_tokens * self._profile.decode_s.at(0.0)
        speed, jobs = self.speeds.get(request.lane, (0.0, 0))
        self.speeds[request.lane] = (speed + alone_s / max(1e-9, e2e_s), jobs + 1)
        for at_s, window in zip(self._changes, self._windows, strict=True):
            if abs(first_s - at_s) < DIP_WINDOW_S:
                side = 0 if first_s < at_s else 2
                window[side] += records.cached_tokens[index]
                window[side + 1] += request.prompt_tokens

    def hit_dip(self) -> float:
        """Return how much less of the prompts is cached after a change than before, on average."""
        dips = [
            _ratio(before, asked_before) - _ratio(after, asked_after)
            for before, asked_before, after, asked_after in self._windows
            if asked_before and asked_after
        ]
        return statistics.fmean(dips) if dips else 0.0


class _Prefixes:
    """Follows each prefix from worker to worker."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        self._counts: dict[int, list[int]] = {}
        """By prefix: times asked for again, times it went elsewhere than the last time."""

    def add(self, request: Request, host: int) -> None:
        """Note where a request went."""
        last = self._last
        shortest = -(-PREFIX_TOKENS_MIN // request.block_tokens)
        blocks = request.blocks[shortest - 1 :]
        prefix = next((block for block in reversed(blocks) if block in last), None)
        if prefix is not None:
            counts = self._counts.setdefault(prefix, [0, 0])
            counts[0] += 1
            counts[1] += last[prefix] != host
        for block in blocks:
            last[block] = host

    def ratios(self) -> tuple[float, float]:
        """Return the share of switches, and that of the hot prefixes."""
        by_heat = sorted(self._counts.values(), key=lambda counts: -counts[0])
        hot = by_heat[: max(1, round(HOT_SHARE * len(by_heat)))]
        return _switch_ratio(by_heat), _switch_ratio(hot)


def _switch_ratio(counts: Sequence[Sequence[int]]) -> float:
    return _ratio(sum(count[1] for count in counts), sum(count[0] for count in counts))


def _busy_share(host: Host, end_s: float) -> float:
    """Return the share of its time that it computes; negative for one that is gone."""
    if not host.alive or end_s <= host.joined_at_s:
        return -1.0
    return host.busy_s / (end_s - host.joined_at_s)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
