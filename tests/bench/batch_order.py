"""What the order of a batch's lines brings: shuffled, sorted by prefix, and sorted in strands.

    python tests/bench/batch_order.py [--profile a100-qwen3-32b] [--lines 5000] [--contexts 500]

Simulated: few-shot contexts of 2,000 to 4,000 tokens, a question and a short answer each, on
workers that have nothing else to do. As in life the mind holds a window of the batch and looks at
the first 64 jobs of that; the runner sorts so many lines at a time as it reads ahead.
"""

import argparse
import random
import sys
from collections import deque
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from msgspec.structs import replace  # noqa: E402

from broker.core.policy import RoutingPolicy  # noqa: E402
from broker.engine_model.profile import PROFILES, Profile  # noqa: E402
from broker.sim.host import Host  # noqa: E402
from broker.sim.mind import TICK_S, MindRouter  # noqa: E402
from broker.sim.request import Request  # noqa: E402
from broker.sim.workload.arrivals import around  # noqa: E402
from broker.sim.workload.prefixes import BLOCK_TOKENS, Prefix  # noqa: E402
from broker.sim.world import World  # noqa: E402
from broker.wire.ids import BATCH_BAND  # noqa: E402
from broker.wire.messages import Usage  # noqa: E402
from tests.unit.sim.sweeps import a_policy  # noqa: E402

WINDOW_JOBS = 512
"""Jobs of a batch queue that the broker holds: `broker.window_batch_jobs`."""

QUESTION_TOKENS, OUTPUT_TOKENS, OUTPUT_TOKENS_MAX = 60, 30, 64


class Held(MindRouter):
    """The mind behind a broker that pulls so many jobs of a batch at a time."""

    def __init__(self, world: World, *, seed: int) -> None:
        super().__init__(world, a_policy(1.0, RoutingPolicy()), seed=seed)
        self._pulls_from = world
        self._stream: deque[Request] = deque()

    def arrived(self, request: Request, *, at_s: float) -> None:
        """Leave a line in its stream until there is room in the window."""
        self._stream.append(request)
        if len(self._stream) == 1:
            self._pulls_from.call_at(at_s, self._pull)

    def ended(self, request: Request, host: Host, *, usage: Usage, at_s: float) -> None:
        """See a line end, and pull the next."""
        super().ended(request, host, usage=usage, at_s=at_s)
        self._pull_some(at_s)

    def _pull(self, at_s: float) -> None:
        self._pull_some(at_s)
        if self._stream:
            self._pulls_from.call_at(at_s + TICK_S / 2, self._pull)

    def _pull_some(self, at_s: float) -> None:
        waiting = sum(row.waiting_jobs for row in self.scheduler.views.queues())
        for _ in range(min(len(self._stream), WINDOW_JOBS - waiting)):
            super().arrived(self._stream.popleft(), at_s=at_s)


def batch(count: int, contexts: int, seed: int) -> list[Request]:
    """Return a batch in random order, as many lines of each context."""
    rng, root = random.Random(seed), Prefix()
    shared = [root.then(n, rng.randint(2000, 4000)) for n in range(contexts)]
    lines: list[Request] = []
    for number in rng.sample(range(count), count):
        prompt = shared[number % contexts].alone(around(rng, QUESTION_TOKENS))
        lines.append(
            Request(
                index=0,
                at_s=0.0,
                prompt_tokens=prompt.tokens,
                output_tokens=around(rng, OUTPUT_TOKENS),
                output_tokens_max=OUTPUT_TOKENS_MAX,
                blocks=prompt.blocks,
                block_tokens=BLOCK_TOKENS,
                band=BATCH_BAND,
            )
        )
    return lines


def grouped(lines: list[Request], *, window: int, strands: int) -> list[Request]:
    """Sort each window by prefix, and take its strands in turns, as the batch runner does."""
    ordered: list[Request] = []
    for start in range(0, len(lines), window):
        by_prefix = sorted(lines[start : start + window], key=lambda line: tuple(line.blocks))
        length = -(-len(by_prefix) // strands)
        ordered += [line for place in range(length) for line in by_prefix[place::length]]
    return ordered


def ran(lines: list[Request], profile: Profile, workers: int, seed: int) -> str:
    """Run a batch; return its cached share and how long it took."""
    requests = [replace(line, index=index) for index, line in enumerate(lines)]
    world = World(requests, profiles=(profile,) * workers, journal=True)
    world.run(Held(world, seed=seed))
    cached = sum(world.records.cached_tokens) / sum(line.prompt_tokens for line in requests)
    return f"{cached:.3f} | {max(world.records.ended_s):.1f} s"


def main() -> None:
    """Print a row for each order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", choices=sorted(PROFILES), default="reference")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--lines", type=int, default=5000)
    parser.add_argument("--contexts", type=int, default=50)
    parser.add_argument("--window", type=int, default=2600, help="32 MB of such lines")
    parser.add_argument("--strands", type=int, nargs="*", default=[1, 8, 32, 64])
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    lines = batch(options.lines, options.contexts, options.seed)
    profile = PROFILES[options.profile]
    print("order | cached share | whole batch")
    print("shuffled |", ran(lines, profile, options.workers, options.seed), flush=True)
    for strands in options.strands:
        ordered = grouped(lines, window=options.window, strands=strands)
        row = ran(ordered, profile, options.workers, options.seed)
        print(f"sorted, {strands} strand(s) |", row, flush=True)


if __name__ == "__main__":
    main()
