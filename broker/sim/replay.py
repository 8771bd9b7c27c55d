"""Yesterday's traffic once more: logged jobs become a workload, and a run is set beside the log.

Three views of the same jobs: as logged, simulated as it ran, simulated under something else. The
first two differ by what the simulation gets wrong, the last two by what the change would bring. Of
a job that never ran nobody knows how long its answer would have been: the mean of its lane's.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from msgspec import Struct
from msgspec.structs import replace

from broker.core.decisions import Cancel, DeadLetter, Decision, Expire, FailStream, Reject
from broker.core.events import Event
from broker.core.policy import LanePolicy, Policy, QuotaRow
from broker.engine_model.profile import Profile
from broker.sim.arrival import ArrivalRouter
from broker.sim.decision_trace import is_traceable
from broker.sim.decisions import LoggedJob
from broker.sim.errors import SimError
from broker.sim.logged_prefixes import LoggedPrefixes
from broker.sim.mind import MODEL, MindRouter, Terms
from broker.sim.network import NETWORK
from broker.sim.peers.base import Peer
from broker.sim.replay_figures import Ending, Seen
from broker.sim.request import SPAN_S_MAX, Request, Workload
from broker.sim.runs import Progress, report_progress
from broker.sim.world import World
from broker.wire.ids import split_job_key
from broker.wire.messages import Kind, Reason

UNFINISHED = Ending(kind="unfinished", reason="never started")

PATIENCE_S = 6 * 3600.0
"""How long after the last arrival a run goes on: what waits then would wait for ever."""

BEFORE_LOG_S_MAX = 3600.0
"""A job that came longer before the log's first word comes with it: its wait is not the log's."""

OTHER_MODEL = "other"
"""Stands for every model but the one that is replayed."""


class Replayed(Struct, frozen=True, kw_only=True):
    """Jobs as a workload: the request of each has its place as its index."""

    jobs: tuple[LoggedJob, ...]
    workload: Workload
    terms: dict[int, Terms]


class LeftOut(Struct, kw_only=True):
    """Jobs that can't be replayed, by what they lack."""

    without_tokens: int = 0
    """Cancelled or failed before an engine counted a token."""
    too_large: int = 0
    """For the cache of a worker."""
    tries: int = 0
    """Refused, and tried again under their id: the last try stands for them all."""


def was_refused(job: LoggedJob) -> bool:
    """Say whether it was turned away as it came, which another quota may not do."""
    return not job.dispatches and job.kind == Kind.REJECTED


def replayable(
    jobs: Iterable[LoggedJob], *, refused: bool, kv_tokens_max: int
) -> tuple[list[LoggedJob], LeftOut]:
    """Choose the jobs that can be run again, as they came; with `refused` those turned away too.

    Tries of one key, all but the last refused, are one job that comes as the first one did.
    """
    left_out = LeftOut()
    chosen: list[LoggedJob] = []
    begun_s: dict[str, float] = {}
    in_order = sorted(jobs, key=lambda job: (job.enqueued_at_s, job.ended_at_s))
    last = {job.key: number for number, job in enumerate(in_order)}
    for number, job in enumerate(in_order):
        if was_refused(job):
            if not refused:
                continue
            begun_s.setdefault(job.key, job.enqueued_at_s)
            if last[job.key] != number:
                left_out.tries += 1
                continue
        waited = not job.dispatches and job.kind in {Kind.REJECTED, Kind.EXPIRED}
        if not waited and not is_traceable(job):
            left_out.without_tokens += 1
        elif job.input_tokens + max(1, job.output_tokens) > kv_tokens_max:
            left_out.too_large += 1
        else:
            came_s = begun_s.pop(job.key, job.enqueued_at_s)
            chosen.append(replace(job, enqueued_at_s=came_s))
    return sorted(chosen, key=lambda job: (job.enqueued_at_s, job.key)), left_out


