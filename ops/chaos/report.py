"""The report of a chaos run: figures for scripts, sentences for people."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ops.chaos import bounds
from ops.chaos.bounds import Timed
from ops.chaos.checker import Rerun, Strike, Verdict
from ops.chaos.history import HistoryEvent
from ops.chaos.moments import recoveries_s, steps_hit

if TYPE_CHECKING:
    from ops.chaos.run import Options, Outcome

SHOWN_MAX = 20
"""Of each kind of finding, so many are named in the report."""


UNSEEN = (
    *("reruns", "reruns_unexplained", "rerun_reasons", "quota_overshoots", "steps"),
    "miscounted",
)
"""Figures of what only workers and brokers of ours tell, or of what others' jobs are in, too: null
where they are another's."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a run is judged by."""

    verdict: Verdict
    times: tuple[Timed, ...] = ()
    not_calm: tuple[int, ...] = ()
    """Faults after which the cluster did not come back."""
    interrupted: bool = False
    is_others: bool = False
    """It was a cluster of others: what its workers and brokers did is not known."""

    @property
    def is_ok(self) -> bool:
        """Whether the run was whole, found nothing, and all went on in time."""
        late = any(one.missed for one in self.times)
        return self.verdict.is_clean and not (late or self.not_calm or self.interrupted)


def report(
    options: "Options", outcome: "Outcome", judgement: Judgement, events: Sequence[HistoryEvent]
) -> dict[str, object]:
    """Put the figures together. Times in seconds."""
    verdict = judgement.verdict
    recoveries = recoveries_s(events, outcome.strikes)
    figures: dict[str, object] = {
        "jobs": verdict.jobs,
        "lost": len(verdict.lost),
        "duplicate_results": len(verdict.duplicate_results),
        "reruns": len(verdict.reruns),
        "stuck": len(verdict.stuck),
        "quota_overshoots": len(verdict.overshoots),
        "faults": dict(sorted(Counter(one.kind.value for one in outcome.strikes).items())),
        "steps": dict(steps_hit(events, outcome.strikes)),
        "recovery_s": _spread(recoveries.values()),
        "reruns_unexplained": len(verdict.unexplained),
        "out_of_fence": len(verdict.out_of_fence),
        "miscounted": len(verdict.miscounted),
        "rerun_reasons": dict(sorted(Counter(one.because for one in verdict.reruns).items())),
        "recovery_s_by_kind": _by_kind(outcome.strikes, recoveries),
        "bounds": bounds.figures(judgement.times),
        "crowded_share": round(outcome.crowd.whole_share(), 3),
        "inflight_at_fault_min": min(outcome.inflight, default=0),
        "not_calm": outcome.not_calm,
        "interrupted": outcome.interrupted,
        "ok": judgement.is_ok,
        "seed": options.seed,
        "plan": [
            {
                "number": one.number,
                "kind": one.kind.value,
                "member": one.member,
                "step": one.step,
                "at_s": round(one.at_s, 3),
                "for_s": round(one.over_at_s - one.at_s, 3),
                "in_midst": one.in_midst,
                "recovery_s": _rounded(recoveries.get(one.number)),
            }
            for one in outcome.strikes
        ],
        "found": {
            "lost": verdict.lost[:SHOWN_MAX],
            "duplicate_results": verdict.duplicate_results[:SHOWN_MAX],
            "stuck": verdict.stuck[:SHOWN_MAX],
            "reruns_unexplained": [asdict(one) for one in verdict.unexplained[:SHOWN_MAX]],
            "quota_overshoots": [asdict(one) for one in verdict.overshoots],
            "out_of_fence": verdict.out_of_fence[:SHOWN_MAX],
            "miscounted": verdict.miscounted[:SHOWN_MAX],
        },
    }
    if judgement.is_others:
        figures |= dict.fromkeys(UNSEEN)
    return figures


def _spread(seconds: Iterable[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    if not ordered:
        return {"p50": 0.0, "max": 0.0}
    return {"p50": round(ordered[len(ordered) // 2], 3), "max": round(ordered[-1], 3)}


def _by_kind(
    strikes: Iterable[Strike], recoveries: Mapping[int, float]
) -> dict[str, dict[str, float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for strike in strikes:
        if strike.number in recoveries:
            found[strike.kind.value].append(recoveries[strike.number])
    return {kind: _spread(seconds) for kind, seconds in sorted(found.items())}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def told(judgement: Judgement, recovery_s: object) -> list[str]:
    """Say what came of it, a line each."""
    verdict = judgement.verdict
    lines = [
        (
            f"{verdict.jobs} jobs accepted: {len(verdict.lost)} lost, "
            f"{len(verdict.duplicate_results)} with a second result, {len(verdict.stuck)} stuck."
        ),
        _runs_told(judgement),
        f"Recovery: {recovery_s} s.",
    ]
    findings = (
        ("lost", verdict.lost),
        ("second result", verdict.duplicate_results),
        ("stuck", verdict.stuck),
        ("ran again without a reason", verdict.unexplained),
        ("overshot", verdict.overshoots),
        ("out of fence", verdict.out_of_fence),
        ("not the sum of the records", verdict.miscounted),
    )
    for name, found in findings:
        lines += [f"  {name}: {_one(one)}" for one in found[:3]]
    lines += [f"  not calm again: after fault {number}" for number in judgement.not_calm]
    return [*lines, *bounds.told(judgement.times)]


def _runs_told(judgement: Judgement) -> str:
    verdict = judgement.verdict
    if judgement.is_others:
        return (
            f"{len(verdict.out_of_fence)} streams mixed attempts. Which jobs ran again and whether "
            "quotas held is not seen from outside."
        )
    return (
        f"{len(verdict.reruns)} ran again, {len(verdict.unexplained)} of them without a reason;"
        f" {len(verdict.overshoots)} quota rows overshot, {len(verdict.out_of_fence)} jobs "
        "taken from a leader of the past."
    )


def _one(found: object) -> str:
    if isinstance(found, Rerun):
        gap_s = found.again_at_s - found.began_at_s
        return f"{found.job}, begun on {found.worker}, and again {gap_s:.1f} s later"
    return str(found)
