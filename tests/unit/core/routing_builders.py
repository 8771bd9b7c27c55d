"""A router with workers and jobs at hand: what the cases of routing are told with."""

from collections.abc import Sequence
from typing import Any

from broker.core.events import JobSpec
from broker.core.placement import Placement, Router
from broker.core.policy import PolicyName, RoutingPolicy
from broker.core.routing import make_router
from broker.core.state import Lease, Worker
from broker.wire.messages import Attempt, CacheSummary
from broker.wire.prefix import pack_hashes

MODEL = "tiny"
BLOCK_TOKENS = 64

SYSTEM = ("system", 30)
"""1,920 tokens: 0.24 s of prefill."""

CACHE_AWARE: list[PolicyName] = ["first_token", "weighted"]


def chain(*runs: tuple[str, int]) -> list[int]:
    """Make a chain of blocks: `chain(("system", 30), ("ask", 2))`; equal beginnings are equal
    blocks.
    """
    blocks: list[int] = []
    parent = 0
    for name, count in runs:
        for place in range(count):
            parent = hash_of(parent, name, place)
            blocks.append(parent)
    return blocks


def hash_of(parent: int, name: str, place: int) -> int:
    """Return a 64-bit number that the three decide alone."""
    value = parent
    for byte in f"{name}.{place}".encode():
        value = ((value ^ byte) * 0x100000001B3 + 0x9E3779B97F4A7C15) & (2**64 - 1)
    return value


def a_worker(name: str = "w0", *, index: int = 0, **fields: Any) -> Worker:
    """A ready worker of four slots that prefills 8,000 tokens a second and decodes 50."""
    defaults: dict[str, Any] = {"models": (MODEL,), "slots": 4, "ready": True}
    return Worker(name, index, **{**defaults, **fields})


def a_spec(name: str = "j1", *, blocks: Sequence[int] = (), **fields: Any) -> JobSpec:
    """A job whose prompt is its blocks, 64 tokens each, and half a block more."""
    defaults: dict[str, Any] = {
        "band": 2,
        "model": MODEL,
        "prompt_tokens": max(1, round((len(blocks) + 0.5) * BLOCK_TOKENS)),
        "output_tokens_max": 50,
        "enqueued_at_s": 1000.0,
        "blocks": blocks,
    }
    return JobSpec(f"acme.{name}", "acme", **{**defaults, **fields})


class Place:
    """A router under test, its workers and its time.

    Unless a test says so, nothing joins a long prompt: a worker that prefills one has no room.
    """

    def __init__(self, workers: Sequence[Worker] | int = 2, **policy: Any) -> None:
        self.at_s = 1000.0
        policy.setdefault("join_s_max", 0.0)
        self.policy = RoutingPolicy(**policy)
        self.router: Router = make_router(self.policy)
        self.jobs = 0
        if isinstance(workers, int):
            workers = [a_worker(f"w{index}", index=index) for index in range(workers)]
        self.workers = {worker.id: worker for worker in workers}
        for worker in workers:
            self.router.joined(worker)

    def spec(self, *runs: tuple[str, int], **fields: Any) -> JobSpec:
        """A new job with this chain."""
        self.jobs += 1
        return a_spec(f"j{self.jobs}", blocks=chain(*runs), **fields)

    def place(self, job: JobSpec, *, excluded: Sequence[str] = (), **fields: Any) -> Placement:
        """Ask where a job goes."""
        return self.router.place(job, excluded=excluded, at_s=self.at_s, **fields)

    def give(self, job: JobSpec, to: str = "", **fields: Any) -> Lease:
        """Dispatch a job where the router says (or `to`)."""
        placement = self.place(job)
        worker = self.workers[to] if to else placement.worker
        assert worker is not None, placement
        hit_tokens = placement.hit_tokens if worker is placement.worker else 0
        lease = Lease(
            job,
            Attempt(1, self.jobs),
            worker.id,
            worker.orders,
            granted_at_s=self.at_s,
            cost_tokens=1.0,
            uncached_tokens=job.prompt_tokens - hit_tokens,
            hit_tokens=hit_tokens,
            output_tokens_expected=fields.pop("output_tokens", job.output_tokens_max),
            progressed_at_s=self.at_s,
        )
        worker.add(lease)
        self.router.given(lease, worker, at_s=self.at_s)
        return lease

    def prefill(self, lease: Lease) -> None:
        """See a job's first token."""
        worker = self.workers[lease.worker]
        worker.mark_prefilled(lease, at_s=self.at_s)
        self.router.changed(worker)

    def end(self, lease: Lease) -> None:
        """See a job's end."""
        worker = self.workers[lease.worker]
        worker.remove(lease.job.key)
        self.router.changed(worker)

    def run(self, job: JobSpec, to: str = "") -> str:
        """Dispatch a job and see it through; returns where it ran."""
        lease = self.give(job, to)
        self.prefill(lease)
        self.end(lease)
        return lease.worker

    def warm(self, worker: str, *runs: tuple[str, int]) -> None:
        """Let a worker report a chain as cached, in full."""
        self.report(worker, 1, added=chain(*runs), full=True)

    def report(
        self,
        worker: str,
        sequence: int,
        *,
        added: Sequence[int] = (),
        removed: Sequence[int] = (),
        full: bool = False,
    ) -> bool:
        """Let a worker send a cache summary."""
        summary = CacheSummary(
            sequence=sequence,
            full=full,
            added=pack_hashes(added),
            removed=pack_hashes(removed),
        )
        return self.router.summary(self.workers[worker], summary, at_s=self.at_s)

    def change(self, worker: str, **fields: Any) -> None:
        """Change a worker's state."""
        for name, value in fields.items():
            setattr(self.workers[worker], name, value)
        self.router.changed(self.workers[worker])


def where(place: Place, *runs: tuple[str, int], **fields: object) -> str:
    """Say where a new job with this chain would go; nowhere is empty."""
    worker = place.place(place.spec(*runs, **fields)).worker
    return worker.id if worker is not None else ""
