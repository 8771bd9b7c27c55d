"""What the broker counts, and how /metrics is written without holding up the loop.

The loop calls the methods, a few tenths of a microsecond each. Gauges are not kept: they are read
from the snapshot source when somebody scrapes. Lanes and models that are not configured are counted
as `unknown`, so that no message can add a time series.
"""

import asyncio
from collections.abc import Collection, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from broker.service.metrics_families import Jobs, Times, Troubles
from broker.service.metrics_gauges import gauge_families
from broker.service.series import CounterFamily, merged
from broker.service.snapshot import (
    LaneView,
    SnapshotSource,
    StatusView,
    WorkerView,
    sliced,
)
from broker.wire.messages import Kind, Reason, Usage

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

UNKNOWN = "unknown"
"""Label of a lane or model that is not configured."""

FOUND = "found"
"""Kind of an ended job whose record another broker or worker wrote."""


class LogCounts(Protocol):
    """What the decision log tells of itself."""

    @property
    def lines_written(self) -> int:
        """Lines on disk."""
        ...

    @property
    def lines_dropped(self) -> int:
        """Lines lost: the queue was full, or the disk."""
        ...

    @property
    def write_errors(self) -> int:
        """Writes that failed."""
        ...


class Metrics:
    """All of the broker's metrics, with a registry of their own."""

    def __init__(self, *, lanes: Collection[str] = (), models: Collection[str] = ()) -> None:
        self._lanes = frozenset(lanes)
        self._models = frozenset(models)
        self._source: SnapshotSource | None = None
        self._log: LogCounts | None = None
        self._jobs = Jobs()
        self._troubles = Troubles()
        self._times = Times()
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_Whole(self))

    def configure(self, *, lanes: Collection[str], models: Collection[str]) -> None:
        """Take new names: all others are counted as `unknown`."""
        self._lanes = frozenset(lanes)
        self._models = frozenset(models)

    def attach(self, source: SnapshotSource, *, log: LogCounts | None = None) -> None:
        """Say who tells the gauges."""
        self._source = source
        self._log = log

    # ---- what the loop calls

    def admitted(self, *, lane: str, band: int, model: str) -> None:
        """Count a job that waits or runs now."""
        self._jobs.admitted.add((self._lane(lane), _BANDS[band], self._model(model)))

    def rejected(self, reason: Reason, *, lane: str, band: int) -> None:
        """Count a refusal."""
        self._jobs.rejected.add((reason.value, self._lane(lane), _BANDS[band]))

    def dispatched(self, *, lane: str, band: int, model: str, held_by: str) -> None:
        """Count a job given to a worker."""
        self._jobs.dispatched.add((self._lane(lane), _BANDS[band], self._model(model)))
        self._jobs.held_by.add((held_by,))

    def queued_s(self, queue_s: float, *, lane: str, band: int) -> None:
        """Note how long a job waited for its first dispatch."""
        self._times.queue.observe((self._lane(lane), _BANDS[band]), queue_s)

    def first_token(self, ttft_s: float, *, lane: str, band: int) -> None:
        """Note submission to first token."""
        self._times.ttft.observe((self._lane(lane), _BANDS[band]), ttft_s)

    def ended(
        self,
        kind: Kind | None,
        *,
        lane: str,
        band: int,
        e2e_s: float | None = None,
        usage: Usage | None = None,
        predicted_hit_tokens: int = 0,
    ) -> None:
        """Count a job whose terminal record stands; without a kind, another wrote the record."""
        lane = self._lane(lane)
        self._jobs.ended.add((FOUND if kind is None else kind.value, lane, _BANDS[band]))
        if e2e_s is not None:
            self._times.e2e.observe((lane, _BANDS[band]), e2e_s)
        if usage is not None:
            self._jobs.tokens.add(("prompt", lane), usage.prompt_tokens)
            self._jobs.tokens.add(("cached", lane), usage.cached_tokens)
            self._jobs.tokens.add(("output", lane), usage.output_tokens)
            self._jobs.tokens.add(("predicted_cached", lane), predicted_hit_tokens)

    def attempt_failed(self, reason: Reason) -> None:
        """Count an attempt that came to nothing."""
        self._jobs.attempts_failed.add((reason.value,))

    def dead_lettered(self, *, lane: str) -> None:
        """Count a job that was given up."""
        self._jobs.dead_lettered.add((self._lane(lane),))

    def usage_counted(self, lane: str, records: int) -> None:
        """Count records that are in the accounts now."""
        self._jobs.usage_counted.add((self._lane(lane),), records)

    def usage_gone(self, lane: str, records: int) -> None:
        """Count records that can't be counted any more."""
        self._troubles.usage_gone.add((self._lane(lane),), records)

    def difference(self, kind: str) -> None:
        """Count one difference of a reconcile."""
        self._troubles.differences.add((kind,))

    def reconciled(self) -> None:
        """Count a reconcile."""
        self._troubles.reconciles.add(())

    def malformed(self, where: str) -> None:
        """Count an unreadable message; `where` is a place in our code: `jobs`, `heartbeat`, ..."""
        self._troubles.malformed.add((where,))

    def unanswered(self, cause: str) -> None:
        """Count an order without an answer."""
        self._troubles.unanswered.add((cause,))

    def worker_gone(self, cause: str) -> None:
        """Count a worker whose leases were revoked."""
        self._troubles.workers_gone.add((cause,))

    def leadership(self, *, leader: bool) -> None:
        """Count a change of role."""
        self._troubles.leaderships.add(("leader" if leader else "standby",))

    def loop_error(self, where: str) -> None:
        """Count a surprise caught at a loop's edge."""
        self._troubles.loop_errors.add((where,))

    def wait_estimated(self, *, told_s: float, had_s: float, band: int) -> None:
        """Note how far a wait estimate was off."""
        self._times.wait_error.observe((_BANDS[band],), abs(told_s - had_s))

    def loop_lag(self, lag_s: float, *, held_s: float) -> None:
        """Note how late the loop woke up, and how much of that was its own work at most."""
        self._times.lag.observe((), lag_s)
        self._times.held.observe((), held_s)

    def stepped(self, step_s: float) -> None:
        """Note how long the mind took for one event."""
        self._times.step.observe((), step_s)

    # ---- what /metrics calls

    async def expose(self) -> bytes:
        """Write all metrics in Prometheus's text format, giving the loop its turn as it goes."""
        status, lanes, workers = None, list[LaneView](), list[WorkerView]()
        if self._source is not None:
            status = self._source.status()
            lanes = [lane async for lane in sliced(self._source.lanes())]
            workers = [worker async for worker in sliced(self._source.workers())]
        parts: list[bytes] = []
        before = ""
        for family in self._all(status, lanes, workers):
            text = generate_latest(_One(family))
            # HELP and TYPE come once, before a family's first part.
            parts.append(text.split(b"\n", 2)[2] if family.name == before else text)
            before = family.name
            await asyncio.sleep(0)
        return b"".join(parts)

    def collect(self) -> Iterator[Metric]:
        """Tell all families at once, for whoever has the time."""
        if self._source is None:
            return merged(self._all(None, [], []))
        source = self._source
        return merged(self._all(source.status(), list(source.lanes()), list(source.workers())))

    def _all(
        self, status: StatusView | None, lanes: list[LaneView], workers: list[WorkerView]
    ) -> Iterator[Metric]:
        for group in (self._jobs, self._troubles, self._times):
            yield from group.collect()
        if self._log is not None:
            yield from _log_families(self._log)
        if status is not None:
            yield from gauge_families(status, lanes, workers)

    def _lane(self, lane: str) -> str:
        return lane if lane in self._lanes else UNKNOWN

    def _model(self, model: str) -> str:
        return model if model in self._models else UNKNOWN


_BANDS = ("0", "1", "2", "3")


class _Whole(Collector):
    """Registers all families of a Metrics as one collector."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Tell them."""
        return self._metrics.collect()


class _One(Collector):
    """A registry of one family."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        """Tell it."""
        yield self._family


def _log_families(log: LogCounts) -> Iterator[Metric]:
    counts = (
        ("written", "Lines of the decision log on disk.", log.lines_written),
        ("dropped", "Lines lost because the disk was slow or full.", log.lines_dropped),
    )
    for name, text, count in counts:
        family = CounterFamily(f"inferlane_decision_log_lines_{name}", text)
        family.add((), count)
        yield from family.collect()
    errors = CounterFamily("inferlane_decision_log_write_errors", "Writes that failed.")
    errors.add((), log.write_errors)
    yield from errors.collect()
