"""What /metrics tells is what the ledger and the lines hold, after any life."""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from broker.core.events import WorkerReported
from broker.core.policy import LanePolicy, Policy, QuotaRow
from broker.core.scheduler import Scheduler
from broker.service.config import BrokerConfig, Config
from broker.service.departures import Departures
from broker.service.learned import Learned
from broker.service.metrics import Metrics
from broker.service.views import Snapshots
from broker.wire.messages import Reason
from tests.unit.core.least_loaded import LeastLoadedRouter
from tests.unit.core.world import MODELS, World

if TYPE_CHECKING:
    from broker.service.leadership import Leadership

LANES = ("acme", "beta")
AGENTS = ("w1", "w2", "w3")
ROUNDS = 40
POLICY = Policy(
    models=MODELS,
    lanes=tuple(LanePolicy(name=lane) for lane in LANES),
    quotas=(
        QuotaRow(lane="acme", inflight_jobs_max=2, ceiling_ratio=2.0),
        QuotaRow(lane="beta", inflight_jobs_max=3, lendable_share=1.0),
        QuotaRow(band=2, inflight_tokens_max=2000, queued_jobs_max=1000),
        QuotaRow(band=1, tokens_per_min=100_000),
    ),
)


@dataclass
class Shelf:
    """Bodies of jobs, none of any size."""

    held_bytes: int = 0
    jobs: set[str] = field(default_factory=set[str])

    def __len__(self) -> int:
        return len(self.jobs)


@dataclass
class Lead:
    """What a leading broker tells of itself here: its scheduler, and an epoch."""

    scheduler: Scheduler
    shelf: Shelf = field(default_factory=Shelf)
    epoch: int = 1

    @property
    def term(self) -> "Lead":
        return self

    @property
    def fleet(self) -> "Lead":
        return self

    def notice(self, _: str) -> str:
        return ""


def a_life(seed: int) -> World:
    """Jobs come, run, fail and end, and workers restart; much still runs and waits."""
    rng = random.Random(seed)
    world = World(POLICY, seed=seed)
    for name in AGENTS:
        world.step(WorkerReported(world.at_s, world.report(world.start_agent(name))))
    world.allow()
    for _ in range(ROUNDS):
        for _ in range(rng.randint(0, 3)):
            world.submit(
                lane=rng.choice(LANES),
                band=rng.randrange(4),
                model=rng.choice(MODELS),
                prompt_tokens=rng.randint(1, 300),
                output_tokens_max=rng.randint(1, 60),
            )
        for name in AGENTS:
            agent = world.agents[name]
            world.deliver_order(agent)
            world.progress(agent)
            if rng.random() < 0.3:
                world.finish(agent)
            if rng.random() < 0.1:
                world.fail(agent, Reason.ENGINE_FAILED)
            if rng.random() < 0.03:
                agent = world.start_agent(name)
            world.events.append(WorkerReported(world.at_s, world.report(agent)))
        while world.events:
            world.hear()
        world.pass_time(0.7)
    return world


@pytest.mark.parametrize("seed", range(5))
async def test_metrics_equal_state(seed: int) -> None:
    """Queues, rows, workers and the broker's own sums, against leases and jobs in line."""
    world = a_life(seed)
    scheduler = world.scheduler
    mind = scheduler._mind
    assert isinstance(world.router, LeastLoadedRouter)
    world.router.index_entries_count = 7 + seed
    for number, worker in enumerate(mind.fleet.workers.values()):
        worker.trust = 0.5 + number / 10
    snapshots = Snapshots(
        Config(policy=POLICY, broker=BrokerConfig()),
        Learned(),
        Departures(),
        now=lambda: world.at_s,
    )
    snapshots.leads(cast("Leadership", Lead(scheduler)))
    metrics = Metrics(lanes=LANES, models=MODELS)
    metrics.attach(snapshots)
    told: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families((await metrics.expose()).decode()):
        for one in family.samples:
            labels = tuple(one.labels[label] for label in sorted(one.labels))
            told.setdefault(one.name, {})[labels] = one.value
    leases = scheduler.leases()
    waiting = [world.jobs[key] for key in scheduler._mind.queues.waiting]
    running = Counter((str(one.job.band), one.job.lane, one.job.model) for one in leases)
    queued = Counter((str(job.band), job.lane, job.model) for job in waiting)
    assert running
    assert queued
    assert _above_0(told["inferlane_queue_inflight_jobs"]) == dict(running)
    assert _above_0(told["inferlane_queue_depth_jobs"]) == dict(queued)
    assert told["inferlane_inflight_jobs"] == {(): len(leases)}
    by_lane = Counter(one.job.lane for one in leases)
    rows = told["inferlane_row_inflight_jobs"]
    assert [rows[f"lane={lane}",] for lane in LANES] == [by_lane[lane] for lane in LANES]
    tokens = sum(one.cost_tokens for one in leases if one.job.band == 2)
    assert told["inferlane_row_inflight_tokens"]["band=2",] == tokens
    waits = sum(job.band == 2 for job in waiting)
    assert _above_0(told["inferlane_row_queued_jobs"]) == ({("band=2",): waits} if waits else {})
    assert told["inferlane_row_limit_queued_jobs"] == {("band=2",): 1000}
    (bucket,) = (one.bucket_tokens for one in scheduler.views.rows() if one.name == "band=1")
    assert told["inferlane_row_bucket_tokens"] == {("band=1",): bucket}
    assert told["inferlane_row_limit_tokens_per_minute"] == {("band=1",): 100_000}
    index_entries_max = POLICY.routing.index_entries_max
    assert told["inferlane_prefix_index_entries"] == {(): 7 + seed}
    assert told["inferlane_prefix_index_limit_entries"] == {(): index_entries_max}
    assert told["inferlane_worker_trust"] == {
        (name,): worker.trust for name, worker in mind.fleet.workers.items()
    }
    lent, borrowed = (told[f"inferlane_row_{kind}_jobs"].values() for kind in ("lent", "borrowed"))
    assert sum(lent) == sum(borrowed)
    assert _above_0(told["inferlane_worker_inflight_jobs"]) == dict(
        Counter((one.worker,) for one in leases)
    )


def _above_0(samples: dict[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
    return {labels: value for labels, value in samples.items() if value}
