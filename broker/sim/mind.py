"""The real mind in the simulation: `broker.core` behind a network of agents, in virtual time.

Events and decisions are the service's own; only the clock and the wire differ. What a message takes
on its way is `Network`: hops, report lag, lost and reordered heartbeats.
"""

import random
from collections.abc import Callable
from functools import partial

from msgspec import Struct

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
    Resync,
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
from broker.core.policy import Policy
from broker.core.routing import make_router
from broker.core.scheduler import Scheduler
from broker.sim.agent import Agent
from broker.sim.host import Host
from broker.sim.request import Request
from broker.sim.world import Change, World
from broker.wire.ids import job_key
from broker.wire.messages import Answer, Attempt, Heartbeat, Kind, Usage

MODEL = "model"
EPOCH = 1

TICK_S = 0.05
"""How often the mind is told that time passed, as in the service."""

Timer = Callable[[], float]


class Network(Struct, frozen=True, kw_only=True):
    """What happens to messages between broker and agents."""

    hop_s: float = 0.0005
    """One way of an order, an answer or a note. A request and its answer over loopback NATS take
    0.3-0.6 ms."""
    heartbeat_s: float = 1.0
    report_lag_s: float = 0.0
    """Extra time that heartbeats, with lists and cache summaries, take."""
    lost_ratio: float = 0.0
    """Share of heartbeats that never arrive."""
    reordered_ratio: float = 0.0
    """Share of heartbeats that arrive after the next one."""


