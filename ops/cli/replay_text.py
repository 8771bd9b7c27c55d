"""What `inferlane replay` says: what it assumed, and its tables."""

from collections.abc import Iterable, Sequence

from rich.console import RenderableType
from rich.text import Text

from broker.sim.decisions import Tally
from broker.sim.logged_engine import LoggedEngine
from broker.sim.replay_figures import GroupFigures, Row, change
from broker.sim.replay_run import Plan, ReplayReport
from ops.cli.decision_tally import left_out
from ops.cli.output import duration, plain, table

GAP_LARGE = 0.25
"""Where simulation and log are further apart in mean TTFT, the reader is told to be careful."""

TIMES_MIN = 10
"""From this ratio on a change reads better as a factor."""


def fitted(found: LoggedEngine, *, says_size: bool) -> list[str]:
    """Say which figures of the engine come from the log."""
    profile = found.profile
    if found.runs:
        prefill, decode = profile.prefill_s, profile.decode_s
        rates = (
            f"engine: least squares over {found.runs:,} runs of the log: "
            f"{1 / prefill.slope_s:,.0f} prefill tokens/s after {duration(prefill.constant_s)}, "
            f"{duration(decode.constant_s)} a token (median error of a first token "
            f"{found.error:.0%})"
        )
    else:
        rates = "engine: too few runs in the log to fit rates; the reference profile's"
    if not says_size:
        return [rates]
    size = f"{profile.kv_tokens_max:,} tokens of KV cache a worker"
    if found.kv_is_estimated:
        sizes = f"{size}, estimated from the cached tokens of the log"
    else:
        sizes = (
            f"{size}, the reference profile's: the log shows no prefix that was evicted. A policy "
            "that spreads prompts more would look too good; give --blocks-per-worker"
        )
    return [rates, sizes]


def assumptions(plan: Plan, tally: Tally) -> list[str]:
    """Say what else the replay rests on."""
    workers = f"{plan.workers} worker{'' if plan.workers == 1 else 's'}"
    said = [f"{workers} alike, all the time; model {plan.model}; ran under {plan.ran}"]
    if plan.quotas_before is None:
        said.append(
            "which quotas ran is not known (--quotas-before FILE): the simulation as it ran takes "
            "what they refused as refused"
        )
    missing = left_out(tally)
    if missing:
        said.append(f"not in the replay: {', '.join(missing)}")
    return said


def tables(found: ReplayReport) -> Iterable[RenderableType]:
    """Give all that is shown, in order."""
    yield _whole(found)
    yield _lanes(found)
    if found.endings:
        yield _endings(found)
    yield Text(plain("\n".join(conclusions(found))))


def _whole(found: ReplayReport) -> RenderableType:
    whole = found.rows[0]
    views = (whole.logged, whole.as_it_ran, whole.changed)
    heads = ("", "logged>", "simulated as it ran>", "off by>", f"under {found.changed}>", "change>")
    title = f"{whole.logged.jobs:,} jobs of {found.model}: as logged, and simulated"
    return table(title, heads, [_line(name, values) for name, values in _measures(views)])


Value = tuple[float | None, str]
"""A number and its text; None where there is nothing to measure, which is no 0."""

Measure = tuple[str, Sequence[Value]]

NOTHING = "–"


def _measures(views: Sequence[GroupFigures]) -> list[Measure]:
    spreads = (
        ("TTFT", [view.ttft_s for view in views]),
        ("queue wait", [view.queue_s for view in views]),
    )
    found: list[Measure] = [
        (
            f"{what} {name}",
            [_value(view, at, duration(at)) for view, at in zip(views, values, strict=True)],
        )
        for what, each in spreads
        for name, values in (
            ("mean", [one.mean for one in each]),
            ("p50", [one.p50 for one in each]),
            ("p99", [one.p99 for one in each]),
        )
    ]
    cached = [view.cached_token_ratio for view in views]
    shares = [_value(one, share, f"{share:.1%}") for one, share in zip(views, cached, strict=True)]
    found.append(("cached share", shares))
    rates = [view.throughput_tokens_s for view in views]
    found.append(("tokens/s", [(rate, f"{rate:,.0f}") for rate in rates]))
    jobs = [view.answered for view in views]
    found.append(("answered", [(float(count), f"{count:,}") for count in jobs]))
    return found


