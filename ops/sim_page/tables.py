"""Tables of a comparison as HTML."""

from collections.abc import Sequence
from html import escape

from broker.sim.comparison import OURS
from broker.sim.measures import MEASURES, TTFT_MEAN, Measure
from broker.sim.report import Against, Entry, Report, Sensitivity, Variant

PARTS_MEASURES = ("ttft_s.p50", "ttft_s.p99", "e2e_s.mean", "cached_token_ratio")

Cell = tuple[str, str]
"""Text and CSS class."""


def policies(report: Report) -> str:
    """Lay all figures of all policies out, the least mean TTFT first."""
    ordered = sorted(report.policies, key=lambda one: one.ttft_s.mean)
    heads = ["policy", *(measure.says for measure in MEASURES), "queue wait mean", "refused"]
    heads += ["attempts beyond the first", "decision p50, p99"]
    best = {name: one.policy for name, one in report.best_peer.items()}
    rows = [(_row(one, best), "ours" if one.family == OURS else "") for one in ordered]
    return _table(heads, rows)


def parts(report: Report) -> str:
    """Lay ours out beside itself with a part taken away; in the order of the report."""
    chosen = (TTFT_MEAN, *(one for one in MEASURES if one.name in PARTS_MEASURES))
    heads = ["policy", "what it is", *(measure.says for measure in chosen)]
    rows = [
        (
            [
                (one.policy, ""),
                (one.source, "left soft"),
                *((measure.text(measure.of(one)), "") for measure in chosen),
            ],
            "",
        )
        for one in report.policies
        if one.family == OURS
    ]
    return _table(heads, rows)


def against(report: Report, policy: str) -> str:
    """Lay one of ours out against the best peer for each measure."""
    heads = ["measure", "verdict", "ours", "best peer", "", "ratio", "difference, 95 %", ""]
    measures = report.against_best_peer[policy]
    rows = [(_against_row(measure, measures[measure.name]), "") for measure in MEASURES]
    return _table(heads, rows)


def sensitivity(found: Sensitivity) -> str:
    """Lay out TTFT mean of each policy under each variant, with its rank."""
    base = found.variants[0]
    heads = ["policy", *(one.name for one in found.variants)]
    rows = [
        ([(policy, ""), *(_sensitivity_cell(one, policy) for one in found.variants)], "")
        for policy in base.order
    ]
    ours = [("ours ÷ best of these peers", "soft"), *(_ratio_cell(one) for one in found.variants)]
    return _table(heads, [*rows, (ours, "")])


def sources(report: Report) -> str:
    """Name the rule that each policy follows."""
    found = {one.family: one.source for one in report.policies if one.family != OURS}
    rows: list[Sequence[Cell]] = [
        [(one.policy, ""), (one.source, "left soft")]
        for one in report.policies
        if one.family == OURS
    ]
    rows += [[(family, ""), (source, "left soft")] for family, source in found.items()]
    return _table(["policy", "what it is"], [(row, "") for row in rows])


def _row(one: Entry, best: dict[str, str]) -> list[Cell]:
    cells: list[Cell] = [(one.policy, "")]
    for measure in MEASURES:
        is_best = best.get(measure.name) == one.policy
        cells.append((measure.text(measure.of(one)), "first" if is_best else ""))
    cells += [
        (f"{one.queue_s.mean * 1000:,.1f} ms", ""),
        (f"{one.refused:,.0f}", ""),
        (f"{one.reruns:,.0f}", ""),
    ]
    us = one.decision_us
    cells.append((f"{us.p50:,.0f}, {us.p99:,.0f} µs" if us is not None else "", ""))
    return cells


def _against_row(measure: Measure, one: Against) -> list[Cell]:
    apart = measure.text(one.difference)
    if one.interval is not None:
        apart = measure.interval(*one.interval)
    return [
        (measure.says, ""),
        (one.verdict, f"left {one.verdict}"),
        (measure.text(one.value), ""),
        (measure.text(one.best), ""),
        (one.policy, "left soft"),
        ("" if one.ratio is None else f"{one.ratio:.3f}", ""),
        (apart, ""),
        (one.reason, "left soft note"),
    ]


def _sensitivity_cell(variant: Variant, policy: str) -> Cell:
    if policy not in variant.values:
        return "not run", "soft"
    rank = variant.order.index(policy) + 1
    is_reversed = any(policy in pair for pair in variant.reversed_pairs)
    text = f"{rank}. {variant.values[policy] * 1000:,.0f} ms"
    return text, "worse" if is_reversed else "first" if rank == 1 else ""


def _ratio_cell(variant: Variant) -> Cell:
    ratio = variant.ours_to_best_peer
    if ratio is None:
        return "", ""
    return f"{ratio:.3f}", "better" if ratio < 1 else "worse"


def _table(heads: Sequence[str], rows: Sequence[tuple[Sequence[Cell], str]]) -> str:
    """Lay rows and their classes out; a head stands as the first row's cell under it."""
    sides = ["left" if "left" in css else "" for _, css in rows[0][0]]
    head = "".join(
        f'<th class="{side}">{escape(text)}</th>' for text, side in zip(heads, sides, strict=True)
    )
    body = "\n".join(
        f'<tr class="{css}">'
        + "".join(f'<td class="{css}">{escape(text)}</td>' for text, css in cells)
        + "</tr>"
        for cells, css in rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )
