"""Engines that cache one sequence a slot, as llama.cpp does, under a router, in virtual time.

Jobs are dispatched in the order in which they came, each when its placement names a worker: the
router's part alone, without quotas, bands or lanes.
"""

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from broker.core.events import JobSpec
from broker.core.policy import RoutingPolicy
from broker.core.prefix_search import common_blocks
from broker.core.routing import make_router
from broker.core.state import Lease, Worker
from broker.wire.messages import Attempt, CacheSummary
from broker.wire.prefix import pack_hashes
from tests.unit.core.routing_builders import BLOCK_TOKENS, a_spec, a_worker, chain

PREFILL_TOKENS_S = 30_000.0
DECODE_TOKENS_S = 50.0
OUTPUT_TOKENS = 32
SIMILARITY_MIN = 0.1
"""llama.cpp's: a slot that shares less of the prompt is not chosen for it."""


@dataclass
class Slot:
    """A sequence in an engine's cache."""

    blocks: Sequence[int] = ()
    used_at_s: float = 0.0
    busy: bool = False


@dataclass
class Engine:
    """A worker's slots, and what it last reported of them."""

    worker: Worker
    slots: list[Slot]
    ready_at_s: float = 0.0
    """When its prefill queue is empty: prompts are prefilled one after another."""
    reported: set[int] = field(default_factory=set[int])
    sequence: int = 0

    def take(self, blocks: Sequence[int], at_s: float) -> tuple[Slot, int]:
        """Choose the idle slot with the longest common prefix, else the oldest."""
        idle = [slot for slot in self.slots if not slot.busy]
        best = max(idle, key=lambda slot: common_blocks(slot.blocks, blocks))
        if common_blocks(best.blocks, blocks) <= SIMILARITY_MIN * len(blocks):
            best = min(idle, key=lambda slot: slot.used_at_s)
        cached = common_blocks(best.blocks, blocks)
        best.blocks, best.used_at_s, best.busy = blocks, at_s, True
        return best, cached

    def summary(self) -> CacheSummary | None:
        """Report the difference since the last time."""
        held = {block: None for slot in self.slots for block in slot.blocks}
        added = [block for block in held if block not in self.reported]
        removed = sorted(self.reported - held.keys())
        is_first = self.sequence == 0
        if not (added or removed or is_first):
            return None
        self.sequence += 1
        self.reported = set(held)
        return CacheSummary(
            sequence=self.sequence,
            full=is_first,
            added=pack_hashes(added),
            removed=pack_hashes(removed),
        )


@dataclass
class Outcome:
    """What a run came to."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list[float])
    jobs: dict[str, int] = field(default_factory=dict[str, int])
    homes: dict[int, set[str]] = field(default_factory=dict[int, set[str]])
    """Workers that served each system prompt in the second half."""

    @property
    def cached_ratio(self) -> float:
        return self.cached_tokens / self.prompt_tokens


class SlotWorld:
    """Chats that share system prompts, over engines with slots."""

    def __init__(
        self,
        policy: RoutingPolicy,
        *,
        workers: int = 4,
        slots: int = 6,
        prompts: int = 20,
        jobs: int = 240,
        jobs_s: float = 6.0,
        seed: int = 1,
    ) -> None:
        self.at_s = 0.0
        self.router = make_router(policy)
        self.outcome = Outcome()
        self.engines: dict[str, Engine] = {}
        self._prompt_of: dict[str, int] = {}
        self._events: list[tuple[float, int, str, object]] = []
        self._number = count()
        self._waiting: list[JobSpec] = []
        self._jobs = jobs
        for index in range(workers):
            worker = a_worker(f"w{index}", index=index, slots=slots)
            worker.prefill_tokens_s, worker.decode_tokens_s = PREFILL_TOKENS_S, DECODE_TOKENS_S
            self.engines[worker.id] = Engine(worker, [Slot() for _ in range(slots)])
            self.router.joined(worker)
            self._at(0.1 * index, "beat", worker.id)
        rng = random.Random(seed)
        at_s = 1.0
        for number in range(jobs):
            at_s += rng.expovariate(jobs_s)
            prompt = rng.randrange(prompts)
            blocks = chain((f"system{prompt}", 2000 // BLOCK_TOKENS), (f"ask{number}", 2))
            job = a_spec(
                f"j{number}", blocks=blocks, enqueued_at_s=at_s, output_tokens_max=OUTPUT_TOKENS
            )
            self._prompt_of[job.key] = prompt
            self._at(at_s, "job", job)

    def run(self) -> Outcome:
        """Play until every job has ended."""
        done = 0
        while done < self._jobs:
            self.at_s, _, kind, what = heapq.heappop(self._events)
            match kind, what:
                case "job", JobSpec():
                    self._waiting.append(what)
                case "beat", str():
                    self._beat(self.engines[what])
                case "token", Lease():
                    worker = self.engines[what.worker].worker
                    worker.mark_prefilled(what, at_s=self.at_s)
                    self.router.changed(worker)
                case "end", (Lease() as lease, Slot() as slot):
                    slot.busy, slot.used_at_s = False, self.at_s
                    worker = self.engines[lease.worker].worker
                    worker.remove(lease.job.key)
                    self.router.changed(worker)
                    done += 1
                case _:
                    raise AssertionError(kind)
            self._dispatch()
        return self.outcome

    def _at(self, at_s: float, kind: str, what: object) -> None:
        heapq.heappush(self._events, (at_s, next(self._number), kind, what))

    def _beat(self, engine: Engine) -> None:
        summary = engine.summary()
        if summary is not None:
            assert self.router.summary(engine.worker, summary, at_s=self.at_s)
        self.router.sweep(self.at_s)
        self._at(self.at_s + 1.0, "beat", engine.worker.id)

    def _dispatch(self) -> None:
        for job in list(self._waiting):
            placement = self.router.place(job, excluded=(), at_s=self.at_s)
            if placement.worker is None:
                continue
            self._waiting.remove(job)
            self._start(job, placement.worker, placement.hit_tokens)

    def _start(self, job: JobSpec, worker: Worker, hit_tokens: int) -> None:
        engine, outcome = self.engines[worker.id], self.outcome
        lease = Lease(
            job,
            Attempt(1, len(outcome.ttft_s)),
            worker.id,
            0,
            granted_at_s=self.at_s,
            cost_tokens=1.0,
            uncached_tokens=job.prompt_tokens - hit_tokens,
            hit_tokens=hit_tokens,
            output_tokens_expected=OUTPUT_TOKENS,
        )
        worker.add(lease)
        self.router.given(lease, worker, at_s=self.at_s)
        slot, cached_blocks = engine.take(job.blocks, self.at_s)
        cached = cached_blocks * BLOCK_TOKENS
        begins_at_s = max(self.at_s, engine.ready_at_s)
        engine.ready_at_s = begins_at_s + (job.prompt_tokens - cached) / PREFILL_TOKENS_S
        self._at(engine.ready_at_s, "token", lease)
        self._at(engine.ready_at_s + OUTPUT_TOKENS / DECODE_TOKENS_S, "end", (lease, slot))
        self.router.hit_seen(lease, worker, cached_tokens=cached)
        outcome.prompt_tokens += job.prompt_tokens
        outcome.cached_tokens += cached
        outcome.ttft_s.append(engine.ready_at_s - job.enqueued_at_s)
        outcome.jobs[worker.id] = outcome.jobs.get(worker.id, 0) + 1
        if len(outcome.ttft_s) > self._jobs // 2:
            outcome.homes.setdefault(self._prompt_of[job.key], set()).add(worker.id)
