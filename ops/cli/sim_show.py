"""How figures of simulations look on a terminal."""

from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table

from broker.sim.comparison import OURS
from broker.sim.lineup import OURS_AS_SHIPPED
from broker.sim.measures import MEASURES, TTFT_MEAN, Measure
from broker.sim.paired import difference
from broker.sim.report import Against, Entry, Report
from ops.cli.output import console, note, say, table
from ops.sim_page.findings import load_sentence, overload_sentence, refusal_sentence

COLUMNS = (
    ("TTFT MEAN>", "ttft_s.mean"),
    ("P50>", "ttft_s.p50"),
    ("P99>", "ttft_s.p99"),
    ("ITL>", "itl_s.mean"),
    ("END TO END>", "e2e_s.mean"),
    ("CACHED>", "cached_token_ratio"),
    ("SWITCHES>", "prefix_switch_ratio"),
)
"""What fits beside a policy's name in 100 columns; the rest stands in the report."""

_BY_NAME = {measure.name: measure for measure in MEASURES}


def show_entry(entry: Entry) -> None:
    """Print all figures of one policy."""
    rows = [(measure.says, measure.text(measure.of(entry))) for measure in MEASURES]
    rows += [
        ("queue wait mean, p99", f"{_ms(entry.queue_s.mean)}, {_ms(entry.queue_s.p99)}"),
        ("time in use", f"{entry.utilisation_mean * 100:.1f} % of a worker's, on average"),
        ("from first arrival to last end", f"{entry.span_s:,.1f} s"),
        ("requests", f"{entry.requests:,.0f} answered, {entry.refused:,.0f} refused"),
        ("attempts beyond the first", f"{entry.reruns:,.0f}"),
    ]
    if entry.decision_us is not None:
        us = entry.decision_us
        rows.append(("a decision, mean, p99", f"{us.mean:,.0f} µs, {us.p99:,.0f} µs"))
    console().print(table(entry.policy, ("MEASURE", "VALUE>"), rows))


def show_report(report: Report) -> None:
    """Print a comparison: the policies, then ours against the best peer for each measure."""
    trace, setting = report.trace, report.setting
    title = (
        f"{trace.name} @ {setting.speed:g}: {trace.requests:,} requests, {setting.workers} × "
        f"{setting.blocks_per_worker:,} blocks, seeds {setting.seeds[0]}-{setting.seeds[-1]}"
    )
    console().print(entries_table(title, report.policies))
    against = report.against_best_peer
    for policy in [one for one in OURS_AS_SHIPPED if one in against] or list(against)[:1]:
        console().print(_against_table(policy, against[policy]))
    say(load_sentence(report))
    if report.overloaded:
        say(overload_sentence(report))
    if refused := refusal_sentence(report):
        say(refused)


def entries_table(title: str, entries: Iterable[Entry]) -> Table:
    """Lay policies out, the best mean TTFT first, ours marked."""
    ordered = sorted(entries, key=lambda one: one.ttft_s.mean)
    rows = [(_name(one), *(_cell(name, one) for _, name in COLUMNS)) for one in ordered]
    return table(title, ("POLICY", *(head for head, _ in COLUMNS)), rows)


def sweep_table(entries: Sequence[Entry]) -> Table:
    """Lay combinations of knobs out in their order, each against the first."""
    rows = [
        (one.policy, *(_cell(name, one) for _, name in COLUMNS), _against_first(one, entries[0]))
        for one in entries
    ]
    heads = ("KNOBS", *(head for head, _ in COLUMNS), "TTFT MEAN AGAINST SHIPPED")
    return table("", heads, rows)


def _against_first(one: Entry, first: Entry) -> str:
    if one is first:
        return ""
    apart = difference(
        [TTFT_MEAN.of(figures) for figures in one.seeds],
        [TTFT_MEAN.of(figures) for figures in first.seeds],
    )
    change = f"{TTFT_MEAN.of(one) / TTFT_MEAN.of(first) - 1:+.1%}"
    return f"{change} {apart.verdict(higher_is_better=False)}"


def written(*paths: object) -> None:
    """Say on standard error which files were written."""
    for path in paths:
        if path is not None:
            note(f"written: {path}")


def _against_table(policy: str, measures: Mapping[str, Against]) -> Table:
    rows = [
        (
            _BY_NAME[name].says,
            _BY_NAME[name].text(one.value),
            _BY_NAME[name].text(one.best),
            one.policy,
            "" if one.ratio is None else f"{one.ratio:.3f}",
            interval_text(_BY_NAME[name], one),
            one.verdict + (f" ({one.reason})" if one.reason else ""),
        )
        for name, one in measures.items()
    ]
    heads = ("MEASURE", "OURS>", "BEST>", "BEST PEER", "RATIO>", "DIFFERENCE (95 %)>", "VERDICT")
    return table(f"{policy} against the best peer for each measure", heads, rows)


def interval_text(measure: Measure, one: Against) -> str:
    """Write a difference with its interval."""
    if one.interval is None:
        return measure.text(one.difference)
    return measure.interval(*one.interval)


def _cell(name: str, entry: Entry) -> str:
    measure = _BY_NAME[name]
    return measure.text(measure.of(entry))


def _name(entry: Entry) -> str:
    return f"{entry.policy}  (ours)" if entry.family == OURS else entry.policy


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms"