NETWORK = Network()


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
    ) -> None:
        """With `timer`, the real seconds of each step are kept in `step_s`."""
        self._world = world
        self._network = network
        self._rng = random.Random(seed)
        self.scheduler = Scheduler(
            policy, epoch=EPOCH, router=make_router(policy.routing), rng=random.Random(seed)
        )
        self._agents: dict[str, Agent] = {}
        self._requests: dict[str, Request] = {}
        self._jobs: dict[str, JobSpec] = {}
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
        """Hold a job, as pulled from its queue."""
        job = self._spec(request, at_s)
        self._requests[job.key] = request
        self._jobs[job.key] = job
        self._step(JobHeld(at_s, job))

    def first_token(self, request: Request, host: Host, *, cached_tokens: int, at_s: float) -> None:
        """Let the agent tell it at once."""
        agent = self._agents[host.name]
        key = _key(request)
        note = agent.first_token(key, cached_tokens=cached_tokens, at_s=at_s)
        self._send(lambda now_s: self._step(FirstTokenSeen(now_s, note)), at_s)

    def ended(self, request: Request, host: Host, *, usage: Usage, at_s: float) -> None:
        """Let the agent tell it at once."""
        agent = self._agents[host.name]
        key = _key(request)
        finished = agent.end(key, kind=Kind.COMPLETED, usage=usage, at_s=at_s)
        name, incarnation = host.name, agent.incarnation
        self._send(lambda now_s: self._step(AttemptEnded(now_s, name, incarnation, finished)), at_s)
        del self._requests[key], self._jobs[key]

    def changed(self, host: Host, change: Change, *, at_s: float) -> None:
        """End or restart an agent, or ask for a drain."""
        match change:
            case Change.DRAIN:
                self._step(DrainRequested(at_s, host.name))
            case Change.LOSE:
                del self._agents[host.name]
            case Change.RESTART:
                self._start_agent(host, at_s=at_s)
            case Change.JOIN:
                pass

    # ---- agents --------------------------------------------------------------------------------

    def _start_agent(self, host: Host, *, at_s: float) -> None:
        incarnation = round(at_s * 1000) + host.lives
        agent = self._agents[host.name] = Agent(host, model=MODEL, incarnation=incarnation)
        stagger_s = self._network.heartbeat_s * self._rng.random()
        self._report(agent, at_s)
        self._world.call_at(at_s + stagger_s, partial(self._beat, agent))

    def _beat(self, agent: Agent, at_s: float) -> None:
        if self._agents.get(agent.host.name) is not agent:
            return
        self._report(agent, at_s)
        self._world.call_at(at_s + self._network.heartbeat_s, partial(self._beat, agent))

    def _report(self, agent: Agent, at_s: float) -> None:
        network = self._network
        beat = agent.heartbeat(at_s=at_s)
        if network.lost_ratio and self._rng.random() < network.lost_ratio:
            return
        lag_s = network.report_lag_s
        if network.reordered_ratio and self._rng.random() < network.reordered_ratio:
            lag_s += 1.5 * network.heartbeat_s
        self._world.call_at(at_s + network.hop_s + lag_s, partial(self._reported, beat))

    def _reported(self, beat: Heartbeat, at_s: float) -> None:
        self._step(WorkerReported(at_s, beat))

    # ---- the mind ------------------------------------------------------------------------------

    def _begin(self, at_s: float) -> None:
        for agent in self._agents.values():
            self._step(WorkerReported(at_s, agent.heartbeat(at_s=at_s)))
        self._step(DispatchAllowed(at_s))
        self._world.call_at(at_s + TICK_S, self._tick)

    def _tick(self, at_s: float) -> None:
        self._step(Tick(at_s))
        self._world.call_at(at_s + TICK_S, self._tick)

    def _step(self, event: Event) -> None:
        """Take an event; those of one instant are settled together, as one turn of the loop is."""
        if not self._settling:
            self._settling = True
            self._world.call_at(event.at_s, self._settle)
        self._timed(partial(self.scheduler.step, event, settles=False), event.at_s)

    def _settle(self, at_s: float) -> None:
        self._settling = False
        self._timed(self.scheduler.settle, at_s)

    def _timed(self, step: Callable[[], list[Decision]], at_s: float) -> None:
        timer = self._timer
        begin_s = timer() if timer is not None else 0.0
        decisions = step()
        if timer is not None:
            self.step_s.append(timer() - begin_s)
        for decision in decisions:
            self._carry(decision, at_s)

    def _carry(self, decision: Decision, at_s: float) -> None:
        match decision:
            case Dispatch():
                self._send(partial(self._deliver, decision), at_s)
            case Abort() | Probe() | DrainOrder():
                self._send(partial(self._order, decision), at_s)
            case Resync(worker=worker):
                agent = self._agents.get(worker)
                if agent is not None:
                    agent.ask_full()
            case Reject(key=key) | Expire(key=key) | Cancel(key=key):
                self._gives_up(key, at_s)
            case DeadLetter(key=key) | FailStream(key=key):
                self._gives_up(key, at_s)
            case _:
                pass

    def _gives_up(self, key: str, at_s: float) -> None:
        del self._jobs[key]
        self._world.give_up(self._requests.pop(key), at_s=at_s)

    def _send(self, call: Callable[[float], None], at_s: float) -> None:
        self._world.call_at(at_s + self._network.hop_s, call)

    def _deliver(self, order: Dispatch, at_s: float) -> None:
        agent = self._agents.get(order.worker)
        if agent is None:
            self._answer(order, Unanswered.NO_RESPONDERS, at_s)
            return
        request = self._requests.get(order.key)
        if request is None:
            return
        answer = agent.take(order, request, self._jobs[order.key], at_s=at_s)
        if answer is Answer.ACCEPTED:
            self._world.submit(request, agent.host, at_s=at_s)
        self._answer(order, answer, at_s)

    def _answer(self, order: Dispatch, answer: Answer | Unanswered, at_s: float) -> None:
        self._send(
            lambda now_s: self._step(
                DispatchAnswered(now_s, order.worker, order.key, order.attempt, answer)
            ),
            at_s,
        )

    def _order(self, order: Abort | Probe | DrainOrder, at_s: float) -> None:
        agent = self._agents.get(order.worker)
        if agent is None:
            if isinstance(order, Probe):
                missed = Unanswered.NO_RESPONDERS
                self._step(ProbeAnswered(at_s, order.worker, None, missed))
            return
        agent.processed(EPOCH, order.number)
        match order:
            case Abort(key=key, attempt=attempt):
                self._abort(agent, key, attempt, at_s)
            case Probe():
                self._send(
                    lambda now_s: self._step(
                        ProbeAnswered(now_s, agent.host.name, agent.incarnation)
                    ),
                    at_s,
                )
            case DrainOrder(draining=draining):
                agent.draining = draining

    def _abort(self, agent: Agent, key: str, attempt: Attempt, at_s: float) -> None:
        run = agent.runs.get(key)
        if run is not None and run.attempt == attempt:
            del agent.runs[key]
            self._world.cancel(run.request, agent.host, at_s=at_s)

    def _spec(self, request: Request, at_s: float) -> JobSpec:
        return JobSpec(
            _key(request),
            request.lane,
            request.band,
            MODEL,
            session=request.session,
            prompt_tokens=request.prompt_tokens,
            output_tokens_max=request.output_tokens_max,
            blocks=request.blocks,
            block_tokens=float(request.block_tokens),
            enqueued_at_s=at_s,
            stream_sequence=request.index + 1,
        )


def _key(request: Request) -> str:
    return job_key(request.lane, f"j{request.index}")
