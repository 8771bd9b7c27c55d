"""The plan of a chaos run: which fault comes when, made from a seed alone.

Each kind comes once before any comes twice, in an order of the seed's own, so that a long plan hits
all kinds evenly and a short one differs from seed to seed.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What is done to whom."""

    KILL_LEADER = "kill_leader"
    TERM_LEADER = "term_leader"
    PAUSE_LEADER = "pause_leader"
    ZOMBIE_LEADER = "zombie_leader"
    """Stopped until another leads, then woken."""
    KILL_STANDBY = "kill_standby"
    KILL_WORKER = "kill_worker"
    TERM_WORKER = "term_worker"
    PAUSE_WORKER = "pause_worker"
    SILENCE_WORKER = "silence_worker"
    """Stopped for longer than a suspect is waited for, then woken."""
    REPLACE_WORKER = "replace_worker"
    """A second one starts under the same name while the first runs."""
    KILL_NATS = "kill_nats"
    TERM_NATS = "term_nats"
    PAUSE_NATS = "pause_nats"
    KILL_STREAM_NATS = "kill_stream_nats"
    """The server that leads a stream of jobs, of records, or of the leader's key."""
    KILL_META_NATS = "kill_meta_nats"
    """The server that leads the cluster of servers."""
    LOSE_NATS = "lose_nats"
    """Killed, and down for ten seconds."""
    KILL_PRODUCER = "kill_producer"
    TERM_PRODUCER = "term_producer"
    PAUSE_PRODUCER = "pause_producer"
    CUT_LEADER = "cut_leader"
    CUT_WORKER = "cut_worker"
    CUT_PRODUCER = "cut_producer"
    PART_WORKER = "part_worker"
    """Cut off for longer than a suspect is waited for."""
    DELAY_LEADER = "delay_leader"
    DELAY_WORKER = "delay_worker"
    SLOW_ENGINE = "slow_engine"
    HANG_ENGINE = "hang_engine"
    CRASH_ENGINE = "crash_engine"
    MALFORMED = "malformed"
    FULL_RESULTS = "full_results"
    FULL_JOBS = "full_jobs"
    HIT_YOURS = "hit_yours"
    """In a cluster of others: one of the commands that its owner gave."""


OF_SEVERAL_SERVERS = frozenset({Kind.KILL_STREAM_NATS, Kind.KILL_META_NATS})
"""One server leads nothing."""


def kinds_of(nats_nodes: int) -> tuple[Kind, ...]:
    """List what can be done to a cluster of so many message servers."""
    own = (kind for kind in Kind if kind is not Kind.HIT_YOURS)
    return tuple(kind for kind in own if nats_nodes > 1 or kind not in OF_SEVERAL_SERVERS)


IN_OTHERS_CLUSTER = (
    Kind.KILL_PRODUCER,
    Kind.TERM_PRODUCER,
    Kind.PAUSE_PRODUCER,
    Kind.CUT_PRODUCER,
    Kind.MALFORMED,
)
"""What can be done in a cluster that others run, without touching what is theirs."""


DURATION_S: dict[Kind, tuple[float, float]] = {
    Kind.PAUSE_LEADER: (0.5, 2.0),
    Kind.ZOMBIE_LEADER: (7.0, 9.0),
    Kind.PAUSE_WORKER: (0.5, 2.0),
    Kind.SILENCE_WORKER: (12.0, 14.0),
    Kind.KILL_NATS: (0.0, 1.0),
    Kind.TERM_NATS: (0.0, 1.0),
    Kind.KILL_STREAM_NATS: (0.0, 1.0),
    Kind.KILL_META_NATS: (0.0, 1.0),
    Kind.PAUSE_NATS: (0.5, 3.0),
    Kind.LOSE_NATS: (10.0, 10.0),
    Kind.PAUSE_PRODUCER: (0.5, 3.0),
    Kind.CUT_LEADER: (0.1, 2.0),
    Kind.CUT_WORKER: (0.1, 2.0),
    Kind.CUT_PRODUCER: (0.1, 3.0),
    Kind.PART_WORKER: (12.0, 14.0),
    Kind.DELAY_LEADER: (2.0, 4.0),
    Kind.DELAY_WORKER: (2.0, 4.0),
    Kind.SLOW_ENGINE: (2.0, 4.0),
    Kind.HANG_ENGINE: (6.0, 7.0),
    Kind.CRASH_ENGINE: (0.5, 2.0),
    Kind.FULL_RESULTS: (1.0, 3.0),
    Kind.FULL_JOBS: (1.0, 3.0),
}
"""Shortest and longest; all others are over when their process is back. Against the defaults that
chaos runs with: a leader's key stands for 5 s, a silent worker is waited for 10 s, and against its
`stall_s`, 5 s."""

RERUNS_ALLOWED = frozenset(
    {
        Kind.KILL_WORKER,
        Kind.SILENCE_WORKER,
        Kind.REPLACE_WORKER,
        Kind.PART_WORKER,
        Kind.HANG_ENGINE,
        Kind.CRASH_ENGINE,
    }
)
"""A job of the worker that is hit may run again; after all other faults none may."""

LEASES_DOUBTED = frozenset(
    {
        Kind.KILL_WORKER,
        Kind.TERM_WORKER,
        Kind.PAUSE_WORKER,
        Kind.SILENCE_WORKER,
        Kind.REPLACE_WORKER,
        Kind.CUT_WORKER,
        Kind.PART_WORKER,
    }
)
"""While such a fault lasts, what runs in its worker's engine may be leased to it no more."""

