"""What a comparison came to, as it is written to JSON and shown on the page."""

import statistics
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from broker.sim.contestants import Contestant
from broker.sim.figures import Figures, Spread
from broker.sim.fleet_changes import written
from broker.sim.load import Load
from broker.sim.paired import Verdict
from broker.sim.request import Workload
from broker.sim.runs import JITTER, Setting


class Entry(Struct, frozen=True, kw_only=True):
    """One policy: means over the seeds, except where said."""

    policy: str
    family: str
    source: str
    ttft_s: Spread
    itl_s: Spread
    e2e_s: Spread
    queue_s: Spread
    cached_token_ratio: float
    utilisation_mean: float
    utilisation_std: float
    throughput_tokens_s: float
    span_s: float
    prefix_switch_ratio: float
    hot_switch_ratio: float
    duplicate_kv_ratio: float
    hit_dip: float
    jain_index: float
    decision_us: Spread | None
    """Real microseconds of a step of the mind, of the first seed; None for peers."""
    requests: float
    refused: float
    reruns: float
    ttft_quantiles_s: tuple[float, ...]
    seeds: tuple[Figures, ...]
    """Of each seed, in order, without quantiles."""


class TraceFacts(Struct, frozen=True, kw_only=True):
    """What ran."""

    name: str
    source: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    lanes: int


class SettingFacts(Struct, frozen=True, kw_only=True):
    """Where it ran."""

    workers: int
    blocks_per_worker: int
    block_tokens: int
    speed: float
    profile: str
    profile_source: str
    seeds: tuple[int, ...]
    jitter: float
    changes: tuple[str, ...] = ()
    """What happened to the fleet: `restart:2@120`."""


class Best(Struct, frozen=True, kw_only=True):
    """The peer to beat for one measure."""

    policy: str
    value: float


class Against(Struct, frozen=True, kw_only=True):
    """One of ours against the best peer for one measure."""

    policy: str
    """The peer."""
    value: float
    """Ours."""
    best: float
    """The peer's."""
    ratio: float | None
    """Ours ÷ the peer's; None where that is 0."""
    difference: float
    """Ours less the peer's, mean over the seeds."""
    interval: tuple[float, float] | None
    """95 % interval of that difference."""
    verdict: Verdict
    reason: str = ""
    """Why nothing is claimed."""


class Variant(Struct, frozen=True, kw_only=True):
    """The same comparison with one constant of the engine changed."""

    name: str
    order: tuple[str, ...] = ()
    """Policies, the best first."""
    values: dict[str, float] = {}
    """Of the measure, means over the seeds."""
    ours_to_best_peer: float | None = None
    reversed_pairs: tuple[tuple[str, str], ...] = ()
    """Pairs whose order is the opposite of that without the change, both differences claimed."""
    problem: str = ""
    """Why it could not be run."""


class Sensitivity(Struct, frozen=True, kw_only=True):
    """Whether the order of policies hangs on one constant of the engine model."""

    measure: str
    holds: bool
    """No pair of policies is reversed by any change."""
    variants: tuple[Variant, ...]
    """The first one is without a change."""


class Report(Struct, frozen=True, kw_only=True):
    """All of it."""

    policies: tuple[Entry, ...]
    setting: SettingFacts
    trace: TraceFacts
    load: Load
    best_peer: dict[str, Best]
    against_best_peer: dict[str, dict[str, Against]]
    """By policy of ours, then by measure."""
    overloaded: tuple[str, ...]
    """This point, if round robin exceeds the cluster's capacity in it."""
    sensitivity: Sensitivity | None = None


def entry(contestant: Contestant, seeds: Sequence[Figures]) -> Entry:
    """Sum a policy up over its seeds, at least one."""

    def mean(name: str) -> float:
        return statistics.fmean(getattr(one, name) for one in seeds)

    timed = next((one.decision_s for one in seeds if one.decision_s is not None), None)
    return Entry(
        policy=contestant.label,
        family=contestant.family,
        source=contestant.source,
        ttft_s=_mean_spread([one.ttft_s for one in seeds]),
        itl_s=_mean_spread([one.itl_s for one in seeds]),
        e2e_s=_mean_spread([one.e2e_s for one in seeds]),
        queue_s=_mean_spread([one.queue_s for one in seeds]),
        cached_token_ratio=mean("cached_token_ratio"),
        utilisation_mean=mean("utilisation_mean"),
        utilisation_std=mean("utilisation_std"),
        throughput_tokens_s=mean("throughput_tokens_s"),
        span_s=mean("span_s"),
        prefix_switch_ratio=mean("prefix_switch_ratio"),
        hot_switch_ratio=mean("hot_switch_ratio"),
        duplicate_kv_ratio=mean("duplicate_kv_ratio"),
        hit_dip=mean("hit_dip"),
        jain_index=mean("jain_index"),
        decision_us=_scaled(timed, 1e6) if timed is not None else None,
        requests=mean("requests"),
        refused=mean("refused"),
        reruns=mean("reruns"),
        ttft_quantiles_s=_mean_quantiles([one.ttft_quantiles_s for one in seeds]),
        seeds=tuple(replace(one, ttft_quantiles_s=()) for one in seeds),
    )


def trace_facts(workload: Workload) -> TraceFacts:
    """Count a workload."""
    prompt_tokens = output_tokens = 0
    lanes: set[str] = set()
    for request in workload.requests:
        prompt_tokens += request.prompt_tokens
        output_tokens += request.output_tokens
        lanes.add(request.lane)
    return TraceFacts(
        name=workload.name,
        source=workload.source,
        requests=len(workload.requests),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        lanes=len(lanes),
    )


def setting_facts(setting: Setting, *, seeds: Sequence[int]) -> SettingFacts:
    """Name a setting of equal workers."""
    return SettingFacts(
        workers=setting.workers,
        blocks_per_worker=setting.blocks_per_worker,
        block_tokens=setting.profile.block_tokens,
        speed=setting.speed,
        profile=setting.profile.name,
        profile_source=setting.profile.source,
        seeds=tuple(seeds),
        jitter=JITTER,
        changes=tuple(map(written, setting.changes)),
    )


def _mean_spread(spreads: Sequence[Spread]) -> Spread:
    return Spread(
        mean=statistics.fmean(one.mean for one in spreads),
        p50=statistics.fmean(one.p50 for one in spreads),
        p90=statistics.fmean(one.p90 for one in spreads),
        p99=statistics.fmean(one.p99 for one in spreads),
    )


def _mean_quantiles(columns: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the mean of each quantile; of seeds that answered nothing there are none."""
    return tuple(statistics.fmean(row) for row in zip(*columns, strict=False))


def _scaled(spread: Spread, factor: float) -> Spread:
    return Spread(
        mean=spread.mean * factor,
        p50=spread.p50 * factor,
        p90=spread.p90 * factor,
        p99=spread.p99 * factor,
    )
