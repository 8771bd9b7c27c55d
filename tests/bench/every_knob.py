"""What each knob of routing and order does when it alone is changed, on the data that is tuned on.

The first half of the conversation trace at speed 3 and the synthetic trace at speed 6, 8 workers x
2,000 blocks; the table of "Every knob" in ops/docs/simulator.md. About half a minute a row of two
seeds. `--elsewhere`: those that have nothing to do there, on loads where they do.

    INFERLANE_TRACES=/path/to/traces python tests/bench/every_knob.py [--seeds 2] [--elsewhere]
"""

import argparse
import os
import random
import sys
from collections.abc import Iterator
from heapq import merge
from pathlib import Path

from msgspec.structs import replace

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from broker.sim.contestants import Contestant, contestant  # noqa: E402
from broker.sim.figures import Figures  # noqa: E402
from broker.sim.knobs import combinations, parse  # noqa: E402
from broker.sim.network import Network  # noqa: E402
from broker.sim.request import Workload  # noqa: E402
from broker.sim.runs import Setting, run  # noqa: E402
from broker.sim.workload import generated  # noqa: E402
from broker.sim.workload.loading import load  # noqa: E402
from broker.sim.workload.shaping import first_half  # noqa: E402
from tests.bench.ablation import SCENES, Scene  # noqa: E402

TRACES = Path(os.environ["INFERLANE_TRACES"]) if "INFERLANE_TRACES" in os.environ else None
VALUES = (
    "routing.prefix_tokens_min=0,512,4096",
    "routing.saving_s_min=0,0.02",
    "routing.sticky_s=0,5,120",
    "routing.switch_penalty_s=0,0.2",
    "routing.wait_s_over_best_max=0.5,8",
    "routing.hold_s_max=0,0.3,2",
    "routing.hold_decode_share=0,0.2,0.6,1",
    "routing.backlog_s_max=0.01,0.04,0.16",
    "routing.join_s_max=0,0.01,0.1",
    "routing.bias=0,1,4",
    "routing.decode_weight=0,0.04,0.15",
    "routing.slowdown_weight=0,0.1",
    "routing.interference_weight=0,0.05",
    "routing.size_weight=0,0.8,3",
    "routing.turnover_weight=0,0.7,3",
    "routing.kv_fill_ratio_max=0.8,1",
    "routing.replicas_max=1,2,3",
    "routing.hot_uses_min=0,16",
    "routing.hot_slowdown_max=2,6",
    "routing.warmup_s=0,20",
    "routing.forced_share=0.05",
    "order.wait_credit=0.02,1",
    "order.lane_slack_tokens=0,65536",
    "order.candidates_max=8",
)
HEARTBEATS_S = (0.25, 5.0)
"""Swept as well; the simulator's agents report so often."""

LANES = 8


def lanes_of_contexts(seed: int) -> Workload:
    """Lanes with contexts of their own, somewhat more than their workers can do, for two minutes.

    The contexts of all are twice what the caches hold, so that it matters whose turn it is where.
    """
    lanes = [
        [
            replace(
                request,
                lane=f"lane-{lane}",
                blocks=tuple(block * LANES + lane for block in request.blocks),
            )
            for request in generated.few_shot(
                random.Random(LANES * seed + lane),
                tasks=10,
                example_tokens=1000,
                requests=700,
                requests_per_s=6.0,
                zipf=0.5,
            ).requests
        ]
        for lane in range(LANES)
    ]
    merged = enumerate(merge(*lanes, key=lambda request: request.at_s))
    requests = [replace(request, index=index) for index, request in merged]
    return Workload(name="lanes", requests=requests, source="generated")


LANES_OF_CONTEXTS = Scene(lanes_of_contexts, Setting(workers=4, blocks_per_worker=100))
WEIGHTED = ("conversation @ 3", "synthetic @ 6")
ELSEWHERE = (
    ("order.lane_slack_tokens=0,2048,32768,131072", "first_token", ("lanes of contexts",)),
    ("order.candidates_max=8,256", "first_token", ("lanes of contexts",)),
    ("order.wait_credit=0.02,1", "first_token", ("lanes of contexts",)),
    ("routing.kv_fill_ratio_max=0.8,1", "first_token", ("conversation @ 7",)),
    ("routing.replicas_max=1,3", "first_token", ("hot group",)),
    ("routing.hot_uses_min=0,1,16", "first_token", ("hot group",)),
    ("routing.hot_slowdown_max=2,6", "first_token", ("hot group",)),
    ("routing.warmup_s=0,20,180", "first_token", ("scale-out",)),
    ("routing.forced_share=0.05,0.2", "first_token", ("scale-out",)),
    ("routing.load_weight=0.6,2.4", "weighted", WEIGHTED),
    ("routing.miss_weight=0.35,1.4", "weighted", WEIGHTED),
    ("routing.leave_weight=0,0.6", "weighted", WEIGHTED),
    ("routing.hit_ratio_min=0,0.6", "weighted", WEIGHTED),
    ("routing.wait_s_over_best_max=0.5,8", "weighted", WEIGHTED),
)
"""Knobs that have nothing to do at those two points, by which policy, and loads where they do."""