WORKER_PLACES = {
    "dispatch": ("publish:before:_INBOX", "publish:after:_INBOX"),
    "run": ("last_message:before:RESULTS", "last_message:after:RESULTS"),
    "record": ("append:before:results.", "append:after:results."),
    "ack": ("ack:before:", "ack:after:"),
    "done": ("publish:before:wrk.", "publish:after:wrk."),
}
"""Where a worker may be killed: before or after a call to the bus, by step of a job's life. The
fields are those of `spy.Place`."""

LEADER_PLACES = {
    "hold": ("deliver:before:", "deliver:after:"),
    "dispatch": ("request:before:work.", "request:after:work."),
    "record": ("append:before:results.", "append:after:results."),
    "ack": ("ack:before:", "ack:after:"),
    "done": ("hear:before:wrk.*.note", "hear:after:wrk.*.note"),
}
"""The same of a leader, which writes the records of jobs whose time is over."""

PRODUCER_PLACES = {"submit": ("append:before:jobs.", "append:after:jobs.")}

PLACES = {"worker": WORKER_PLACES, "leader": LEADER_PLACES, "producer": PRODUCER_PLACES}
"""By the part that its process plays."""

DIES_THERE = frozenset({Kind.KILL_WORKER, Kind.KILL_LEADER, Kind.KILL_PRODUCER})
"""Such a process kills itself, at the very place."""

STANDS_THERE = frozenset(
    {
        Kind.TERM_LEADER,
        Kind.TERM_WORKER,
        Kind.TERM_PRODUCER,
        Kind.PAUSE_LEADER,
        Kind.ZOMBIE_LEADER,
        Kind.PAUSE_WORKER,
        Kind.SILENCE_WORKER,
        Kind.KILL_NATS,
        Kind.TERM_NATS,
        Kind.KILL_STREAM_NATS,
        Kind.KILL_META_NATS,
        Kind.PAUSE_NATS,
        Kind.LOSE_NATS,
        Kind.PAUSE_PRODUCER,
        Kind.CUT_LEADER,
        Kind.CUT_WORKER,
        Kind.CUT_PRODUCER,
        Kind.PART_WORKER,
    }
)
"""Here a process stands still at a place until the fault has come: the one that is hit, or of those
that the server serves any."""

DOWN_S = (0.0, 1.0)
"""How long a process that was ended is down before it starts again, as by a supervisor; ..."""

AWAY_S = (6.0, 8.0)
"""... or for longer than others wait for it: a leader's key and a worker's lease run out."""

AWAY_SHARE = 0.3

SOON_SHARE = 0.3

AIMED_SHARE = 0.75
"""Of these, so many come at a place; the others come whenever they come."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, before it is known whom it hits."""

    number: int
    kind: Kind
    for_s: float = 0.0
    pick: float = 0.0
    """Which of those it may hit: 0..1 of their list."""
    part: str = ""
    """Whose work it comes in the midst of: worker, leader, producer; empty: at any moment."""
    step: str = ""
    """At which step of a job's life, ..."""
    place: str = ""
    """... and at which place in the process."""
    down_s: float = 0.0
    """How long a process that was ended stays away."""
    soon: bool = False
    """The next one comes as soon as anything ends, perhaps in the midst of the recovery."""


def plan(seed: int, count: int, *, kinds: Sequence[Kind] = kinds_of(1)) -> tuple[Fault, ...]:
    """Plan `count` faults of these kinds."""
    rng = random.Random(seed)
    faults: list[Fault] = []
    left: list[Kind] = []
    aims = {part: _Aims(rng, places) for part, places in PLACES.items()}
    for number in range(count):
        if not left:
            left = rng.sample(kinds, len(kinds))
        faults.append(_fault(rng, number, left.pop(), aims))
    return tuple(faults)


class _Aims:
    """Steps of one part, each once before any twice."""

    def __init__(self, rng: random.Random, places: Mapping[str, tuple[str, ...]]) -> None:
        self._rng = rng
        self._places = places
        self._left: list[str] = []

    def next(self) -> tuple[str, str]:
        """Choose a step, and a place in it."""
        if not self._left:
            self._left = self._rng.sample(sorted(self._places), len(self._places))
        step = self._left.pop()
        return step, self._rng.choice(self._places[step])


def _fault(rng: random.Random, number: int, kind: Kind, aims: Mapping[str, _Aims]) -> Fault:
    part, step, place = _part(rng, kind), "", ""
    if part:
        step, place = aims[part].next()
    return Fault(
        number,
        kind,
        for_s=round(rng.uniform(*DURATION_S.get(kind, (0.0, 0.0))), 2),
        pick=rng.random(),
        part=part,
        step=step,
        place=place,
        soon=rng.random() < SOON_SHARE,
        down_s=round(rng.uniform(*(AWAY_S if rng.random() < AWAY_SHARE else DOWN_S)), 2),
    )


def _part(rng: random.Random, kind: Kind) -> str:
    """Choose in whose work a fault comes; empty where it may come at any moment."""
    if kind not in DIES_THERE | STANDS_THERE or rng.random() >= AIMED_SHARE:
        return ""
    hit = kind.value.rpartition("_")[2]
    return hit if hit in PLACES else rng.choice(sorted(PLACES))
