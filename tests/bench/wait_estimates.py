"""How far wait estimates are off, by scenario and seed, and how far off who knows more would be.

    python tests/bench/wait_estimates.py [--seeds 1 2 3] [--only slots "KV cache"] [--oracle 150]

Prints for each scenario the median and 90th percentile of |told - had| ÷ had over the waits of 5 s
and more, with the signed median beside. `--traces FOLDER` (of the public traces) adds the
conversation trace at 8 and 9 times its speed, and at 6 with half of the workers lost.

`--oracle N`: of N receipts, spread over the run, the wait is also told by someone who knows the
cluster's whole state, every waiting and running job's true output included, and the scheduler's own
code: the world is forked at the receipt and run on until that job goes. What he does not know is
who comes later. Twice: with `none` he expects nobody; with `other` he knows the very law by which
requests come, its waves too, but not the draw (of the conversation trace: it goes on as it does
half of it later). What `other` misses, no estimate told at the receipt can be asked for.
"""

import argparse
import math
import os
import random
import statistics
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from msgspec.structs import replace  # noqa: E402

from broker.core.decisions import Decision, Dispatch, Queued  # noqa: E402
from broker.core.events import Event  # noqa: E402
from broker.core.policy import LanePolicy, Policy  # noqa: E402
from broker.core.wait_errors import WAIT_S_MIN  # noqa: E402
from broker.sim.mind import MODEL, MindRouter  # noqa: E402
from broker.sim.records import Records  # noqa: E402
from broker.sim.request import Request  # noqa: E402
from broker.sim.runs import JITTER, Setting  # noqa: E402
from broker.sim.wait_scenarios import NO_LONGEST_WAITS, lose_half, scenarios  # noqa: E402
from broker.sim.waits import Told, Waits, figures  # noqa: E402
from broker.sim.workload.loading import load  # noqa: E402
from broker.sim.workload.shaping import scaled  # noqa: E402
from broker.sim.world import World  # noqa: E402

FUTURES = ("none", "other")

OTHER_SEED = 1000
"""Added to a seed, it draws another future by the same law."""

ON_S_MAX = 600.0
"""An oracle looks no further."""

CONVERSATION = {"conversation @ 8": 8.0, "conversation @ 9": 9.0, "half lost, conversation": 6.0}

Point = tuple[Sequence[Request], Policy, Setting, Sequence[Request]]
"""What comes, by what policy and where, and what might have come."""


class Foreseen(World):
    """A world whose future can be exchanged."""

    def foresee(self, come: Sequence[Request]) -> None:
        """Let these come, in order, and nobody else who has not arrived."""
        known = len(self.requests)
        later = [replace(one, index=known + n) for n, one in enumerate(come)]
        self.requests = [*self.requests, *later]
        records = Records(len(self.requests))
        records.ended_s[:known] = self.records.ended_s
        self.records = records
        self._arrivals = iter(later)
        self._await_next()
        self._arrive_all(self.at_s)


class Oracles(Waits):
    """Watches a mind, and asks of every so many receipts what who knows more would have said."""

    def __init__(
        self,
        world: Foreseen,
        other: Sequence[Request],
        *,
        every: int,
        changes_at_s: Sequence[float],
    ) -> None:
        super().__init__(changes_at_s=changes_at_s)
        self.said: dict[str, tuple[float, ...]] = {}
        self._world = world
        self._other = other
        self._every = every
        self._receipts_seen = 0
        self._asks: list[tuple[str, float]] = []
        self._until: str | None = None
        self.went_at_s: float | None = None

    def stepped(self, event: Event | None, decisions: Sequence[Decision], at_s: float) -> None:
        """See what was decided; in a fork, only whether the one job went."""
        if self._until is not None:
            for decision in decisions:
                if isinstance(decision, Dispatch) and decision.key == self._until:
                    self.went_at_s = at_s
            return
        super().stepped(event, decisions, at_s)
        for decision in decisions:
            if isinstance(decision, Queued) and decision.wait_s > WAIT_S_MIN / 2:
                self._receipts_seen += 1
                if self._every and self._receipts_seen % self._every == 0:
                    self._world.call_at(at_s, self._ask_all)
                    self._asks.append((decision.key, at_s))

    def _ask_all(self, _: float) -> None:
        asks, self._asks = self._asks, []
        for key, told_at_s in asks:
            self.said[key] = tuple(self._forked(key, told_at_s, future) for future in FUTURES)

    def _forked(self, key: str, at_s: float, future: str) -> float:
        """Run a copy of the world on until the job goes; inf when it does not."""
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                wait_s = self._run_on(key, at_s, future)
                os.write(writes, struct.pack("d", wait_s))
            finally:
                os._exit(0)
        os.close(writes)
        with os.fdopen(reads, "rb") as pipe:
            told = pipe.read()
        os.waitpid(child, 0)
        return struct.unpack("d", told)[0] if told else math.inf

    def _run_on(self, key: str, at_s: float, future: str) -> float:
        self._until = key
        world = self._world
        later = [one for one in self._other if one.at_s > at_s] if future == "other" else []
        world.foresee(later)
        while self.went_at_s is None and world.at_s < at_s + ON_S_MAX:
            world.run_until(world.at_s + 0.05)
        return math.inf if self.went_at_s is None else self.went_at_s - at_s


