"""One self-contained page about one comparison: findings first, then plots, tables and method."""

from html import escape
from pathlib import Path

from broker.sim.comparison import NEGLIGIBLE, OURS
from broker.sim.lineup import OURS_AS_SHIPPED
from broker.sim.report import Report
from ops.sim_page import plots, tables
from ops.sim_page.findings import (
    findings,
    leading,
    load_sentence,
    overload_sentence,
    refusal_sentence,
    sensitivity_sentence,
    summary,
)

STYLE = Path(__file__).parent / "style.css"

HOW_TO = {
    "ttft": (
        "How to read it: one row a policy, the least mean on top; ours in bold and blue, the peer "
        "with the least mean in orange. Of each peer's knobs, the best for the mean is shown. Far "
        "left is good; a long line means that some wait much longer than others."
    ),
    "cached": (
        "How to read it: each dot is a policy at one setting of its knobs. Up and left is good. A "
        "policy that is high but far right finds the cache and pays for it by queueing."
    ),
    "distribution": (
        "How to read it: at a time on the horizontal axis, the height says how many requests had "
        "their first token by then. The higher curve is the better one; where two cross, one "
        "serves the quick requests better and the other the slow ones."
    ),
    "e2e": (
        "How to read it: as above, from a request's arrival to its last token. The order is still "
        "that of mean TTFT, so a dot that sticks out to the right pays in decoding for it."
    ),
    "utilisation": (
        "How to read it: short bars mean that all workers are in use alike. Affinity makes a "
        "policy uneven; a long bar beside a good TTFT means that it is worth it."
    ),
    "differences": (
        "How to read it: the dot is the mean difference, the bar its 95 % interval over the "
        "seeds. A bar that crosses 0 says nothing (grey). Green is better, red worse, whichever "
        "side is the good one. Beyond ± 10 % the axis is logarithmic."
    ),
    "sensitivity": (
        "How to read it: rank and mean TTFT of each policy when one constant of the engine model "
        "is changed. Red cells belong to policies whose order is reversed, both ways beyond doubt."
    ),
}

PARTS = (
    "Ours with a part taken away. From “on arrival” to “fifo”, late binding with hold; from “fifo” "
    "to “first_token”, ordering; from “no hold” to “first_token”, the hold."
)

MEASURES = (
    ("TTFT", "From a request's arrival to its first token; the wait at the broker is in it."),
    ("ITL", "(end − first token) ÷ (output tokens − 1), mean over requests."),
    ("cached-token share", "Prompt tokens that an engine served from its cache ÷ all of them."),
    ("prefix switches", "Of requests with a known prefix, those sent to another worker than last."),
    ("duplicate KV", "Cached blocks of which another worker holds a copy too, mean over samples."),
    ("hit dip", "Cached share in the minute before a worker joins or restarts, less that after."),
    ("Jain", "Fairness of speed between lanes: 1 is equal."),
    ("queue wait", "At the broker only. Peers bind on arrival: theirs is 0, and they wait inside."),
    ("decision", "Real microseconds of one step of the mind on this machine, of one seed."),
)


METHOD = (
    (
        "Better or worse is said where the 95 % interval of the difference, paired by seed, "
        f"excludes 0 (Student's t; 3 seeds or more), unless all of it is {NEGLIGIBLE}."
    ),
    (
        "Each measure has its own best peer, at the best of its knobs, chosen on these very seeds: "
        "that favours the peer."
    ),
    (
        "Peers bind on arrival, as they do in life; ours waits at the broker, and its TTFT counts "
        "that wait."
    ),
    (
        "Load is what is offered ÷ what round robin serves with every request there at once, in "
        "tokens/s. It is overstated on a short trace."
    ),
)


