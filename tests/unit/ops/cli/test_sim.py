"""`inferlane sim`: what a newcomer types, what it says, and what it writes."""

import json
import os
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from broker.sim.measures import MEASURES
from ops.cli import errors, sim_compare
from ops.cli.main import main

EXCERPT = ["--trace", "excerpt:conversation", "--part", "40"]


def run_json(arguments: list[str], path: Path) -> Any:
    """Run a command with --report, and read what it wrote."""
    assert main([*arguments, "--report", str(path)]) == 0
    return json.loads(path.read_bytes())


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """A small comparison, as JSON and as a page."""
    folder = tmp_path_factory.mktemp("compared")
    arguments = ["sim", "compare", *EXCERPT, "--seeds", "3", "--jobs", "1", "--sensitivity"]
    arguments += ["--policies", "first_token,weighted,lmetric,round-robin"]
    found = run_json([*arguments, "--html", str(folder / "a.html")], folder / "a.json")
    assert sorted(path.name for path in folder.iterdir()) == ["a.html", "a.json"]
    return found, (folder / "a.html").read_text()


def test_run_shows_and_writes_an_entry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], compared: tuple[dict[str, Any], str]
) -> None:
    """The JSON has the keys of one entry of a comparison; the table names every measure."""
    found = run_json(["sim", "run", *EXCERPT, "--policy", "dynamo"], tmp_path / "run.json")
    assert found["policy"] == "dynamo scale=1"
    assert found["requests"] == 40
    assert found["decision_us"] is None
    assert found.keys() == compared[0]["policies"][0].keys()
    out = capsys.readouterr().out
    for measure in MEASURES:
        assert measure.says in out


def test_run_of_ours_times_its_decisions(tmp_path: Path) -> None:
    """Decision times are of ours only."""
    found = run_json(["sim", "run", *EXCERPT], tmp_path / "run.json")
    assert found["policy"] == "first_token"
    assert 0 < found["decision_us"]["p50"] <= found["decision_us"]["p99"]


def test_run_is_the_same_under_one_seed(tmp_path: Path) -> None:
    """Another seed moves the arrivals, the same seed nothing."""
    arguments = ["sim", "run", *EXCERPT, "--policy", "lmetric", "--seed"]
    one, again, other = (
        run_json([*arguments, seed], tmp_path / f"{place}.json")
        for place, seed in enumerate(("1", "1", "2"))
    )
    assert one == again
    assert one["ttft_s"] != other["ttft_s"]


def test_policy_list_names_everybody(capsys: pytest.CaptureFixture[str]) -> None:
    """No trace is needed to see who there is."""
    assert main(["sim", "run", "--policy", "list"]) == 0
    out = capsys.readouterr().out
    for label in ("first_token", "round-robin", "sglang 4/1.1", "dynamo scale=32"):
        assert label in out


def test_comparison_has_what_was_agreed(compared: tuple[dict[str, Any], str]) -> None:
    """The keys that other programs read."""
    found, _ = compared
    assert [one["policy"] for one in found["policies"]] == [
        *("first_token", "weighted", "lmetric", "round-robin")
    ]
    first = found["policies"][0]
    for name in ("ttft_s", "itl_s", "e2e_s", "queue_s", "decision_us"):
        assert set(first[name]) == {"mean", "p50", "p90", "p99"}
    assert len(first["seeds"]) == 3
    mean = sum(one["ttft_s"]["mean"] for one in first["seeds"]) / 3
    assert first["ttft_s"]["mean"] == pytest.approx(mean)
    assert set(found["best_peer"]) == {measure.name for measure in MEASURES}
    assert set(found["against_best_peer"]) == {"first_token", "weighted"}
    assert found["overloaded"] == []
    assert found["setting"]["seeds"] == [1, 2, 3]
    assert found["trace"]["requests"] == 40
    assert len(found["sensitivity"]["variants"]) == 7


def test_page_says_what_is_better_and_what_is_not(compared: tuple[dict[str, Any], str]) -> None:
    """Both stand first, from the same comparison as the JSON."""
    _, html = compared
    assert "first_token: what is better, and what is not" in html
    assert html.index("Better than the best peer") < html.index("<svg")
    assert html.index("Worse than the best peer") < html.index("<svg")
    assert "Does the order hang on one constant?" in html


def test_comparison_is_the_same_over_a_pool(tmp_path: Path) -> None:
    """Two processes come to what one comes to."""
    arguments = ["sim", "compare", *EXCERPT, "--policies", "lmetric,power-of-two", "--seeds", "2"]
    one = run_json([*arguments, "--jobs", "1"], tmp_path / "one.json")
    two = run_json([*arguments, "--jobs", "2"], tmp_path / "two.json")
    assert one == two


