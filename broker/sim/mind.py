"""The real mind in the simulation: `broker.core` behind a network of agents, in virtual time.

Only clock and wire differ from the service; what messages take on their way is `Network`. A record
stands once the world says that a request ended: an agent that is given such a job does not run it.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from broker.core.decisions import (
    Abort,
    Cancel,
    DeadLetter,
    Decision,
    Dispatch,
    DrainOrder,
    Expire,
    FailStream,
    Probe,
    Reject,
    Release,
    Requeue,
    Resync,
)
from broker.core.events import (
    AttemptEnded,
    CancelRequested,
    DispatchAllowed,
    DispatchAnswered,
    DrainRequested,
    Event,
    FirstTokenSeen,
    JobHeld,
    JobSpec,
    LinkChanged,
    ProbeAnswered,
    Tick,
    Unanswered,
    WorkerReported,
)
from broker.core.policy import Policy
from broker.core.routing import make_router
from broker.core.scheduler import Scheduler
from broker.sim.agent import Agent
from broker.sim.host import Host
from broker.sim.network import NETWORK, Network, Wire
from broker.sim.request import Request
from broker.sim.terms import MODEL, Terms, key_of, spec_of
from broker.sim.world import Change, World
from broker.wire.messages import (
    Answer,
    Failure,
    Finished,
    Heartbeat,
    Kind,
    Reason,
    Usage,
)

EPOCH = 1

TICK_S = 0.05
"""How often the mind is told that time passed, as in the service."""

Timer = Callable[[], float]
_Order = Dispatch | Abort | Probe | DrainOrder


TAKE_OVER_S = 1.0
"""How long a new leader collects the workers' lists before it dispatches."""


class Observer(Protocol):
    """Sees each step of the mind before its decisions are carried out."""

    def stepped(self, event: Event | None, decisions: Sequence[Decision], at_s: float) -> None:
        """See an event and what was decided; None = the settling of an instant's events."""
        ...


