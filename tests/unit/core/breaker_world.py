"""Workers whose engines fail or not, as told, under the scheduler and a real router.

Beside the mind it keeps its own, simpler account of what each worker's jobs came to, and checks
after each step what no breaker may do whatever happens.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from broker.core.breaker import BreakerState
from broker.core.decisions import Abort, DeadLetter, Decision, Dispatch, HeldBy, Release
from broker.core.events import (
    AttemptEnded,
    CancelRequested,
    DispatchAllowed,
    DispatchAnswered,
    Event,
    JobHeld,
    Tick,
    Unanswered,
    WorkerReported,
)
from broker.core.policy import BreakerPolicy, LeasePolicy, PolicyName, RoutingPolicy
from broker.core.routing import make_router
from broker.core.scheduler import Scheduler
from broker.core.views import WorkerView
from broker.wire.messages import (
    Answer,
    CacheSummary,
    Finished,
    Heartbeat,
    Kind,
    Outcome,
    Reason,
    Usage,
)
from broker.wire.prefix import pack_hashes
from tests.unit.core.cluster import MODEL, a_policy, a_spec, in_flight
from tests.unit.core.invariants import check_sums

STEP_S = 0.25
"""Between two ticks; a second of the service has twenty."""

REST_S = 1.0
"""Beyond what is bounded by policy: a tick, a report, a back-off's jitter."""

FAULTS = (Reason.ENGINE_FAILED, Reason.ENGINE_GARBAGE, Reason.ENGINE_TIMEOUT, Reason.STALLED)


def settled(kind: Kind, reason: Reason | None = None, *, ran: bool = True) -> dict[str, Any]:
    """An attempt whose job has its record."""
    usage = Usage(100, 0, 50) if kind is Kind.COMPLETED and ran else Usage()
    return {
        "outcome": Outcome.SETTLED,
        "kind": kind,
        "reason": reason,
        "usage": usage,
        "run_s": 1.0,
        "ran": ran,
    }


def retried(reason: Reason, *, charged: bool = True) -> dict[str, Any]:
    """An attempt that came to nothing."""
    return {"outcome": Outcome.RETRY, "reason": reason, "charged": charged}


COMPLETED = settled(Kind.COMPLETED)

HARMLESS: dict[str, dict[str, Any]] = {
    "refused by the engine (4xx)": settled(Kind.FAILED, Reason.ENGINE_REFUSED),
    "answer too large": settled(Kind.FAILED, Reason.PAYLOAD_TOO_LARGE),
    "cancelled": settled(Kind.CANCELLED, Reason.CANCELLED),
    "out of time": settled(Kind.EXPIRED, Reason.DEADLINE_EXPIRED),
    "record found": settled(Kind.COMPLETED, ran=False),
    "engine busy (429)": retried(Reason.ENGINE_FAILED, charged=False),
    "handed back": retried(Reason.HANDED_BACK, charged=False),
    "stopped as a double": retried(Reason.DUPLICATE, charged=False),
    "ran for too long": retried(Reason.RUN_TIME_EXCEEDED),
    "worker died": retried(Reason.WORKER_LOST),
}
"""Ends of an attempt that say nothing of the engine, or nothing that counts."""

UNTAKEN = (
    Answer.BUSY,
    Answer.DRAINING,
    Answer.STALE_EPOCH,
    Answer.UNKNOWN,
    Unanswered.UNSENT,
    Unanswered.NO_RESPONDERS,
)
"""Answers to an order after which the job surely does not run."""


@dataclass
class Account:
    """What a worker's jobs came to, by our own count."""

    faults: list[str] = field(default_factory=list[str])
    """Keys of jobs that failed by its engine's fault, since one completed."""
    probes: set[str] = field(default_factory=set[str])
    """Given while it was half-open, and not over."""
    probe_failed: bool = False
    """By the engine's fault, at this very step."""
    open_since_s: float | None = None
    openings: int = 0


