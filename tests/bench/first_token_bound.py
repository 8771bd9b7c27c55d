"""How many requests could have their first token within a limit, whoever routes them.

    INFERLANE_TRACES=/path/to/traces python tests/bench/first_token_bound.py [--limit-ms 37.8]

For the synthetic trace, 8 workers, profile `reference`. An upper bound for routers of one kind:

- Requests come as a Poisson process (they do there), and the router doesn't know the future. So a
  worker that spends a share r of its time in prefills too long to be waited for is found in one by
  a share r of the requests that must go there, whatever the order of work.
- It gives a prompt that nobody holds to a worker by its length alone: which of them will be asked
  again nobody can tell. What repeats it can be quick only there.
- It finds of each prompt what the best known router finds when the cluster is empty (speed 1).

All else is in the router's favour: no queue ever forms, no step takes longer for what else runs, a
step of decoding under way costs nothing, and prompts that are quick without any cache go where
least is prefilled. How the lengths are spread over the workers is then chosen best: by exchange,
those with most repeats for each second of prefill stand where least is prefilled, so what is left
to choose is each worker's share of the work, and a table over that finds the best.
"""

import argparse
import math
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from broker.engine_model.profile import REFERENCE, Profile  # noqa: E402
from broker.sim.contestants import contestant, run_world  # noqa: E402
from broker.sim.mind import NETWORK  # noqa: E402
from broker.sim.request import Request  # noqa: E402
from broker.sim.runs import Setting  # noqa: E402
from broker.sim.workload.loading import load  # noqa: E402
from broker.sim.world import World  # noqa: E402

WORKERS = 8
SPEED = 6.0
LIMIT_MS = 37.8
"""0.80 x the best peer's TTFT p50 at that speed."""

HOPS_S = 2 * NETWORK.hop_s
"""An order's way to the engine, and its first token's way back."""

CELLS = 1200
"""Of the table: steps into which the work is divided."""

SIZES_PER_OCTAVE = 2


@dataclass
class Size:
    """Prompts of about one length, each with all that repeats it later."""

    repeats: int = 0
    """Requests that are quick where it is cached, and only there."""
    work_s: float = 0.0
    """For so long nobody else's first token can come in time."""


@dataclass
class Load:
    """What the router has to place."""

    quick: int = 0
    """Requests that need no cache to be quick."""
    quick_work_s: float = 0.0
    sizes: dict[int, Size] = field(default_factory=lambda: defaultdict[int, Size](Size))


def alone_s(profile: Profile, *, uncached: int, prompt: int) -> float:
    """Return the seconds from a prompt's start to its first token, on an idle engine."""
    chunks, rest = divmod(uncached - 1, profile.step_tokens_max)
    whole_s = chunks * profile.prefill_s.at(profile.step_tokens_max)
    decode_s = profile.decode_s.at(prompt / profile.kv_tokens_max)
    return whole_s + profile.prefill_s.at(rest + 1) + decode_s


def load_of(
    requests: Sequence[Request], cached: Sequence[int], profile: Profile, *, limit_s: float
) -> Load:
    """Sort requests by what they need; `cached` tokens are found of each."""
    # Who comes so late in a prefill is in time still; prompts that share a step share its start.
    start_s = profile.prefill_s.at(0.0) + profile.decode_s.at(0.0)
    spare_s = max(limit_s - start_s, start_s)
    found = Load()
    first: dict[int, int] = {}
    size_of: dict[int, int] = {}
    for request, hit in zip(requests, cached, strict=True):
        uncached = max(1, request.prompt_tokens - hit)
        own_s = alone_s(profile, uncached=uncached, prompt=request.prompt_tokens)
        work_s = max(0.0, own_s - spare_s)
        tokens = request.prompt_tokens
        if alone_s(profile, uncached=tokens, prompt=tokens) <= limit_s:
            found.quick += 1
            found.quick_work_s += work_s
            continue
        root = first.setdefault(request.blocks[0], request.index)
        octave = math.floor(SIZES_PER_OCTAVE * math.log2(uncached))
        size = found.sizes[size_of.setdefault(root, octave)]
        size.work_s += work_s
        size.repeats += own_s <= limit_s
    return found


def most_quick(load: Load, *, workers: int, lasts_s: float) -> float:
    """Return how many requests are quick at most, of a load that comes over so many seconds."""
    sizes = sorted(load.sizes.values(), key=lambda one: -one.repeats / max(1e-9, one.work_s))
    total_s = sum(size.work_s for size in sizes)
    cell_s = total_s / CELLS
    repeats = _cumulated(sizes, cell_s)
    most_cells = min(CELLS, math.floor(lasts_s / cell_s))
    best = [0.0] + [-math.inf] * CELLS
    for worker in range(workers):
        # The first has the least work, and all that can go anywhere.
        anywhere = load.quick if worker == 0 else 0
        best = [
            max(
                best[done]
                + (anywhere + repeats[upto] - repeats[done])
                * (1.0 - (upto - done) * cell_s / lasts_s)
                for done in range(max(0, upto - most_cells), upto + 1)
            )
            for upto in range(CELLS + 1)
        ]
    return best[CELLS]


def _cumulated(sizes: Sequence[Size], cell_s: float) -> list[float]:
    """Return how many repeats the first so many cells of work bring."""
    repeats, upto_s, upto = [0.0], 0.0, 0.0
    for size in sizes:
        begin_s, begin = upto_s, upto
        upto_s, upto = upto_s + size.work_s, upto + size.repeats
        while len(repeats) <= CELLS and len(repeats) * cell_s <= upto_s + cell_s * 1e-6:
            share = (len(repeats) * cell_s - begin_s) / size.work_s
            repeats.append(begin + min(1.0, share) * size.repeats)
    return repeats


def found_when_empty(traces: Path) -> tuple[Sequence[Request], Sequence[int]]:
    """Return the trace's requests, and what is found cached of each in an empty cluster."""
    requests = load("synthetic", traces=traces).requests
    world = World(requests, profiles=Setting(workers=WORKERS).fleet(), journal=True)
    lanes = sorted({request.lane for request in requests})
    run_world(world, contestant("first_token"), lanes=lanes, seed=1, network=NETWORK)
    return requests, world.records.cached_tokens


def main() -> None:
    """Print the bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--limit-ms", type=float, default=LIMIT_MS)
    limit_s = parser.parse_args().limit_ms / 1e3 - HOPS_S
    requests, cached = found_when_empty(Path(os.environ["INFERLANE_TRACES"]))
    found = load_of(requests, cached, REFERENCE, limit_s=limit_s)
    lasts_s = requests[-1].at_s / SPEED
    most = most_quick(found, workers=WORKERS, lasts_s=lasts_s)
    repeats = sum(size.repeats for size in found.sizes.values())
    work_s = sum(size.work_s for size in found.sizes.values()) + found.quick_work_s
    print(
        f"quick in an empty cluster: {found.quick / len(requests):.1%} without any cache, "
        f"{repeats / len(requests):.1%} where they are cached\n"
        f"prefill too long to be waited for: {work_s / lasts_s:.2f} of {WORKERS} workers' time\n"
        f"quick at most: {most / len(requests):.1%}"
    )


if __name__ == "__main__":
    main()
