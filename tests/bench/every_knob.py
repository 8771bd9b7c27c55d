"""What each knob of routing and order does when it alone is changed, on the data that is tuned on.

The first half of the conversation trace at speed 3 and the synthetic trace at speed 6, 8 workers x
2,000 blocks; the table of "Every knob" in ops/docs/simulator.md. About half a minute a row of two
seeds.

    INFERLANE_TRACES=/path/to/traces python tests/bench/every_knob.py [--seeds 2]
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from broker.sim.contestants import Contestant, contestant  # noqa: E402
from broker.sim.knobs import combinations, parse  # noqa: E402
from broker.sim.network import Network  # noqa: E402
from broker.sim.request import Workload  # noqa: E402
from broker.sim.runs import Setting, run  # noqa: E402
from broker.sim.workload.loading import load  # noqa: E402
from broker.sim.workload.shaping import first_half  # noqa: E402

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
    runs = [run(workload, ours, setting, seed=seed).figures for seed in seeds]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    ttft_s = [one.ttft_s for one in runs]
    first = mean([one.mean for one in ttft_s]), mean([one.p50 for one in ttft_s])
    ms = (*first, mean([one.p99 for one in ttft_s]))
    e2e_s = mean([one.e2e_s.mean for one in runs])
    cached = mean([one.cached_token_ratio for one in runs])
    return " / ".join(f"{1e3 * one:.0f}" for one in ms) + f" | {1e3 * e2e_s:.0f} | {cached:.3f}"


def main() -> None:
    """Print a table in Markdown, a row at a time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    seeds = range(1, parser.parse_args().seeds + 1)
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
