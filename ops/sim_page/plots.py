"""Plots of a comparison as SVG, to stand in a page: text takes the page's colour.

Every plot is drawn from the report alone, and the same report gives the same bytes.
"""

# Most of matplotlib's methods take keywords that its own types leave open.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false

import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from broker.sim.comparison import OURS
from broker.sim.figures import Spread
from broker.sim.lineup import ROUND_ROBIN
from broker.sim.measures import MEASURES, TTFT_MEAN
from broker.sim.report import Entry, Report

TEXT = "#010203"
"""Stands for the page's text colour while matplotlib draws."""

OURS_COLOUR = "#2f81d8"
PEER_COLOUR = "#8c8c86"
BEST_COLOUR = "#e08a1e"
GOOD_COLOUR = "#2a9d62"
BAD_COLOUR = "#d2554c"
GRID_COLOUR = "#80808040"

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "inferlane",
    "font.size": 10,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": PEER_COLOUR,
    "xtick.color": PEER_COLOUR,
    "ytick.color": PEER_COLOUR,
    "xtick.labelcolor": TEXT,
    "ytick.labelcolor": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}

FAR_RATIO = 5.0
"""A policy whose mean TTFT is this many times the least would press all others into a corner."""

WIDTH_IN = 9.0
ROW_IN = 0.26


def time_rows(report: Report, name: str, label: str) -> str:
    """Draw p50, mean and p99 of a time by policy; `name` is a spread of an entry."""
    rows = shown(report)
    spreads: list[Spread] = [getattr(one, name) for one in rows]

    def draw(axes: Axes) -> None:
        for place, (one, spread) in enumerate(zip(rows, spreads, strict=True)):
            colour = _colour(report, one)
            times = [1000 * value for value in (spread.p50, spread.mean, spread.p99)]
            axes.plot([min(times), max(times)], [place, place], color=colour, lw=1.2, alpha=0.6)
            axes.plot(times[0], place, "o", color=colour, mfc="none", ms=6)
            axes.plot(times[1], place, "o", color=colour, ms=6)
            axes.plot(times[2], place, "|", color=colour, ms=11, mew=2)
        _name_rows(axes, rows)
        _log_ms(axes)
        axes.set_xlabel(f"{label}, ms (○ median, ● mean, | p99), log scale")

    return _svg(draw, rows=len(rows))


def cached_against_ttft(report: Report) -> str:
    """Draw the cached share of every policy against its mean TTFT."""
    named = {one.policy for one in shown(report)}
    entries = sorted(_near(report.policies), key=lambda one: one.family == OURS)

    def draw(axes: Axes) -> None:
        for one in entries:
            x, y = 1000 * one.ttft_s.mean, 100 * one.cached_token_ratio
            colour = _colour(report, one)
            axes.plot(x, y, "o", color=colour, ms=6 if one.policy in named else 4, alpha=0.85)
        for one, height in _label_heights([o for o in entries if o.policy in named]):
            x, y = 1000 * one.ttft_s.mean, 100 * one.cached_token_ratio
            axes.annotate(
                one.policy,
                (x, y),
                xytext=(1.02, height),
                textcoords="axes fraction",
                fontsize=8,
                va="center",
                color=TEXT,
                arrowprops={"arrowstyle": "-", "color": GRID_COLOUR, "lw": 0.8},
                annotation_clip=False,
            )
        _log_ms(axes)
        axes.grid(visible=True, color=GRID_COLOUR)
        axes.set_xlabel("TTFT mean, ms, log scale (left is better)")
        axes.set_ylabel("prompt tokens from a cache, % (up is better)")

    return _svg(draw, height_in=4.6)


def distribution(report: Report) -> str:
    """Draw the share of requests whose first token came within a time."""

    def draw(axes: Axes) -> None:
        for one in _contrasted(report):
            xs = [1000 * max(value, 1e-4) for value in one.ttft_quantiles_s]
            colour = _colour(report, one)
            axes.plot(xs, range(len(xs)), color=colour, lw=2, label=one.policy)
        _log_ms(axes)
        axes.grid(visible=True, color=GRID_COLOUR)
        axes.set_ylim(0, 100)
        axes.set_xlabel("TTFT, ms, log scale")
        axes.set_ylabel("requests with a first token by then, %")
        axes.legend(loc="lower right")

    return _svg(draw, height_in=4.2)


