"""Random lives of a cluster: faults of every kind, and what must hold after each step of them.

Case 1: online or batch, first try or retry, whatever happens to it: each sum equals the live leases
that it is a sum of.
"""

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from broker.core.events import (
    CancelRequested,
    DrainRequested,
    LinkChanged,
    PolicyChanged,
    WorkerReported,
)
from broker.core.policy import (
    LanePolicy,
    OrderPolicy,
    Policy,
    PolicyName,
    QuotaRow,
    RoutingPolicy,
)
from broker.core.routing import make_router
from broker.wire.messages import Reason
from tests.unit.core.world import MODELS, World

AGENTS = ("w1", "w2", "w3")
agents = st.sampled_from(AGENTS)

ROWS = (
    QuotaRow(inflight_jobs_max=6),
    QuotaRow(lane="acme", inflight_jobs_max_per_worker=1.5),
    QuotaRow(model="tiny", band=2, inflight_tokens_max=900),
    QuotaRow(lane="beta", queued_jobs_max=3),
    QuotaRow(lane="beta", tokens_per_min=6000),
    QuotaRow(lane="acme", model="tiny", inflight_jobs_max=2, ceiling_ratio=2.0),
    QuotaRow(lane="beta", model="tiny", inflight_jobs_max=3, lendable_share=0.7, ceiling_ratio=1.5),
    QuotaRow(band=0, inflight_jobs_max=1, ceiling_ratio=3.0, lendable_share=1.0),
    QuotaRow(band=3, inflight_jobs_max_per_worker=1.0, lendable_share=1.0, ceiling_ratio=1.4),
)


ROUTINGS: tuple[PolicyName, ...] = ("round_robin", "first_token", "weighted")


def a_world_policy(rows: tuple[QuotaRow, ...], routing: PolicyName = "first_token") -> Policy:
    """Two lanes of different weight, a small window and slack, and the rows of the case."""
    return Policy(
        models=MODELS,
        lanes=(LanePolicy(name="acme"), LanePolicy(name="beta", weight=2.0)),
        quotas=rows,
        order=OrderPolicy(lane_slack_tokens=100.0),
        routing=RoutingPolicy(policy=routing),
    )


class Lives(RuleBasedStateMachine):
    """A cluster to which things happen."""

    world: World

    @initialize(
        seed=st.integers(0, 1000),
        rows=st.sets(st.sampled_from(range(len(ROWS)))),
        routing=st.sampled_from((None, *ROUTINGS)),
    )
    def begin(self, seed: int, rows: set[int], routing: PolicyName | None) -> None:
        policy = a_world_policy(tuple(ROWS[n] for n in sorted(rows)), routing or "first_token")
        if routing is None:
            self.world = World(policy, seed=seed)
        else:
            self.world = World(policy, seed=seed, make=make_router)
        for name in AGENTS:
            agent = self.world.start_agent(name)
            self.world.step(WorkerReported(self.world.at_s, self.world.report(agent)))
        self.world.allow()

    @rule(
        lane=st.sampled_from(("acme", "beta")),
        band=st.integers(0, 3),
        model=st.sampled_from(MODELS),
        prompt_tokens=st.integers(1, 400),
        output_tokens_max=st.integers(1, 100),
        streamed=st.booleans(),
        deadline=st.sampled_from((None, None, 5.0, 500.0)),
        count=st.integers(1, 5),
    )
    def submit(self, *, deadline: float | None, count: int, **fields: Any) -> None:
        for _ in range(count):
            at_s = None if deadline is None else self.world.at_s + deadline
            self.world.submit(deadline_at_s=at_s, **fields)

    @rule(name=agents, lost=st.booleans(), count=st.integers(1, 6))
    def orders_arrive(self, name: str, *, lost: bool, count: int) -> None:
        for _ in range(count):
            self.world.deliver_order(self.world.agents[name], answer_lost=lost)

    @rule(name=agents)
    def an_order_is_lost(self, name: str) -> None:
        self.world.lose_order(self.world.agents[name])

    @rule(name=agents)
    def work_goes_on(self, name: str) -> None:
        self.world.progress(self.world.agents[name])

    @rule(name=agents, note_lost=st.booleans())
    def a_job_completes(self, name: str, *, note_lost: bool) -> None:
        self.world.finish(self.world.agents[name], note_lost=note_lost)

    @rule(name=agents, charged=st.booleans())
    def a_job_fails(self, name: str, *, charged: bool) -> None:
        self.world.fail(self.world.agents[name], Reason.ENGINE_FAILED, charged=charged)

    @rule(name=agents)
    def an_agent_reports(self, name: str) -> None:
        agent = self.world.agents[name]
        if agent.alive:
            self.world.events.append(WorkerReported(self.world.at_s, self.world.report(agent)))

    @rule(newest=st.booleans(), count=st.integers(1, 10))
    def the_broker_hears(self, *, newest: bool, count: int) -> None:
        for _ in range(count):
            self.world.hear(newest=newest)

    @precondition(lambda self: self.world.events)
    @rule()
    def a_message_to_the_broker_is_lost(self) -> None:
        self.world.lose_event()

    @rule(seconds=st.sampled_from((0.01, 0.5, 1.1, 3.0, 11.0, 61.0, 130.0)))
    def time_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(name=agents)
    def an_agent_dies(self, name: str) -> None:
        self.world.agents[name].alive = False
        self.world.agents[name].runs = {}

    @rule(name=agents)
    def an_agent_restarts(self, name: str) -> None:
        agent = self.world.start_agent(name)
        self.world.events.append(WorkerReported(self.world.at_s, self.world.report(agent)))

    @rule(name=agents, draining=st.booleans())
    def an_operator_drains(self, name: str, *, draining: bool) -> None:
        self.world.step(DrainRequested(self.world.at_s, name, draining))

    @rule(up=st.booleans())
    def the_link_changes(self, *, up: bool) -> None:
        self.world.step(LinkChanged(self.world.at_s, up))

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data())
    def an_owner_cancels(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.world.jobs)))
        self.world.step(CancelRequested(self.world.at_s, key))

    @rule(rows=st.sets(st.sampled_from(range(len(ROWS)))))
    def the_policy_changes(self, rows: set[int]) -> None:
        routing = self.world.policy.routing.policy
        policy = a_world_policy(tuple(ROWS[n] for n in sorted(rows)), routing)
        self.world.policy = policy
        self.world.step(PolicyChanged(self.world.at_s, policy))

    @rule()
    def another_broker_takes_over(self) -> None:
        self.world.take_over()

    def teardown(self) -> None:
        """After all faults, every job comes to its one end."""
        if hasattr(self, "world"):
            self.world.step(LinkChanged(self.world.at_s, up=True))
            self.world.settle()


TestLives = Lives.TestCase
TestLives.settings = settings(
    max_examples=25,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
