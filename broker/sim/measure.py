"""Takes the figures of a run: from its records, and from samples of the caches on the way."""

import statistics
from collections.abc import Iterable, Sequence

from broker.sim.figures import Figures, Spread, jain, spread
from broker.sim.host import Host
from broker.sim.records import Records
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
    records = world.records
    answered = [index for index in range(len(records)) if not records.refused[index]]
    arrived, first, ended = records.arrived_s, records.first_token_s, records.ended_s
    prompt_tokens = sum(world.requests[index].prompt_tokens for index in answered)
    output_tokens = sum(world.requests[index].output_tokens for index in answered)
    span_s = max(ended, default=0.0) - min(arrived, default=0.0)
    shares = [share for host in world.hosts if (share := _busy_share(host, world.at_s)) >= 0]
    switches, hot_switches = _switches(world.requests, records, answered)
    return Figures(
        requests=len(answered),
        refused=len(records) - len(answered),
        reruns=sum(records.attempts[index] - 1 for index in answered),
        ttft_s=spread(first[index] - arrived[index] for index in answered),
        itl_s=spread(_itls(world.requests, records, answered)),
        e2e_s=spread(ended[index] - arrived[index] for index in answered),
        queue_s=spread(records.given_s[index] - arrived[index] for index in answered),
        cached_token_ratio=_cached_ratio(world.requests, records, answered),
        utilisation_mean=statistics.fmean(shares) if shares else 0.0,
        utilisation_std=statistics.pstdev(shares) if shares else 0.0,
        throughput_tokens_s=(prompt_tokens + output_tokens) / span_s if span_s else 0.0,
        span_s=span_s,
        prefix_switch_ratio=switches,
        hot_switch_ratio=hot_switches,
        duplicate_kv_ratio=duplicate_kv_ratio,
        hit_dip=_hit_dip(world, answered),
        jain_index=jain(_lane_speeds(world, answered)),
        decision_s=decision_s,
    )


def _busy_share(host: Host, end_s: float) -> float:
    """Share of its time that it computes; negative for one that is gone."""
    if not host.alive or end_s <= host.joined_at_s:
        return -1.0
    return host.busy_s / (end_s - host.joined_at_s)


def _itls(requests: Sequence[Request], records: Records, rows: Iterable[int]) -> Iterable[float]:
    for index in rows:
        gaps = requests[index].output_tokens - 1
        if gaps:
            yield (records.ended_s[index] - records.first_token_s[index]) / gaps


def _cached_ratio(requests: Sequence[Request], records: Records, rows: Sequence[int]) -> float:
    prompt_tokens = sum(requests[index].prompt_tokens for index in rows)
    cached_tokens = sum(records.cached_tokens[index] for index in rows)
    return cached_tokens / prompt_tokens if prompt_tokens else 0.0


def _switches(
    requests: Sequence[Request], records: Records, rows: Sequence[int]
) -> tuple[float, float]:
    """Return how often a prefix, and a hot one, went to another worker than the last time."""
    last: dict[int, int] = {}
    asked: dict[int, list[int]] = {}
    """By prefix: times asked for, times switched."""
    for index in sorted(rows, key=records.given_s.__getitem__):
        request, host = requests[index], records.host[index]
        shortest = -(-PREFIX_TOKENS_MIN // request.block_tokens)
        blocks = request.blocks[shortest - 1 :]
        prefix = next((block for block in reversed(blocks) if block in last), None)
        if prefix is not None:
            counts = asked.setdefault(prefix, [0, 0])
            counts[0] += 1
            counts[1] += last[prefix] != host
        for block in blocks:
            last[block] = host
    by_heat = sorted(asked.values(), key=lambda counts: -counts[0])
    hot = by_heat[: max(1, round(HOT_SHARE * len(by_heat)))]
    return _switch_ratio(by_heat), _switch_ratio(hot)


def _switch_ratio(counts: Sequence[Sequence[int]]) -> float:
    times = sum(count[0] for count in counts)
    return sum(count[1] for count in counts) / times if times else 0.0


def _hit_dip(world: World, rows: Sequence[int]) -> float:
    dips: list[float] = []
    kinds = (Change.JOIN, Change.RESTART, Change.LOSE)
    first = world.records.first_token_s
    for change in world.changes:
        if change.change in kinds:
            at_s = change.at_s
            before = [index for index in rows if at_s - DIP_WINDOW_S <= first[index] < at_s]
            after = [index for index in rows if at_s <= first[index] < at_s + DIP_WINDOW_S]
            if before and after:
                was = _cached_ratio(world.requests, world.records, before)
                dips.append(was - _cached_ratio(world.requests, world.records, after))
    return statistics.fmean(dips) if dips else 0.0


def _lane_speeds(world: World, rows: Sequence[int]) -> list[float]:
    profile, records = world.hosts[0].profile, world.records
    sums: dict[str, list[float]] = {}
    for index in rows:
        request = world.requests[index]
        alone_s = profile.prefill_s.at(request.prompt_tokens)
        alone_s += request.output_tokens * profile.decode_s.at(0.0)
        total = sums.setdefault(request.lane, [0.0, 0])
        total[0] += alone_s / max(1e-9, records.ended_s[index] - records.arrived_s[index])
        total[1] += 1
    return [speed / jobs for speed, jobs in sums.values()]
