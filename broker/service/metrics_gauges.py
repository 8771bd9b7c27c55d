"""The gauges of /metrics, made from a snapshot of the cluster."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from broker.core.pressure_step import Step
from broker.service.series import SERIES_TOLD, in_slices
from broker.service.snapshot import (
    LaneView,
    PoolView,
    QueueView,
    RowView,
    StatusView,
    WorkerView,
)

WORKERS_MAX = 5_000
"""Workers told one by one: the broker is made for 4,000."""

QUEUES_MAX = 4_000
"""Queues (lane, band, model) told one by one."""

ROWS_MAX = 4_000
"""Quota rows told one by one."""

POOLS_MAX = 200
"""Models told one by one."""


def gauge_families(
    status: StatusView, lanes: list[LaneView], workers: list[WorkerView]
) -> Iterator[Metric]:
    """Make all gauges, some series at a time: a family may come in several parts."""
    yield from _status(status)
    yield from _pools(status.pools[:POOLS_MAX])
    yield from _queues(lanes)
    yield from _rows(lanes)
    yield from _workers(workers)


def _status(status: StatusView) -> Iterator[Metric]:
    gauges = (
        ("leader", "1: this process decides; 0: it stands by.", float(status.leader)),
        ("leader_epoch", "Rises with each leader.", status.epoch),
        ("role_seconds", "How long it has been leader or standby.", status.since_s),
        ("held_jobs", "Jobs pulled from their streams and not yet dispatched.", status.held_jobs),
        ("held_bytes", "Bodies of the held jobs, in memory.", status.held_bytes),
        ("held_bytes_limit", "Bound of held_bytes.", status.held_bytes_max),
        ("inflight_jobs", "Jobs leased to workers.", status.inflight_jobs),
        ("prefix_index_entries", "Pairs of block and worker it keeps.", status.index_entries),
        ("prefix_index_limit_entries", "Bound of these.", status.index_entries_max),
    )
    for name, text, value in gauges:
        yield GaugeMetricFamily(f"inferlane_{name}", text, value=value)
    labels = ("watchdog",)
    text = "1: something is wrong, or was within the last minute; the status page says what."
    alarm = GaugeMetricFamily("inferlane_watchdog_alarm", text, labels=labels)
    alarms = CounterMetricFamily("inferlane_watchdog_alarms", "Times it began.", labels=labels)
    for watch in status.watches:
        alarm.add_metric((watch.name,), float(bool(watch.trouble)))
        alarms.add_metric((watch.name,), watch.alarms)
    yield alarm
    yield alarms


def _pools(pools: Sequence[PoolView]) -> Iterator[Metric]:
    gauges: tuple[tuple[str, str, Callable[[PoolView], float]], ...] = (
        ("pressure_step", "How far batch gives way: 0 no, 1 lends, 2 holds, 3 refuses.", _step),
        ("online_wait_seconds", "Expected wait of bands 0-1.", lambda one: one.online_wait_s),
        ("backlog_seconds", "All that waits, at the rate of now.", lambda one: one.backlog_s),
        ("oldest_wait_seconds", "Of those that wait.", lambda one: one.oldest_wait_s),
        ("desired_workers", "What runs and waits calls for.", lambda one: one.desired_workers),
        (
            "fairness_gap",
            "Greatest difference between lanes that wait in the same band.",
            lambda one: one.fairness_gap,
        ),
        ("fairness_bound", "Bound of fairness_gap.", lambda one: one.fairness_bound),
    )
    for name, text, value in gauges:
        family = GaugeMetricFamily(f"inferlane_{name}", text, labels=("model",))
        for pool in pools:
            family.add_metric((pool.model,), value(pool))
        yield family
    text = "Weighted tokens dispatched, by right: priority, or an exception (share, aged, claim)."
    work = CounterMetricFamily("inferlane_work_tokens", text, labels=("model", "band", "way"))
    for pool in pools:
        for band, way, tokens in pool.work_tokens:
            work.add_metric((pool.model, str(band), way), tokens)
    yield work
    yield from _wait_errors(pools)


def _wait_errors(pools: Sequence[PoolView]) -> Iterator[Metric]:
    labels = ("model", "band")
    text = "Waits over 5 s: by which share of it the estimate was off, median of the latest 200."
    error = GaugeMetricFamily("inferlane_wait_estimate_error_ratio", text, labels=labels)
    text = "Waits over 5 s that judged their estimate."
    judged = CounterMetricFamily("inferlane_wait_estimates_judged", text, labels=labels)
    for pool in pools:
        for band, ratio, jobs in pool.wait_errors:
            error.add_metric((pool.model, str(band)), ratio)
            judged.add_metric((pool.model, str(band)), jobs)
    yield error
    yield judged


def _step(pool: PoolView) -> float:
    return Step[pool.pressure.upper()].value


def _queues(lanes: list[LaneView]) -> Iterator[Metric]:
    queues = [(lane, queue) for lane in lanes for queue in lane.queues][:QUEUES_MAX]
    gauges: tuple[tuple[str, str, Callable[[QueueView], float]], ...] = (
        ("queue_depth_jobs", "Jobs that wait, held or still in the stream.", _queued),
        ("queue_limit_jobs", "Bound of the queue; 0: its stream's bound only.", _queued_max),
        ("queue_pending_jobs", "Of those, jobs the broker has not pulled yet.", _pending),
        ("queue_inflight_jobs", "Jobs of this queue leased to workers.", _inflight),
        ("queue_wait_seconds", "Expected wait of a job that comes now.", _wait),
    )
    for name, text, value in gauges:
        for some in in_slices(queues, SERIES_TOLD):
            family = GaugeMetricFamily(f"inferlane_{name}", text, labels=("lane", "band", "model"))
            for lane, queue in some:
                family.add_metric((lane.lane, str(queue.band), queue.model), value(queue))
            yield family
    for told in in_slices(lanes[:QUEUES_MAX], SERIES_TOLD):
        paused = GaugeMetricFamily("inferlane_lane_paused", "1: takes no jobs.", labels=("lane",))
        for lane in told:
            paused.add_metric((lane.lane,), float(lane.paused))
        yield paused


def _queued(queue: QueueView) -> float:
    return queue.queued_jobs


def _queued_max(queue: QueueView) -> float:
    return queue.queued_jobs_max


def _pending(queue: QueueView) -> float:
    return queue.pending_jobs


def _inflight(queue: QueueView) -> float:
    return queue.inflight_jobs


def _wait(queue: QueueView) -> float:
    return queue.wait_s


def _rows(lanes: list[LaneView]) -> Iterator[Metric]:
    rows = list({row.row: row for lane in lanes for row in lane.rows}.values())[:ROWS_MAX]
    gauges: tuple[tuple[str, str, Callable[[RowView], float | None]], ...] = (
        ("row_inflight_jobs", "Jobs leased under a quota row.", lambda row: row.inflight_jobs),
        ("row_limit_jobs", "Bound of row_inflight_jobs.", lambda row: row.inflight_jobs_max),
        ("row_lent_jobs", "Of row_limit_jobs, used by other rows.", lambda row: row.lent_jobs),
        ("row_borrowed_jobs", "Of other rows' seats, used here.", lambda row: row.borrowed_jobs),
        ("row_inflight_tokens", "Weighted tokens leased.", lambda row: row.inflight_tokens),
        ("row_limit_tokens", "Bound of row_inflight_tokens.", lambda row: row.inflight_tokens_max),
        ("row_queued_jobs", "Online jobs that wait under a row that bounds them.", _row_queued),
        ("row_limit_queued_jobs", "Bound of row_queued_jobs.", lambda row: row.queued_jobs_max),
        ("row_bucket_tokens", "Weighted tokens that may be started at once.", _bucket),
        ("row_limit_tokens_per_minute", "What fills the bucket.", lambda row: row.tokens_per_min),
        ("row_result_bytes", "Results that stand, and to come.", _result_bytes),
        ("row_limit_result_bytes", "Bound of row_result_bytes.", lambda row: row.result_bytes_max),
    )
    for name, text, value in gauges:
        for some in in_slices(rows, SERIES_TOLD):
            family = GaugeMetricFamily(f"inferlane_{name}", text, labels=("row",))
            for row in some:
                amount = value(row)
                if amount is not None:
                    family.add_metric((row.row,), amount)
            yield family


def _row_queued(row: RowView) -> float | None:
    return None if row.queued_jobs_max is None else row.queued_jobs


def _bucket(row: RowView) -> float | None:
    return None if row.tokens_per_min is None else row.bucket_tokens


def _result_bytes(row: RowView) -> float | None:
    return None if row.result_bytes_max is None else row.result_bytes


def _workers(workers: list[WorkerView]) -> Iterator[Metric]:
    gauges: tuple[tuple[str, str, Callable[[WorkerView], float]], ...] = (
        ("up", "1: live and ready; 0: suspect, gone or loading.", _up),
        ("draining", "1: takes nothing new.", lambda one: float(one.draining)),
        ("breaker", "0: closed; 1: half-open, one job is tried; 2: open, nothing new.", _breaker),
        ("notice", "1: something keeps it from ending jobs; the status page says what.", _notice),
        ("breaker_openings", "Times it opened since the worker joined.", _openings),
        ("slots", "Jobs it can run at once.", lambda one: one.slots),
        ("inflight_jobs", "Jobs leased to it.", lambda one: one.inflight_jobs),
        ("backlog_tokens", "Prompt tokens it must still prefill.", lambda one: one.backlog_tokens),
        ("kv_tokens", "KV cache its jobs take when they end.", lambda one: one.kv_tokens),
        ("kv_limit_tokens", "Its KV cache; 0: not known.", lambda one: one.kv_tokens_max),
        ("cached_token_ratio", "Share of prompt tokens from its cache.", _cached),
        ("trust", "What its credit for cached prefixes counts; 1: as predicted.", _trust),
        ("signal_age_seconds", "Since its last heartbeat.", lambda one: one.signal_age_s),
    )
    for name, text, value in gauges:
        for some in in_slices(workers[:WORKERS_MAX], SERIES_TOLD):
            family = GaugeMetricFamily(f"inferlane_worker_{name}", text, labels=("worker",))
            for worker in some:
                family.add_metric((worker.worker,), value(worker))
            yield family
    known = "Workers known, also those past the bound of one-by-one metrics."
    yield GaugeMetricFamily("inferlane_workers", known, value=len(workers))


def _up(worker: WorkerView) -> float:
    return float(worker.phase == "live" and worker.ready)


def _breaker(worker: WorkerView) -> float:
    return {"closed": 0.0, "half_open": 1.0}.get(worker.breaker, 2.0)


def _notice(worker: WorkerView) -> float:
    return float(bool(worker.notice))


def _openings(worker: WorkerView) -> float:
    return worker.breaker_openings


def _trust(worker: WorkerView) -> float:
    return worker.trust


def _cached(worker: WorkerView) -> float:
    return worker.cached_token_ratio