class MindRouter:
    """Carries out what the mind decides."""

    def __init__(
        self,
        world: World,
        policy: Policy,
        *,
        seed: int,
        network: Network = NETWORK,
        timer: Timer | None = None,
        terms: Mapping[int, Terms] | None = None,
        observer: Observer | None = None,
        adapters: Callable[[Host], Sequence[str]] = lambda _: (),
    ) -> None:
        """With `timer`, the real seconds of each step are kept in `step_s`; `terms` by request."""
        self._adapters = adapters
        self._world = world
        self._network = network
        self._policy = policy
        self._seed = seed
        self._rng = random.Random(seed)
        self.wire = Wire(network, self._rng)
        self.epoch = EPOCH
        self.leads = True  # False between the end of one leader and the start of the next.
        self.scheduler = self._make_scheduler()
        self.agents: dict[str, Agent] = {}
        self._requests: dict[str, Request] = {}
        self._jobs: dict[str, JobSpec] = {}
        self._failures: dict[str, tuple[Failure, ...]] = {}  # As persisted for a next leader.
        self._terms = terms or {}
        self._observer = observer
        self._timer = timer
        self.step_s: list[float] = []
        self.begun = False
        self._settling = False

    # ---- what the world tells ------------------------------------------------------------------

    def joined(self, host: Host, *, at_s: float) -> None:
        """Start an agent beside a new engine."""
        self._start_agent(host, at_s=at_s)
        if not self.begun:
            self.begun = True
            self._world.call_at(at_s, self._begin)

    def arrived(self, request: Request, *, at_s: float) -> None:
        """Hold a job, as pulled from its queue; without a leader it stays there."""
        job = spec_of(request, self._terms.get(request.index), at_s=at_s)
        self._requests[job.key] = request
        self._jobs[job.key] = job
        if self.leads:
            self._step(JobHeld(at_s, job))

    def first_token(self, request: Request, host: Host, *, cached_tokens: int, at_s: float) -> None:
        """Let the agent tell it at once."""
        agent = self.agents[host.name]
        key = key_of(request)
        if key not in agent.runs:
            return  # Stopped at this very instant.
        note = agent.first_token(key, cached_tokens=cached_tokens, at_s=at_s)
        self._note(agent, lambda now_s: FirstTokenSeen(now_s, note), at_s)

    def ended(self, request: Request, host: Host, *, usage: Usage, at_s: float) -> None:
        """Let the agent tell it at once."""
        agent = self.agents[host.name]
        key = key_of(request)
        if key in agent.runs:
            finished = agent.end(key, kind=Kind.COMPLETED, usage=usage, at_s=at_s)
            self._tell_end(agent, finished, at_s)

    def changed(self, host: Host, change: Change, *, at_s: float) -> None:
        """End or restart an agent, or ask for a drain."""
        match change:
            case Change.DRAIN:
                self.drain(host, draining=True, at_s=at_s)
            case Change.LOSE:
                del self.agents[host.name]
            case Change.RESTART:
                self._start_agent(host, at_s=at_s)
            case Change.JOIN:
                pass

    # ---- what people and faults do -------------------------------------------------------------

    def drain(self, host: Host, *, draining: bool, at_s: float) -> None:
        """Carry an operator's word."""
        if self.leads:
            self._step(DrainRequested(at_s, host.name, draining))

    def cancel(self, request: Request, *, at_s: float) -> None:
        """Carry its owner's wish to stop a request."""
        if self.leads:
            self._step(CancelRequested(at_s, key_of(request)))

    def restart_engine(self, host: Host, *, at_s: float) -> None:
        """Let an engine die under its agent and start anew, empty."""
        agent = self.agents.get(host.name)
        if agent is None:
            return
        host.restart()
        for finished in agent.engine_died(at_s=at_s):
            self._tell_end(agent, finished, at_s)

    def link_changed(self, *, up: bool, at_s: float) -> None:
        """Lose the broker's own link, or have it back."""
        self.wire.is_up = up
        if self.leads:
            self._step(LinkChanged(at_s, up))

    def stand_down(self) -> None:
        """Let the leader die: what was on its way to it is lost."""
        self.leads = False

    def take_over(self, *, at_s: float) -> None:
        """Let a new leader begin: it knows nothing but what workers list and queues hold."""
        self.epoch += 1
        self.leads = True
        self.scheduler = self._make_scheduler()
        if not self.wire.is_up:
            self._step(LinkChanged(at_s, up=False))
        for agent in self.agents.values():
            self._world.call_at(
                at_s + self._network.hop_s, partial(self._announced, agent, self.epoch)
            )
        self._world.call_at(at_s + TAKE_OVER_S, partial(self._reign, self.epoch))

    def _announced(self, agent: Agent, epoch: int, at_s: float) -> None:
        name = agent.host.name
        if self.agents.get(name) is agent and not self.wire.is_cut(name, at_s):
            agent.learn(epoch)
            self._report(agent, at_s)

    def _reign(self, epoch: int, at_s: float) -> None:
        """Hold again what has no record, and begin to dispatch."""
        if epoch != self.epoch or not self.leads:
            return
        for request in list(self._world.open.values()):
            key = key_of(request)
            job = replace(self._jobs[key], failures=self._failures.get(key, ()))
            self._step(JobHeld(at_s, job))
        self._step(DispatchAllowed(at_s))

    def _make_scheduler(self) -> Scheduler:
        return Scheduler(
            self._policy,
            epoch=self.epoch,
            router=make_router(self._policy.routing),
            rng=random.Random(self._seed + self.epoch - EPOCH),
        )

    # ---- agents --------------------------------------------------------------------------------

    def _start_agent(self, host: Host, *, at_s: float) -> None:
        incarnation = round(at_s * 1000) + host.lives
        models = (MODEL, *self._adapters(host))
        agent = self.agents[host.name] = Agent(host, models=models, incarnation=incarnation)
        stagger_s = self._network.heartbeat_s * self._rng.random()
        self._report(agent, at_s)
        self._world.call_at(at_s + stagger_s, partial(self._beat, agent))

    def _beat(self, agent: Agent, at_s: float) -> None:
        name = agent.host.name
        if self.agents.get(name) is not agent:
            return
        if not self.wire.is_cut(name, at_s):
            self._report(agent, at_s)
        self._world.call_at(at_s + self._network.heartbeat_s, partial(self._beat, agent))

    def _report(self, agent: Agent, at_s: float) -> None:
        beat = agent.heartbeat(at_s=at_s)
        takes_s = self.wire.report_s(at_s)
        if takes_s is not None:
            self._world.call_at(at_s + takes_s, partial(self._reported, beat))

    def _reported(self, beat: Heartbeat, at_s: float) -> None:
        if self.leads and self.wire.is_up:
            self._step(WorkerReported(at_s, beat))

    def _tell_end(self, agent: Agent, finished: Finished, at_s: float) -> None:
        name, incarnation = agent.host.name, agent.incarnation
        self._note(agent, lambda now_s: AttemptEnded(now_s, name, incarnation, finished), at_s)

    def _note(self, agent: Agent, event: Callable[[float], Event], at_s: float) -> None:
        """Tell the broker at once; what is lost, the next heartbeats tell."""
        wire = self.wire
        if wire.is_cut(agent.host.name, at_s) or wire.loses(self._network.lost_note_ratio, at_s):
            return
        self._world.call_at(at_s + self._network.hop_s, lambda now_s: self._heard(event(now_s)))

    def _heard(self, event: Event) -> None:
        if self.leads and self.wire.is_up:
            self._step(event)

    # ---- the mind ------------------------------------------------------------------------------

    def _begin(self, at_s: float) -> None:
        for agent in self.agents.values():
            self._step(WorkerReported(at_s, agent.heartbeat(at_s=at_s)))
        self._step(DispatchAllowed(at_s))
        self._world.call_at(at_s + TICK_S, self._tick)

    def _tick(self, at_s: float) -> None:
        if self.leads:
            self._step(Tick(at_s))
        self._world.call_at(at_s + TICK_S, self._tick)

    def _step(self, event: Event) -> None:
        """Take an event; those of one instant are settled together, as one turn of the loop is."""
        self._settle_at(event.at_s)
        self._timed(partial(self.scheduler.step, event, settles=False), event.at_s, event)

    def _settle_at(self, at_s: float) -> None:
        if not self._settling:
            self._settling = True
            self._world.call_at(at_s, self._settle)

    def _settle(self, at_s: float) -> None:
        self._settling = False
        if self.leads:
            self._timed(self.scheduler.settle, at_s, None)
            if self.scheduler.is_unsettled:
                self._settle_at(at_s)

    def _timed(self, step: Callable[[], list[Decision]], at_s: float, event: Event | None) -> None:
        timer = self._timer
        begin_s = timer() if timer is not None else 0.0
        decisions = step()
        if timer is not None:
            self.step_s.append(timer() - begin_s)
        if self._observer is not None:
            self._observer.stepped(event, decisions, at_s)
        for decision in decisions:
            self._carry(decision, at_s)

    def _carry(self, decision: Decision, at_s: float) -> None:
        match decision:
            case Dispatch() | Abort() | Probe() | DrainOrder():
                self._send(decision, at_s)
            case Release(key=key):
                self._forget(key)
            case Resync(worker=worker):
                agent = self.agents.get(worker)
                if agent is not None:
                    agent.ask_full()
            case Reject(key=key) | Expire(key=key) | Cancel(key=key):
                self._gives_up(key, at_s)
            case DeadLetter(key=key) | FailStream(key=key):
                self._gives_up(key, at_s)
            case Requeue(key=key, failure=failure) if failure is not None:
                self._failures[key] = (*self._failures.get(key, ()), failure)
            case _:
                pass

    def _gives_up(self, key: str, at_s: float) -> None:
        request = self._request(key)
        self._forget(key)
        if request.index in self._world.open:
            self._world.give_up(request, at_s=at_s)

    def _forget(self, key: str) -> None:
        self._requests.pop(key, None)
        self._jobs.pop(key, None)
        if self._failures:
            self._failures.pop(key, None)

    def _request(self, key: str) -> Request:
        """Find a request, also one that was forgotten."""
        request = self._requests.get(key)
        return (
            request if request is not None else self._world.requests[int(key.rpartition(".j")[2])]
        )

    # ---- orders --------------------------------------------------------------------------------

    def _send(self, order: _Order, at_s: float) -> None:
        """Send an order; where no answer comes in time, the mind is told so."""
        takes_s = self.wire.order_s(order.worker, at_s)
        waits_until_s = at_s + self._policy.leases.dispatch_answer_s
        if takes_s is None or at_s + takes_s > waits_until_s:
            self._unanswered(order, self.epoch, Unanswered.TIMEOUT, waits_until_s)
        if takes_s is not None:
            deliver = partial(self._deliver, order, self.epoch, waits_until_s)
            self._world.call_at(at_s + takes_s, deliver)

    def _deliver(self, order: _Order, epoch: int, waits_until_s: float, at_s: float) -> None:
        agent = self.agents.get(order.worker)
        if agent is None:
            if at_s <= waits_until_s:
                self._unanswered(order, epoch, Unanswered.NO_RESPONDERS, at_s + self._network.hop_s)
            return
        answer = self._obey(agent, order, epoch, at_s)
        if at_s > waits_until_s:
            return
        wire = self.wire
        if wire.is_cut(order.worker, at_s) or wire.loses(self._network.lost_answer_ratio, at_s):
            self._unanswered(order, epoch, Unanswered.TIMEOUT, waits_until_s)
            return
        event: Callable[[float], Event]
        match order:
            case Dispatch():
                event = partial(_answered, order, answer)
            case Probe():
                incarnation = agent.incarnation
                event = partial(_probed, order, incarnation, None)
            case _:
                return
        self._world.call_at(at_s + self._network.hop_s, partial(self._replied, event, epoch))

    def _unanswered(self, order: _Order, epoch: int, how: Unanswered, told_at_s: float) -> None:
        match order:
            case Dispatch():
                event = partial(_answered, order, how)
            case Probe():
                event = partial(_probed, order, None, how)
            case _:
                return
        self._world.call_at(told_at_s, partial(self._replied, event, epoch))

    def _replied(self, event: Callable[[float], Event], epoch: int, at_s: float) -> None:
        """Let an answer reach the leader that asked; no other one waits for it."""
        if self.leads and epoch == self.epoch:
            self._step(event(at_s))

    def _obey(self, agent: Agent, order: _Order, epoch: int, at_s: float) -> Answer:
        match order:
            case Dispatch():
                return self._take(agent, order, at_s)
            case _ if epoch < agent.epoch:
                return Answer.STALE_EPOCH
            case Abort():
                agent.processed(epoch, order.number)
                self._abort(agent, order, at_s)
            case Probe():
                agent.processed(epoch, order.number)
            case DrainOrder():
                if agent.processed(epoch, order.number):
                    agent.draining = order.draining
        return Answer.ACCEPTED

    def _take(self, agent: Agent, order: Dispatch, at_s: float) -> Answer:
        request = self._request(order.key)
        job = self._jobs.get(order.key) or spec_of(
            request, self._terms.get(request.index), at_s=at_s
        )
        answer = agent.take(order, request, job, at_s=at_s)
        if answer is not Answer.ACCEPTED:
            return answer
        fails_after_s = agent.host.fails_after_s
        if request.index in self._world.open and fails_after_s is not None:
            self._world.call_at(at_s + fails_after_s, partial(self._fail, agent, order))
        elif request.index in self._world.open:
            self._world.submit(request, agent.host, at_s=at_s)
        else:
            finished = agent.end(
                order.key, kind=Kind.COMPLETED, usage=Usage(), at_s=at_s, ran=False
            )
            self._tell_end(agent, finished, at_s)
        return answer

    def _fail(self, agent: Agent, order: Dispatch, at_s: float) -> None:
        """Let a sick engine answer with an error, if the attempt still runs there."""
        run = agent.runs.get(order.key)
        if self.agents.get(agent.host.name) is agent and run and run.attempt == order.attempt:
            self._tell_end(agent, agent.fail(order.key, Reason.ENGINE_FAILED), at_s)

    def _abort(self, agent: Agent, order: Abort, at_s: float) -> None:
        run = agent.runs.get(order.key)
        if run is None or run.attempt != order.attempt:
            return
        self._world.cancel(run.request, agent.host, at_s=at_s)
        if order.reason is Reason.CANCELLED:
            finished = agent.end(order.key, kind=Kind.CANCELLED, usage=Usage(), at_s=at_s)
            if run.request.index in self._world.open:
                self._world.give_up(run.request, at_s=at_s)
            self._tell_end(agent, finished, at_s)
        elif order.reason is Reason.STALLED:
            self._tell_end(agent, agent.fail(order.key, Reason.STALLED), at_s)
        else:
            del agent.runs[order.key]


def _answered(order: Dispatch, answer: Answer | Unanswered, at_s: float) -> DispatchAnswered:
    return DispatchAnswered(at_s, order.worker, order.key, order.attempt, answer)


def _probed(
    order: Probe, incarnation: int | None, missed: Unanswered | None, at_s: float
) -> ProbeAnswered:
    return ProbeAnswered(at_s, order.worker, incarnation, missed)