class BreakerWorld:
    """A scheduler, its time, its workers, and who is checked."""

    def __init__(
        self,
        *,
        workers: int = 3,
        slots: int = 2,
        routing: PolicyName = "first_token",
        tries: int = 1000,
        **breaker: Any,
    ) -> None:
        """`tries`: failures after which a job is a dead letter. Breakers open for 5 to 30 s."""
        self.at_s = 1000.0
        self.breaker = replace(BreakerPolicy(open_s=5.0, open_s_max=30.0), **breaker)
        self.policy = a_policy(
            routing=RoutingPolicy(policy=routing),
            breaker=self.breaker,
            leases=LeasePolicy(failures_max=tries, retry_base_s=0.1, retry_s_max=0.2),
        )
        self.scheduler = Scheduler(
            self.policy,
            epoch=1,
            router=make_router(self.policy.routing),
            rng=random.Random(1),
        )
        self.slots = slots
        self.names = [f"w{number}" for number in range(workers)]
        self.lives = dict.fromkeys(self.names, 1)
        self.engines = dict.fromkeys(self.names, 1)
        self.sequence = self.summaries = 0
        self.accounts = {name: Account() for name in self.names}
        self.running: dict[str, Dispatch] = {}
        """By key, what was dispatched and is not over."""
        self.given: dict[str, int] = dict.fromkeys(self.names, 0)
        self.ended: dict[str, str] = {}
        self.jobs = 0
        for name in self.names:
            self.report(name)
        self.step(DispatchAllowed(self.at_s))

    # ---- steps ---------------------------------------------------------------------------------

    def step(self, event: Event) -> list[Decision]:
        """Let something happen, and check what followed."""
        decisions = self.scheduler.step(event)
        views = self.views
        for decision in decisions:
            match decision:
                case Dispatch(key=key, worker=worker):
                    self.given[worker] += 1
                    self.running[key] = decision
                    self._check_given(decision, views[worker])
                case Release(key=key):
                    self.ended[key] = "ended"
                    self._forget(key)
                case DeadLetter(key=key):
                    self.ended[key] = "dead"
                case _:
                    pass
        for name, view in views.items():
            self._check_turn(self.accounts[name], view)
        check_sums(self.scheduler)
        return decisions

    @property
    def views(self) -> dict[str, WorkerView]:
        """Each known worker as the mind shows it."""
        return {view.worker: view for view in self.scheduler.views.workers()}

    def state(self, name: str) -> str:
        """Say how a worker's breaker stands."""
        return self.views[name].breaker

    def _check_given(self, decision: Dispatch, view: WorkerView) -> None:
        """Nothing goes to an open worker, one at a time to a half-open one."""
        account = self.accounts[decision.worker]
        assert view.breaker != BreakerState.OPEN, f"{decision.worker} is open"
        if view.breaker == BreakerState.HALF_OPEN:
            assert decision.explanation.is_probe
            account.probes.add(decision.key)
        assert len(account.probes) <= 1, f"{account.probes} are tried at once"

    def _check_turn(self, account: Account, view: WorkerView) -> None:
        """It opens for as many faults as the policy says, and for no longer than that says."""
        if view.breaker_openings > account.openings:
            account.openings = view.breaker_openings
            account.open_since_s = self.at_s
            enough = len(set(account.faults)) >= self.breaker.failures_max
            fair = enough or account.probe_failed
            assert fair, f"{view.worker} opened after {account.faults}"
        if view.breaker != BreakerState.OPEN:
            account.open_since_s = None
        elif account.open_since_s is not None:
            open_s = self.at_s - account.open_since_s
            assert open_s <= self.breaker.open_s_max + STEP_S, f"{view.worker} stays open"

    def _forget(self, key: str) -> None:
        self.running.pop(key, None)
        for account in self.accounts.values():
            account.probes.discard(key)

    # ---- what happens --------------------------------------------------------------------------

    def keys_at(self, name: str) -> list[str]:
        """Name the jobs that run at a worker."""
        return [key for key, one in self.running.items() if one.worker == name]

    def submit(self, count: int = 1, **fields: Any) -> None:
        """Let jobs come."""
        for _ in range(count):
            self.jobs += 1
            fields = {"prompt_tokens": 10, "enqueued_at_s": self.at_s, **fields}
            self.step(JobHeld(self.at_s, a_spec(f"j{self.jobs}", **fields)))

    def end(self, key: str, **how: Any) -> None:
        """Let a running attempt end in some way."""
        dispatch = self.running[key]
        account = self.accounts[dispatch.worker]
        if how["outcome"] is Outcome.RETRY and how["reason"] in FAULTS and how["charged"]:
            account.faults.append(key)
            account.probe_failed = key in account.probes
        died = how.get("reason") is Reason.WORKER_LOST
        for gone in self.keys_at(dispatch.worker) if died else [key]:
            self._forget(gone)
        incarnation = self.lives[dispatch.worker]
        finished = Finished(key, dispatch.attempt, **how)
        self.step(AttemptEnded(self.at_s, dispatch.worker, incarnation, finished))
        account.probe_failed = False
        if how.get("kind") is Kind.COMPLETED and how["ran"]:
            account.faults.clear()

    def answer(self, key: str, answer: Answer | Unanswered) -> None:
        """Let an order come back untaken."""
        dispatch = self.running[key]
        self._forget(key)
        self.step(DispatchAnswered(self.at_s, dispatch.worker, key, dispatch.attempt, answer))

    def cancel(self, key: str) -> None:
        """Let a running job's owner stop it."""
        decisions = self.step(CancelRequested(self.at_s, key))
        if any(isinstance(one, Abort) for one in decisions):
            self.end(key, **settled(Kind.CANCELLED, Reason.CANCELLED))

    def warm(self, name: str, blocks: Sequence[int]) -> None:
        """Let a worker report these blocks as cached, and no others."""
        self.summaries += 1
        added = pack_hashes(blocks)
        self.report(name, summary=CacheSummary(sequence=self.summaries, full=True, added=added))

    def report(
        self, name: str, *, listed: bool = True, summary: CacheSummary | None = None
    ) -> None:
        """Let a worker report, ready and not draining, with all it was given."""
        self.sequence += 1
        view = self.views.get(name)
        orders = self.scheduler._mind.fleet.workers[name].orders if view is not None else 0
        leases = [one for one in self.scheduler.leases() if one.worker == name and listed]
        beat = Heartbeat(
            worker=name,
            incarnation=self.lives[name],
            sequence=self.sequence,
            epoch=1,
            echo=orders,
            at_s=self.at_s,
            models=(MODEL,),
            slots=self.slots,
            inflight=tuple(in_flight(one.job, one.attempt) for one in leases),
            engine_incarnation=self.engines[name],
            summary=summary,
        )
        self.step(WorkerReported(self.at_s, beat))

    def restart(self, name: str) -> None:
        """Let a worker begin a new life, with nothing in it."""
        self.lives[name] += 1
        self._all_gone(name)
        self.report(name, listed=False)

    def restart_engine(self, name: str) -> None:
        """Let an engine die under its agent, and come back."""
        self.engines[name] += 1
        for key in self.keys_at(name)[:1]:
            self.end(key, **retried(Reason.WORKER_LOST))
        for key in self.keys_at(name):
            self.answer(key, Answer.BUSY)  # Sent before the engine was back.
        self.report(name)

    def _all_gone(self, name: str) -> None:
        self.accounts[name] = Account()
        for key in self.keys_at(name):
            del self.running[key]

    def wait(self, seconds: float) -> None:
        """Let time pass; workers report each second."""
        until_s = self.at_s + seconds
        while self.at_s < until_s:
            self.at_s = min(until_s, self.at_s + STEP_S)
            self.step(Tick(self.at_s))
            if self.at_s % 1.0 < STEP_S:
                for name in self.names:
                    self.report(name)

    # ---- all is well ---------------------------------------------------------------------------

    def heal(self) -> None:
        """From here on every engine works, and all are needed: all serve, and all jobs end, in
        bounded time.
        """
        until_s = self.at_s + self.breaker.open_s_max + REST_S
        for name in self.names:
            self.report(name)
        while not self._is_well():
            assert self.at_s <= until_s, f"{self._shut()} still don't serve; {self._waiting()}"
            self.submit(len(self.names) * self.slots)  # All are needed, the least liked one, too.
            self._complete_all()
            self.wait(STEP_S)
        until_s = self.at_s + REST_S + 0.1 * self.jobs
        while len(self.ended) < self.jobs:
            assert self.at_s <= until_s, f"jobs are stuck: {self._waiting()}"
            self._complete_all()
            self.wait(STEP_S)

    def _complete_all(self) -> None:
        while self.running:
            self.end(next(iter(self.running)), **COMPLETED)

    def _is_well(self) -> bool:
        return not self._shut()

    def _shut(self) -> list[str]:
        return [name for name, one in self.views.items() if one.breaker != BreakerState.CLOSED]

    def _waiting(self) -> dict[str, HeldBy]:
        whys = {key: self.scheduler.views.why(key) for key in self.scheduler._mind.queues.waiting}
        return {key: why.held_by for key, why in whys.items() if why is not None}
