"""What each part of the mind is worth: the same loads with it and without it, seed by seed.

Each part is taken out where it should matter, and at the two points of the public traces where the
policies differ most. A difference is called one where the paired interval over the seeds excludes 0
at 95 % (`broker.sim.paired`); of two seeds or fewer nothing is claimed. About four minutes a seed.

    INFERLANE_TRACES=/path/to/traces python tests/bench/ablation.py [--seeds 3] [--parts hold ...]
"""

import argparse
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from msgspec.structs import replace

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from broker.core.policy import Policy  # noqa: E402
from broker.sim.contestants import contestant  # noqa: E402
from broker.sim.figures import Figures  # noqa: E402
from broker.sim.paired import difference  # noqa: E402
from broker.sim.request import Workload  # noqa: E402
from broker.sim.runs import Setting, run  # noqa: E402
from broker.sim.workload import generated  # noqa: E402
from broker.sim.workload.loading import load  # noqa: E402
from broker.sim.world import Change, FleetChange  # noqa: E402

TRACES = Path(os.environ["INFERLANE_TRACES"]) if "INFERLANE_TRACES" in os.environ else None
SHIPPED = contestant("first_token")
UNBOUNDED_S = 1e6


@dataclass(frozen=True)
class Scene:
    """A load and the fleet that it meets."""

    workload: Callable[[int], Workload]
    setting: Setting


@dataclass(frozen=True)
class Part:
    """A part of the mind, how it is taken out, and where that should show."""

    name: str
    scenes: tuple[str, ...]
    routing: dict[str, Any] = field(default_factory=dict[str, Any])
    order: dict[str, Any] = field(default_factory=dict[str, Any])


@cache
def _trace(name: str) -> Workload:
    return load(name, traces=TRACES)


JOINS = tuple(FleetChange(at_s=60.0, change=Change.JOIN) for _ in range(3))
SCENES = {
    "conversation @ 3": Scene(lambda _: _trace("conversation"), Setting(speed=3.0)),
    "conversation @ 5": Scene(lambda _: _trace("conversation"), Setting(speed=5.0)),
    "conversation @ 7": Scene(lambda _: _trace("conversation"), Setting(speed=7.0)),
    "synthetic @ 6": Scene(lambda _: _trace("synthetic"), Setting(speed=6.0)),
    "agentic": Scene(lambda _: _trace("agentic"), Setting(speed=2.0)),
    "hot group": Scene(
        lambda seed: generated.hot_group(random.Random(seed), requests_per_s=150.0),
        Setting(workers=16),
    ),
    "alternating": Scene(
        lambda seed: generated.alternating(random.Random(seed), requests_per_s=80.0), Setting()
    ),
    "few-shot": Scene(
        lambda seed: generated.few_shot(random.Random(seed), requests_per_s=60.0), Setting()
    ),
    "scale-out": Scene(
        lambda seed: generated.scale_out(random.Random(seed), requests_per_s=30.0),
        Setting(workers=4, changes=JOINS),
    ),
}
EVERYWHERE = ("conversation @ 3", "synthetic @ 6")
PARTS = (
    Part("hold for the best worker", EVERYWHERE, {"hold_for_affinity": False}),
    Part("late binding", EVERYWHERE, {"backlog_s_max": UNBOUNDED_S, "hold_for_affinity": False}),
    Part("joining a long prompt", (*EVERYWHERE, "conversation @ 5"), {"join_s_max": 0.0}),
    Part("least uncached work first", EVERYWHERE, order={"wait_credit": 1e6, "candidates_max": 1}),
    Part("bias", EVERYWHERE, {"bias": 0.0}),
    Part("decoding in the score", EVERYWHERE, {"decode_weight": 0.0, "slowdown_weight": 0.0}),
    Part("prefill's cost to others", EVERYWHERE, {"interference_weight": 0.0}),
    Part("less of it when waiting", EVERYWHERE, {"hold_decode_share": 1.0}),
    Part(
        "short jobs apart from long ones",
        (*EVERYWHERE, "conversation @ 5", "conversation @ 7"),
        {"size_weight": 0.0},
    ),
    Part(
        "caches filled anew alike",
        (*EVERYWHERE, "conversation @ 5", "conversation @ 7", "agentic", "few-shot"),
        {"turnover_weight": 0.0},
    ),
    Part("floor of a match", (*EVERYWHERE, "few-shot"), {"prefix_tokens_min": 0}),
    Part("floor of a saving", (*EVERYWHERE, "alternating"), {"saving_s_min": 0.0}),
    Part(
        "stickiness",
        (*EVERYWHERE, "alternating", "agentic", "few-shot"),
        {"switch_penalty_s": 0.0},
    ),
    Part(
        "hard threshold", (*EVERYWHERE, "conversation @ 7"), {"wait_s_over_best_max": UNBOUNDED_S}
    ),
    Part("warm-up", ("scale-out", *EVERYWHERE), {"warmup_s": 0.0}),
    Part("a forced share of 0.2 (off as it ships)", ("scale-out",), {"forced_share": 0.2}),
    Part("KV room kept free", (*EVERYWHERE, "conversation @ 7"), {"kv_fill_ratio_max": 1.0}),
    Part("a cap of 3 replicas (off as it ships)", ("hot group", *EVERYWHERE), {"replicas_max": 3}),
    Part("copies of hot prefixes", ("hot group", "alternating"), {"hot_uses_min": 0.0}),
    Part("prefix index", (*EVERYWHERE, "few-shot"), {"index_entries_max": 0}),
)
MEASURES: tuple[tuple[str, Callable[[Figures], float], float, int], ...] = (
    ("TTFT mean, ms", lambda one: one.ttft_s.mean, 1e3, 1),
    ("p99", lambda one: one.ttft_s.p99, 1e3, 0),
    ("end to end, ms", lambda one: one.e2e_s.mean, 1e3, 0),
    ("cached", lambda one: one.cached_token_ratio, 1.0, 3),
    ("switches", lambda one: one.hot_switch_ratio, 1.0, 4),
)


