"""`inferlane decisions accuracy`: predicted against real, by whose word on the cache it was."""

import gzip
from pathlib import Path

import orjson
import pytest

from broker.wire.messages import Outcome, Usage
from ops.cli.decision_accuracy import accuracy_of
from ops.cli.main import main
from tests.decision_logs import a_closing_line, a_dispatch_line, an_end_line


def a_job(name: str, *, cached_tokens: int, source: str = "model") -> list[bytes]:
    """A job that was predicted 640 cached tokens and its first token after 0.5 s; it came so."""
    usage = Usage(prompt_tokens=700, cached_tokens=cached_tokens, output_tokens=16)
    end = an_end_line(name, at_s=4.0, usage=usage, cache_source=source)
    return [a_dispatch_line(name, waited_s=1.0), end]


def test_predicted_tokens_are_told_beside_cached_ones() -> None:
    """Sums by source, the one with most jobs first."""
    lines = [
        *a_job("a", cached_tokens=640),
        *a_job("b", cached_tokens=160),
        *a_job("c", cached_tokens=600, source="events"),
    ]
    found = accuracy_of(lines, skip_jobs=0)
    told = [(one.source, one.jobs, one.predicted_tokens, one.cached_tokens) for one in found.hits]
    assert told == [("model", 2, 1280, 800), ("events", 1, 640, 600)]
    assert found.hits[0].ratio == 1.6


def test_errors_do_not_cancel_each_other_out() -> None:
    """Predicted 640 twice: one found 800, one 480. In sum that is right, and neither was."""
    lines = [*a_job("a", cached_tokens=800), *a_job("b", cached_tokens=480)]
    (found,) = accuracy_of(lines, skip_jobs=0).hits
    assert (found.ratio, found.error_ratio) == (1.0, 0.25)


def test_the_first_jobs_may_be_left_out() -> None:
    """Caches fill and rates are learned then."""
    lines = [*a_job("a", cached_tokens=0), *a_job("b", cached_tokens=640)]
    found = accuracy_of(lines, skip_jobs=1)
    assert [one.ratio for one in found.hits] == [1.0]
    assert accuracy_of(lines, skip_jobs=2).hits == []


def test_first_tokens_are_compared_from_the_dispatch_on() -> None:
    """Predicted 0.5 s: one came so, one after 1 s, one after 2 s."""
    lines: list[bytes] = []
    for name, ttft_s in (("a", 0.5), ("b", 1.0), ("c", 2.0)):
        lines += [a_dispatch_line(name), an_end_line(name, at_s=4.0, ttft_s=ttft_s)]
    found = accuracy_of(lines, skip_jobs=0)
    assert found.first_tokens == 3
    assert found.first_token_error_ratio == pytest.approx(0.5)
    assert found.first_token_bias_ratio == pytest.approx(-0.5)


def test_what_ran_twice_or_never_is_not_compared() -> None:
    """A prediction is for one attempt, and its outcome must be that one's."""
    lines = [
        a_dispatch_line("a"),
        an_end_line("a", outcome=Outcome.RETRY, kind=None),
        a_dispatch_line("a", number=2),
        an_end_line("a"),
        a_dispatch_line("b"),
        a_closing_line("b"),
        b"garbage",
    ]
    found = accuracy_of(lines, skip_jobs=0)
    assert (found.hits, found.first_tokens, found.tally.broken_lines) == ([], 0, 1)


def test_command_reads_rotated_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In words and as JSON."""
    old, new = tmp_path / "decisions.1.jsonl.gz", tmp_path / "decisions.jsonl"
    old.write_bytes(gzip.compress(b"".join(a_job("a", cached_tokens=320)), mtime=0))
    new.write_bytes(b"".join(a_job("b", cached_tokens=320)) + b"cut")
    assert main(["decisions", "accuracy", str(new), str(old)]) == 0
    out, err = capsys.readouterr()
    assert err == "left out: 1 lines that can't be read\n"
    told = " ".join(out.split())
    assert "the agent's guess 2 1,400 1,280 640 2.00" in told
    assert "half of the predictions were off by 0% or less" in told
    assert main(["decisions", "accuracy", str(new), str(old), "--json"]) == 0
    assert orjson.loads(capsys.readouterr().out)["hits"][0]["jobs"] == 2


def test_log_with_nothing_to_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message says what was read, and what it lacked."""
    log = tmp_path / "decisions.jsonl"
    log.write_bytes(a_dispatch_line("a") + b"garbage\n")
    assert main(["decisions", "accuracy", str(log)]) == 1
    assert "in 2 lines (1 without an end, 1 lines that can't be read)" in capsys.readouterr().err
    log.write_bytes(a_dispatch_line("b") + a_closing_line("b"))
    assert main(["decisions", "accuracy", str(log)]) == 1
    assert "no job to compare: none of 1 ran once to its end" in capsys.readouterr().err
    assert main(["decisions", "accuracy"]) == 2
