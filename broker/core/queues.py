"""Where jobs wait: a queue for each (lane, band, model), and each model's pool.

A queue keeps two lines, both in the order of `due_at_s`: fresh jobs, and those that have waited
past their band's `aging_s` and compete one band up. A job in back-off stands in no line, so that
retries never fill the window in which the next job is looked for. `due_at_s` is when a job's wait
ends at the latest (its band's longest wait, or its own nearer deadline), so a nearer deadline goes
before, and retries keep their place, because it counts from the enqueue time. In a queue of batch
the fresh ones stand in lines of their own too, one a client, which take turns (`flows`).
"""

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from msgspec import Struct

from broker.core.bands import BandShares
from broker.core.decisions import HeldBy
from broker.core.events import JobSpec
from broker.core.flows import Flows
from broker.core.lanes import LaneCounters, Ranking
from broker.core.policy import Policy
from broker.core.pressure_step import Step
from broker.core.quotas import Quotas
from broker.core.rows import RowUsage
from broker.core.state import Worker
from broker.wire.ids import BANDS, BATCH_BAND, ONLINE_BANDS
from broker.wire.messages import Failure

WAIT_S_UNBOUNDED = 86_400.0
"""Stands for the longest wait of a band that has none: the longest batch window, a day."""

AGED_BANDS = (1, 2)
"""Bands whose jobs may rise by the clock: the highest can't rise, and batch takes shares and idle
capacity."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A job that waits for its dispatch."""

    job: JobSpec
    queue: "Queue"
    held_at_s: float
    """When it began to wait here: for a retry, when its last attempt ended."""
    due_at_s: float
    output_tokens_expected: int
    work_tokens: float
    """Its cost without any cache: what it adds to the backlog."""
    not_before_s: float = 0.0
    """Back-off of a retry."""
    failures: tuple[Failure, ...] = ()
    excluded: tuple[str, ...] = ()
    """Workers where an attempt failed."""
    held_by: HeldBy = HeldBy.NOTHING
    """What held it when it was last looked at."""
    least_tokens: int = 0
    """Of its prompt, what whoever holds most of it must compute, when it was last looked at."""
    row: str = ""
    """The quota row that held it, if one did."""
    retried: bool = False
    """It was given to a worker before, and its owner knows."""
    receipted: bool = False
    aged: bool = False
    resting: bool = False

    @property
    def place(self) -> tuple[float, int, str]:
        """Its place in its line."""
        return (self.due_at_s, self.job.stream_sequence, self.job.key)


LineEntry = tuple[float, int, str, Waiting]
Line = list[LineEntry]
"""In order of (due_at_s, stream sequence, key)."""


