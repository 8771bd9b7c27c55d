"""A scheduler with time, workers and jobs at hand: what the cases of the core are told with."""

import random
from typing import Any, TypeVar

from broker.core.decisions import Decision, Dispatch
from broker.core.events import (
    AttemptEnded,
    CancelRequested,
    DispatchAllowed,
    DispatchAnswered,
    Event,
    FirstTokenSeen,
    JobHeld,
    JobSpec,
    Tick,
    Unanswered,
    WorkerReported,
)
from broker.core.policy import LanePolicy, LeasePolicy, OrderPolicy, Policy, QuotaRow
from broker.core.scheduler import Scheduler
from broker.wire.messages import (
    Answer,
    Attempt,
    Finished,
    FirstToken,
    Heartbeat,
    InFlight,
    Kind,
    Outcome,
    Reason,
    Usage,
)
from tests.unit.core.least_loaded import LeastLoadedRouter

MODEL = "tiny"
LANE = "acme"
EPOCH = 7

Kept = TypeVar("Kept")


def a_policy(*quotas: QuotaRow, lanes: tuple[str, ...] = (LANE, "beta"), **fields: Any) -> Policy:
    """Two lanes and one model; no quota."""
    defaults: dict[str, Any] = {
        "models": (MODEL, "other"),
        "lanes": tuple(LanePolicy(name=name) for name in lanes),
        "quotas": quotas,
        "order": OrderPolicy(lane_slack_tokens=0.0),
        "leases": LeasePolicy(),
    }
    return Policy(**{**defaults, **fields})


def a_spec(name: str = "j1", *, lane: str = LANE, **fields: Any) -> JobSpec:
    """A standard job of 100 prompt tokens and up to 50 of output: cost 200."""
    defaults: dict[str, Any] = {
        "band": 2,
        "model": MODEL,
        "prompt_tokens": 100,
        "output_tokens_max": 50,
        "enqueued_at_s": 1000.0,
    }
    return JobSpec(f"{lane}.{name}", lane, **{**defaults, **fields})


