"""Views of a made-up cluster, for tests of what shows them: valid by default."""

from collections.abc import Iterable
from typing import Any

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


def a_worker_view(**fields: Any) -> WorkerView:
    """A live worker with one job."""
    defaults: dict[str, Any] = {
        "worker": "gpu-1",
        "phase": "live",
        "ready": True,
        "draining": False,
        "drained": False,
        "models": ("tiny",),
        "slots": 6,
        "inflight_jobs": 1,
        "backlog_tokens": 300,
        "kv_tokens": 1000,
        "kv_tokens_max": 4000,
        "prefill_tokens_s": 8000.0,
        "decode_tokens_s": 50.0,
        "cached_token_ratio": 0.75,
        "signal_age_s": 0.4,
        "incarnation": 1,
    }
    return WorkerView(**{**defaults, **fields})


def a_gone_view(**fields: Any) -> GoneView:
    """A worker that was lost with three jobs, one of which had a stream."""
    defaults: dict[str, Any] = {
        "worker": "gpu-9",
        "how": "lost",
        "cause": "no responders",
        "ago_s": 300.0,
        "times": 1,
        "jobs": 3,
        "requeued_jobs": 2,
        "back": False,
    }
    return GoneView(**{**defaults, **fields})


def a_queue_view(**fields: Any) -> QueueView:
    """An interactive queue with three jobs."""
    defaults: dict[str, Any] = {
        "band": 1,
        "model": "tiny",
        "queued_jobs": 3,
        "queued_jobs_max": 400,
        "inflight_jobs": 2,
        "wait_s": 1.5,
        "pending_jobs": 0,
    }
    return QueueView(**{**defaults, **fields})


def a_pool_view(**fields: Any) -> PoolView:
    """Model `tiny` on two workers; people wait, and batch gets its share only."""
    defaults: dict[str, Any] = {
        "model": "tiny",
        "workers": 2,
        "slots": 8,
        "inflight_jobs": 5,
        "pressure": "hold_batch",
        "backlog_s": 42.0,
        "oldest_wait_s": 8.5,
        "desired_workers": 3,
        "online_wait_s": 6.5,
        "fairness_gap": 900.0,
        "fairness_bound": 12_000.0,
        "work_tokens": ((1, "priority", 5000.0), (3, "share", 250.0)),
        "wait_errors": ((1, 0.12, 340), (2, 0.31, 25)),
    }
    return PoolView(**{**defaults, **fields})


def a_lane_view(**fields: Any) -> LaneView:
    """Lane `acme` with one queue and one row."""
    defaults: dict[str, Any] = {
        "lane": "acme",
        "paused": False,
        "queues": (a_queue_view(),),
        "rows": (RowView(row="band=1", inflight_jobs=2, inflight_jobs_max=200, lent_jobs=7),),
    }
    return LaneView(**{**defaults, **fields})


def a_status_view(**fields: Any) -> StatusView:
    """A leader of epoch 7."""
    defaults: dict[str, Any] = {
        "epoch": 7,
        "leader": True,
        "since_s": 3725.0,
        "held_jobs": 3,
        "held_bytes": 6000,
        "inflight_jobs": 2,
        "held_bytes_max": 512 * 1024 * 1024,
        "pools": (a_pool_view(),),
        "watches": (WatchView(name="link", alarms=2), WatchView(name="store")),
    }
    return StatusView(**{**defaults, **fields})


class Cluster:
    """A snapshot source of given views."""

    def __init__(
        self,
        *,
        status: StatusView | None = None,
        lanes: Iterable[LaneView] | None = None,
        workers: Iterable[WorkerView] | None = None,
        gone: tuple[GoneView, ...] = (),
    ) -> None:
        self._gone = gone
        self._status = status or a_status_view()
        self._lanes = [a_lane_view()] if lanes is None else list(lanes)
        self._workers = [a_worker_view()] if workers is None else list(workers)

    def status(self) -> StatusView:
        return self._status

    def lanes(self) -> Iterable[LaneView]:
        return iter(self._lanes)

    def lane(self, name: str) -> LaneView | None:
        return next((lane for lane in self._lanes if lane.lane == name), None)

    def workers(self) -> Iterable[WorkerView]:
        return iter(self._workers)

    def gone(self) -> tuple[GoneView, ...]:
        return self._gone
