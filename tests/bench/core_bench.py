"""What a step of the mind costs: `python tests/bench/core_bench.py`, about ten seconds.

Four steps a job (held, accepted, first token, ended), as in life; printed is the whole of them, and
the step that dispatches, in time of this thread alone. "Waiting" keeps that many jobs in line, so
that each end sets one free.
"""

import gc
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from broker.core.decisions import Decision, Dispatch
from broker.core.events import (
    AttemptEnded,
    DispatchAllowed,
    DispatchAnswered,
    Event,
    FirstTokenSeen,
    JobHeld,
    JobSpec,
    WorkerReported,
)
from broker.core.policy import LanePolicy, Policy, QuotaRow, RoutingPolicy
from broker.core.routing import make_router
from broker.core.scheduler import Scheduler
from broker.wire.messages import (
    Answer,
    Finished,
    FirstToken,
    Heartbeat,
    Kind,
    Load,
    Outcome,
    Usage,
)

MODEL = "tiny"
SLOTS = 20
JOBS = 2_000

CASES = ((8, 4, 0), (64, 4, 0), (8, 1, 10_000), (8, 20, 10_000))
"""Workers, lanes, jobs that wait."""


class Bench:
    """A scheduler with workers that answer at once."""

    def __init__(self, *, workers: int, lanes: int, policy: str, slots: int = SLOTS) -> None:
        names = tuple(f"lane{n}" for n in range(lanes))
        routing = RoutingPolicy(policy=policy)  # pyright: ignore[reportArgumentType]
        self.policy = Policy(
            models=(MODEL,),
            lanes=tuple(LanePolicy(name=name) for name in names),
            quotas=(
                QuotaRow(inflight_jobs_max=100_000),
                QuotaRow(band=1, inflight_jobs_max_per_worker=1000.0),
                QuotaRow(lane="lane0", inflight_tokens_max=10**9, queued_jobs_max=10**6),
            ),
            routing=routing,
        )
        self.names = names
        self.rng = random.Random(1)
        self.scheduler = Scheduler(
            self.policy, epoch=1, router=make_router(routing), rng=random.Random(1)
        )
        self.at_s = 1000.0
        self.count = 0
        self.spent_s: list[float] = []
        self.running: list[Dispatch] = []
        for n in range(workers):
            beat = Heartbeat(
                worker=f"w{n}",
                incarnation=1,
                sequence=1,
                epoch=1,
                echo=0,
                at_s=self.at_s,
                models=(MODEL,),
                slots=slots,
                load=Load(prefill_tokens_s=1e9, decode_tokens_s=50.0),
            )
            self.step(WorkerReported(self.at_s, beat))
        self.step(DispatchAllowed(self.at_s))

    def step(self, event: Event) -> list[Decision]:
        """Take a step, and its time."""
        begin = time.thread_time()
        decisions = self.scheduler.step(event)
        self.spent_s.append(time.thread_time() - begin)
        return decisions

    def hold(self) -> list[Decision]:
        """Let a job come."""
        self.count += 1
        self.at_s += 0.0005
        lane = self.names[self.count % len(self.names)]
        chain = self.rng.randrange(50)
        job = JobSpec(
            f"{lane}.j{self.count}",
            lane,
            1 + self.count % 2,
            MODEL,
            prompt_tokens=self.rng.randrange(200, 4000),
            output_tokens_max=200,
            blocks=tuple(chain * 1000 + block for block in range(8)),
            enqueued_at_s=self.at_s,
            stream_sequence=self.count,
        )
        return self.step(JobHeld(self.at_s, job))

    def serve(self, dispatch: Dispatch) -> list[Decision]:
        """Answer, and say the first token."""
        at_s, attempt = self.at_s, dispatch.attempt
        self.step(DispatchAnswered(at_s, dispatch.worker, dispatch.key, attempt, Answer.ACCEPTED))
        note = FirstToken(
            worker=dispatch.worker,
            incarnation=1,
            key=dispatch.key,
            attempt=attempt,
            ttft_s=0.1,
            cached_tokens=100,
        )
        return self.step(FirstTokenSeen(at_s, note))

    def end(self, dispatch: Dispatch) -> list[Decision]:
        """Complete a job."""
        finished = Finished(
            dispatch.key,
            dispatch.attempt,
            Outcome.SETTLED,
            kind=Kind.COMPLETED,
            usage=Usage(1000, 100, 150),
            run_s=3.0,
        )
        return self.step(AttemptEnded(self.at_s, dispatch.worker, 1, finished))


def dispatches(decisions: list[Decision]) -> list[Dispatch]:
    """Pick the dispatches."""
    return [one for one in decisions if isinstance(one, Dispatch)]


def empty_queue(bench: Bench) -> tuple[float, float]:
    """Jobs that find a free worker: seconds of the dispatching step, and of the whole job."""
    steps: list[float] = []
    whole: list[float] = []
    for _ in range(JOBS):
        mark = len(bench.spent_s)
        (dispatch,) = dispatches(bench.hold())
        steps.append(bench.spent_s[-1])
        bench.serve(dispatch)
        bench.end(dispatch)
        whole.append(sum(bench.spent_s[mark:]))
    return statistics.median(steps), statistics.median(whole)


def deep_queue(bench: Bench, *, waiting: int) -> tuple[float, float]:
    """Every end sets one of many waiting jobs free."""
    running: list[Dispatch] = []
    while bench.scheduler.views.pools()[0].waiting_jobs < waiting:
        running += dispatches(bench.hold())
        for dispatch in running[-1:]:
            running += dispatches(bench.serve(dispatch))
    steps: list[float] = []
    whole: list[float] = []
    for _ in range(JOBS):
        mark = len(bench.spent_s)
        bench.hold()
        freed = dispatches(bench.end(running.pop(0)))
        steps.append(bench.spent_s[-1])
        for dispatch in freed:
            freed += dispatches(bench.serve(dispatch))
        running += freed
        whole.append(sum(bench.spent_s[mark:]))
    return statistics.median(steps), statistics.median(whole)


def main() -> None:
    """Print the table."""
    print(f"{'case':<52}{'dispatching step':>18}{'whole job':>12}")
    for policy in ("round_robin", "first_token", "weighted"):
        for workers, lanes, waiting in CASES:
            gc.collect()
            bench = Bench(workers=workers, lanes=lanes, policy=policy)
            step_s, whole_s = deep_queue(bench, waiting=waiting) if waiting else empty_queue(bench)
            name = f"{policy}, {workers} workers, {lanes} lanes, {waiting:,} wait"
            print(f"{name:<52}{step_s * 1e6:>15.1f} µs{whole_s * 1e6:>9.1f} µs")


if __name__ == "__main__":
    main()