class Cluster:
    """A scheduler under test, its time, and honest workers that do only what the test says."""

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        seed: int = 1,
        started: bool = True,
        epoch: int = EPOCH,
        router: LeastLoadedRouter | None = None,
    ) -> None:
        self.at_s = 1000.0
        self.epoch = epoch
        self.router = router or LeastLoadedRouter()
        self.scheduler = Scheduler(
            policy or a_policy(), epoch=epoch, router=self.router, rng=random.Random(seed)
        )
        self.beats: dict[str, Heartbeat] = {}
        self.decisions: list[Decision] = []
        """All that was decided, in order."""
        if started:
            self.step(DispatchAllowed(self.at_s))

    def step(self, event: Event) -> list[Decision]:
        """Let an event happen."""
        decisions = self.scheduler.step(event)
        self.decisions += decisions
        return decisions

    def tick(self, after_s: float = 0.0) -> list[Decision]:
        """Let time pass."""
        self.at_s += after_s
        return self.step(Tick(self.at_s))

    def wait(self, seconds: float) -> list[Decision]:
        """Let time pass in which all workers report each second, as they do."""
        decisions: list[Decision] = []
        for _ in range(int(seconds)):
            decisions += self.tick(1.0)
            for name in self.beats:
                decisions += self.beat(name)
        return decisions + self.tick(seconds - int(seconds))

    def wait_for(self, name: str, seconds: float) -> list[Decision]:
        """Let time pass in which one worker reports."""
        return self.tick(seconds) + self.beat(name)

    def hold(self, *specs: JobSpec) -> list[Decision]:
        """Pull jobs from their queues."""
        return [one for spec in specs for one in self.step(JobHeld(self.at_s, spec))]

    def hold_many(self, count: int, **fields: Any) -> list[Decision]:
        """Pull `count` jobs named j0, j1, ..., enqueued a millisecond apart."""
        first_at_s = fields.pop("enqueued_at_s", self.at_s)
        prefix = fields.pop("prefix", "j")
        return self.hold(
            *(
                a_spec(
                    f"{prefix}{n}",
                    enqueued_at_s=first_at_s + n / 1000,
                    stream_sequence=n + 1,
                    **fields,
                )
                for n in range(count)
            )
        )

    def join(self, *names: str, **fields: Any) -> list[Decision]:
        """Let workers report for the first time."""
        return [one for name in names for one in self.beat(name, **fields)]

    def beat(self, name: str, *, sequence: int | None = None, **fields: Any) -> list[Decision]:
        """Let a worker report what it last said and was given, but for what the case names."""
        last = self.beats.get(name)
        told: dict[str, Any] = {
            "models": (MODEL,),
            "slots": 4,
            "incarnation": 1,
            "epoch": self.epoch,
            "engine_incarnation": 1,
        }
        if last is not None:
            told = {key: getattr(last, key) for key in (*told, "ready", "draining", "load")}
        worker = self.scheduler._mind.fleet.workers.get(name)
        orders = worker.orders if worker is not None else 0
        told |= {"echo": orders, "inflight": self.listed(name)} | fields
        number = sequence if sequence is not None else (last.sequence + 1 if last else 1)
        beat = Heartbeat(worker=name, sequence=number, at_s=self.at_s, **told)
        if last is None or number > last.sequence or beat.incarnation > last.incarnation:
            self.beats[name] = beat
        return self.step(WorkerReported(self.at_s, beat))

    def listed(self, name: str, **fields: Any) -> tuple[InFlight, ...]:
        """List what a worker was given, as it would itself."""
        return tuple(
            in_flight(lease.job, lease.attempt, **fields)
            for lease in self.scheduler.leases()
            if lease.worker == name
        )

    def answer(self, dispatch: Dispatch, answer: Answer | Unanswered) -> list[Decision]:
        """Answer a dispatch."""
        return self.step(
            DispatchAnswered(self.at_s, dispatch.worker, dispatch.key, dispatch.attempt, answer)
        )

    def first_token(
        self, dispatch: Dispatch, *, cached_tokens: int | None = None
    ) -> list[Decision]:
        """Let a job's first token come."""
        note = FirstToken(
            worker=dispatch.worker,
            incarnation=self.beats[dispatch.worker].incarnation,
            key=dispatch.key,
            attempt=dispatch.attempt,
            ttft_s=0.1,
            cached_tokens=cached_tokens,
        )
        return self.step(FirstTokenSeen(self.at_s, note))

    def end(self, dispatch: Dispatch, **fields: Any) -> list[Decision]:
        """Let an attempt end: completed, unless the case says otherwise."""
        return self.step(self.end_event(dispatch, **fields))

    def end_event(self, dispatch: Dispatch, **fields: Any) -> AttemptEnded:
        """Say how an attempt ended."""
        incarnation = fields.pop("incarnation", self.beats[dispatch.worker].incarnation)
        lease = self.scheduler._mind.ledger.get(dispatch.key)
        if lease is not None and fields.get("kind", Kind.COMPLETED) is not None:
            job = lease.job
            usage = Usage(job.prompt_tokens, lease.hit_tokens, job.output_tokens_max)
            fields = {"usage": usage, **fields}
        ended = finished(dispatch.key, dispatch.attempt, **fields)
        return AttemptEnded(self.at_s, dispatch.worker, incarnation, ended)

    def fail(
        self, dispatch: Dispatch, reason: Reason = Reason.ENGINE_FAILED, **fields: Any
    ) -> list[Decision]:
        """Let an attempt come to nothing."""
        return self.end(dispatch, outcome=Outcome.RETRY, kind=None, reason=reason, **fields)

    def cancel(self, key: str) -> list[Decision]:
        """Let the owner cancel a job."""
        return self.step(CancelRequested(self.at_s, key))

    @property
    def usage(self) -> dict[str, tuple[int, float]]:
        """Jobs and tokens in flight, by row."""
        return {
            row.name: (row.inflight_jobs, row.inflight_tokens)
            for row in self.scheduler.views.rows()
        }


def finished(key: str, attempt: Attempt, **fields: Any) -> Finished:
    """An attempt that completed its job: 100 prompt tokens, 50 of output."""
    defaults: dict[str, Any] = {
        "outcome": Outcome.SETTLED,
        "kind": Kind.COMPLETED,
        "usage": Usage(100, 0, 50),
        "run_s": 1.0,
    }
    told = {**defaults, **fields}
    if told["kind"] is None:
        told["usage"] = fields.get("usage", Usage())
    return Finished(key, attempt, **told)


def in_flight(job: JobSpec, attempt: Attempt, **fields: Any) -> InFlight:
    """A job as its worker lists it, its first token not yet out."""
    defaults: dict[str, Any] = {
        "cached_tokens": 0,
        "output_tokens": 0,
        "prefilled": False,
        "started_at_s": 1000.0,
        "ack_subject": "ack",
        "client": job.client,
    }
    return InFlight(
        key=job.key,
        attempt=attempt,
        stream_sequence=job.stream_sequence,
        band=job.band,
        model=job.model,
        prompt_tokens=job.prompt_tokens,
        output_tokens_max=job.output_tokens_max,
        enqueued_at_s=job.enqueued_at_s,
        **{**defaults, **fields},
    )


def of(kind: type[Kept], decisions: list[Decision]) -> list[Kept]:
    """Pick the decisions of one kind."""
    return [one for one in decisions if isinstance(one, kind)]


def only(kind: type[Kept], decisions: list[Decision]) -> Kept:
    """Pick the one decision of a kind."""
    (one,) = of(kind, decisions)
    return one


def keys(kind: type[Any], decisions: list[Decision]) -> list[str]:
    """Name the jobs that decisions of one kind are about."""
    about: list[Any] = of(kind, decisions)
    return [one.key for one in about]