def without(part: Part) -> Policy:
    """Return the shipped policy without a part."""
    policy = SHIPPED.policy
    assert policy is not None, "ours has one"
    return replace(
        policy,
        routing=replace(policy.routing, **part.routing),
        order=replace(policy.order, **part.order),
    )


@cache
def shipped(scene: str, seed: int) -> Figures:
    """Run a scene as it ships; once for all parts."""
    return run(SCENES[scene].workload(seed), SHIPPED, SCENES[scene].setting, seed=seed).figures


def compare(part: Part, scene: str, seeds: range) -> str:
    """Return a row: each measure without the part, and with it; * where they differ."""
    ablated = replace(SHIPPED, label=f"without {part.name}", policy=without(part))
    ours = [shipped(scene, seed) for seed in seeds]
    runs = [
        run(SCENES[scene].workload(seed), ablated, SCENES[scene].setting, seed=seed).figures
        for seed in seeds
    ]
    cells = [part.name, scene]
    for _, measure, scale, digits in MEASURES:
        with_it, without_it = [measure(one) for one in ours], [measure(one) for one in runs]
        interval = difference(with_it, without_it).interval
        star = "*" if interval is not None and not interval[0] <= 0 <= interval[1] else ""
        mean_with, mean_without = sum(with_it) / len(ours), sum(without_it) / len(ours)
        cells.append(f"{scale * mean_without:,.{digits}f} / {scale * mean_with:,.{digits}f}{star}")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parts", nargs="*", default=[], help="only those that hold these words")
    options = parser.parse_args()
    names = [name for name, *_ in MEASURES]
    print("| part | load | " + " | ".join(f"{name}: without / with" for name in names) + " |")
    print("|---" * (len(names) + 2) + "|", flush=True)
    for part in PARTS:
        if options.parts and not any(word in part.name for word in options.parts):
            continue
        for scene in part.scenes:
            print(compare(part, scene, range(1, options.seeds + 1)), flush=True)


if __name__ == "__main__":
    main()