def as_workload(jobs: Sequence[LoggedJob], *, kv_tokens_max: int) -> Replayed:
    """Turn jobs, in the order in which they came, into requests: jobs of one model.

    Raises SimError when they span more than a run can.
    """
    prefixes, answers = LoggedPrefixes(jobs), _Answers(jobs)
    start_s = _start_s(jobs)
    requests: list[Request] = []
    terms: dict[int, Terms] = {}
    for index, job in enumerate(jobs):
        if job.enqueued_at_s - start_s > SPAN_S_MAX:
            message = (
                f"{job.key} came {(job.enqueued_at_s - start_s) / 86_400:,.0f} days after the "
                "log's begin: a clock was wrong; leave the lines of that job, or those before it, "
                "out"
            )
            raise SimError(message)
        prompt_tokens = max(1, job.input_tokens)
        output_tokens = min(answers.of(job), max(1, kv_tokens_max - prompt_tokens))
        request = Request(
            index=index,
            at_s=max(0.0, job.enqueued_at_s - start_s),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            output_tokens_max=max(output_tokens, job.output_tokens_max),
            blocks=prefixes.of(job),
            block_tokens=prefixes.block_tokens,
            lane=job.lane,
            band=job.band,
            session=job.session,
        )
        requests.append(request)
        if job.deadline_at_s is not None:
            terms[index] = Terms(deadline_s=job.deadline_at_s - job.enqueued_at_s)
    workload = Workload(name="log", requests=requests, source="a decision log")
    return Replayed(jobs=tuple(jobs), workload=workload, terms=terms)


def _start_s(jobs: Sequence[LoggedJob]) -> float:
    """Return the instant that becomes 0 s."""
    first_word_s = min((job.dispatched_at_s or job.ended_at_s for job in jobs), default=0.0)
    came_s = (job.enqueued_at_s for job in jobs)
    lately_s = (at_s for at_s in came_s if at_s >= first_word_s - BEFORE_LOG_S_MAX)
    return min(lately_s, default=first_word_s)


class _Answers:
    """How long answers are: as logged, or as its lane's are on average."""

    def __init__(self, jobs: Iterable[LoggedJob]) -> None:
        lengths: dict[str, list[int]] = {}
        for job in jobs:
            if job.output_tokens:
                lengths.setdefault(job.lane, []).append(job.output_tokens)
        self._means = {lane: round(fmean(each)) for lane, each in lengths.items()}
        everyone = [tokens for each in lengths.values() for tokens in each]
        self._mean = round(fmean(everyone)) if everyone else 0

    def of(self, job: LoggedJob) -> int:
        """Return it, at least 1; never more than its sender allows."""
        if job.output_tokens or job.dispatches:
            return max(1, job.output_tokens)
        expected = self._means.get(job.lane, self._mean) or job.output_tokens_max
        return max(1, min(expected, job.output_tokens_max or expected))


# ---- views -------------------------------------------------------------------------------------


def as_logged(jobs: Iterable[LoggedJob]) -> list[Seen]:
    """See jobs as the log does."""
    return [
        Seen(
            lane=job.lane,
            band=job.band,
            came_s=job.enqueued_at_s,
            ended_s=job.ended_at_s,
            ttft_s=job.ttft_s,
            queue_s=job.queue_s if job.dispatches else None,
            prompt_tokens=job.counted_prompt_tokens,
            cached_tokens=job.cached_tokens,
            output_tokens=job.output_tokens,
            ending=None
            if job.kind == Kind.COMPLETED
            else Ending(kind=job.kind or "unknown", reason=job.reason, row=job.row),
        )
        for job in jobs
    ]


def simulated(
    replayed: Replayed,
    *,
    profile: Profile,
    workers: int,
    policy: Policy | None,
    peer: Peer | None,
    progress: Progress | None = None,
) -> list[Seen]:
    """Run the workload under our mind, or a peer that binds on arrival; seed 0, no jitter."""
    assert (policy is None) != (peer is None), "one of the two"
    requests = replayed.workload.requests
    world = World(requests, profiles=(profile,) * workers, journal=policy is not None)
    endings = _Endings()
    _watch(world, last_at_s=requests[-1].at_s if requests else 0.0, endings=endings)
    if progress is not None:
        report_progress(world, progress)
    if policy is not None:
        router = MindRouter(world, policy, seed=0, terms=replayed.terms, observer=endings)
        world.run(router)
    elif peer is not None:
        world.run(ArrivalRouter(world, peer, hop_s=NETWORK.hop_s))
    return [_seen(world, request, endings) for request in requests]