def points(seed: int, traces: str) -> Iterator[tuple[str, Point]]:
    """Yield all scenarios of a seed."""
    for name, overload in scenarios().items():
        other = overload.requests(seed + OTHER_SEED)
        yield name, (overload.requests(seed), overload.policy(), overload.setting, other)
    if not traces:
        return
    for name, speed in CONVERSATION.items():
        workload = load("conversation", traces=Path(traces))
        shaped = scaled(workload, rng=random.Random(seed), speed=speed, jitter=JITTER)
        changes = lose_half(200.0, 8) if "lost" in name else ()
        lanes = tuple(LanePolicy(name=lane) for lane in {one.lane for one in shaped.requests})
        policy = Policy(models=(MODEL,), lanes=lanes, bands=NO_LONGEST_WAITS)
        requests = list(shaped.requests)
        setting = Setting(speed=speed, changes=changes)
        yield name, (requests, policy, setting, _half_later(requests))


def _half_later(requests: Sequence[Request]) -> list[Request]:
    """Turn a trace by half of its time: as many, in other places."""
    end_s = requests[-1].at_s
    moved = [replace(one, at_s=(one.at_s + end_s / 2) % end_s) for one in requests]
    return sorted(moved, key=lambda one: one.at_s)


def run(point: Point, *, seed: int, every: int) -> Oracles:
    """Run one."""
    requests, policy, setting, other = point
    world = Foreseen(requests, profiles=setting.fleet(), changes=setting.changes, journal=True)
    changes_at_s = [change.at_s for change in setting.changes]
    waits = Oracles(world, other, every=every, changes_at_s=changes_at_s)
    router = MindRouter(world, policy, seed=seed, network=setting.network, observer=waits)
    waits.watch(router)
    world.run(router)
    return waits


def _line(told: Sequence[Told]) -> str:
    seen = figures(told)
    if seen is None:
        return "no long waits"
    return (
        f"{100 * seen.error_ratio_p50:5.1f} / {100 * seen.error_ratio_p90:4.0f} % "
        f"({100 * seen.off_ratio_p50:+5.1f} %) of {seen.jobs} jobs, {seen.wait_s_p50:.0f} s"
    )


def _oracle_line(waits: Oracles) -> str:
    """Tell, over the same jobs, how far off we were and the oracles."""
    judged = [one for one in waits.told if one.key in waits.said and one.had_s >= WAIT_S_MIN]
    if not judged:
        return "none judged"
    parts = [
        f"of {len(judged)}: told {100 * statistics.median(_off(o.told_s, o) for o in judged):.1f}"
    ]
    for number, future in enumerate(FUTURES):
        off = statistics.median(_off(waits.said[one.key][number], one) for one in judged)
        parts.append(f"{future} {100 * off:.1f}")
    return ", ".join(parts) + " %"


def _off(said_s: float, one: Told) -> float:
    return abs(said_s - one.had_s) / one.had_s


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--traces", default="")
    parser.add_argument("--oracle", type=int, default=0, help="receipts to ask about, about")
    options = parser.parse_args()
    for seed in options.seeds:
        for name, point in points(seed, options.traces):
            if options.only and name not in options.only:
                continue
            began_s = time.perf_counter()
            every = max(1, len(point[0]) // options.oracle) if options.oracle else 0
            waits = run(point, seed=seed, every=every)
            changed_at_s = min((one.at_s for one in point[2].changes), default=math.inf)
            lines = {"told": waits.told}
            if waits.asked:
                later = [one for one in waits.told if one.at_s >= changed_at_s]
                lines = {"asked again": waits.asked, "queued after": later}
            took_s = time.perf_counter() - began_s
            for what, told in lines.items():
                print(f"{seed} {name:26} {what:12} {_line(told)}  [{took_s:.0f} s]", flush=True)
            if options.oracle:
                print(f"{seed} {name:26} oracle       {_oracle_line(waits)}", flush=True)


if __name__ == "__main__":
    main()
