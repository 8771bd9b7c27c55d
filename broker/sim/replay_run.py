"""One replay: the log, the simulation as it ran, and the simulation under something else.

What was refused yesterday is refused in a simulation that knows no quotas, too: without the file
that refused it, nobody can say what else it would have let in. Under a quota file it asks anew.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from broker.core.policy import Policy, RoutingPolicy
from broker.engine_model.profile import Profile
from broker.sim.contestants import Contestant, contestant
from broker.sim.decisions import LoggedJob
from broker.sim.errors import SimError
from broker.sim.replay import (
    LeftOut,
    as_logged,
    as_workload,
    for_one_model,
    in_words_of,
    replayable,
    simulated,
    was_refused,
)
from broker.sim.replay_figures import EndingCount, Row, Seen, Views, endings, rows
from broker.sim.runs import Progress

EXAMPLES_MAX = 20
"""Keys of jobs that a report names."""

ROUTING = {
    policy.policy: policy
    for policy in (
        RoutingPolicy(),
        RoutingPolicy(policy="weighted"),
        RoutingPolicy(policy="round_robin"),
    )
}
"""What the broker itself can be told to do, as a log names it."""


class Plan(Struct, frozen=True, kw_only=True):
    """What to replay, and on what."""

    model: str
    profile: Profile
    workers: int
    ran: str
    """Routing policy that the log names."""
    quotas_before: Policy | None = None
    """Of the configuration that ran; None: not known."""
    policy: str = ""
    """Label of a contestant; empty: as it ran."""
    quotas: Policy | None = None
    """Of the configuration to try; None: as it ran."""


class ReplayReport(Struct, frozen=True, kw_only=True):
    """What came of it."""

    model: str
    workers: int
    profile: str
    as_it_ran: str
    changed: str
    quotas: bool
    """The change is simulated with a quota file."""
    binds_on_arrival: bool
    """The change is a peer's policy: no quotas, and nothing expires."""
    rows: tuple[Row, ...]
    endings: tuple[EndingCount, ...]
    left_out: LeftOut
    unanswered_now: int
    """Jobs answered in the simulation as it ran, and not under the change."""
    unanswered_now_keys: tuple[str, ...]
    answered_now: int
    """Jobs answered under the change only."""


class _View(Struct, frozen=True, kw_only=True):
    seen: tuple[Seen, ...]
    answered: dict[str, bool]
    left_out: LeftOut


Report = Callable[[int, int, int], None]
"""Called with which simulation it is (0: as it ran, 1: changed), and of its requests with the
number of those that ended, and of all."""


def _unheard(run: int, ended: int, requests: int) -> None:
    """Tell nobody."""


def replay(jobs: Sequence[LoggedJob], plan: Plan, *, report: Report = _unheard) -> ReplayReport:
    """Run both simulations. Raises SimError for a senseless change, or where no job fits."""
    before = plan.quotas_before
    ran = before or Policy(routing=_routing(plan.ran))
    change = _change(plan, ran)
    admits_anew = before is not None or (plan.quotas is not None and isinstance(change, Policy))
    as_it_ran = _view(jobs, plan, ran, refused=before is not None, progress=partial(report, 0))
    changed = _view(jobs, plan, change, refused=admits_anew, progress=partial(report, 1))
    return _report(jobs, plan, as_it_ran, changed, change)


def _change(plan: Plan, ran: Policy) -> Policy | Contestant:
    """Return what to try: our mind under some policy, or a peer."""
    base = plan.quotas or ran
    if not plan.policy:
        return base
    own = ROUTING.get(plan.policy)
    if own is not None:
        return replace(base, routing=replace(base.routing, policy=own.policy))
    chosen = contestant(plan.policy)
    if chosen.policy is not None:
        return replace(base, routing=chosen.policy.routing, order=chosen.policy.order)
    if plan.quotas is not None:
        message = (
            f"{chosen.label} is a router's policy and knows no quotas; with --quotas take one of "
            f"the broker's own: {', '.join(ROUTING)}"
        )
        raise SimError(message)
    return chosen


def _routing(name: str) -> RoutingPolicy:
    routing = ROUTING.get(name)
    if routing is None:
        message = f"the log was written under a policy that is not known here: {name or 'none'}"
        raise SimError(message)
    return routing


def _view(
    jobs: Sequence[LoggedJob],
    plan: Plan,
    under: Policy | Contestant,
    *,
    refused: bool,
    progress: Progress,
) -> _View:
    """Simulate; without `refused` what was turned away yesterday is so again.

    Raises SimError when no job fits a worker.
    """
    kv_tokens_max = plan.profile.kv_tokens_max
    chosen, left_out = replayable(jobs, refused=refused, kv_tokens_max=kv_tokens_max)
    if left_out.too_large and not chosen:
        message = (
            f"no job fits the {kv_tokens_max:,} tokens of a worker's KV cache: give it more "
            "(--blocks-per-worker)"
        )
        raise SimError(message)
    replayed = as_workload(chosen, kv_tokens_max=kv_tokens_max)
    lanes = sorted({job.lane for job in jobs})
    policy = for_one_model(under, plan.model, lanes) if isinstance(under, Policy) else None
    make_peer = under.peer if isinstance(under, Contestant) else None
    peer = make_peer(random.Random(0)) if make_peer is not None else None
    ended = simulated(
        replayed,
        profile=plan.profile,
        workers=plan.workers,
        policy=policy,
        peer=peer,
        progress=progress,
    )
    progress(len(ended), len(ended))
    seen = in_words_of(plan.model, ended)
    answered = {job.key: one.ending is None for job, one in zip(replayed.jobs, seen, strict=True)}
    if not refused:
        turned_away = as_logged(job for job in jobs if was_refused(job))
        seen += [replace(one, came_s=0.0, ended_s=0.0) for one in turned_away]
    return _View(seen=tuple(seen), answered=answered, left_out=left_out)


def _report(
    jobs: Sequence[LoggedJob],
    plan: Plan,
    as_it_ran: _View,
    changed: _View,
    change: Policy | Contestant,
) -> ReplayReport:
    views = Views(logged=as_logged(jobs), as_it_ran=as_it_ran.seen, changed=changed.seen)
    before, after = as_it_ran.answered, changed.answered
    lost = [key for key, answered in before.items() if answered and not after.get(key, False)]
    won = [key for key, answered in after.items() if answered and not before.get(key, False)]
    return ReplayReport(
        model=plan.model,
        workers=plan.workers,
        profile=plan.profile.name,
        as_it_ran=plan.ran,
        changed=plan.policy or (plan.quotas.routing.policy if plan.quotas else plan.ran),
        quotas=plan.quotas is not None,
        binds_on_arrival=isinstance(change, Contestant),
        rows=tuple(rows(views)),
        endings=tuple(endings(views)),
        left_out=changed.left_out,
        unanswered_now=len(lost),
        unanswered_now_keys=tuple(lost[:EXAMPLES_MAX]),
        answered_now=len(won),
    )
