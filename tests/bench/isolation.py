"""What a backlog, a greedy lane or longer jobs cost the others, at full size, in the simulator.

Eight `demo` engines. People come at half of the capacity for 90 s, with nothing behind them, with
10,000 standard jobs or with 50,000 lines of batch that came at once before: their waits, beside the
time in which a slot frees. A lane at once and at 20 times its quota: another's waits. Two lanes
that both wait, of short and of long jobs: the work each got. `tests/unit/sim/test_isolation.py` has
the same in the small. About six minutes a seed.

    python tests/bench/isolation.py [--seeds 1 2 3]
"""

import argparse
import random
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from broker.core.policy import QuotaRow  # noqa: E402
from broker.engine_model.profile import DEMO  # noqa: E402
from broker.sim.request import Request  # noqa: E402
from tests.unit.sim.backlogs import (  # noqa: E402
    a_world,
    jobs,
    p99,
    residual_s,
    under,
    waits_s,
    work_while_both_wait,
)

WORKERS = 8
CAPACITY_JOBS_S = 20.3
"""Of eight `demo` engines, by a run of 2,000 such jobs at once."""

SECONDS = 90
BEGUN_S = 5.0
"""The backlog comes to an idle fleet: who comes now waits for its first jobs to end."""

RESIDUAL_RATIO_MAX = 1.2


def is_person(request: Request) -> bool:
    """Say whether somebody came when both loads were under way."""
    return request.band == 1 and request.at_s > BEGUN_S


def backlogs(seed: int) -> None:
    """Print people's p99 wait behind each backlog, and what it may be."""
    rate = CAPACITY_JOBS_S / 2
    people = jobs(random.Random(seed), count=round(rate * SECONDS), per_s=rate)
    calm = a_world(people, workers=WORKERS)
    under(calm)
    empty_s = p99(waits_s(calm, is_person))
    print(f"seed {seed}, nothing behind: p99 wait {1e3 * empty_s:.1f} ms", flush=True)
    for name, band, count in (("standard jobs", 2, 10_000), ("lines of batch", 3, 50_000)):
        behind = jobs(random.Random(seed + 100), count=count, band=band)
        world = a_world([*people, *behind], workers=WORKERS)
        under(world)
        frees_s = residual_s(world, begin_s=BEGUN_S, end_s=people[-1][0])
        wait_s = p99(waits_s(world, is_person))
        may_be_s = RESIDUAL_RATIO_MAX * empty_s + frees_s
        print(
            f"seed {seed}, {count:,} {name} behind: p99 wait {1e3 * wait_s:.1f} ms, a slot frees "
            f"in {1e3 * frees_s:.1f} ms: may be {1e3 * may_be_s:.1f} ms",
            flush=True,
        )


def a_greedy_lane(seed: int) -> None:
    """Print another lane's p99 wait, and first token's, while one sends 20 times its quota."""
    quota = 6
    share = CAPACITY_JOBS_S * quota / (WORKERS * DEMO.slots)
    rate = CAPACITY_JOBS_S / 2
    other = jobs(random.Random(seed), count=round(rate * 120), per_s=rate, lane="other")
    for times in (1, 20):
        count = round(share * times * 120)
        greedy = jobs(random.Random(seed + 10), count=count, per_s=share * times, lane="greedy")
        world = a_world([*other, *greedy], workers=WORKERS)
        row = QuotaRow(lane="greedy", inflight_jobs_max=quota)
        under(world, row, lanes=("greedy", "other"))
        wait_s = p99(waits_s(world, lambda request: request.lane == "other"))
        records = world.records
        ttft_s = p99(
            records.first_token_s[r.index] - records.arrived_s[r.index]
            for r in world.requests
            if r.lane == "other"
        )
        print(
            f"seed {seed}, a lane at {times} x its quota: another's p99 wait "
            f"{1e3 * wait_s:.2f} ms, first token {1e3 * ttft_s:.1f} ms",
            flush=True,
        )


def short_against_long(seed: int) -> None:
    """Print how the work of two lanes that both wait is shared, and the bound."""
    rng = random.Random(seed)
    short = jobs(rng, count=6000, band=2, lane="short", prompt_tokens=100, output_tokens=20)
    long = jobs(rng, count=700, band=2, lane="long", prompt_tokens=1500, output_tokens=400)
    world = a_world([*short, *long], workers=WORKERS // 2)
    router = under(world, lanes=("short", "long"))
    work = work_while_both_wait(world, ("short", "long"))
    (pool,) = router.scheduler.views.pools()
    total = sum(work.values())
    print(
        f"seed {seed}, short against long: {work['short'] / total:.1%} to "
        f"{work['long'] / total:.1%}, {abs(work['short'] - work['long']):,} weighted tokens "
        f"apart; may be {pool.fairness_bound:,.0f}",
        flush=True,
    )


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description="Measure what lanes cost each other.")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    for seed in parser.parse_args().seeds:
        a_greedy_lane(seed)
        short_against_long(seed)
        backlogs(seed)


if __name__ == "__main__":
    main()
