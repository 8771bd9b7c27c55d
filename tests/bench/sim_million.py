"""How long a million simulated requests on 256 workers take, and how much memory.

    python tests/bench/sim_million.py [--requests N] [--policy first_token]

The bound is 20 minutes on one core and 4 GB. A tenth of the requests tells the time of all. Times
are of this process alone, so that others on the machine don't count.
"""

import argparse
import random
import resource
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from broker.sim.contestants import contestant  # noqa: E402
from broker.sim.figures import Figures  # noqa: E402
from broker.sim.runs import Setting, run  # noqa: E402
from broker.sim.workload.generated import many  # noqa: E402

WORKERS = 256
BLOCKS_PER_WORKER = 200
"""Of 512 tokens: each holds 100 of the 2,000 prompts, so that where a request goes matters."""

REPORT_S = 30.0
"""Real time between two lines of progress."""


class Progress:
    """Prints now and then how many requests have ended."""

    def __init__(self) -> None:
        self._next_s = time.perf_counter() + REPORT_S

    def __call__(self, ended: int, requests: int) -> None:
        """Print, if it is time."""
        if time.perf_counter() >= self._next_s:
            self._next_s += REPORT_S
            print(f"{ended:,} of {requests:,}", file=sys.stderr, flush=True)


def shown(figures: Figures, *, took_s: float) -> str:
    """Return the lines of the result."""
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    per_100_000_s = took_s / figures.requests * 100_000
    return (
        f"{figures.requests:,} requests in {took_s:.0f} s: {per_100_000_s:.1f} s per 100,000\n"
        f"peak memory {peak_mb:,.0f} MB\n"
        f"TTFT mean {figures.ttft_s.mean * 1000:.1f} ms, p99 {figures.ttft_s.p99 * 1000:.1f} ms, "
        f"cached {figures.cached_token_ratio:.3f}, utilisation {figures.utilisation_mean:.2f}"
    )


def main() -> None:
    """Run once and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--policy", default="first_token")
    args = parser.parse_args()
    workload = many(random.Random(1), requests=args.requests)
    setting = Setting(workers=WORKERS, blocks_per_worker=BLOCKS_PER_WORKER)
    start_s = time.process_time()
    outcome = run(workload, contestant(args.policy), setting, progress=Progress())
    print(shown(outcome.figures, took_s=time.process_time() - start_s))


if __name__ == "__main__":
    main()
