"""What wait estimates learn of a pool: how fast it takes waiting work up, and what queues send.

While jobs wait for room, what is dispatched a second *is* the rate at which the pool works,
whatever it is that binds it: slots, KV cache or prefill. It is kept per slot, so that a lost worker
is felt at once. Until enough was dispatched that way, Little's law stands in: jobs in flight × what
a job costs ÷ how long it runs (Little, "A proof for the queuing formula L = λW", 1961).

A job's work is what it would cost without any cache; each queue learns which part of that its jobs
come to cost when they are dispatched, so that hits count in the backlog as they do in the rate.
"""

import math
from dataclasses import dataclass, field

from broker.core.size_factors import SizeFactors
from broker.core.wait_errors import WaitErrors
from broker.wire.ids import BANDS

PACE_JOBS = 50.0
"""Jobs that a queue's and a pool's means remember."""

PACE_S_MIN = 60.0
"""The means remember at least so long, however fast jobs come: 50 jobs of the conversation trace at
8 times its speed are two seconds, and what those cost is no more than their draw."""

DRAIN_JOBS = 100.0
"""Dispatches that a pool's rate remembers: their cost varies by about its mean, so the rate is
known within 10 %."""

DRAIN_S_MIN = 20.0
"""The rate remembers at least so long, however fast jobs are: heartbeats and batches come in
steps."""

RECENT_S = 10.0
"""A burst of arrivals is seen within about this long."""

USUAL_S = 120.0
"""What usually arrives is averaged over about this long. A burst is as likely to end as to last, so
half of each is expected."""

KEEP = 1.0 - 1.0 / PACE_JOBS


def _keep(seconds: float) -> float:
    """Tell what remains of a mean's sums when a job comes so long after the last."""
    return max(KEEP, math.exp(-seconds / PACE_S_MIN))


QueueKey = tuple[str, int]
"""Lane and band."""


@dataclass(slots=True)
class Runs:
    """What jobs cost and how long they ran, as moving sums."""

    cost_tokens: float = 0.0
    run_s: float = 0.0
    jobs: float = 0.0
    at_s: float = 0.0
    """When the last of them ended."""

    def ran(self, cost_tokens: float, run_s: float, *, at_s: float) -> None:
        """Learn from a job that ended."""
        keep = _keep(at_s - self.at_s)
        self.at_s = at_s
        self.cost_tokens = self.cost_tokens * keep + cost_tokens
        self.run_s = self.run_s * keep + run_s
        self.jobs = self.jobs * keep + 1.0

    @property
    def slot_tokens_s(self) -> float:
        """What one slot works."""
        return self.cost_tokens / self.run_s

    @property
    def job_tokens(self) -> float:
        """Mean cost."""
        return self.cost_tokens / self.jobs

    @property
    def job_s(self) -> float:
        """Mean time."""
        return self.run_s / self.jobs


@dataclass(slots=True)
class Flow:
    """What one queue sends."""

    began_at_s: float
    at_s: float
    recent_tokens_s: float = 0.0
    usual_tokens_s: float = 0.0
    cost_tokens: float = 1.0
    """Moving sums of what its jobs cost when dispatched, and of their work without any cache."""
    work_tokens: float = 1.0
    cost_at_s: float = 0.0
    """When the last of them was dispatched."""
    runs: Runs = field(default_factory=Runs)
    sizes: SizeFactors = field(default_factory=SizeFactors)

    def arrived(self, work_tokens: float, *, at_s: float) -> None:
        """Count an arrival."""
        self._fade(at_s)
        self.recent_tokens_s += work_tokens / RECENT_S
        self.usual_tokens_s += work_tokens / USUAL_S

    def dispatched(self, *, cost_tokens: float, work_tokens: float, at_s: float) -> None:
        """Learn which part of its work a job came to cost."""
        keep = _keep(at_s - self.cost_at_s)
        self.cost_at_s = at_s
        self.cost_tokens = self.cost_tokens * keep + cost_tokens
        self.work_tokens = self.work_tokens * keep + work_tokens

    def arrivals_tokens_s(self, at_s: float) -> float:
        """Expect the cost of what arrives a second."""
        self._fade(at_s)
        # A queue that is new has not had the time to be known.
        known = 1.0 - math.exp((self.began_at_s - RECENT_S - at_s) / USUAL_S)
        return self.cost_ratio * (self.recent_tokens_s + self.usual_tokens_s / known) / 2.0

    @property
    def cost_ratio(self) -> float:
        """The part of its jobs' work that they come to cost."""
        return self.cost_tokens / self.work_tokens

    def _fade(self, at_s: float) -> None:
        seconds = at_s - self.at_s
        if seconds > 0:
            self.recent_tokens_s *= math.exp(-seconds / RECENT_S)
            self.usual_tokens_s *= math.exp(-seconds / USUAL_S)
            self.at_s = at_s