@dataclass(slots=True, eq=False)
class Queue:
    """The waiting jobs of one (lane, band, model)."""

    lane: str
    band: int
    pool: "Pool"
    rows: tuple[RowUsage, ...] = ()
    weight: float = 1.0
    wait_s_max: float = WAIT_S_UNBOUNDED
    fresh: Line = field(default_factory=Line)
    aged: Line = field(default_factory=Line)
    flows: Flows | None = None
    """Of batch: the fresh ones, by client."""
    waiting_jobs: int = 0
    """In line or resting."""
    work_tokens: float = 0.0
    pending_jobs: int = 0
    """Messages of it that the broker has not pulled yet."""
    inflight_jobs: int = 0

    def count(self, jobs: int) -> None:
        """Count jobs that wait (or no longer do), here and in the rows that bound queues."""
        self.waiting_jobs += jobs
        self.pool.waiting_jobs[self.band] += jobs
        if self.band != BATCH_BAND:
            for usage in self.rows:
                usage.queued_jobs += jobs

    @property
    def is_closed(self) -> bool:
        """Whether no worker has room for its smallest job."""
        pool = self.pool
        return pool.closed or (pool.closed_to_batch and self.band == BATCH_BAND)

    def ahead_of(self, waiting: Waiting) -> int:
        """Count the jobs in line before this one."""
        place = waiting.place
        if self.flows is None or waiting.aged or waiting.resting:
            return bisect_left(self.fresh, place) + bisect_left(self.aged, place)
        client, jobs = waiting.job.client, len(self.fresh)
        return len(self.aged) + self.flows.ahead_of(place, client, jobs_in_line=jobs)

    def turns(self, *, aged: bool, slack_tokens: float) -> list[Line]:
        """List lines that have their turn: all that is in line, or of fresh batch some clients'."""
        if aged or self.flows is None:
            return [self.aged if aged else self.fresh]
        return self.flows.fair(slack_tokens=slack_tokens)

    def others(self, *, slack_tokens: float) -> list[Line]:
        """List lines of fresh batch that have their turn next."""
        return [] if self.flows is None else self.flows.others(slack_tokens=slack_tokens)

    def position_of(self, job: JobSpec, *, due_at_s: float) -> int:
        """Count the jobs in line before one that came now, whose wait must be over then."""
        place = (due_at_s, job.stream_sequence, job.key)
        return bisect_left(self.fresh, place) + bisect_left(self.aged, place)

    @property
    def oldest_enqueued_at_s(self) -> float | None:
        """When the job at the head was enqueued; None when nobody is in line."""
        heads = [line[0][3].job.enqueued_at_s for line in (self.aged, self.fresh) if line]
        return min(heads, default=None)


class TooLarge(Struct, frozen=True):
    """A job for which no worker had room."""

    prompt_tokens: int
    output_tokens: int
    """As expected."""
    band: int
    enqueued_at_s: float


@dataclass(slots=True, eq=False)
class Pool:
    """A model: the workers that serve it and the jobs that want it."""

    model: str
    counters: LaneCounters = field(default_factory=LaneCounters)
    shares: BandShares = field(default_factory=BandShares)
    workers: dict[str, Worker] = field(default_factory=dict[str, Worker])
    """Live, ready and not draining."""
    queues: dict[tuple[str, int], Queue] = field(default_factory=dict[tuple[str, int], Queue])
    fresh: list[Ranking] = field(default_factory=lambda: [Ranking() for _ in BANDS])
    """By band, the lanes with fresh jobs in line."""
    aged: list[Ranking] = field(default_factory=lambda: [Ranking() for _ in BANDS])
    in_line: list[int] = field(default_factory=lambda: [0 for _ in BANDS])
    """Jobs in line, by band."""
    waiting_jobs: list[int] = field(default_factory=lambda: [0 for _ in BANDS])
    """Jobs in line or resting, by band."""
    work_tokens: list[float] = field(default_factory=lambda: [0.0 for _ in BANDS])
    """Their work, by band."""
    pending_jobs: list[int] = field(default_factory=lambda: [0 for _ in BANDS])
    """Messages not pulled yet, by band."""
    slots: int = 0
    """Of its workers."""
    inflight_jobs: int = 0
    busy_slots: int = 0
    """Of `slots`, those that jobs take, of whatever model."""
    inflight_online_jobs: int = 0
    """Of bands 0-1."""
    inflight_batch_jobs: int = 0
    pressure: Step = Step.NONE
    refusing_since_s: float = 0.0
    """When new batch began to be refused; told while `pressure` says so."""
    online_wait_s: float = 0.0
    """Expected of a job of bands 0-1, when it was last looked at."""
    lacks_seats: bool = False
    """Somebody passed over in this look may go with a seat of another row's."""
    no_room: TooLarge | None = None
    """A job for which no worker had room: none has for a larger one until something opens."""
    most_tokens: dict[bool, float] = field(default_factory=dict[bool, float])
    """No worker has room for a longer prompt, until something opens: by whether it is batch's."""
    closed: bool = False
    """No worker has room for even the smallest job, until something opens."""
    closed_to_batch: bool = False
    """No worker that batch may use has room for even the smallest job, until something opens."""
    settled: bool = False
    """All in line were looked at since a worker or a row last gave way: only newcomers may go."""
    refill_at_s: float | None = None
    """When a token bucket that holds some back will let one pass."""
    overdue_at_s: float = math.inf
    """When the first of those that found no room will have been overtaken for long enough."""
    holding: bool = False
    """Some are held for the worker with their prefix."""

    def floor_jobs(self, floor_share: float) -> int:
        """Tell how many slots are kept for online jobs: a share, rounded up, and never all."""
        return min(math.ceil(floor_share * self.slots), max(0, self.slots - 1))

    def keeps_from(self, band: int, floor_share: float) -> bool:
        """Say whether all free slots, if any, are kept from a band for online jobs."""
        if band in ONLINE_BANDS:
            return False
        floor = self.floor_jobs(floor_share)
        kept = floor if band == BATCH_BAND else min(floor, self.inflight_online_jobs)
        return 0 < kept >= self.slots - self.busy_slots

    def mean_tokens(self, band: int) -> float:
        """Tell the mean work of a band's waiting jobs, those in back-off included; 0 with none."""
        return self.work_tokens[band] / max(1, self.waiting_jobs[band])

    @property
    def waiting(self) -> bool:
        """Say whether anyone is in line."""
        return any(self.in_line)

    def opened(self) -> None:
        """Note that a worker may take more than before."""
        self.settled = self.closed = self.closed_to_batch = False
        self.no_room = None
        self.most_tokens.clear()