def page(report: Report) -> str:
    """Write the page; it needs no network."""
    trace, setting = report.trace, report.setting
    title = f"{trace.name} @ {setting.speed:g}: which policy?"
    body = "\n".join(
        [
            f"<h1>{escape(title)}</h1>",
            _facts(report),
            f"<p>{escape(summary(report))}</p>",
            _warning(overload_sentence(report)),
            _warning(refusal_sentence(report)),
            _findings(report),
            _plots(report),
            _against(report),
            _sensitivity(report),
            "<h2>All policies, all figures</h2>",
            "<p class='soft'>Means over the seeds; bold is the best peer for that measure.</p>",
            tables.policies(report),
            _method(report),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE.read_text()}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _facts(report: Report) -> str:
    trace, setting = report.trace, report.setting
    seeds = "1 seed" if len(setting.seeds) == 1 else f"{len(setting.seeds)} seeds"
    changes = f", {', '.join(setting.changes)} s" if setting.changes else ""
    text = (
        f"{trace.requests:,} requests, {trace.prompt_tokens:,} prompt and {trace.output_tokens:,} "
        f"output tokens; {setting.workers} workers × {setting.blocks_per_worker:,} blocks of "
        f"{setting.block_tokens} tokens, profile {setting.profile}{changes}; {seeds}. "
        f"{load_sentence(report)}"
    )
    return f"<p class='soft'>{escape(text)}</p>"


def _warning(text: str) -> str:
    return f"<p class='warn'>{escape(text)}</p>" if text else ""


def _findings(report: Report) -> str:
    policy = leading(report)
    if policy not in report.against_best_peer:
        return ""
    found = findings(report, policy)
    cards = (
        ("Better than the best peer", "better", found.better),
        ("Worse than the best peer", "worse", found.worse),
        ("No difference, or no claim", "soft", found.undecided),
    )
    made = "\n".join(_card(title, css, lines) for title, css, lines in cards)
    return (
        f"<h2>{escape(policy)}: what is better, and what is not</h2><div class='pair'>{made}</div>"
    )


def _card(title: str, css: str, lines: list[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines) or "<li>nothing</li>"
    return f"<div class='card'><h3 class='{css}'>{title}</h3><ul>{items}</ul></div>"


def _plots(report: Report) -> str:
    far = [f"{one.policy} ({one.ttft_s.mean:,.1f} s)" for one in plots.far_off(report)]
    note = f" Far off to the right, not drawn: {', '.join(far)}." if far else ""
    return "\n".join(
        [
            _figure("Time to first token", plots.time_rows(report, "ttft_s", "TTFT"), "ttft"),
            _figure(
                "Cached share against time to first token",
                plots.cached_against_ttft(report),
                "cached",
                note=note,
            ),
            _figure("Who waits how long", plots.distribution(report), "distribution"),
            _figure("End to end", plots.time_rows(report, "e2e_s", "end to end"), "e2e"),
            _figure("Spread of utilisation", plots.utilisation(report), "utilisation"),
        ]
    )


def _against(report: Report) -> str:
    policy = leading(report)
    if policy not in report.against_best_peer:
        return ""
    figure = _figure("", plots.differences(report, policy), "differences")
    parts = [f"<h2>Ours against the best peer for each measure</h2>{figure}"]
    shipped = [one for one in OURS_AS_SHIPPED if one in report.against_best_peer]
    for one in shipped or list(report.against_best_peer)[:1]:
        parts += [f"<h3>{escape(one)}</h3>", tables.against(report, one)]
    if sum(one.family == OURS for one in report.policies) > len(shipped):
        parts += [f"<h2>What each part of ours brings</h2><p>{PARTS}</p>", tables.parts(report)]
    return "\n".join(parts)


def _sensitivity(report: Report) -> str:
    found = report.sensitivity
    if found is None:
        return ""
    return "\n".join(
        [
            "<h2>Does the order hang on one constant?</h2>",
            f"<p>{escape(sensitivity_sentence(found))}</p>",
            tables.sensitivity(found),
            f"<p class='soft'>{HOW_TO['sensitivity']}</p>",
        ]
    )


def _figure(title: str, svg: str, how_to: str, *, note: str = "") -> str:
    head = f"<h2>{title}</h2>" if title else ""
    caption = f"<figcaption>{HOW_TO[how_to]}{escape(note)}</figcaption>"
    return f"{head}<figure>{svg}{caption}</figure>"


def _method(report: Report) -> str:
    setting = report.setting
    seeds = setting.seeds
    lines = (
        (
            f"Seeds {seeds[0]} to {seeds[-1]}: each moves every gap between arrivals by up to "
            f"{setting.jitter * 100:g} %; all policies see the same arrivals under a seed."
        ),
        *METHOD,
        f"Trace: {report.trace.source}.",
        f"Engine profile {setting.profile}: {setting.profile_source}",
    )
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    words = "".join(f"<dt>{escape(one)}</dt><dd>{escape(says)}</dd>" for one, says in MEASURES)
    return (
        f"<h2>How this was measured</h2><ul>{items}</ul><h2>Measures</h2><dl>{words}</dl>"
        f"<h2>The policies</h2>{tables.sources(report)}"
    )
