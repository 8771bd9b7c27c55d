"""What the histories of a chaos run say was lost, doubled, stuck, run again, over quota, unfenced.

Pure: histories and what is left at the end go in, a verdict comes out. It trusts no ledger of the
product: runs are told by the engines, records and acknowledgements by the bus, ends by producers.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

from broker.wire.messages import Kind as End
from ops.chaos.history import (
    Accepted,
    HistoryEvent,
    Mixed,
    Recorded,
    RunBegan,
    RunEnded,
    Taken,
)
from ops.chaos.plan import LEASES_DOUBTED, RERUNS_ALLOWED, Kind
from ops.chaos.setting import Row

FAILED = "failed"
"""How a run ended whose engine failed it; another may follow."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault as it happened."""

    number: int
    kind: Kind
    member: str
    """Process that it hit; empty: none in particular."""
    at_s: float
    over_at_s: float
    """When what was done was undone: the process back, the link mended, the engine well."""
    step: str = ""
    """Of a job's life, in whose midst the process died."""
    back_at_s: float = 0.0
    """When a process that was ended was started again; 0: none was."""
    in_midst: bool = False
    """It came before the recovery of the one before was waited for."""


@dataclass(frozen=True, slots=True)
class Remains:
    """What stands in the cluster once all is quiet."""

    recorded: dict[str, int] = field(default_factory=dict[str, int])
    """Terminal records by job key."""
    queued: frozenset[str] = frozenset()
    """Jobs whose message is still in its stream."""
    lines_lost: tuple[str, ...] = ()
    """Batch lines without a result in the files of their batch; ..."""
    lines_doubled: tuple[str, ...] = ()
    """... and those with more than one."""
    miscounted: tuple[str, ...] = ()
    """Rows in which the lanes' accounts are not the sum of their records."""


@dataclass(frozen=True, slots=True)
class Rerun:
    """A job that an engine began again."""

    job: str
    worker: str
    """Where it had run before."""
    began_at_s: float
    again_at_s: float
    because: str
    """The fault that allows it; empty: none does."""


@dataclass(frozen=True, slots=True)
class Overshoot:
    """More jobs at once than a row allows."""

    lane: str
    jobs: int
    jobs_max: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found; job keys, sorted."""

    jobs: int
    """Accepted."""
    lost: tuple[str, ...]
    duplicate_results: tuple[str, ...]
    stuck: tuple[str, ...]
    reruns: tuple[Rerun, ...]
    overshoots: tuple[Overshoot, ...]
    out_of_fence: tuple[str, ...]
    miscounted: tuple[str, ...] = ()

    @property
    def unexplained(self) -> tuple[Rerun, ...]:
        """Reruns that no fault allows."""
        return tuple(rerun for rerun in self.reruns if not rerun.because)

    @property
    def is_clean(self) -> bool:
        """Whether nothing is there that must not be."""
        found = (
            self.lost,
            self.duplicate_results,
            self.stuck,
            self.unexplained,
            self.overshoots,
            self.out_of_fence,
            self.miscounted,
        )
        return not any(found)


def check(
    history: Sequence[HistoryEvent],
    strikes: Sequence[Strike],
    remains: Remains,
    *,
    rows: Sequence[Row] = (),
) -> Verdict:
    """Judge a run. `history` is in the order of time."""
    accepted = {event.job for event in history if isinstance(event, Accepted)}
    ended = remains.recorded.keys() | _rejected(history)
    stuck = {job for job in accepted - ended if job in remains.queued} | remains.queued
    doubled = _doubled(history, remains)
    return Verdict(
        jobs=len(accepted),
        lost=(*sorted(accepted - ended - stuck), *remains.lines_lost),
        duplicate_results=(*doubled, *remains.lines_doubled),
        stuck=tuple(sorted(stuck)),
        reruns=tuple(_reruns(history, strikes)),
        overshoots=tuple(_overshoots(history, strikes, rows)),
        out_of_fence=tuple(sorted(_out_of_fence(history))),
        # Of a job with two records, one of which stands, both were counted.
        miscounted=() if doubled else remains.miscounted,
    )


def _rejected(history: Iterable[HistoryEvent]) -> set[str]:
    """Find jobs that were turned away: their record runs out by itself."""
    return {
        event.job
        for event in history
        if isinstance(event, Recorded) and event.won and event.kind == End.REJECTED
    }


def _doubled(history: Iterable[HistoryEvent], remains: Remains) -> list[str]:
    """Find jobs with a second record. A rejection's may be followed by another try's."""
    results: dict[str, int] = defaultdict(int)
    for event in history:
        if isinstance(event, Recorded) and event.won and event.kind != End.REJECTED:
            results[event.job] += 1
    doubled = {job for job, count in results.items() if count > 1}
    return sorted(doubled | {job for job, count in remains.recorded.items() if count > 1})


# ---- reruns ----


@dataclass(frozen=True, slots=True)
class _Leased:
    """A run, and since when its worker had the job."""

    run: RunBegan
    since_s: float
    how: str
    """It ended; empty: it died with its process."""


def _reruns(history: Sequence[HistoryEvent], strikes: Sequence[Strike]) -> list[Rerun]:
    """Pair each run of a job with the next, by when their workers took it.

    A worker that was stopped may begin its run after the one that took its place.
    """
    return [
        Rerun(
            first.run.job,
            first.run.worker,
            first.run.at_s,
            second.run.at_s,
            _because(first, second, strikes),
        )
        for runs in _leased_runs(history).values()
        for first, second in pairwise(sorted(runs, key=lambda leased: leased.since_s))
    ]


def _leased_runs(history: Sequence[HistoryEvent]) -> dict[str, list[_Leased]]:
    runs: dict[str, list[_Leased]] = defaultdict(list)
    taken: dict[tuple[str, str, int], float] = {}
    hows = {
        (event.worker, event.life, event.run): event.how
        for event in history
        if isinstance(event, RunEnded)
    }
    for event in history:
        match event:
            case Taken(job=job, worker=worker, life=life):
                taken[job, worker, life] = event.at_s
            case RunBegan(job=job, worker=worker, life=life):
                since_s = taken.get((job, worker, life), event.at_s)
                how = hows.get((worker, life, event.run), "")
                runs[job].append(_Leased(event, since_s, how))
            case _:
                pass
    return runs


def _because(first: _Leased, second: _Leased, strikes: Sequence[Strike]) -> str:
    """Name what allows a second lease: the first one's worker was hit while it had the job."""
    because = FAILED if first.how == FAILED else ""
    for strike in strikes:
        hits = strike.member == first.run.worker and strike.kind in RERUNS_ALLOWED
        # That it is leased again may come much later.
        if hits and first.since_s <= strike.over_at_s and strike.at_s <= second.since_s:
            because = strike.kind.value
    return because


