"""How soon work must go on after a fault, and whether it did. Pure.

A fault is judged alone: where the one before it was not waited for, the next one came before the
bound was over, or the machine was crowded meanwhile, a miss says nothing of the product and counts
as disturbed.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from ops.chaos.checker import Strike
from ops.chaos.history import Acked, Held, HistoryEvent, Recorded, Submitted, Taken
from ops.chaos.moments import held_by, since, until_all_go_on
from ops.chaos.plan import Kind
from ops.chaos.setting import CROWDED_SHARE_MIN, CROWDED_TIMES_MAX, Setting


class Promise(StrEnum):
    """What is bounded."""

    KILLED_WORKER = "killed_worker"
    """From a worker's kill until the last job that it held was taken again or had ended."""
    DEAD_LEADER = "dead_leader"
    """From a leader's kill until the last job that it held was taken by a worker or had ended."""
    LEADER_LEFT = "leader_left"
    """From when a leader is asked to end until a worker takes a job from the next one."""
    AGENT_BACK = "agent_back"
    """From an agent's start under an old name until it takes a job."""
    NATS_BACK = "nats_back"
    """From when the servers say they are ready, after 10 s, until a worker takes a job."""


WORDS = {
    Promise.KILLED_WORKER: "a killed worker's jobs run elsewhere",
    Promise.DEAD_LEADER: "what a dead leader held is dispatched",
    Promise.LEADER_LEFT: "a leader that is asked to end hands over",
    Promise.AGENT_BACK: "an agent that is started again takes jobs",
    Promise.NATS_BACK: "work goes on after NATS was away for 10 s",
}

PROMISED = {
    Kind.KILL_WORKER: (Promise.KILLED_WORKER, Promise.AGENT_BACK),
    Kind.TERM_WORKER: (Promise.AGENT_BACK,),
    Kind.KILL_LEADER: (Promise.DEAD_LEADER,),
    Kind.TERM_LEADER: (Promise.LEADER_LEFT,),
    Kind.LOSE_NATS: (Promise.NATS_BACK,),
}
"""What is promised after which kind of fault."""


GIVEN_ROOM = frozenset({Promise.KILLED_WORKER, Promise.DEAD_LEADER})
"""Promised of jobs that find a free worker."""


@dataclass(frozen=True, slots=True)
class Timed:
    """How long one fault's promise took."""

    promise: Promise
    strike: Strike
    limit_s: float
    took_s: float
    """Infinite: it never came."""
    disturbed: bool
    """By another fault or a crowd: then only a time within the limit says something."""

    @property
    def judged(self) -> bool:
        """Whether it says something of the product."""
        return self.took_s <= self.limit_s or not self.disturbed

    @property
    def missed(self) -> bool:
        """Whether it took longer than promised, and nothing else was the reason."""
        return self.took_s > self.limit_s and not self.disturbed


def timed(
    history: Sequence[HistoryEvent],
    strikes: Sequence[Strike],
    *,
    setting: Setting,
    loaded_until_s: float = inf,
    has_room: bool = True,
    crowd: Callable[[float, float], float] = lambda _from_s, _to_s: 0.0,
) -> tuple[Timed, ...]:
    """Time all that is promised. `history` is in the order of time, as are `strikes`.

    `loaded_until_s`: when the producers were told to stop; without load nothing has to go on.
    `has_room`: with one worker gone there are slots for all that may run; without them nothing is
    promised of when jobs are dispatched.
    `crowd`: the share of a time, from and until, in which something waited for a processor.
    """
    found: list[Timed] = []
    for number, strike in enumerate(strikes):
        next_at_s = strikes[number + 1].at_s if number + 1 < len(strikes) else loaded_until_s
        for promise in PROMISED.get(strike.kind, ()):
            if promise in GIVEN_ROOM and not has_room:
                continue
            limit_s, (from_s, took_s) = _limit_s(promise, setting), _TIMES[promise](history, strike)
            due_s = from_s + limit_s
            alone = due_s <= next_at_s and not strike.in_midst
            slowed = took_s <= CROWDED_TIMES_MAX * limit_s and (
                crowd(from_s, due_s) > CROWDED_SHARE_MIN
            )
            found.append(Timed(promise, strike, limit_s, took_s, slowed or not alone))
    return tuple(found)


def _limit_s(promise: Promise, setting: Setting) -> float:
    match promise:
        case Promise.KILLED_WORKER:
            return setting.killed_worker_s_max
        case Promise.DEAD_LEADER:
            return setting.dead_leader_s_max
        case Promise.LEADER_LEFT:
            return setting.leader_left_s_max
        case Promise.AGENT_BACK:
            return setting.agent_back_s_max
        case Promise.NATS_BACK:
            return setting.nats_back_s_max


