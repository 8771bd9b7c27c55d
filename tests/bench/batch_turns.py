"""What turns between batches bring: a small one handed in two seconds after a large one.

    python tests/bench/batch_turns.py [--large 10000] [--small 100] [--workers 2]

Simulated, so that the machine counts for nothing: the lines of `batch_order`, of other contexts in
each batch, both with a window of a day. Once as if all were one client's, with a thousand lines of
each batch in the stream: then the lines go by their deadlines, as without turns. Once as they are:
each batch its own client, and as many lines waiting as runners allow.
"""

import argparse
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from msgspec.structs import replace  # noqa: E402

from broker.core.policy import RoutingPolicy  # noqa: E402
from broker.engine_model.profile import PROFILES, Profile  # noqa: E402
from broker.sim.host import Host  # noqa: E402
from broker.sim.mind import TICK_S, MindRouter  # noqa: E402
from broker.sim.records import NOT_YET  # noqa: E402
from broker.sim.request import Request  # noqa: E402
from broker.sim.terms import Terms  # noqa: E402
from broker.sim.world import World  # noqa: E402
from broker.wire.messages import Usage  # noqa: E402
from producers.batches.config import BatchesConfig  # noqa: E402
from tests.bench.batch_order import WINDOW_JOBS, batch, grouped  # noqa: E402
from tests.unit.sim.sweeps import a_policy  # noqa: E402

LATER_S = 2.0
DAY_S = 86_400.0
STRANDS = 32
CONFIG = BatchesConfig()


class Runners(MindRouter):
    """The mind behind a broker's window, and runners that keep lines in the stream."""

    def __init__(self, world: World, firsts: Sequence[int], *, turns: bool, seed: int) -> None:
        """`firsts`: index of each batch's first line."""
        ends = [*firsts[1:], len(world.requests)]
        terms = {
            index: Terms(
                deadline_s=DAY_S,
                client=f"batch-{number}" if turns else "",
                jobs_behind=ends[number] - index - 1,
            )
            for number, first in enumerate(firsts)
            for index in range(first, ends[number])
        }
        super().__init__(world, a_policy(1.0, RoutingPolicy()), seed=seed, terms=terms)
        self._on = world
        self._turns = turns
        self._firsts = firsts
        self._input: dict[int, deque[Request]] = {}
        self._stored: dict[int, dict[int, Request]] = {}
        """By batch: its lines in the cluster."""
        self._stream: deque[Request] = deque()
        self._ticks = False

    def arrived(self, request: Request, *, at_s: float) -> None:
        """Have a line in a batch's input."""
        number = sum(request.index >= first for first in self._firsts) - 1
        self._input.setdefault(number, deque()).append(request)
        self._stored.setdefault(number, {})
        if not self._ticks:
            self._ticks = True
            self._on.call_at(at_s, self._tick)

    def ended(self, request: Request, host: Host, *, usage: Usage, at_s: float) -> None:
        """See a line end: its runner stores the next, and the broker pulls."""
        super().ended(request, host, usage=usage, at_s=at_s)
        for stored in self._stored.values():
            stored.pop(request.index, None)
        self._store(at_s)

    def _tick(self, at_s: float) -> None:
        self._store(at_s)
        if any(self._input.values()) or self._stream:
            self._on.call_at(at_s + TICK_S / 2, self._tick)
        else:
            self._ticks = False

    def _store(self, at_s: float) -> None:
        given_s = self._on.records.given_s
        batches = [number for number in self._input if self._input[number] or self._stored[number]]
        for number in batches:
            left, stored = self._input[number], self._stored[number]
            room = CONFIG.lines_inflight_max - len(stored)
            if self._turns:
                waiting = sum(given_s[index] == NOT_YET for index in stored)
                room = min(room, CONFIG.lines_waiting_max // len(batches) - waiting)
            for _ in range(min(room, len(left))):
                line = left.popleft()
                stored[line.index] = line
                self._stream.append(line)
        waiting = sum(row.waiting_jobs for row in self.scheduler.views.queues())
        for _ in range(min(len(self._stream), WINDOW_JOBS - waiting)):
            super().arrived(self._stream.popleft(), at_s=at_s)


def ran(large: list[Request], small: list[Request], *, turns: bool, asked: "Asked") -> str:
    """Run both; return when each had ended after it was handed in, and the cached share."""
    later = [replace(line, at_s=LATER_S) for line in small]
    requests = [replace(line, index=index) for index, line in enumerate([*large, *later])]
    world = World(requests, profiles=(asked.profile,) * asked.workers, journal=True)
    firsts = [0, len(large)] if small else [0]
    world.run(Runners(world, firsts, turns=turns, seed=asked.seed))
    ended_s = world.records.ended_s
    cached = sum(world.records.cached_tokens) / sum(line.prompt_tokens for line in requests)
    small_s = max(ended_s[len(large) :]) - LATER_S if small else 0.0
    return f"{max(ended_s[: len(large)]):.1f} s | {small_s:.1f} s | {cached:.3f}"


class Asked(argparse.Namespace):
    """What the command line asks for."""

    profile: Profile
    workers: int
    large: int
    small: int
    seed: int


def main() -> None:
    """Print a row for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=PROFILES.__getitem__, default=PROFILES["reference"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--large", type=int, default=10_000)
    parser.add_argument("--small", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(namespace=Asked())
    large, small = (
        grouped(batch(lines, max(1, lines // 100), seed), window=2048, strands=STRANDS)
        for lines, seed in ((asked.large, asked.seed), (asked.small, asked.seed + 1))
    )
    print("| | the large one ends after | the small one | cached share |\n|---|---|---|---|")
    print("| alone |", ran(large, [], turns=True, asked=asked), flush=True)
    print("| small alone |", ran(small, [], turns=True, asked=asked), flush=True)
    print("| by deadline |", ran(large, small, turns=False, asked=asked), flush=True)
    print("| in turns |", ran(large, small, turns=True, asked=asked), flush=True)


if __name__ == "__main__":
    main()
