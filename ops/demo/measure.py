"""What came of a run, taken from the durable records and from what the client saw."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from broker.bus.base import Bus
from broker.wire import subjects
from broker.wire.codec import MalformedMessage, decode
from broker.wire.messages import Kind, TerminalRecord


@dataclass(slots=True)
class Seen:
    """What the load's own clients saw."""

    submitted: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """(lane, job id) of every accepted chat."""
    batch_lines: int = 0
    """Lines of the batch, each a job; ..."""
    batch_results: int = 0
    """... and lines of its output and error files."""
    ttft_s: list[float] = field(default_factory=list[float])
    """Submission to first token of each streamed chat."""
    rejected: int = 0
    ends: Counter[str] = field(default_factory=Counter[str])
    """Ends heard per job id."""
    span_s: float = 0.0
    """First submission to last end."""


@dataclass(frozen=True, slots=True)
class LaneRecords:
    """One lane's durable outcome."""

    lane: str
    records: tuple[TerminalRecord, ...]
    doubled: int
    """Jobs with more than one record."""
    queued: int
    """Job messages still in the lane's streams."""


async def read_lane(bus: Bus, lane: str, *, bands: Iterable[int]) -> LaneRecords:
    """Read every terminal record of a lane. Raises BusError."""
    stream = subjects.results_stream(lane)
    records: list[TerminalRecord] = []
    times: Counter[str] = Counter()
    async for stored in bus.messages(stream):
        times[stored.subject] += 1
        try:
            records.append(decode(stored.data, TerminalRecord))
        except MalformedMessage:
            continue  # Its job counts as lost: nobody can read its answer.
    queued = 0
    for name in sorted({subjects.jobs_stream(lane, band) for band in bands}):
        queued += (await bus.stream_state(name)).messages
    doubled = sum(count - 1 for count in times.values())
    return LaneRecords(lane, tuple(records), doubled, queued)


def report(
    seen: Seen, lanes: Sequence[LaneRecords], *, policy: str, engine: str, slots: int
) -> dict[str, object]:
    """Put the figures together. Times in seconds, shares in 0..1."""
    records = [record for lane in lanes for record in lane.records]
    have = {(record.lane, record.job) for record in records}
    kinds = Counter(record.kind for record in records)
    done = [record for record in records if record.kind is Kind.COMPLETED]
    prompt_tokens = sum(record.usage.prompt_tokens for record in done)
    output_tokens = sum(record.usage.output_tokens for record in done)
    cached_tokens = sum(record.usage.cached_tokens for record in done)
    waits_s = [max(0.0, record.dispatched_at_s - record.submitted_at_s) for record in done]
    batch_lost = max(0, seen.batch_lines - seen.batch_results)
    return {
        "jobs_submitted": len(seen.submitted) + seen.batch_lines,
        "jobs_completed": kinds[Kind.COMPLETED],
        "jobs_failed": kinds[Kind.FAILED] + kinds[Kind.DEAD_LETTERED] + kinds[Kind.EXPIRED],
        "jobs_rejected": seen.rejected,
        "jobs_retried": sum(bool(record.failures) for record in records),
        "results_duplicate": sum(lane.doubled for lane in lanes) + _second_ends(seen),
        "jobs_lost": sum(job not in have for job in seen.submitted) + batch_lost,
        "jobs_left_queued": sum(lane.queued for lane in lanes),
        "ttft_s": {"p50": quantile(seen.ttft_s, 0.5), "p99": quantile(seen.ttft_s, 0.99)},
        "queue_s": {"p50": quantile(waits_s, 0.5), "p99": quantile(waits_s, 0.99)},
        "cached_token_ratio": cached_tokens / prompt_tokens if prompt_tokens else 0.0,
        "utilisation_std": _utilisation_std(done, span_s=seen.span_s, slots=slots),
        "throughput_tokens_s": (prompt_tokens + output_tokens) / seen.span_s if seen.span_s else 0,
        "span_s": seen.span_s,
        "policy": policy,
        "engine": engine,
        "per_worker": _per_worker(done),
        "by_lane_and_band": _by_lane_and_band(records),
    }


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0..1) of `values` lie; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _second_ends(seen: Seen) -> int:
    return sum(count - 1 for count in seen.ends.values() if count > 1)


def _per_worker(done: Sequence[TerminalRecord]) -> dict[str, dict[str, float]]:
    per_worker: dict[str, dict[str, float]] = {}
    for record in done:
        worker = per_worker.setdefault(
            record.worker, {"jobs": 0, "prompt_tokens": 0, "cached_tokens": 0, "busy_s": 0.0}
        )
        worker["jobs"] += 1
        worker["prompt_tokens"] += record.usage.prompt_tokens
        worker["cached_tokens"] += record.usage.cached_tokens
        worker["busy_s"] += max(0.0, record.ended_at_s - record.dispatched_at_s)
    return dict(sorted(per_worker.items()))


def _by_lane_and_band(records: Sequence[TerminalRecord]) -> list[dict[str, object]]:
    counts: dict[tuple[str, int], Counter[str]] = {}
    for record in records:
        counts.setdefault((record.lane, record.band), Counter())[record.kind.value] += 1
    return [
        {"lane": lane, "band": band, **dict(count)}
        for (lane, band), count in sorted(counts.items())
    ]


def _utilisation_std(done: Sequence[TerminalRecord], *, span_s: float, slots: int) -> float:
    """Spread between workers of the share of slot time in use."""
    busy = [worker["busy_s"] for worker in _per_worker(done).values()]
    if not busy or not span_s:
        return 0.0
    return statistics.pstdev(seconds / (span_s * slots) for seconds in busy)
