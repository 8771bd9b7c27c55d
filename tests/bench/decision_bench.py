"""What a routing decision costs, with the index full: the public conversation trace, 256-byte
blocks.

Each 512-token block of the trace becomes 8 chained blocks of 256 bytes (4 bytes a token). The index
is first filled to its bound with other prefixes; then the trace's jobs are placed and given one by
one, at a steady load, at 64 and at 4,000 workers. A decision is `place` + `given`. Timed beside it:
the log's `explain`, the tick's `sweep` (which writes the dispatched chains into the index), and
`again`: `place` of jobs that wait already, after another was dispatched.

Times are of this thread alone, so that other processes on the machine don't count, but for what
they push out of the processor's caches. With `--repeats N` each `place` is made N times on the same
state, the answer forgotten in between, and the least counts: what the decision's own work takes,
were the caches ours. The first try alone is what it takes on this machine now. `given` changes the
state, and is timed once.

    INFERLANE_TRACES=/path/to/traces python tests/bench/decision_bench.py [--repeats N] ...
"""

import argparse
import gc
import os
import random
import sys
import time
import tracemalloc
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import orjson

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from broker.core.cache_router import CacheAwareRouter  # noqa: E402
from broker.core.events import JobSpec  # noqa: E402
from broker.core.placement import Placement  # noqa: E402
from broker.core.policy import RoutingPolicy  # noqa: E402
from broker.core.prefix_index import PrefixIndex  # noqa: E402
from broker.core.state import Lease, Worker  # noqa: E402
from broker.wire.messages import Attempt  # noqa: E402

TRACE = "mooncake/conversation_trace.jsonl"
MODEL = "model"
SUB_BLOCKS = 8
"""512 tokens of 4 bytes are 8 blocks of 256."""

CHAIN_BLOCKS = 192
"""Of the filling: the trace's mean."""

INFLIGHT_RATIO = 0.5
"""Jobs in flight per slot: steady load, so that some workers have room and some have not."""

SLOTS = 4
JOBS_PER_TICK = 1
"""At 20 ticks a second: 20 such jobs a second, what about 64 GPUs prefill."""

CANDIDATES = 64
P50, P99 = 0.5, 0.99


@dataclass
class Timings:
    """Seconds of each kind of call."""

    place: list[float] = field(default_factory=list[float])
    given: list[float] = field(default_factory=list[float])
    explain: list[float] = field(default_factory=list[float])
    decision: list[float] = field(default_factory=list[float])
    again: list[float] = field(default_factory=list[float])
    """`place` of a waiting job after another was dispatched."""
    sweep: list[float] = field(default_factory=list[float])


def read_jobs(path: Path, limit: int) -> Iterator[JobSpec]:
    """Expand the trace into jobs."""
    with path.open("rb") as lines:
        for number, line in zip(range(limit), lines, strict=False):
            record = orjson.loads(line)
            blocks = array("Q")
            for block in record["hash_ids"]:
                blocks.extend(_sub_blocks(block))
            yield JobSpec(
                key=f"lane.{number}",
                lane="lane",
                band=1,
                model=MODEL,
                prompt_tokens=max(1, record["input_length"]),
                output_tokens_max=max(1, record["output_length"]),
                blocks=blocks,
            )


def _sub_blocks(block: int) -> list[int]:
    rng = random.Random(block)
    return [rng.getrandbits(64) for _ in range(SUB_BLOCKS)]


