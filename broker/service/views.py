"""The mind's views in the words of operators: for metrics, the status page, control replies."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from broker.core import views as mind
from broker.core.policy import Policy
from broker.core.scheduler import Scheduler
from broker.service.config import Config
from broker.service.departures import Departure, Departures
from broker.service.learned import Learned
from broker.service.queues import models_of
from broker.service.snapshot import (
    GoneView,
    LaneView,
    PoolView,
    QueueView,
    RowView,
    StatusView,
    WatchView,
    WorkerView,
)
from broker.wire.messages import LaneState, QueueState

if TYPE_CHECKING:
    from broker.service.leadership import Leadership


class Snapshots:
    """Tells the cluster's state now (`snapshot.SnapshotSource`); little of it while standing by."""

    def __init__(
        self,
        config: Config,
        learned: Learned,
        departures: Departures,
        *,
        watches: Callable[[], tuple[WatchView, ...]] = tuple,
        now: Callable[[], float],
    ) -> None:
        """Stand by. `watches` tells what the watchdogs see."""
        self._config = config
        self._watches = watches
        self._learned = learned
        self._departures = departures
        self._now = now
        self._since_s = now()
        self.leadership: Leadership | None = None

    def leads(self, leadership: "Leadership | None") -> None:
        """This broker leads now, or stands by again."""
        self.leadership = leadership
        self._since_s = self._now()

    def configure(self, config: Config) -> None:
        """Tell of the lanes of a new configuration."""
        self._config = config

    def status(self) -> StatusView:
        """Tell the broker's own state."""
        leadership = self.leadership
        shelf = leadership.shelf if leadership else None
        inflight = len(leadership.scheduler.leases()) if leadership else 0
        return StatusView(
            epoch=leadership.term.epoch if leadership else 0,
            leader=leadership is not None,
            since_s=self._now() - self._since_s,
            held_jobs=max(0, len(shelf) - inflight) if shelf is not None else 0,
            held_bytes=shelf.held_bytes if shelf is not None else 0,
            inflight_jobs=inflight,
            held_bytes_max=self._config.broker.held_bytes_max,
            index_entries=leadership.scheduler.views.index_entries if leadership else 0,
            index_entries_max=self._config.policy.routing.index_entries_max,
            pools=tuple(map(_pool, leadership.scheduler.views.pools())) if leadership else (),
            watches=self._watches(),
        )

    def lanes(self) -> Iterable[LaneView]:
        """Tell each lane's queues and rows."""
        leadership = self.leadership
        return lane_views(leadership.scheduler, self._config.policy) if leadership else ()

    def lane(self, name: str) -> LaneView | None:
        """Tell one lane's queues and rows; None when there is none of that name."""
        leadership = self.leadership
        if leadership is None:
            return None
        policy = self._config.policy
        found = replace(policy, lanes=tuple(one for one in policy.lanes if one.name == name))
        return next(lane_views(leadership.scheduler, found), None)

    def workers(self) -> Iterator[WorkerView]:
        """Tell each known worker."""
        leadership = self.leadership
        for worker in leadership.scheduler.views.workers() if leadership else ():
            notice = leadership.fleet.notice(worker.worker) if leadership else ""
            yield _worker(worker, self._learned, notice=notice)

    def gone(self) -> tuple[GoneView, ...]:
        """Tell who went of late, the latest first; nobody while standing by."""
        leadership = self.leadership
        if leadership is None:
            return ()
        at_s, knows = self._now(), leadership.scheduler.views.knows_worker
        latest = self._departures.latest(at_s=at_s)
        return tuple(_gone(one, back=knows(one.worker), at_s=at_s) for one in latest)


def _gone(departure: Departure, *, back: bool, at_s: float) -> GoneView:
    return GoneView(
        worker=departure.worker,
        how=departure.how,
        cause=departure.cause,
        ago_s=max(0.0, at_s - departure.at_s),
        times=departure.times,
        jobs=departure.jobs,
        requeued_jobs=departure.requeued_jobs,
        back=back,
    )


