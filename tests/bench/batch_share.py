"""What a batch sweep costs people who think between turns, at several shares of workers for batch.

    python tests/bench/batch_share.py [--workers 8] [--users 200] [--shares 0.25 0.5]

Simulated: chats of ten turns with 30 s of thinking, and as many lines of a sweep that share nothing
as are kept in the cluster by a batch runner. The first row is without the sweep, the second with it
and no share.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from broker.core.policy import RoutingPolicy  # noqa: E402
from broker.engine_model.profile import PROFILES  # noqa: E402
from tests.unit.sim.sweeps import Beside, beside  # noqa: E402

STRANDS_PER_WORKER = 32
HEADING = (
    "share | people's cached share | TTFT mean / p50 / p99, ms | end to end, s | batch tokens/s"
)


def shown(name: str, figures: Beside) -> str:
    """Return a row."""
    ttft_s = figures.ttft_s
    times = f"{ttft_s.mean * 1000:,.0f} / {ttft_s.p50 * 1000:,.0f} / {ttft_s.p99 * 1000:,.0f}"
    return (
        f"{name} | {figures.cached_ratio:.3f} | {times} | {figures.e2e_s_mean:.2f} | "
        f"{figures.batch_tokens_s:,.0f}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--users", type=int, default=200)
    parser.add_argument("--think-s", type=float, default=30.0)
    parser.add_argument("--profile", choices=sorted(PROFILES), default="h100x2-llama-70b")
    parser.add_argument("--horizon-s", type=float, default=RoutingPolicy().online_prefix_s)
    shares = [0.125, 0.25, 0.375, 0.5, 0.75]
    parser.add_argument("--shares", type=float, nargs="*", default=shares)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    def row(name: str, share: float, strands: int) -> None:
        figures = beside(
            share=share,
            users=options.users,
            workers=options.workers,
            strands=strands,
            seed=options.seed,
            profile=PROFILES[options.profile],
            routing=RoutingPolicy(online_prefix_s=options.horizon_s),
            think_s=options.think_s,
        )
        print(shown(name, figures), flush=True)

    print(HEADING)
    strands = STRANDS_PER_WORKER * options.workers
    row("no sweep", 1.0, 0)
    row("1 (any worker)", 1.0, strands)
    for share in options.shares:
        row(f"{share:g}", share, strands)


if __name__ == "__main__":
    main()