class Queues:
    """All queues and pools, and the one way in and out of line."""

    def __init__(self, policy: Policy, quotas: Quotas) -> None:
        self.waiting: dict[str, Waiting] = {}
        self.pools: dict[str, Pool] = {}
        self._policy = policy
        self._quotas = quotas

    def pool(self, model: str) -> Pool:
        """Find a model's pool, made at first use."""
        pool = self.pools.get(model)
        if pool is None:
            pool = self.pools[model] = Pool(model)
        return pool

    def queue(self, *, lane: str, band: int, model: str) -> Queue:
        """Find a queue, made at first use."""
        pool = self.pool(model)
        queue = pool.queues.get((lane, band))
        if queue is None:
            flows = Flows() if band == BATCH_BAND else None
            queue = pool.queues[lane, band] = Queue(lane, band, pool, flows=flows)
            self._configure(queue)
        return queue

    def reconfigured(self, policy: Policy, quotas: Quotas) -> None:
        """Take a new policy: rows, weights and longest waits. Everybody keeps its enqueue time."""
        self._policy, self._quotas = policy, quotas
        in_line = [waiting for waiting in self.waiting.values() if not waiting.resting]
        for waiting in in_line:
            self._step_out(waiting)
        for pool in self.pools.values():
            pool.opened()
            for queue in pool.queues.values():
                self._configure(queue)
        for waiting in self.waiting.values():
            waiting.due_at_s = self.due_at_s(waiting.job, waiting.queue)
        for waiting in in_line:
            self._line_up(waiting)

    def due_at_s(self, job: JobSpec, queue: Queue) -> float:
        """Tell when a job's wait must be over."""
        due_at_s = job.enqueued_at_s + queue.wait_s_max
        return due_at_s if job.deadline_at_s is None else min(due_at_s, job.deadline_at_s)

    def add(self, waiting: Waiting) -> None:
        """Let a job wait: in line, or resting until its back-off is over."""
        queue = waiting.queue
        self.waiting[waiting.job.key] = waiting
        queue.work_tokens += waiting.work_tokens
        queue.pool.work_tokens[queue.band] += waiting.work_tokens
        queue.count(1)
        if not waiting.resting:
            self._enter(waiting)

    def remove(self, waiting: Waiting) -> None:
        """Take a job out of wherever it waits."""
        queue = waiting.queue
        del self.waiting[waiting.job.key]
        if not waiting.resting:
            self._step_out(waiting)
            queue.pool.counters.left(queue.lane, band=queue.band)
        queue.work_tokens -= waiting.work_tokens
        queue.pool.work_tokens[queue.band] -= waiting.work_tokens
        queue.count(-1)

    def wake(self, waiting: Waiting) -> None:
        """End a job's back-off."""
        if waiting.resting:
            waiting.resting = False
            self._enter(waiting)

    def age(self, waiting: Waiting) -> None:
        """Let a job rise one band."""
        if waiting.aged:
            return
        if not waiting.resting:
            self._step_out(waiting)
        waiting.aged = True
        if not waiting.resting:
            self._line_up(waiting)

    def charge(self, queue: Queue, cost_tokens: float, *, client: str) -> None:
        """Charge a lane, and in batch its client, for a job that goes."""
        slack_tokens = self._policy.order.lane_slack_tokens
        queue.pool.counters.dispatched(
            queue.lane,
            cost_tokens / queue.weight,
            band=queue.band,
            slack_tokens=slack_tokens,
        )
        self._rank(queue)
        if queue.flows is not None:
            queue.flows.charge(client, cost_tokens, slack_tokens=slack_tokens)

    def correct(self, queue: Queue, tokens: float, *, client: str) -> None:
        """Charge a lane for what its jobs cost more than it paid; or refund it, when negative."""
        queue.pool.counters.correct(queue.lane, tokens / queue.weight, band=queue.band)
        self._rank(queue)
        if queue.flows is not None:
            queue.flows.correct(client, tokens)

    def lift(self, queue: Queue, counter: float) -> None:
        """Raise a lane's counter to this, if it is less."""
        queue.pool.counters.lift(queue.lane, counter, band=queue.band)
        self._rank(queue)

    def _rank(self, queue: Queue) -> None:
        """Move a lane to its place in each ranking that it stands in."""
        pool, lane, band = queue.pool, queue.lane, queue.band
        for ranking in (pool.fresh[band], pool.aged[band]):
            if lane in ranking:
                ranking.put(lane, pool.counters.place(lane, band=band))

    def _enter(self, waiting: Waiting) -> None:
        queue = waiting.queue
        queue.pool.counters.lined_up(queue.lane, band=queue.band)
        self._line_up(waiting)

    def _line_up(self, waiting: Waiting) -> None:
        queue, pool = waiting.queue, waiting.queue.pool
        line = queue.aged if waiting.aged else queue.fresh
        if not line:
            ranking = (pool.aged if waiting.aged else pool.fresh)[queue.band]
            ranking.put(queue.lane, pool.counters.place(queue.lane, band=queue.band))
        entry = (*waiting.place, waiting)
        insort(line, entry)
        if queue.flows is not None and not waiting.aged:
            queue.flows.enter(entry)
        pool.in_line[queue.band] += 1

    def _step_out(self, waiting: Waiting) -> None:
        queue, pool = waiting.queue, waiting.queue.pool
        line = queue.aged if waiting.aged else queue.fresh
        del line[bisect_left(line, waiting.place)]
        if queue.flows is not None and not waiting.aged:
            queue.flows.leave(waiting.place, waiting.job.client)
        pool.in_line[queue.band] -= 1
        if not line:
            (pool.aged if waiting.aged else pool.fresh)[queue.band].drop(queue.lane)

    def _configure(self, queue: Queue) -> None:
        policy = self._policy
        waiting_jobs = queue.waiting_jobs
        queue.count(-waiting_jobs)
        queue.rows = self._quotas.matching(lane=queue.lane, band=queue.band, model=queue.pool.model)
        queue.count(waiting_jobs)
        queue.weight = next((lane.weight for lane in policy.lanes if lane.name == queue.lane), 1.0)
        wait_s_max = policy.bands[queue.band].wait_s_max
        queue.wait_s_max = WAIT_S_UNBOUNDED if wait_s_max is None else wait_s_max