def _value(view: GroupFigures, value: float, text: str) -> Value:
    return (value, text) if view.answered else (None, NOTHING)


def _line(name: str, values: Sequence[Value]) -> list[str]:
    (logged, logged_text), (ran, ran_text), (changed, changed_text) = values
    gap, difference = percent(logged, ran), percent(ran, changed)
    return [name, logged_text, ran_text, gap, changed_text, difference]


def percent(before: float | None, after: float | None) -> str:
    """Write a change: `+12%`, from ten times on `x 14`; empty where there is nothing to compare."""
    if before is None or after is None:
        return ""
    if not before:
        return "" if after else "+0%"
    times = after / before
    return f"x {times:,.0f}" if times >= TIMES_MIN else f"{change(before, after):+.0%}"


def _lanes(found: ReplayReport) -> RenderableType:
    heads = (
        "lane",
        "band>",
        "jobs>",
        "TTFT mean>",
        "p50>",
        "p99>",
        "queue wait>",
        "cached>",
        "tokens/s>",
        "unanswered>",
        "",
    )
    title = "By lane and band: logged / as it ran / under the change"
    return table(title, heads, [_lane(row) for row in found.rows[1:]])


def _lane(row: Row) -> list[str]:
    views = (row.logged, row.as_it_ran, row.changed)

    def three(texts: Iterable[str]) -> str:
        return " / ".join(texts)

    def known(texts: Iterable[str]) -> str:
        pairs = zip(views, texts, strict=True)
        return three(text if view.answered else NOTHING for view, text in pairs)

    def times(values: Iterable[float]) -> str:
        return known(map(duration, values))

    return [
        row.lane,
        str(row.band),
        f"{row.logged.jobs:,}",
        times(view.ttft_s.mean for view in views),
        times(view.ttft_s.p50 for view in views),
        times(view.ttft_s.p99 for view in views),
        times(view.queue_s.mean for view in views),
        known(f"{view.cached_token_ratio:.0%}" for view in views),
        three(f"{view.throughput_tokens_s:,.0f}" for view in views),
        three(f"{view.jobs - view.answered:,}" for view in views),
        row.verdict,
    ]


def _endings(found: ReplayReport) -> RenderableType:
    heads = ("ended", "reason", "row", "logged>", "as it ran>", "under the change>")
    rows = [
        [
            one.ending.kind,
            one.ending.reason,
            one.ending.row,
            f"{one.logged:,}",
            f"{one.as_it_ran:,}",
            f"{one.changed:,}",
        ]
        for one in found.endings
    ]
    return table("Without an answer", heads, rows)


def conclusions(found: ReplayReport) -> list[str]:
    """Say in words who gains, who loses, and how far to trust it."""
    said: list[str] = []
    for verdict, what in (("gains", "gain"), ("loses", "lose")):
        names = [
            f"{row.lane} (band {row.band})" for row in found.rows[1:] if row.verdict == verdict
        ]
        said.append(f"Lanes that {what}: {', '.join(names) or 'none'}.")
    if found.unanswered_now:
        keys = ", ".join(found.unanswered_now_keys[:3])
        said.append(f"{found.unanswered_now:,} jobs would not have been answered: {keys}, ...")
    if found.answered_now:
        said.append(f"{found.answered_now:,} jobs would have been answered that were not.")
    left = found.left_out
    counts = (
        (left.without_tokens, "ended without tokens"),
        (left.too_large, "too large for a worker's cache"),
        (left.tries, "tries of one job counted as one"),
    )
    missing = [f"{count:,} {what}" for count, what in counts if count]
    if missing:
        said.append(f"Left out of the simulations: {', '.join(missing)}.")
    if found.binds_on_arrival:
        said.append(f"{found.changed} binds jobs on arrival: it has no quotas, and none expires.")
    whole = found.rows[0]
    if not whole.logged.answered or not whole.as_it_ran.answered:
        said.append("How far the simulation is off the log can't be told: nothing was answered.")
        return said
    gap = change(whole.logged.ttft_s.mean, whole.as_it_ran.ttft_s.mean)
    care = ", so take its differences with care" if abs(gap) > GAP_LARGE else ""
    said.append(f"The simulation as it ran is {gap:+.0%} off the log in mean TTFT{care}.")
    return said