def rows() -> Iterator[tuple[str, Contestant, Network]]:
    """Yield each row's name, policy and network: as shipped, then one knob at a time."""
    ours = contestant("first_token")
    base = ours.policy
    assert base is not None, "ours has one"
    network = Network()
    yield "as shipped", ours, network
    for given in VALUES:
        for one in combinations(base, parse([given]))[1:]:
            yield one.label, replace(ours, policy=one.policy), network
    for heartbeat_s in HEARTBEATS_S:
        yield f"leases.heartbeat_s={heartbeat_s:g}", ours, Network(heartbeat_s=heartbeat_s)


def cells(workload: Workload, ours: Contestant, setting: Setting, seeds: range) -> str:
    """Return a point's three cells: TTFT mean / p50 / p99 in ms, end to end in ms, cached share."""
    return cells_of([run(workload, ours, setting, seed=seed).figures for seed in seeds])


def cells_of(runs: list[Figures]) -> str:
    """Return the same of some runs."""

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    ttft_s = [one.ttft_s for one in runs]
    first = mean([one.mean for one in ttft_s]), mean([one.p50 for one in ttft_s])
    ms = (*first, mean([one.p99 for one in ttft_s]))
    e2e_s = mean([one.e2e_s.mean for one in runs])
    cached = mean([one.cached_token_ratio for one in runs])
    return " / ".join(f"{1e3 * one:.0f}" for one in ms) + f" | {1e3 * e2e_s:.0f} | {cached:.3f}"


def elsewhere(seeds: range) -> None:
    """Print what the others do where they have something to do, a row at a time."""
    print("| load | policy | setting | TTFT mean / p50 / p99 | end to end | cached | Jain |")
    print("|---" * 7 + "|", flush=True)
    done: set[tuple[str, str]] = set()
    for given, name, scenes in ELSEWHERE:
        ours = contestant(name)
        assert ours.policy is not None, "ours has one"
        combined = combinations(ours.policy, parse([given]))
        for scene in scenes:
            for one in combined:
                label = one.label if one is not combined[0] else "as shipped"
                if label == "as shipped" and (scene, name) in done:
                    continue
                done.add((scene, name))
                chosen = replace(ours, policy=one.policy)
                print(f"| {scene} | `{name}` | `{label.partition('.')[2] or label}` | ", end="")
                print(f"{scene_cells(scene, chosen, seeds)} |", flush=True)


def scene_cells(scene: str, ours: Contestant, seeds: range) -> str:
    """Return a load's cells: as of a point, and Jain's index over the lanes."""
    where = LANES_OF_CONTEXTS if scene == "lanes of contexts" else SCENES[scene]
    runs = [run(where.workload(seed), ours, where.setting, seed=seed).figures for seed in seeds]
    jain = sum(one.jain_index for one in runs) / len(runs)
    return f"{cells_of(runs)} | {jain:.4f}"


def main() -> None:
    """Print a table in Markdown, a row at a time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--elsewhere", action="store_true")
    options = parser.parse_args()
    seeds = range(1, options.seeds + 1)
    if options.elsewhere:
        elsewhere(seeds)
        return
    conversation = first_half(load("conversation", traces=TRACES))
    synthetic = load("synthetic", traces=TRACES)
    print("| setting | conversation @ 3 | end to end | cached ", end="")
    print("| synthetic @ 6 | end to end | cached |")
    print("|---" * 7 + "|", flush=True)
    for name, ours, network in rows():
        first = cells(conversation, ours, Setting(speed=3.0, network=network), seeds)
        second = cells(synthetic, ours, Setting(speed=6.0, network=network), seeds)
        print(f"| `{name.partition('.')[2] or name}` | {first} | {second} |", flush=True)


if __name__ == "__main__":
    main()
