"""What /metrics tells is what the ledger and the lines hold, after any life."""

import math
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from broker.core.decisions import Decision, Dispatch
from broker.core.events import Event, QueueDepth, WorkerReported
from broker.core.lanes import DEBT_TOKENS_MAX
from broker.core.policy import LanePolicy, Policy, PressurePolicy, QuotaRow
from broker.core.pressure import step_of
from broker.core.pressure_step import Step
from broker.core.queues import Pool
from broker.core.scaling import WAIT_S_MAX
from broker.core.scheduler import Scheduler
from broker.service.config import BrokerConfig, Config
from broker.service.departures import Departures
from broker.service.learned import Learned
from broker.service.metrics import Metrics
from broker.service.views import Snapshots
from broker.wire.ids import BANDS, BATCH_BAND
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
    pressure=PressurePolicy(borrow_wait_s=0.5, hold_batch_wait_s=2.0),
)

Told = dict[str, dict[tuple[str, ...], float]]
"""By name: values by those of the labels, in order of the labels' names."""


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


class Accounted(World):
    """A world that sums up what its dispatches cost, by band and model."""

    def __init__(self, policy: Policy, *, seed: int) -> None:
        self.given_tokens = Counter[tuple[str, str]]()
        super().__init__(policy, seed=seed)

    def step(self, event: Event) -> list[Decision]:
        decisions = super().step(event)
        leases = {lease.job.key: lease for lease in self.scheduler.leases()}
        for one in decisions:
            if isinstance(one, Dispatch):
                job, cost = leases[one.key].job, leases[one.key].cost_tokens
                self.given_tokens[str(job.band), job.model] += int(cost)
        return decisions


def a_life(seed: int) -> Accounted:
    """Jobs come, run, fail and end, and workers restart; much still runs and waits."""
    rng = random.Random(seed)
    world = Accounted(POLICY, seed=seed)
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
    for band in BANDS:
        world.step(QueueDepth(world.at_s, LANES[0], band, MODELS[0], rng.randint(0, 50)))
    return world


async def told_of(world: World) -> Told:
    """Read what /metrics tells of a broker that leads."""
    snapshots = Snapshots(
        Config(policy=POLICY, broker=BrokerConfig()),
        Learned(),
        Departures(),
        now=lambda: world.at_s,
    )
    snapshots.leads(cast("Leadership", Lead(world.scheduler)))
    metrics = Metrics(lanes=LANES, models=MODELS)
    metrics.attach(snapshots)
    told: Told = {}
    for family in text_string_to_metric_families((await metrics.expose()).decode()):
        for one in family.samples:
            labels = tuple(one.labels[label] for label in sorted(one.labels))
            told.setdefault(one.name, {})[labels] = one.value
    return told


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
    told = await told_of(world)
    leases = scheduler.leases()
    waiting = [world.jobs[key] for key in scheduler._mind.queues.waiting]
    running = Counter((str(one.job.band), one.job.lane, one.job.model) for one in leases)
    queued = Counter((str(job.band), job.lane, job.model) for job in waiting)
    assert running
    assert queued
    assert _above_0(told["inferlane_queue_inflight_jobs"]) == dict(running)
    for queue in scheduler.views.queues():
        queued[str(queue.band), queue.lane, queue.model] += queue.pending_jobs
    assert _above_0(told["inferlane_queue_depth_jobs"]) == dict(+queued)
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


@pytest.mark.parametrize("seed", [0, 3, 4, 5, 7])
async def test_models_metrics_equal_state(seed: int) -> None:
    """Pressure, work, fairness and the signals for scaling, against leases and jobs in line: of
    lives that end with online jobs waiting; in that of seed 4 one rests.
    """
    world = a_life(seed)
    told = await told_of(world)
    given: Counter[tuple[str, str]] = Counter()
    for (band, model, _), tokens in told["inferlane_work_tokens_total"].items():
        given[band, model] += int(tokens)
    assert given
    assert given == world.given_tokens
    steps: set[float] = set()
    for model in MODELS:
        pool = world.scheduler._mind.queues.pool(model)
        wait_s = told["inferlane_online_wait_seconds"][model,]
        step = told["inferlane_pressure_step"][model,]
        assert wait_s == pool.online_wait_s
        assert step == pool.pressure == step_of(POLICY.pressure, wait_s, before=pool.pressure)
        steps.add(step)
        assert told["inferlane_fairness_gap"][model,] == pytest.approx(_gap(world, pool))
        assert told["inferlane_fairness_bound"][model,] == pytest.approx(_bound(pool))
        assert _gap(world, pool) <= _bound(pool)
        backlog_s, oldest_s, workers = _scaling(world, pool)
        assert told["inferlane_backlog_seconds"][model,] == pytest.approx(backlog_s)
        assert told["inferlane_oldest_wait_seconds"][model,] == pytest.approx(oldest_s)
        assert told["inferlane_desired_workers"][model,] == workers
    assert steps != {Step.NONE}, "else it says little"


def _gap(world: World, pool: Pool) -> float:
    """Tell how far apart the counters are of lanes in line in one band, at most."""
    gap = 0.0
    for band in BANDS:
        lanes = {
            one.job.lane
            for one in world.scheduler._mind.queues.waiting.values()
            if (one.job.model, one.job.band, one.resting) == (pool.model, band, False)
        }
        counters = [pool.counters.counter(lane, band=band) for lane in lanes]
        gap = max([gap, *(one - min(counters) for one in counters)])
    return gap


def _bound(pool: Pool) -> float:
    """Tell the bound as `lanes` has it: max(D, U + Q + P) + K·E."""
    period = pool.counters.period
    turns = period.cost_max + POLICY.order.lane_slack_tokens
    turns += min(period.passed_max, DEBT_TOKENS_MAX)
    return max(period.apart, turns) + period.inflight_jobs_max * period.error_max


def _scaling(world: World, pool: Pool) -> tuple[float, float, int]:
    """Tell the backlog and the oldest wait in seconds, and how many workers they call for."""
    scheduler = world.scheduler
    mind, model = scheduler._mind, pool.model
    rate = scheduler._estimates.rate_tokens_s(pool)
    waiting = [one for one in mind.queues.waiting.values() if one.job.model == model]
    work = [0.0 for _ in BANDS]
    for band in BANDS:
        held = [one.work_tokens for one in waiting if one.job.band == band]
        views = [one for one in scheduler.views.queues() if (one.band, one.model) == (band, model)]
        pending = sum(one.pending_jobs for one in views)
        work[band] = sum(held) + pending * (sum(held) / len(held) if held else 1.0)
    workers = [one for one in mind.fleet.workers.values() if mind.fleet.serves_now(one)]
    running = sum(one.job.model == model for one in scheduler.leases())
    slots = sum(one.slots_for_new for one in workers)
    desired = max(
        math.ceil(running * len(workers) / slots),
        math.ceil(len(workers) * sum(work[:BATCH_BAND]) / rate / WAIT_S_MAX),
        int(sum(work) > 0),
    )
    in_line = [world.at_s - one.job.enqueued_at_s for one in waiting if not one.resting]
    return sum(work) / rate, max(in_line, default=0.0), desired


def _above_0(samples: dict[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
    return {labels: value for labels, value in samples.items() if value}