@dataclass(slots=True)
class Pace:
    """One pool."""

    runs: Runs
    """Of all its jobs; with something in it from the start."""
    at_s: float
    bands: tuple[Flow, ...]
    """What each band sends, in all its queues."""
    flows: dict[QueueKey, Flow] = field(default_factory=dict[QueueKey, Flow])
    lanes: list[int] = field(default_factory=lambda: [0 for _ in BANDS])
    """By band, the lanes that ever sent."""
    errors: dict[int, WaitErrors] = field(default_factory=dict[int, WaitErrors])
    """By band."""
    saturated: bool = False
    """Jobs wait for room: what is dispatched tells the rate."""
    waits: bool = False
    """Anybody was in line when it was last looked at."""
    slots: int = 0
    """As it was then."""
    drained_tokens: float = 0.0
    """Dispatched while it was saturated, for how long, and with how many slots: fading sums."""
    drained_jobs: float = 0.0
    drained_s: float = 0.0
    drained_slot_s: float = 0.0

    def flow(self, key: QueueKey, *, at_s: float) -> Flow:
        """Find a queue's flow, made at first use."""
        flow = self.flows.get(key)
        if flow is None:
            flow = self.flows[key] = Flow(at_s, at_s)
            self.lanes[key[1]] += 1
        return flow

    def errors_of(self, band: int) -> WaitErrors:
        """Find a band's errors, made at first use."""
        errors = self.errors.get(band)
        if errors is None:
            errors = self.errors[band] = WaitErrors()
        return errors

    def pass_time(self, at_s: float) -> None:
        """Count the time in which it was saturated."""
        seconds = at_s - self.at_s
        if seconds <= 0:
            return
        self.at_s = at_s
        if not self.saturated:
            return
        for_s = max(DRAIN_S_MIN, DRAIN_JOBS * self.drained_s / max(1.0, self.drained_jobs))
        keep = math.exp(-seconds / for_s)
        self.drained_tokens *= keep
        self.drained_jobs *= keep
        self.drained_s = self.drained_s * keep + seconds
        self.drained_slot_s = self.drained_slot_s * keep + seconds * self.slots

    def dispatched(self, cost_tokens: float) -> None:
        """Count a dispatch, where it tells the rate."""
        if self.saturated:
            self.drained_tokens += cost_tokens
            self.drained_jobs += 1.0

    def rate_tokens_s(self, *, slots: int, inflight_jobs: int) -> float:
        """Tell how fast it works with so many slots; 0 with none.

        The mean of what was seen and of Little's law, which counts as the time that a job runs.
        """
        runs = self.runs
        running = max(1, min(inflight_jobs, slots)) if self.saturated else slots
        seconds = runs.job_s
        tokens = self.drained_tokens + running * runs.slot_tokens_s * seconds
        return slots * tokens / (self.drained_slot_s + slots * seconds) if slots else 0.0