def lane_views(
    scheduler: Scheduler, policy: Policy, *, with_rows: bool = True
) -> Iterator[LaneView]:
    """Tell each lane's queues and the quota rows that concern it, made as its turn comes."""
    rows: dict[str | None, list[RowView]] = defaultdict(list)
    for row in scheduler.views.rows() if with_rows else ():
        rows[row.lane].append(_row(row))
    for lane in policy.lanes:
        queues = [
            _queue(scheduler.views.queue(lane=lane.name, band=band, model=model))
            for band in sorted(lane.bands)
            for model in sorted(models_of(policy, lane))
        ]
        yield LaneView(
            lane=lane.name,
            paused=lane.paused,
            queues=tuple(queues),
            rows=(*rows[None], *rows[lane.name]),
        )


def lane_states(
    scheduler: Scheduler, policy: Policy, *, epoch: int, at_s: float
) -> Iterator[LaneState]:
    """Tell clients each lane's queues, as `q.<lane>` carries them; made one at a time."""
    for lane in lane_views(scheduler, policy, with_rows=False):
        yield LaneState(
            lane=lane.lane,
            epoch=epoch,
            at_s=at_s,
            queues=tuple(
                QueueState(
                    band=queue.band,
                    model=queue.model,
                    queued_jobs=queue.queued_jobs,
                    queued_jobs_max=queue.queued_jobs_max,
                    inflight_jobs=queue.inflight_jobs,
                    wait_s=queue.wait_s,
                )
                for queue in lane.queues
            ),
        )


def _queue(queue: mind.QueueView) -> QueueView:
    return QueueView(
        band=queue.band,
        model=queue.model,
        queued_jobs=queue.waiting_jobs + queue.pending_jobs,
        queued_jobs_max=queue.queued_jobs_max or 0,
        inflight_jobs=queue.inflight_jobs,
        wait_s=queue.wait_s,
        pending_jobs=queue.pending_jobs,
    )


def _pool(pool: mind.PoolView) -> PoolView:
    return PoolView(
        model=pool.model,
        workers=pool.workers,
        slots=pool.slots,
        inflight_jobs=pool.inflight_jobs,
        pressure=pool.pressure.name.lower(),
        backlog_s=pool.scaling.backlog_s,
        oldest_wait_s=pool.scaling.oldest_wait_s,
        desired_workers=pool.scaling.desired_workers,
        online_wait_s=pool.online_wait_s,
        fairness_gap=pool.fairness_gap,
        fairness_bound=pool.fairness_bound,
        work_tokens=tuple((band, way.value, tokens) for band, way, tokens in pool.work_tokens),
        wait_errors=pool.wait_errors,
    )


def _row(row: mind.RowView) -> RowView:
    return RowView(
        row=row.name,
        inflight_jobs=row.inflight_jobs,
        inflight_jobs_max=None if row.inflight_jobs_max is None else int(row.inflight_jobs_max),
        lent_jobs=row.lent_jobs,
        borrowed_jobs=row.borrowed_jobs,
        inflight_tokens=row.inflight_tokens,
        inflight_tokens_max=row.inflight_tokens_max,
        queued_jobs=row.queued_jobs,
        queued_jobs_max=row.queued_jobs_max,
        bucket_tokens=row.bucket_tokens,
        tokens_per_min=row.tokens_per_min,
        result_bytes=row.result_bytes,
        result_bytes_max=row.result_bytes_max,
    )


def _worker(worker: mind.WorkerView, learned: Learned, *, notice: str) -> WorkerView:
    return WorkerView(
        worker=worker.worker,
        phase=worker.phase,
        ready=worker.ready,
        draining=worker.draining,
        drained=worker.drained,
        models=worker.models,
        slots=worker.slots,
        inflight_jobs=worker.inflight_jobs,
        backlog_tokens=worker.backlog_tokens,
        kv_tokens=worker.kv_tokens,
        kv_tokens_max=worker.kv_tokens_max,
        prefill_tokens_s=worker.prefill_tokens_s,
        decode_tokens_s=worker.decode_tokens_s,
        cached_token_ratio=learned.cached_token_ratio(worker.worker),
        trust=worker.trust,
        signal_age_s=worker.signal_age_s,
        incarnation=worker.incarnation,
        breaker=worker.breaker,
        breaker_openings=worker.breaker_openings,
        notice=notice,
    )