def fill(index: PrefixIndex, workers: Sequence[Worker], entries: int) -> None:
    """Store other prefixes until the index is at its bound."""
    rng = random.Random(7)
    for number in range(entries // CHAIN_BLOCKS + 1):
        chain = array("Q", rng.randbytes(8 * CHAIN_BLOCKS))
        index.store(workers[number % len(workers)].index, chain)


def replay(
    jobs: list[JobSpec], workers_count: int, entries: int, *, repeats: int = 1
) -> tuple[Timings, PrefixIndex]:
    """Route all jobs once; each stays a while, and is prefilled before the next few."""
    router = CacheAwareRouter(RoutingPolicy(index_entries_max=entries))
    workers = [
        Worker(f"w{index}", index, models=(MODEL,), slots=SLOTS, ready=True)
        for index in range(workers_count)
    ]
    for worker in workers:
        router.joined(worker)
    fill(router.index, workers, entries)
    timings = Timings()
    prefilling: deque[tuple[Lease, Worker]] = deque()
    running: deque[tuple[Lease, Worker]] = deque()
    waiting = jobs[:CANDIDATES]
    gc.collect()
    gc.freeze()
    clock = time.thread_time
    for number, job in enumerate(jobs[CANDIDATES:]):
        at_s = number * 0.05
        waiting.append(job)
        waiting.pop(0)
        placement, place_s = _place(router, job, at_s, repeats)
        worker = placement.worker
        if worker is None:
            worker = next(w for w in workers if w.id == placement.held_for)
        explain_from = clock()
        router.explain(job, placement, at_s=at_s)
        explained = clock()
        lease = Lease(
            job,
            Attempt(1, number),
            worker.id,
            number,
            granted_at_s=at_s,
            cost_tokens=1.0,
            uncached_tokens=placement.uncached_tokens,
            hit_tokens=placement.hit_tokens,
            output_tokens_expected=job.output_tokens_max,
        )
        worker.add(lease)
        give_from = clock()
        router.given(lease, worker, at_s=at_s)
        given = clock()
        timings.place.append(place_s)
        timings.explain.append(explained - explain_from)
        timings.given.append(given - give_from)
        timings.decision.append(place_s + given - give_from)
        for other in waiting[:-1]:
            begin = clock()
            router.place(other, excluded=(), at_s=at_s)
            timings.again.append(clock() - begin)
        prefilling.append((lease, worker))
        while len(prefilling) > max(1, workers_count * INFLIGHT_RATIO):
            done, at = prefilling.popleft()
            at.mark_prefilled(done, at_s=at_s)
            router.changed(at)
            running.append((done, at))
        while len(running) > workers_count * SLOTS * INFLIGHT_RATIO:
            done, at = running.popleft()
            at.remove(done.job.key)
            router.changed(at)
        if number % JOBS_PER_TICK == 0:
            begin = clock()
            router.sweep(at_s)
            timings.sweep.append(clock() - begin)
    return timings, router.index


def _place(
    router: CacheAwareRouter, job: JobSpec, at_s: float, repeats: int
) -> tuple[Placement, float]:
    """Place a job anew so many times; returns the answer, and the least seconds that took."""
    tried: list[tuple[float, Placement]] = []
    for _ in range(max(1, repeats)):
        router._known.pop(job.key, None)
        begin = time.thread_time()
        placement = router.place(job, excluded=(), at_s=at_s)
        tried.append((time.thread_time() - begin, placement))
    return tried[0][1], min(seconds for seconds, _ in tried)


def bytes_per_entry(workers_count: int, entries: int, *, holders: int) -> float:
    """Measure what a full index takes for each (block, worker), at so many holders of each
    block.
    """
    gc.collect()
    tracemalloc.start()
    index = PrefixIndex(entries_max=entries, ttl_s=600.0)
    rng = random.Random(3)
    for number in range(entries // (CHAIN_BLOCKS * holders) + 1):
        packed = rng.randbytes(8 * CHAIN_BLOCKS)
        for copy in range(holders):
            # As reports arrive: each its own array of numbers.
            index.store((number + copy) % workers_count, array("Q", packed))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / index.entries_count


def linear_walk_us(index: PrefixIndex) -> float:
    """Time the walk that galloping search replaces, in this run, on this machine."""
    blocks = array("Q", random.Random(5).sample(list(index._blocks), 1600))
    begin = time.thread_time()
    held = -1
    for block in blocks:
        holders = index._blocks.get(block)
        if holders is None:
            break
        held &= holders.bits
    return (time.thread_time() - begin) * 1e6


def _percentile_us(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] * 1e6


def main() -> None:
    """Print p50 and p99 in microseconds, and bytes per entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=RoutingPolicy().index_entries_max)
    parser.add_argument("--jobs", type=int, default=12_031)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--workers", type=int, nargs="*", default=[64, 4000])
    options = parser.parse_args()
    trace = Path(os.environ.get("INFERLANE_TRACES", "traces")) / TRACE
    if not trace.exists():
        parser.error(f"{trace} is not there: INFERLANE_TRACES names the folder of the traces")
    jobs = list(read_jobs(trace, options.jobs))
    for workers_count in options.workers:
        timings, index = replay(jobs, workers_count, options.entries, repeats=options.repeats)
        print(f"{workers_count} workers, {index.entries_count:,} entries, {len(jobs):,} jobs")
        for name in ("decision", "place", "given", "explain", "again", "sweep"):
            values = getattr(timings, name)
            figures = _percentile_us(values, P50), _percentile_us(values, P99)
            print(f"  {name:9} p50 {figures[0]:7.1f} µs   p99 {figures[1]:7.1f} µs")
        print(f"  a plain walk down 1,600 blocks, for scale: {linear_walk_us(index):.0f} µs")
        del index
    for holders in (1, 2, 8):
        size = bytes_per_entry(64, min(options.entries, 1_000_000), holders=holders)
        print(f"{holders} holder(s) a block: {size:.0f} bytes per (block, worker)")


if __name__ == "__main__":
    main()