# ---- how long it took: since when, and the time ----


def _killed_worker(history: Sequence[HistoryEvent], strike: Strike) -> tuple[float, float]:
    before, after = since(history, strike.at_s)
    return strike.at_s, until_all_go_on(after, held_by(before, strike.member), strike.at_s)


def _dead_leader(history: Sequence[HistoryEvent], strike: Strike) -> tuple[float, float]:
    before, after = since(history, strike.at_s)
    return strike.at_s, until_all_go_on(after, _waiting_at(before, strike.member), strike.at_s)


def _waiting_at(before: Iterable[HistoryEvent], broker: str) -> set[str]:
    """Name the jobs that a broker had pulled, and that no worker had taken from it.

    What was pulled on its way to the ack that ended it waits for nothing.
    """
    waiting: set[str] = set()
    ended: set[str] = set()
    for event in before:
        match event:
            case Submitted(job=job):
                ended.discard(job)
            case Held(job=job, by=holder) if job not in ended:
                (waiting.add if holder == broker else waiting.discard)(job)
            case Taken(job=job):
                waiting.discard(job)
            case Recorded(job=job) | Acked(job=job):
                waiting.discard(job)
                ended.add(job)
            case _:
                pass
    return waiting


def _leader_left(history: Sequence[HistoryEvent], strike: Strike) -> tuple[float, float]:
    before, after = since(history, strike.at_s)
    epoch = max((one.epoch for one in _taken(before)), default=0)
    return strike.at_s, _first((one for one in _taken(after) if one.epoch > epoch), strike.at_s)


def _agent_back(history: Sequence[HistoryEvent], strike: Strike) -> tuple[float, float]:
    _, after = since(history, strike.back_at_s)
    taken = (one for one in _taken(after) if one.worker == strike.member)
    return strike.back_at_s, _first(taken, strike.back_at_s)


def _nats_back(history: Sequence[HistoryEvent], strike: Strike) -> tuple[float, float]:
    _, after = since(history, strike.over_at_s)
    return strike.over_at_s, _first(_taken(after), strike.over_at_s)


def _taken(events: Iterable[HistoryEvent]) -> Iterable[Taken]:
    return (event for event in events if isinstance(event, Taken))


def _first(events: Iterable[HistoryEvent], from_s: float) -> float:
    first = next(iter(events), None)
    return inf if first is None else first.at_s - from_s


_TIMES: dict[Promise, Callable[[Sequence[HistoryEvent], Strike], tuple[float, float]]] = {
    Promise.KILLED_WORKER: _killed_worker,
    Promise.DEAD_LEADER: _dead_leader,
    Promise.LEADER_LEFT: _leader_left,
    Promise.AGENT_BACK: _agent_back,
    Promise.NATS_BACK: _nats_back,
}


# ---- as it is reported ----


def figures(times: Iterable[Timed]) -> dict[str, dict[str, object]]:
    """Sum up by promise and kind of fault. Times in seconds, of those that are judged."""
    sums: dict[str, dict[str, object]] = {}
    by_promise: dict[Promise, list[Timed]] = defaultdict(list)
    for one in times:
        by_promise[one.promise].append(one)
    for promise, all_of_it in sorted(by_promise.items()):
        sums[promise.value] = {"limit_s": all_of_it[0].limit_s}
        for kind in sorted({one.strike.kind for one in all_of_it}):
            sums[promise.value][kind.value] = _sum([x for x in all_of_it if x.strike.kind == kind])
    return sums


def _sum(times: Sequence[Timed]) -> dict[str, object]:
    judged = [one for one in times if one.judged]
    took_s = sorted(one.took_s for one in judged if one.took_s < inf)
    return {
        "judged": len(judged),
        "missed": sum(one.missed for one in judged),
        "disturbed": len(times) - len(judged),
        "p50": round(took_s[len(took_s) // 2], 3) if took_s else 0.0,
        "max": round(took_s[-1], 3) if took_s else 0.0,
    }


def told(times: Iterable[Timed]) -> list[str]:
    """Say which promises were not kept, a line each, and how many times say nothing."""
    times = tuple(times)
    silent = sum(1 for one in times if not one.judged)
    why = "another fault came in their midst, or the machine was crowded"
    lines = [f"{silent} of {len(times)} recoveries say nothing: {why}."] if silent else []
    return lines + [
        f"  too late: {WORDS[one.promise]} within {one.limit_s:g} s, but after fault "
        f"{one.strike.number} ({one.strike.kind.value} {one.strike.member}) {_how_late(one)}"
        for one in times
        if one.missed
    ]


def _how_late(one: Timed) -> str:
    return "never" if one.took_s == inf else f"it took {one.took_s:.1f} s"
