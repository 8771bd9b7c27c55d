"""What a comparison says, in sentences: what is better, and as plainly what is not."""

from msgspec import Struct

from broker.sim.comparison import OURS
from broker.sim.lineup import OURS_AS_SHIPPED
from broker.sim.load import ITL_LOAD_RATIO_MAX, OVERLOADED_TTFT_S
from broker.sim.measures import E2E_MEAN, MEASURES, TTFT_MEAN, Measure
from broker.sim.report import Against, Report, Sensitivity


class Findings(Struct, frozen=True, kw_only=True):
    """Of one of ours, a sentence each."""

    better: list[str]
    worse: list[str]
    undecided: list[str]


def leading(report: Report) -> str:
    """Return which of ours the page is about: what ships; empty when none took part."""
    ours = [one.policy for one in report.policies if one.family == OURS]
    return next((label for label in OURS_AS_SHIPPED if label in ours), ours[0] if ours else "")


def findings(report: Report, policy: str) -> Findings:
    """Sort the measures by what may be claimed."""
    found = Findings(better=[], worse=[], undecided=[])
    for measure in MEASURES:
        one = report.against_best_peer[policy][measure.name]
        if one.value == one.best and one.difference == 0:
            continue  # The same for all: nothing of the kind happens in this trace.
        match one.verdict:
            case "better":
                found.better.append(_sentence(measure, one))
            case "worse":
                found.worse.append(_sentence(measure, one))
            case _:
                found.undecided.append(_sentence(measure, one))
    return found


def summary(report: Report) -> str:
    """Say in a sentence or two how ours stands."""
    policy = leading(report)
    if not policy or not report.against_best_peer:
        return "Ours and at least one peer must take part for a comparison."
    ttft, e2e = (report.against_best_peer[policy][one.name] for one in (TTFT_MEAN, E2E_MEAN))
    return (
        f"{policy} against the best peer for each measure: mean TTFT {_times(ttft)} that of "
        f"{ttft.policy} ({ttft.verdict}), mean end to end {_times(e2e)} that of {e2e.policy} "
        f"({e2e.verdict})."
    )


def load_sentence(report: Report) -> str:
    """Say how loaded the point is."""
    load = report.load
    text = (
        f"Load {load.load_ratio * 100:.0f} %: {load.offered_tokens_s:,.0f} tokens/s are offered, "
        f"and round robin serves {load.capacity_tokens_s:,.0f} when all requests are there at once."
    )
    if load.overloaded:
        return text
    if load.load_ratio > 1:
        text += (
            f" That is more than it can do, yet its mean TTFT stays under {OVERLOADED_TTFT_S:.0f}"
            " s: the trace ends before the backlog counts."
        )
    if not load.itl_comparable:
        text += (
            f" Inter-token latency is compared below {ITL_LOAD_RATIO_MAX * 100:g} %, so not here."
        )
    return text


def overload_sentence(report: Report) -> str:
    """Warn that the point is overloaded; empty when it isn't."""
    if not report.overloaded:
        return ""
    return (
        f"Overloaded: {', '.join(report.overloaded)} offers more than round robin can serve, and "
        f"its requests wait {report.load.round_robin_ttft_s_mean:,.0f} s for their first token on "
        "average. What a policy comes to here depends on how long the trace is; such points are "
        "listed apart and prove nothing about others."
    )


def refusal_sentence(report: Report) -> str:
    """Warn that a policy left requests without an answer; empty when none did."""
    refused = [
        f"{one.policy} {one.refused / (one.refused + one.requests):.1%}"
        for one in report.policies
        if one.refused
    ]
    if not refused:
        return ""
    return (
        f"Requests refused: {', '.join(refused)} of them, most as batch gives way under load. The "
        "figures of a policy are of what it answered, and peers refuse none: compare with care."
    )


def sensitivity_sentence(found: Sensitivity) -> str:
    """Say whether the order hangs on one constant."""
    failed = [
        f"{one.name} could not be run ({one.problem})" for one in found.variants if one.problem
    ]
    pairs = [
        f"{one.name}: {first} and {second}"
        for one in found.variants
        for first, second in one.reversed_pairs
    ]
    text = (
        "No: where one policy leads another beyond doubt, no change of one constant lets the other "
        "lead beyond doubt."
    )
    if pairs:
        text = f"Yes: these pairs are reversed: {'; '.join(pairs)}."
    return " ".join([text, *(f"{one}." for one in failed)])


def _sentence(measure: Measure, one: Against) -> str:
    text = (
        f"{measure.says}: {measure.text(one.value)} against {measure.text(one.best)} of "
        f"{one.policy}"
    )
    if one.ratio is not None:
        text += f", ×\N{NO-BREAK SPACE}{one.ratio:.3f}"
    return f"{text} ({one.reason})" if one.reason else text


def _times(one: Against) -> str:
    return "as" if one.ratio is None else f"{one.ratio:.2f} ×"
