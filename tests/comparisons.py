"""Builders of figures, entries and reports of comparisons."""

from collections.abc import Mapping, Sequence
from typing import Any

from broker.sim.comparison import against_best_peers, best_peers
from broker.sim.contestants import contestant
from broker.sim.figures import Figures, Spread
from broker.sim.load import Load
from broker.sim.report import Entry, Report, entry, setting_facts, trace_facts
from broker.sim.request import Request, Workload
from broker.sim.runs import Setting


def a_spread(mean: float = 0.2, **fields: float) -> Spread:
    """Build a distribution around a mean."""
    values = {"p50": mean * 0.7, "p90": mean * 2, "p99": mean * 4} | fields
    return Spread(mean=mean, **values)


def some_figures(ttft_s: float = 0.2, **fields: Any) -> Figures:
    """Build the figures of a run with a mean TTFT."""
    values: dict[str, Any] = {
        "requests": 100,
        "refused": 0,
        "reruns": 0,
        "ttft_s": a_spread(ttft_s),
        "itl_s": a_spread(0.01),
        "e2e_s": a_spread(ttft_s + 2),
        "queue_s": a_spread(0.0),
        "cached_token_ratio": 0.2,
        "utilisation_mean": 0.5,
        "utilisation_std": 0.03,
        "throughput_tokens_s": 10_000.0,
        "span_s": 100.0,
        "prefix_switch_ratio": 0.1,
        "hot_switch_ratio": 0.1,
        "duplicate_kv_ratio": 0.1,
        "hit_dip": 0.0,
        "jain_index": 1.0,
        "ttft_quantiles_s": tuple(ttft_s * number / 50 for number in range(101)),
    }
    return Figures(**(values | fields))


def an_entry(label: str, ttft_s: Sequence[float], **fields: Any) -> Entry:
    """Build a policy of that label with a mean TTFT for each seed."""
    return entry(contestant(label), [some_figures(one, **fields) for one in ttft_s])


def a_load(load_ratio: float = 0.5, *, overloaded: bool = False) -> Load:
    """Build a load."""
    return Load(
        load_ratio=load_ratio,
        offered_tokens_s=load_ratio * 1000,
        capacity_tokens_s=1000.0,
        round_robin_ttft_s_mean=30.0 if overloaded else 0.3,
        overloaded=overloaded,
    )


def a_report(
    policies: Mapping[str, Sequence[float]], *, load: Load | None = None, **fields: Any
) -> Report:
    """Build a report of policies with these mean TTFTs, by seed."""
    load = load or a_load()
    entries = tuple(an_entry(label, ttft_s) for label, ttft_s in policies.items())
    best = best_peers(entries)
    seeds = range(1, 1 + len(next(iter(policies.values()))))
    values: dict[str, Any] = {
        "policies": entries,
        "setting": setting_facts(Setting(), seeds=seeds),
        "trace": trace_facts(a_workload()),
        "load": load,
        "best_peer": best,
        "against_best_peer": against_best_peers(entries, best, load),
        "overloaded": ("some-trace @ 1",) if load.overloaded else (),
    }
    return Report(**(values | fields))


def a_workload(requests: int = 10, *, gap_s: float = 1.0, after: bool = False) -> Workload:
    """Build requests at an even pace of 110 tokens each; with `after`, each follows the last."""
    return Workload(
        name="some-trace",
        source="made up",
        requests=[
            Request(
                index=index,
                at_s=gap_s if after and index else gap_s * index,
                prompt_tokens=100,
                output_tokens=10,
                output_tokens_max=10,
                block_tokens=512,
                after=index - 1 if after and index else None,
            )
            for index in range(requests)
        ],
    )
