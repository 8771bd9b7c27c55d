"""The page of a comparison: self-contained, readable, and honest before it is pretty."""

import re
from html.parser import HTMLParser

import pytest
from msgspec.structs import replace

from broker.sim.sensitivity import UNCHANGED, sensitivity
from ops.cli.sim_show import show_report
from ops.sim_page.page import HOW_TO, page
from tests.comparisons import a_load, a_report, some_figures

POLICIES = {
    "first_token": [0.10, 0.11, 0.12],
    "first_token fifo": [0.13, 0.14, 0.15],
    "lmetric": [0.2, 0.21, 0.22],
    "dynamo scale=1": [0.3, 0.31, 0.32],
    "round-robin": [0.4, 0.41, 0.42],
}

VOID = {"meta", "br", "link", "img"}


class Balance(HTMLParser):
    """Sees that every element that is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        del attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_page_is_whole() -> None:
    """Balanced, with every plot and its words on how to read it."""
    html = page(a_report(POLICIES))
    seen = Balance()
    seen.feed(html)
    assert seen.open == []
    assert html.count("<svg") == 6
    text = "".join(seen.text)
    for name, says in HOW_TO.items():
        assert (says in text) == (name != "sensitivity")


def test_page_needs_no_network() -> None:
    """Nothing is loaded: no source, no link, no import, no script."""
    html = page(a_report(POLICIES))
    assert not re.search(r"""\bsrc=|@import|<script|<link|url\((?!#)|href="(?!#)""", html)


def test_text_of_plots_takes_the_page_s_colour() -> None:
    """Dark or light, labels are readable: they have no colour of their own."""
    html = page(a_report(POLICIES))
    assert "prefers-color-scheme: dark" in html
    texts = re.findall(r"<text[^>]*>", html)
    assert len(texts) > 50
    assert all("fill: currentColor" in one for one in texts)


def test_same_report_gives_the_same_page() -> None:
    """No dates, no random ids."""
    assert page(a_report(POLICIES)) == page(a_report(POLICIES))


def test_what_is_worse_stands_as_high_as_what_is_better() -> None:
    """Before the first plot, in words, with the peer's name."""
    html = page(a_report({"first_token": [0.2, 0.21, 0.22], "lmetric": [0.1, 0.11, 0.12]}))
    head = html[: html.index("<svg")]
    assert "TTFT mean: 210 ms against 110 ms of lmetric, ×\N{NO-BREAK SPACE}1.909" in head
    better, worse = head.split("Worse than the best peer")
    assert "TTFT mean:" not in better
    assert "TTFT mean:" in worse
    assert "(worse)" in head


def test_overloaded_point_is_said_first() -> None:
    """Its figures prove nothing about others, and the page says so on top."""
    html = page(a_report(POLICIES, load=a_load(1.2, overloaded=True)))
    assert html.index("Overloaded: some-trace @ 1") < html.index("what is better")
    assert "class='warn'" not in page(a_report(POLICIES))


def test_refused_requests_are_said_first(capsys: pytest.CaptureFixture[str]) -> None:
    """Who leaves out the slowest looks the faster for it: on the page, and on the terminal."""
    report = a_report(POLICIES)
    first, *others = report.policies
    told = "Requests refused: first_token 20.0% of them"
    report = replace(report, policies=(replace(first, refused=25.0), *others))
    html = page(report)
    assert html.index(told) < html.index("what is better")
    show_report(report)
    assert told in capsys.readouterr().out
    show_report(a_report(POLICIES))
    assert "refused" not in capsys.readouterr().out


@pytest.mark.parametrize("policies", [["lmetric", "round-robin"], ["first_token"]])
def test_one_side_alone_is_shown_without_a_comparison(policies: list[str]) -> None:
    """Peers alone, or ours alone: figures, and no claim."""
    html = page(a_report({label: POLICIES[label] for label in policies}))
    assert "Ours and at least one peer must take part" in html
    assert "what is better" not in html


def test_two_seeds_claim_nothing() -> None:
    """Every measure stands under what is not shown."""
    html = page(a_report({"first_token": [0.1, 0.1], "lmetric": [0.2, 0.2]}))
    assert html.count("<li>nothing</li>") == 2
    assert "a claim needs 3 seeds" in html


def test_policy_far_off_is_named_not_drawn() -> None:
    """One that drowns would press all others into a corner."""
    html = page(a_report(POLICIES | {"aibrix 8/1": [40.0, 41.0, 42.0]}))
    assert "Far off to the right, not drawn: aibrix 8/1 (41.0 s)." in html


def test_reversed_pairs_are_named() -> None:
    """The order hangs on a constant: which one, and for whom."""
    base = {
        label: [some_figures(one) for one in POLICIES[label]]
        for label in ("first_token", "lmetric")
    }
    turned = {"first_token": base["lmetric"], "lmetric": base["first_token"]}
    outcomes = {UNCHANGED: base, "KV size halved": turned, "KV size doubled": "does not fit"}
    found = sensitivity(outcomes, ours=["first_token"])
    html = page(a_report(POLICIES, sensitivity=found))
    assert "Yes: these pairs are reversed: KV size halved: first_token and lmetric." in html
    assert "KV size doubled could not be run (does not fit)." in html