# ---- quotas ----


def _overshoots(
    history: Sequence[HistoryEvent], strikes: Sequence[Strike], rows: Sequence[Row]
) -> list[Overshoot]:
    """Find the worst overshoot of each row.

    A job counts from its start in the engine to its end there, or to the first fault that puts its
    lease in doubt: from then on the broker may know better. So it never counts for longer than its
    lease.
    """
    found: list[Overshoot] = []
    spans = _spans(history, strikes)
    for row in rows:
        moments = sorted(
            moment
            for lane, start_s, end_s in spans
            if lane == row.lane
            for moment in ((start_s, 1), (end_s, -1))
        )
        jobs, worst = 0, Overshoot(row.lane, 0, row.jobs_max, 0.0)
        for at_s, change in moments:
            jobs += change
            if jobs > max(worst.jobs, row.jobs_max):
                worst = Overshoot(row.lane, jobs, row.jobs_max, at_s)
        if worst.jobs:
            found.append(worst)
    return found


def _spans(
    history: Sequence[HistoryEvent], strikes: Sequence[Strike]
) -> list[tuple[str, float, float]]:
    """Tell of each run its lane, when it began and until when it surely counts."""
    last_at_s = history[-1].at_s if history else 0.0
    doubts: dict[str, list[Strike]] = defaultdict(list)
    for strike in strikes:
        if strike.kind in LEASES_DOUBTED:
            doubts[strike.member].append(strike)
    ends = {
        (event.worker, event.life, event.run): event.at_s
        for event in history
        if isinstance(event, RunEnded)
    }
    spans: list[tuple[str, float, float]] = []
    for leased in chain.from_iterable(_leased_runs(history).values()):
        run = leased.run
        end_s = ends.get((run.worker, run.life, run.run), last_at_s)
        doubted_s = [
            max(run.at_s, strike.at_s)
            for strike in doubts[run.worker]
            if strike.over_at_s >= leased.since_s
        ]
        spans.append((run.job.partition(".")[0], run.at_s, min([end_s, *doubted_s])))
    return spans


# ---- the fence ----


def _out_of_fence(history: Iterable[HistoryEvent]) -> set[str]:
    """Find jobs that were accepted from a broker that led no more, or shown out of turn."""
    found: set[str] = set()
    latest: dict[tuple[str, int], tuple[int, int]] = {}
    for event in history:
        match event:
            case Taken():
                life, order = (event.worker, event.life), (event.epoch, event.number)
                if event.epoch < event.epoch_known or order <= latest.get(life, (0, 0)):
                    found.add(event.job)
                latest[life] = max(order, latest.get(life, (0, 0)))
            case Mixed():
                found.add(event.job)
            case _:
                pass
    return found
