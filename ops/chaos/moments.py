"""Where jobs were in their lives when a fault hit, and how soon they went on. Pure.

Steps are those of the design: submit, hold, dispatch, run, record, ack, done.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from ops.chaos.checker import Strike
from ops.chaos.history import (
    Accepted,
    Acked,
    HistoryEvent,
    Ordered,
    Recorded,
    RunEnded,
    Submitted,
    Taken,
    Told,
)
from ops.chaos.plan import Kind

STEPS = ("submit", "hold", "dispatch", "run", "record", "ack", "done")

OF_WORKERS = frozenset({"dispatch", "run", "record", "ack"})
OF_LEADERS = frozenset({"hold", "dispatch", "done"})
OF_PRODUCERS = frozenset({"submit", "done"})
OF_ALL = frozenset(STEPS)

_WORKER_KINDS = frozenset(kind for kind in Kind if kind.value.endswith(("worker", "engine")))
_LEADER_KINDS = frozenset(kind for kind in Kind if kind.value.endswith("leader"))
_PRODUCER_KINDS = frozenset(kind for kind in Kind if kind.value.endswith("producer"))
_NOBODYS_KINDS = frozenset({Kind.KILL_STANDBY, Kind.MALFORMED})


@dataclass(frozen=True, slots=True)
class _Stay:
    """A job's time in one step."""

    step: str
    from_s: float
    to_s: float
    by: tuple[str, ...]
    """Worker or producer in whose hands it is; empty: in nobody's but the cluster's."""


def steps_hit(history: Sequence[HistoryEvent], strikes: Sequence[Strike]) -> Counter[str]:
    """Count for each step the faults that hit a job in it."""
    hit: Counter[str] = Counter(dict.fromkeys(STEPS, 0))
    stays = sorted(_stays(history), key=lambda stay: stay.from_s)
    begins = [stay.from_s for stay in stays]
    longest_s = max((stay.to_s - stay.from_s for stay in stays), default=0.0)
    for strike in strikes:
        first = bisect_right(begins, strike.at_s - longest_s - 1e-9)
        last = bisect_right(begins, strike.at_s)
        steps = {stay.step for stay in stays[first:last] if _is_hit(stay, strike)}
        for step in sorted(steps | ({strike.step} if strike.step else set())):
            hit[step] += 1
    return hit


def _is_hit(stay: _Stay, strike: Strike) -> bool:
    if strike.at_s >= stay.to_s or strike.kind in _NOBODYS_KINDS:
        return False
    if strike.kind in _WORKER_KINDS:
        return stay.step in OF_WORKERS and strike.member in stay.by
    if strike.kind in _PRODUCER_KINDS:
        return stay.step in OF_PRODUCERS and strike.member in stay.by
    return stay.step in (OF_LEADERS if strike.kind in _LEADER_KINDS else OF_ALL)


def _stays(history: Iterable[HistoryEvent]) -> list[_Stay]:
    """Cut each job's life into its steps, from what marks their beginnings."""
    stays: list[_Stay] = []
    lives: dict[str, list[tuple[float, str, str]]] = defaultdict(list)
    for event in history:
        mark = _mark(event)
        if mark is not None:
            job, step, by = mark
            lives[job].append((event.at_s, step, by))
    for marks in lives.values():
        producer = next((by for _, step, by in marks if step == "submit"), "")
        for (at_s, step, by), (next_s, _, _) in pairwise(marks):
            if step in OF_ALL:
                hands = (by, producer) if step == "done" else (by,)
                stays.append(_Stay(step, at_s, next_s, hands))
    return stays


def _mark(event: HistoryEvent) -> tuple[str, str, str] | None:
    """Tell which step begins for which job, in whose hands."""
    match event:
        case Submitted(job=job, by=by):
            return job, "submit", by
        case Accepted(job=job):
            return job, "hold", ""
        case Ordered(job=job, worker=worker):
            return job, "dispatch", worker
        case Taken(job=job, worker=worker):
            return job, "run", worker
        case RunEnded(job=job, worker=worker):
            return job, "record", worker
        case Recorded(job=job, by=by):
            return job, "ack", by
        case Acked(job=job, by=by):
            return job, "done", by
        case Told(job=job, by=by):
            return job, "", by
        case _:
            return None


def recoveries_s(history: Sequence[HistoryEvent], strikes: Sequence[Strike]) -> dict[int, float]:
    """Tell for each fault, by number, how long it took until work went on.

    Of a worker's fault: until the last job that it held was dispatched again or had ended, counted
    from the fault. Of a leader's that cost it the lead: until the first order of a later epoch,
    counted from the fault. Of all others: until the first record after the fault was over; where
    records are written by others, until a producer was told of one.
    """
    found: dict[int, float] = {}
    seen = any(isinstance(event, Recorded) for event in history)
    for strike in strikes:
        recovery_s = _recovery_s(history, strike, end=Recorded if seen else Told)
        if recovery_s is not None:
            found[strike.number] = recovery_s
    return found


def _recovery_s(
    history: Sequence[HistoryEvent], strike: Strike, *, end: type[Recorded | Told]
) -> float | None:
    before, after = since(history, strike.at_s)
    if strike.kind in _WORKER_KINDS:
        recovery_s = until_all_go_on(after, held_by(before, strike.member), strike.at_s)
        return recovery_s if recovery_s < inf else None
    if strike.kind in (Kind.KILL_LEADER, Kind.TERM_LEADER, Kind.ZOMBIE_LEADER):
        epoch = max((one.attempt.epoch for one in _orders(before)), default=0)
        later = (one.at_s for one in _orders(after) if one.attempt.epoch > epoch)
        at_s = next(later, None)
        return None if at_s is None else at_s - strike.at_s
    ends = (
        event.at_s for event in after if isinstance(event, end) and event.at_s >= strike.over_at_s
    )
    at_s = next(ends, None)
    return None if at_s is None else at_s - strike.over_at_s


def _orders(events: Iterable[HistoryEvent]) -> Iterator[Ordered]:
    return (event for event in events if isinstance(event, Ordered))


def since(
    history: Sequence[HistoryEvent], at_s: float
) -> tuple[Sequence[HistoryEvent], Sequence[HistoryEvent]]:
    """Part a history, which is in the order of time, in what was until then and what came after."""
    first = bisect_right(history, at_s, key=lambda event: event.at_s)
    return history[:first], history[first:]


def held_by(before: Iterable[HistoryEvent], worker: str) -> set[str]:
    """Name the jobs that a worker had accepted and that had no record yet."""
    held: set[str] = set()
    recorded: set[str] = set()
    for event in before:
        match event:
            case Taken(job=job, worker=taker) if job not in recorded:
                (held.add if taker == worker else held.discard)(job)
            case Recorded(job=job) | Acked(job=job):
                # Who died between its record and its word of it leaves the ack to another.
                recorded.add(job)
                held.discard(job)
            case _:
                pass
    return held


def until_all_go_on(after: Iterable[HistoryEvent], held: set[str], from_s: float) -> float:
    """Tell how long it took until each of these was taken or had ended; infinite: one never was.

    0 when there are none.
    """
    waiting = set(held)
    for event in after:
        match event:
            case Taken(job=job) | Recorded(job=job) | Acked(job=job) if job in waiting:
                waiting.discard(job)
                if not waiting:
                    return event.at_s - from_s
            case _:
                pass
    return inf if waiting else 0.0