class _Endings:
    """Notes why the mind ended what never was answered (`mind.Observer`)."""

    def __init__(self) -> None:
        self.by_index: dict[int, Ending] = {}

    def stepped(self, event: Event | None, decisions: Sequence[Decision], at_s: float) -> None:
        """See what was decided."""
        del event, at_s
        for decision in decisions:
            match decision:
                case Reject(key, reason, row):
                    self._note(key, Kind.REJECTED, reason, row)
                case Expire(key, reason):
                    self._note(key, Kind.EXPIRED, reason)
                case Cancel(key):
                    self._note(key, Kind.CANCELLED, Reason.CANCELLED)
                case DeadLetter(key, failures) | FailStream(key, failures):
                    reason = failures[-1].reason if failures else Reason.WORKER_LOST
                    self._note(key, Kind.FAILED, reason)
                case _:
                    pass

    def _note(self, key: str, kind: Kind, reason: Reason, row: str = "") -> None:
        index = int(split_job_key(key)[1].removeprefix("j"))
        self.by_index[index] = Ending(kind=kind.value, reason=reason.value, row=row)


def _watch(world: World, *, last_at_s: float, endings: _Endings) -> None:
    """Give up at last what would wait for ever."""

    def give_up(at_s: float) -> None:
        for index, request in list(world.open.items()):
            endings.by_index[index] = UNFINISHED
            world.give_up(request, at_s=at_s)

    world.call_at(last_at_s + PATIENCE_S, give_up)


def _seen(world: World, request: Request, endings: _Endings) -> Seen:
    records, index = world.records, request.index
    came_s, first_s, given_s = (
        column[index] for column in (records.arrived_s, records.first_token_s, records.given_s)
    )
    is_answered = not records.refused[index]
    return Seen(
        lane=request.lane,
        band=request.band,
        came_s=came_s,
        ended_s=records.ended_s[index],
        ttft_s=first_s - came_s if first_s >= 0 else None,
        queue_s=given_s - came_s if given_s >= 0 else None,
        prompt_tokens=request.prompt_tokens if is_answered else 0,
        cached_tokens=records.cached_tokens[index] if is_answered else 0,
        output_tokens=request.output_tokens if is_answered else 0,
        ending=None if is_answered else endings.by_index.get(index, UNFINISHED),
    )


def in_words_of(model: str, seen: Iterable[Seen]) -> list[Seen]:
    """Name the model in the rows that refused as the log does: simulated it has another name."""
    return [
        one
        if one.ending is None
        else replace(one, ending=replace(one.ending, row=_renamed(one.ending.row, model)))
        for one in seen
    ]


def _renamed(row: str, model: str) -> str:
    shown = f"model={MODEL}"
    return " ".join(f"model={model}" if part == shown else part for part in row.split(" "))


# ---- policies ----------------------------------------------------------------------------------


def for_one_model(policy: Policy, model: str, lanes: Iterable[str]) -> Policy:
    """Return the policy as it bears on one model; without lanes of its own it takes these."""
    renamed: Mapping[str, str] = {model: MODEL}

    def rename(name: str) -> str:
        return renamed.get(name, OTHER_MODEL)

    given = policy.lanes or tuple(LanePolicy(name=lane) for lane in lanes)
    quotas: tuple[QuotaRow, ...] = tuple(
        replace(row, model=None if row.model is None else MODEL)
        for row in policy.quotas
        if row.model in {None, model}
    )
    return replace(
        policy,
        models=tuple(rename(name) for name in policy.models) or (MODEL,),
        lanes=tuple(replace(lane, models=tuple(map(rename, lane.models))) for lane in given),
        quotas=quotas,
    )