def utilisation(report: Report) -> str:
    """Draw the spread of utilisation between workers, by policy."""
    rows = shown(report)

    def draw(axes: Axes) -> None:
        values = [100 * one.utilisation_std for one in rows]
        colours = [_colour(report, one) for one in rows]
        axes.barh(range(len(rows)), values, height=0.6, color=colours)
        _name_rows(axes, rows)
        axes.grid(visible=True, axis="x", color=GRID_COLOUR)
        axes.set_xlabel("standard deviation between workers of the share of time in use, points")

    return _svg(draw, rows=len(rows))


def differences(report: Report, policy: str) -> str:
    """Draw ours against the best peer for each measure, as a share of the peer's value."""
    measures = report.against_best_peer[policy]
    rows = [(measure, measures[measure.name]) for measure in MEASURES]
    rows = [(measure, one) for measure, one in rows if one.best]
    colours = {"better": GOOD_COLOUR, "worse": BAD_COLOUR}

    def draw(axes: Axes) -> None:
        for place, (_, one) in enumerate(rows):
            colour = colours.get(one.verdict, PEER_COLOUR)
            if one.interval is not None:
                ends = [100 * end / one.best for end in one.interval]
                axes.plot(ends, [place, place], color=colour, lw=3, solid_capstyle="butt")
            axes.plot(100 * one.difference / one.best, place, "o", color=colour, ms=6)
        axes.axvline(0, color=PEER_COLOUR, lw=1)
        names = [
            f"{measure.says} ({'more' if measure.higher_is_better else 'less'} is better)"
            for measure, _ in rows
        ]
        axes.set_yticks(range(len(rows)), names)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xscale("symlog", linthresh=10)
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda value, _: f"{value:+g} %" if value else "0")
        )
        axes.grid(visible=True, axis="x", color=GRID_COLOUR)
        axes.set_xlabel(f"{policy} less the best peer, % of the peer's value")

    return _svg(draw, rows=len(rows))


def shown(report: Report) -> list[Entry]:
    """Return what the plots name: all of ours, and of each peer's knobs the least mean TTFT."""
    best: dict[str, Entry] = {}
    for one in report.policies:
        key = one.policy if one.family == OURS else one.family
        if key not in best or one.ttft_s.mean < best[key].ttft_s.mean:
            best[key] = one
    return sorted(best.values(), key=lambda one: one.ttft_s.mean)


def _contrasted(report: Report) -> list[Entry]:
    """Return round robin, the best peer and the first of ours, where they took part."""
    ours = next((one.policy for one in report.policies if one.family == OURS), "")
    best = report.best_peer.get(TTFT_MEAN.name)
    wanted = (ROUND_ROBIN, best.policy if best else "", ours)
    by_label = {one.policy: one for one in report.policies}
    return [by_label[label] for label in dict.fromkeys(wanted) if label in by_label]


def _colour(report: Report, one: Entry) -> str:
    best = report.best_peer.get(TTFT_MEAN.name)
    if one.family == OURS:
        return OURS_COLOUR
    return BEST_COLOUR if best and one.policy == best.policy else PEER_COLOUR


def far_off(report: Report) -> list[Entry]:
    """Return the policies that the plot of cached shares leaves out."""
    near = {one.policy for one in _near(report.policies)}
    return [one for one in report.policies if one.policy not in near]


def _near(entries: Sequence[Entry]) -> list[Entry]:
    least = min(one.ttft_s.mean for one in entries)
    return [one for one in entries if one.ttft_s.mean <= FAR_RATIO * least]


def _label_heights(entries: Sequence[Entry]) -> list[tuple[Entry, float]]:
    """Spread labels evenly beside the plot, in the order of their points: they never overlap."""
    ordered = sorted(entries, key=lambda one: -one.cached_token_ratio)
    step = 1.0 / max(1, len(ordered) - 1)
    return [(one, 1.0 - place * step) for place, one in enumerate(ordered)]


def _name_rows(axes: Axes, rows: Sequence[Entry]) -> None:
    axes.set_yticks(range(len(rows)), [one.policy for one in rows])
    for text, one in zip(axes.get_yticklabels(), rows, strict=True):
        text.set_fontweight("bold" if one.family == OURS else "normal")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(visible=True, axis="y", color=GRID_COLOUR)


def _log_ms(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.grid(visible=True, axis="x", color=GRID_COLOUR)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _svg(draw: Callable[[Axes], None], *, rows: int = 0, height_in: float = 0.0) -> str:
    with mpl.rc_context(STYLE):
        size = (WIDTH_IN, height_in or rows * ROW_IN + 0.9)
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots())
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :].replace(TEXT, "currentColor")