def test_sweep_begins_with_what_ships(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each combination stands beside the values that ship."""
    arguments = ["sim", "sweep", *EXCERPT, "--jobs", "1", "--seeds", "1"]
    arguments += ["--knob", "routing.bias=0,2", "--knob", "order.wait_credit=1"]
    found = run_json(arguments, tmp_path / "sweep.json")
    assert [one["knobs"] for one in found["points"]] == [
        {},
        {"routing.bias": "0", "order.wait_credit": "1"},
        {"routing.bias": "2", "order.wait_credit": "1"},
    ]
    assert "as shipped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run"], "name a trace, for example --trace excerpt:conversation"),
        (["run", "--trace", "absent"], "absent: no such trace"),
        (["run", "--trace", "conversation"], "set INFERLANE_TRACES"),
        (["run", "--trace", "generated:many?requests=1", "--part", "first-half"], "no request"),
        (["run", "--trace", "generated:scale_out?duration_s=1e-9"], "scale_out: has no request"),
        (["run", *EXCERPT, "--policy", "nobody"], "there are: first_token"),
        (["run", *EXCERPT, "--profile", "referense"], 'Did you mean "reference"?'),
        (["run", *EXCERPT[:2], "--part", "third"], "--part is all, first-half, second-half or"),
        (["run", *EXCERPT, "--blocks-per-worker", "3"], "give it more blocks"),
        (["run", *EXCERPT, "--report", "/absent/a.json"], "/absent/a.json can't be written"),
        (["run", *EXCERPT, "--workers", "0"], "--workers"),
        (["run", *EXCERPT, "--workers", "100000000"], "--workers"),
        (["compare", *EXCERPT, "--policies", "nobody"], "no policy is called 'nobody'"),
        (["compare", *EXCERPT, "--html", "/absent/a.html"], "/absent/a.html can't be written"),
        (["compare", *EXCERPT, "--policies", ","], "--policies names nobody"),
        (["run", *EXCERPT, "--report", "/dev/null"], "a device or a pipe; name a file"),
        (["compare", *EXCERPT, "--html", "a", "--report", "a"], "named for two results"),
        (["run", *EXCERPT, "--blocks-per-worker", "9" * 400], "--blocks-per-worker"),
        (["run", *EXCERPT, "--speed", "inf"], "--speed"),
        (["run", *EXCERPT[:2], "--part", "9" * 5000], "--part is all, first-half, second-half or"),
        (["compare", *EXCERPT, "--seeds", "1000000000"], "--seeds"),
        (["compare", *EXCERPT, "--jobs", "100000"], "--jobs"),
        (["fuzz", "--jobs", "100000"], "--jobs"),
        (["fuzz", "--seeds", "9" * 30], "--seeds"),
        (["sweep", *EXCERPT], "name a knob and its values"),
        (["sweep", *EXCERPT, "--knob", "routing.bais=1"], 'Did you mean "routing.bias"?'),
        (["sweep", *EXCERPT, "--knob", "routing.bias=1", "--policy", "lmetric"], "a peer's"),
    ],
)
def test_wrong_usage(
    arguments: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Code 2 and one sentence that says what to do, before anything runs."""
    monkeypatch.delenv("INFERLANE_TRACES", raising=False)
    assert main(["sim", *arguments]) == errors.ExitCode.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err


@pytest.mark.parametrize("command", ["run", "compare", "sweep"])
def test_a_result_never_takes_the_place_of_the_trace(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """By a path, or by its name in the folder of traces."""
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 2}\n')
    arguments = ["sim", command, "--traces", str(tmp_path), "--report", str(trace)]
    if command == "sweep":
        arguments += ["--knob", "routing.bias=1"]
    for name in (str(trace), "t.jsonl"):
        assert main([*arguments, "--trace", name]) == errors.ExitCode.USAGE
        assert "t.jsonl is what is read" in capsys.readouterr().err
    assert trace.read_text().startswith('{"timestamp"')


def test_a_trace_may_be_called_anything(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Bytes that are no text, markup of a terminal or of a page: all is shown as text."""
    name = os.fsdecode(b"[b]a\xff<script>\x1b[31m.jsonl")
    (tmp_path / name).write_text('{"timestamp": 0, "input_length": 9, "output_length": 2}\n')
    arguments = ["sim", "compare", "--trace", str(tmp_path / name), "--policies", "dynamo,lmetric"]
    arguments += ["--seeds", "1", "--jobs", "1", "--html", str(tmp_path / "a.html")]
    found = run_json(arguments, tmp_path / "a.json")
    assert found["trace"]["name"] == "[b]a�<script>\x1b[31m"
    assert "[b]a�<script>�[31m @ 1: 1 requests" in capsys.readouterr().out
    page = (tmp_path / "a.html").read_text()
    assert "[b]a�&lt;script&gt;" in page
    assert "<script" not in page


def test_page_without_matplotlib_fails_before_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What to install is said at once, not after an hour."""
    real = util.find_spec
    monkeypatch.setattr(
        sim_compare, "find_spec", lambda name: None if name == "matplotlib" else real(name)
    )
    arguments = ["sim", "compare", "--trace", "absent", "--html", str(tmp_path / "a.html")]
    assert main(arguments) == errors.ExitCode.USAGE
    assert "pip install 'inferlane[sim]'" in capsys.readouterr().err
