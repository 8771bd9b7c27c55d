"""What a runner knows of each lane's open batches: who shares it, and how fast the lane is.

Batches of a lane take turns in the broker, whoever runs them (`broker.core.flows`). So what one
gets hangs on how many there are, and what all of them get does not: that pace, seen over all
records of the lane, is what forecasts are made of. What a new batch hands in is seen by the broker
only within its window, so those that are there keep less waiting together than that has room for.
"""

from collections import deque
from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from producers.batches.config import BatchesConfig
from producers.batches.forecast import SAMPLE_S, SAMPLES_MAX, Rate, forecast, rate_of, shared
from producers.batches.records import Batch, Forecast

LINES_WAITING_MIN = 16
"""Of each batch, however many share a lane: with fewer it would idle while a line is stored."""

HEARD_MAX = 64
"""Batches of a lane heard of and not seen yet: with more there is the least for each anyway."""

OUTPUT_WEIGHT = 2.0
"""Of an output token beside one of the prompt: as the broker charges."""


def line_cost(batch: Batch) -> float:
    """Tell what a line of a batch cost on average, in weighted tokens; 0 while not known."""
    usage = batch.usage
    tokens = usage.prompt_tokens - usage.cached_tokens + OUTPUT_WEIGHT * usage.output_tokens
    return tokens / batch.counts.completed if batch.counts.completed else 0.0


def left_lines(batch: Batch) -> int:
    """Count the lines of a batch that have not ended; before it was looked over, all it has."""
    return max((batch.counts.total or batch.lines) - batch.counts.ended, 0)


def shared_work(batch: Batch, others: Iterable[Batch], *, cost: float) -> float:
    """Tell how much its lane does until a batch ends, in weighted tokens, at `cost` a line of it.

    So much is taken of a line of those of which nothing is known, too.
    """
    lefts = (left_lines(one) * (line_cost(one) or cost) for one in others)
    return shared(left_lines(batch) * cost, lefts)


class LanePace:
    """How fast a lane's batches end, all together."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, dict[str, int]]] = deque(maxlen=SAMPLES_MAX + 1)

    def note(self, batches: Mapping[str, Batch], *, at_s: float) -> None:
        """Take a sample of how many lines of each have ended, unless the last is too fresh."""
        if self._samples and at_s < self._samples[-1][0] + SAMPLE_S:
            return
        before = self._samples[-1][1] if self._samples else {}
        now = {name: batch.counts.ended for name, batch in batches.items()}
        self._samples.append((at_s, {**before, **now}))

    def rate(self, costs: Mapping[str, float], *, cost: float) -> Rate | None:
        """Tell the pace, a line of each batch at its cost, of others at `cost`; None: not known.

        The samples from before the first line ended are left out: a lane only began then.
        """
        points: list[tuple[float, float]] = []
        first: dict[str, int] = {}
        for at_s, ended in self._samples:
            done = 0.0
            for name, lines in ended.items():
                # One that was not there before had no lines ended then.
                done += (lines - first.setdefault(name, lines if not points else 0)) * (
                    costs.get(name) or cost
                )
            if len(points) == 1 and done == points[0][1]:
                points[0] = (at_s, done)
            else:
                points.append((at_s, done))
        return rate_of(points)


class Lanes:
    """The open batches of all lanes, as they were last seen."""

    def __init__(self, config: BatchesConfig) -> None:
        self._config = config
        self._open: dict[str, dict[str, Batch]] = {}
        self._heard: dict[str, set[str]] = {}
        self._paces: dict[str, LanePace] = {}

    def seen(self, batches: Iterable[Batch], *, at_s: float) -> None:
        """Take what stands in all records."""
        before, self._open = self._open, {}
        self._heard.clear()
        known: dict[str, dict[str, Batch]] = {}
        for batch in batches:
            if not batch.has_ended:
                self._open.setdefault(batch.lane, {})[batch.id] = batch
            if not batch.has_ended or batch.id in before.get(batch.lane, {}):
                known.setdefault(batch.lane, {})[batch.id] = batch
        self._paces = {lane: self._paces.get(lane) or LanePace() for lane in self._open}
        for lane, pace in self._paces.items():
            pace.note(known[lane], at_s=at_s)

    def heard(self, lane: str, batch_id: str) -> None:
        """Somebody wrote a record: of a batch that was not seen yet, until the next look."""
        heard = self._heard.setdefault(lane, set())
        if batch_id not in self._open.get(lane, {}) and len(heard) < HEARD_MAX:
            heard.add(batch_id)

    def others(self, batch: Batch) -> list[Batch]:
        """List the lane's other open batches."""
        open_ = self._open.get(batch.lane, {})
        return [one for one in open_.values() if one.id != batch.id]

    def rate(self, batch: Batch) -> Rate | None:
        """Tell the pace of a batch's lane, in weighted tokens a second; None: not known."""
        pace = self._paces.get(batch.lane)
        costs = {one.id: line_cost(one) for one in (*self.others(batch), batch)}
        return None if pace is None else pace.rate(costs, cost=mean_cost(costs.values()))

    def forecast(self, batch: Batch, own: Rate | None, *, at_s: float) -> Forecast | None:
        """Tell what is left of a batch; None while no pace is known. `own`: in lines, its own."""
        others, rate = self.others(batch), self.rate(batch)
        costs = [line_cost(one) for one in (batch, *others)]
        cost = costs[0] or mean_cost(costs)
        if rate is None and own is not None and not others:
            rate = Rate(own.a_second * cost, own.spread)  # As good, and known sooner.
        work = shared_work(batch, others, cost=cost)
        found = forecast(work, rate, left_s=batch.deadline_at_s - at_s, at_s=at_s)
        if found is None or rate is None:
            return None
        return replace(found, lane_lines_s=rate.a_second / cost)

    def lines_waiting_max(self, lane: str) -> int:
        """Tell how many lines each batch of a lane may keep waiting for their start."""
        batches = len(self._open.get(lane, {})) + len(self._heard.get(lane, ()))
        return max(LINES_WAITING_MIN, self._config.lines_waiting_max // max(1, batches))


def mean_cost(costs: Iterable[float]) -> float:
    """Tell the mean of those that are known; 1 without any, so that lines are counted."""
    known = [cost for cost in costs if cost]
    return sum(known) / len(known) if known else 1.0
