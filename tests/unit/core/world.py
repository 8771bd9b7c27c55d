"""A world around the scheduler: honest agents, and a network that loses and reorders.

Agents do what the protocol says: they keep the highest epoch, refuse what is stale or too much,
look for a terminal record before they run a job, write it once, and repeat what ended until a
report was sent.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from broker.core.decisions import (
    Abort,
    Cancel,
    DeadLetter,
    Decision,
    Difference,
    DifferenceKind,
    Dispatch,
    DrainOrder,
    Expire,
    FailStream,
    Probe,
    Queued,
    Reject,
    Release,
    Requeue,
)
from broker.core.events import (
    AttemptEnded,
    DispatchAllowed,
    DispatchAnswered,
    DrainRequested,
    Event,
    FirstTokenSeen,
    JobHeld,
    JobSpec,
    ProbeAnswered,
    Tick,
    Unanswered,
    WorkerReported,
)
from broker.core.placement import Router
from broker.core.policy import Policy, RoutingPolicy
from broker.core.scheduler import Scheduler
from broker.wire.messages import (
    Answer,
    Attempt,
    Failure,
    Finished,
    FirstToken,
    Heartbeat,
    InFlight,
    Kind,
    Load,
    Outcome,
    Reason,
    Usage,
)
from tests.unit.core.cluster import in_flight, keys
from tests.unit.core.invariants import (
    accounts_of,
    check_estimates,
    check_rows,
    check_sums,
    check_work_conservation,
)
from tests.unit.core.least_loaded import LeastLoadedRouter

MODELS = ("tiny", "other")


@dataclass(slots=True)
class Run:
    """An attempt on an agent."""

    job: JobSpec
    attempt: Attempt
    output_tokens: int = 0
    prefilled: bool = False


@dataclass(slots=True)
class Agent:
    """A worker process and its engine."""

    id: str
    incarnation: int
    slots: int = 3
    models: tuple[str, ...] = MODELS
    alive: bool = True
    draining: bool = False
    epoch: int = 0
    echo: int = 0
    sequence: int = 0
    runs: dict[str, Run] = field(default_factory=dict[str, Run])
    finished: list[Finished] = field(default_factory=list[Finished])


class World:
    """Everything but the scheduler."""

    def __init__(
        self,
        policy: Policy,
        *,
        seed: int,
        make: Callable[[RoutingPolicy], Router] = lambda _: LeastLoadedRouter(),
    ) -> None:
        self.make = make
        self.rng = random.Random(seed)
        self.at_s = 1000.0
        self.policy = policy
        self.epoch = 1
        self.jobs: dict[str, JobSpec] = {}
        self.ends: dict[str, str] = {}
        """How each job ended: exactly once."""
        self.records: dict[str, Kind] = {}
        """Terminal records that agents wrote."""
        self.attempts_failed: dict[str, tuple[Failure, ...]] = {}
        self.agents: dict[str, Agent] = {}
        self.orders: dict[str, deque[Decision]] = {}
        """On their way to each agent, in order."""
        self.events: deque[Event] = deque()
        """On their way to the broker."""
        self.ghosts: set[str] = set()
        """Ended, but still run by a worker that this broker had not heard of: it can't know yet."""
        self.incarnations = 0
        self.started = False
        self.ran: dict[str, int] = {}
        self.queued: dict[str, int] = {}
        self._start()

    def _start(self) -> None:
        self.router = self.make(self.policy.routing)
        self.scheduler = Scheduler(
            self.policy, epoch=self.epoch, router=self.router, rng=random.Random(self.epoch)
        )
        self.started = False

    # ---- the broker ----

    def step(self, event: Event) -> list[Decision]:
        """Let the broker see an event, and check what it decided."""
        known = {key for key in self.jobs if self.scheduler.is_known(key)}
        decisions = self.scheduler.step(event)
        for decision in decisions:
            self._carry(decision, known)
        self.check(decisions)
        return decisions

    def _carry(self, decision: Decision, known: set[str]) -> None:
        match decision:
            case Dispatch(key=key, worker=worker):
                assert key not in self.ends or key in self.ghosts, f"{key} had ended"
                self._may_take(worker)
                self.orders[worker].append(decision)
            case Abort(worker=worker) | DrainOrder(worker=worker) | Probe(worker=worker):
                self.orders[worker].append(decision)
            case Release(key=key):
                self._ends(key, "released")
            case Reject(key=key):
                assert key not in known, "only a newcomer is refused"
                self._ends(key, "rejected")
            case Expire(key=key) | Cancel(key=key) | DeadLetter(key=key) | FailStream(key=key):
                self.records.setdefault(key, Kind.FAILED)
                self._ends(key, type(decision).__name__)
            case Requeue(key=key, failure=failure):
                if failure is not None:
                    before = self.attempts_failed.get(key, ())
                    self.attempts_failed[key] = (*before, failure)
            case Difference(kind=DifferenceKind.RUNS_UNLEASED, key=key) if key in self.ends:
                self.ghosts.add(key)
            case Queued(key=key, position=position, wait_s=wait_s):
                assert 0 <= position < len(self.jobs)
                assert 0 <= wait_s <= 86_400.0
                self.queued[key] = self.queued.get(key, 0) + 1
            case _:
                pass

    def _may_take(self, worker_id: str) -> None:
        assert self.started, "dispatched before start-up was over"
        worker = self.scheduler._mind.fleet.workers[worker_id]
        assert self.scheduler._mind.fleet.serves_now(worker)
        assert len(worker.leases) <= worker.slots or any(
            lease.number == 0 for lease in worker.leases.values()
        )

    def _ends(self, key: str, how: str) -> None:
        if key in self.ghosts:
            self.ghosts.remove(key)
            return
        assert key not in self.ends, f"{key} ended twice: {self.ends[key]}, {how}"
        self.ends[key] = how

    def check(self, decisions: list[Decision]) -> None:
        """Check what must always hold."""
        check_sums(self.scheduler)
        self._check_conservation()
        check_rows(self.scheduler, [self.jobs[key] for key in keys(Dispatch, decisions)])
        if self.started and self.scheduler._mind.link_up:
            check_work_conservation(self.scheduler, self.router)
            check_estimates(self.scheduler, self.router)

    def _check_conservation(self) -> None:
        mind = self.scheduler._mind
        assert not set(mind.queues.waiting) & {lease.job.key for lease in mind.ledger}
        for key in self.jobs:
            known = self.scheduler.is_known(key)
            ended = key in self.ends and key not in self.ghosts
            assert known != ended, f"{key}: known {known}, ended {self.ends.get(key)}"

    # ---- jobs ----

    def submit(self, **fields: Any) -> JobSpec:
        """Let a job come."""
        number = len(self.jobs) + 1
        lane = fields.pop("lane", "acme")
        job = JobSpec(
            f"{lane}.j{number}",
            lane,
            enqueued_at_s=self.at_s,
            stream_sequence=number,
            **fields,
        )
        self.jobs[job.key] = job
        before = accounts_of(self.scheduler)
        decisions = self.step(JobHeld(self.at_s, job))
        if len(decisions) == 1 and isinstance(decisions[0], Reject):
            assert accounts_of(self.scheduler) == before, "a rejection changes nothing"
        return job

    # ---- agents ----

    def start_agent(self, name: str, **fields: Any) -> Agent:
        """Start a worker, or restart it: a new life with nothing in it."""
        self.incarnations += 1
        agent = self.agents[name] = Agent(name, self.incarnations, **fields)
        self.orders.setdefault(name, deque())
        return agent

    def report(self, agent: Agent) -> Heartbeat:
        """Make a heartbeat."""
        agent.sequence += 1
        beat = Heartbeat(
            worker=agent.id,
            incarnation=agent.incarnation,
            sequence=agent.sequence,
            epoch=agent.epoch,
            echo=agent.echo,
            at_s=self.at_s,
            models=agent.models,
            slots=agent.slots,
            draining=agent.draining,
            inflight=tuple(self._list(run) for run in agent.runs.values()),
            finished=tuple(agent.finished),
            load=Load(kv_tokens_max=4000),
            engine_incarnation=agent.incarnation,
        )
        agent.finished = []
        return beat

    def _list(self, run: Run) -> InFlight:
        return in_flight(
            run.job,
            run.attempt,
            output_tokens=run.output_tokens,
            prefilled=run.prefilled,
            started_at_s=self.at_s,
        )

    def deliver_order(self, agent: Agent, *, answer_lost: bool = False) -> None:
        """Let the next order arrive at a living agent."""
        if not self.orders[agent.id]:
            return
        order = self.orders[agent.id].popleft()
        if not agent.alive:
            self._nobody_there(order)
            return
        if self.epoch > agent.epoch:
            agent.epoch, agent.echo = self.epoch, 0
        match order:
            case Dispatch():
                answer = self._take(agent, order)
                agent.echo = order.number
                told = Unanswered.TIMEOUT if answer_lost else answer
                self.events.append(
                    DispatchAnswered(self.at_s, agent.id, order.key, order.attempt, told)
                )
            case Abort(key=key, attempt=attempt, number=number, reason=reason):
                agent.echo = number
                run = agent.runs.get(key)
                if run is not None and run.attempt == attempt:
                    self._abort(agent, run, reason)
            case DrainOrder(number=number, draining=draining):
                agent.echo = number
                agent.draining = draining
            case Probe(number=number):
                agent.echo = number
                missed = Unanswered.TIMEOUT if answer_lost else None
                told = None if answer_lost else agent.incarnation
                self.events.append(ProbeAnswered(self.at_s, agent.id, told, missed))
            case _:
                raise AssertionError(order)

    def lose_order(self, agent: Agent) -> None:
        """Lose an order on its way."""
        if self.orders[agent.id]:
            self._missed(self.orders[agent.id].popleft(), Unanswered.TIMEOUT)

    def _nobody_there(self, order: Decision) -> None:
        self._missed(order, Unanswered.NO_RESPONDERS)

    def _missed(self, order: Decision, how: Unanswered) -> None:
        match order:
            case Dispatch():
                self.events.append(
                    DispatchAnswered(self.at_s, order.worker, order.key, order.attempt, how)
                )
            case Probe():
                self.events.append(ProbeAnswered(self.at_s, order.worker, None, how))
            case _:
                pass

    def _take(self, agent: Agent, order: Dispatch) -> Answer:
        if order.attempt.epoch < agent.epoch:
            return Answer.STALE_EPOCH
        if order.key in agent.runs:
            return Answer.DUPLICATE
        if agent.draining:
            return Answer.DRAINING
        if len(agent.runs) >= agent.slots:
            return Answer.BUSY
        if order.key in self.records:
            self._finish(agent, order.key, order.attempt, ran=False)
            return Answer.ACCEPTED
        agent.runs[order.key] = Run(self.jobs[order.key], order.attempt)
        self.ran[order.key] = self.ran.get(order.key, 0) + 1
        return Answer.ACCEPTED

    def _abort(self, agent: Agent, run: Run, reason: Reason) -> None:
        del agent.runs[run.job.key]
        if reason is Reason.CANCELLED:
            self.records.setdefault(run.job.key, Kind.CANCELLED)
            self._finish(agent, run.job.key, run.attempt)
        elif reason is Reason.STALLED:
            self._retry(agent, run, Reason.STALLED)

    def progress(self, agent: Agent) -> None:
        """Let each of an agent's runs go on a little."""
        for run in list(agent.runs.values()):
            if not run.prefilled:
                run.prefilled = True
                note = FirstToken(
                    worker=agent.id,
                    incarnation=agent.incarnation,
                    key=run.job.key,
                    attempt=run.attempt,
                    ttft_s=0.1,
                )
                self.events.append(FirstTokenSeen(self.at_s, note))
            else:
                run.output_tokens += 10

    def finish(self, agent: Agent, *, note_lost: bool = False) -> None:
        """Let an agent's first run complete."""
        if agent.runs:
            run = agent.runs.pop(next(iter(agent.runs)))
            self.records.setdefault(run.job.key, Kind.COMPLETED)
            self._finish(agent, run.job.key, run.attempt, note_lost=note_lost)

    def fail(self, agent: Agent, reason: Reason, *, charged: bool = True) -> None:
        """Let an agent's first run come to nothing."""
        if agent.runs:
            run = agent.runs.pop(next(iter(agent.runs)))
            self._retry(agent, run, reason, charged=charged)

    def _retry(self, agent: Agent, run: Run, reason: Reason, *, charged: bool = True) -> None:
        ended = Finished(run.job.key, run.attempt, Outcome.RETRY, reason=reason, charged=charged)
        agent.finished.append(ended)
        self.events.append(AttemptEnded(self.at_s, agent.id, agent.incarnation, ended))

    def _finish(
        self, agent: Agent, key: str, attempt: Attempt, *, ran: bool = True, note_lost: bool = False
    ) -> None:
        usage = Usage(self.jobs[key].prompt_tokens, 0, 20)
        ended = Finished(
            key, attempt, Outcome.SETTLED, kind=self.records[key], usage=usage, run_s=1.0, ran=ran
        )
        agent.finished.append(ended)
        if not note_lost:
            self.events.append(AttemptEnded(self.at_s, agent.id, agent.incarnation, ended))

    # ---- time, and the broker's own life ----

    def pass_time(self, seconds: float) -> None:
        """Let time pass."""
        self.at_s += seconds
        self.step(Tick(self.at_s))

    def hear(self, *, newest: bool = False) -> None:
        """Let one message arrive at the broker; the newest first is a reordering."""
        if self.events:
            event = self.events.pop() if newest else self.events.popleft()
            self.step(replace(event, at_s=self.at_s))

    def lose_event(self) -> None:
        """Lose a report or a note; an order's missing answer is known to be missing."""
        event = self.events.popleft()
        if isinstance(event, DispatchAnswered | ProbeAnswered):
            self.events.append(event)

    def allow(self) -> None:
        """End the start-up."""
        if not self.started:
            self.started = True
            self.step(DispatchAllowed(self.at_s))

    def take_over(self) -> None:
        """Let a new leader start from the stream and the workers' lists."""
        self.epoch += 1
        self.events.clear()
        for orders in self.orders.values():
            orders.clear()
        for key in self.records:
            self.ends.setdefault(key, "record found")
        self._start()
        self.ghosts.clear()
        open_jobs = [job for key, job in self.jobs.items() if key not in self.ends]
        for agent in self.agents.values():
            if agent.alive:
                agent.epoch, agent.echo = self.epoch, 0
                self.scheduler.step(WorkerReported(self.at_s, self.report(agent)))
        self.ghosts = {lease.job.key for lease in self.scheduler.leases()} & set(self.ends)
        for job in open_jobs:
            failures = self.attempts_failed.get(job.key, ())
            self.scheduler.step(JobHeld(self.at_s, replace(job, failures=failures)))
        self.check([])
        self.allow()

    def settle(self) -> None:
        """Heal everything, and let all work come to its end."""
        for name, agent in list(self.agents.items()):
            if not agent.alive or agent.draining:
                self.start_agent(name, slots=agent.slots)
        self.allow()
        for name in self.agents:
            self.step(DrainRequested(self.at_s, name, draining=False))
        for _ in range(400):
            if not any(self.scheduler.is_known(key) for key in self.jobs):
                assert set(self.ends) == set(self.jobs), "conservation"
                return
            for agent in self.agents.values():
                while self.orders[agent.id]:
                    self.deliver_order(agent)
                self.progress(agent)
                self.finish(agent)
                self.events.append(WorkerReported(self.at_s, self.report(agent)))
            while self.events:
                self.hear()
            self.pass_time(1.0)
        left = [key for key in self.jobs if self.scheduler.is_known(key)]
        pytest.fail(f"never ended: {[self.scheduler.views.why(key) for key in left]}")
