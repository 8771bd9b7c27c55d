"""`inferlane replay`: what it reads, assumes, shows and refuses."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from msgspec.structs import replace

from broker.core.policy import RoutingPolicy
from broker.sim.decisions import LoggedJob
from broker.wire.messages import Usage
from ops.cli import sim_bar
from ops.cli.main import main
from ops.cli.output import duration
from ops.cli.replay import BAR_STEPS
from ops.cli.replay_text import percent
from ops.cli.sim_bar import Report
from tests.decision_logs import a_dispatch_line, a_refusal_line, an_end_line
from tests.replays import ENGINE, IN_TURN, START_S, TIGHT, a_logged_day, some_requests

QUOTAS = """\
[policy]
models = ["tiny"]
[[policy.lanes]]
name = "acme"
[[policy.lanes]]
name = "bolt"
[[policy.quotas]]
lane = "acme"
inflight_jobs_max = 1
queued_jobs_max = 1
"""


def lines_of(job: LoggedJob) -> list[tuple[float, bytes]]:
    """Write a job as the broker's own writer does; the wire's blocks are eight a logged one."""
    name = job.key.split(".")[1]
    asked: dict[str, Any] = {"band": job.band, "model": job.model}
    came_s = job.enqueued_at_s - START_S
    wire = [block for logged in job.blocks for block in (*range(7), logged)]
    if not job.dispatches:
        line = a_refusal_line(
            name,
            lane=job.lane,
            enqueued_s=came_s,
            at_s=job.ended_at_s - START_S,
            blocks=wire,
            prompt_tokens=job.prompt_tokens,
            output_tokens_max=job.output_tokens_max,
            **asked,
        )
        return [(job.ended_at_s, line)]
    run_s, ttft_s = job.run_s or 0.0, job.ttft_s or 0.0
    dispatch = a_dispatch_line(
        name,
        lane=job.lane,
        enqueued_s=came_s,
        waited_s=job.queue_s,
        worker=job.worker,
        blocks=wire,
        prompt_tokens=job.prompt_tokens,
        output_tokens_max=job.output_tokens_max,
        **asked,
    )
    end = an_end_line(
        name,
        lane=job.lane,
        at_s=job.ended_at_s - START_S,
        worker=job.worker,
        usage=Usage(job.counted_prompt_tokens, job.cached_tokens, job.output_tokens),
        run_s=run_s,
        ttft_s=job.enqueued_at_s + ttft_s - (job.ended_at_s - run_s),
    )
    return [(job.dispatched_at_s, dispatch), (job.ended_at_s, end)]


def a_log(folder: Path, *, count: int = 150, refusing: bool = False, **traffic: Any) -> Path:
    """The log of a day on two workers, under first_token (as the builder's lines say)."""
    quotas = TIGHT.quotas if refusing else ()
    day = replace(IN_TURN, routing=RoutingPolicy(), quotas=quotas)
    jobs = a_logged_day(some_requests(count, systems=24, **traffic), ENGINE, policy=day)
    lines = sorted(line for job in jobs for line in lines_of(job))
    path = folder / "decisions.jsonl"
    path.write_bytes(b"".join(line for _, line in lines))
    return path


def run(*arguments: str | Path) -> int:
    """Run the command."""
    return main(["replay", *map(str, arguments)])


def test_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three figures side by side; what was assumed, on standard error."""
    log, report = a_log(tmp_path), tmp_path / "r.json"
    assert run(log, "--policy", "round_robin", "--report", report) == 0
    out, err = capsys.readouterr()
    assert "150 jobs of tiny: as logged, and simulated" in out
    assert "under round_robin" in out
    for measure in ("TTFT mean", "TTFT p50", "TTFT p99", "queue wait mean", "cached share"):
        assert measure in out
    assert "The simulation as it ran is " in out
    assert "least squares over 150 runs of the log" in err
    assert "2 workers alike, all the time; model tiny; ran under first_token" in err
    assert f"report: {report}" in err
    found = orjson.loads(report.read_bytes())
    assert found["assumptions"] == err.splitlines()[:-1]
    whole, *lanes = found["rows"]
    assert (whole["lane"], whole["band"], [one["lane"] for one in lanes]) == (
        "all",
        None,
        ["acme", "bolt"],
    )
    assert duration(whole["logged"]["ttft_s"]["mean"]) in out
    assert whole["as_it_ran"]["ttft_s"]["mean"] == pytest.approx(
        whole["logged"]["ttft_s"]["mean"], rel=0.2
    )
    assert whole["changed"]["cached_token_ratio"] < whole["as_it_ran"]["cached_token_ratio"]


def test_its_bar_fills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of `sim compare`, over both simulations, and moves as they run."""
    shown: list[tuple[int, int]] = []

    @contextmanager
    def bar(names: Sequence[str], *, weights: Sequence[int], requests: int) -> Generator[Report]:
        assert (len(names), len(weights), requests) == (2, 2, BAR_STEPS)
        yield lambda number, ended: shown.append((number, ended))

    monkeypatch.setattr(sim_bar, "bar", bar)
    assert run(a_log(tmp_path), "--policy", "round_robin") == 0
    assert shown == sorted(shown)
    for number in (0, 1):
        steps = [ended for one, ended in shown if one == number]
        assert (steps[0], steps[-1]) == (0, BAR_STEPS)
        assert len(set(steps)) > 10


def test_quota_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who would have been refused, by reason and row, and which lanes gain and lose."""
    log, file = a_log(tmp_path, per_s=8.0), tmp_path / "tighter.toml"
    file.write_text(QUOTAS)
    assert run(log, "--quotas", file, "--policy", "weighted") == 0
    out = capsys.readouterr().out
    assert "under weighted" in out
    (line,) = [one for one in out.splitlines() if "queue_full" in one]
    ended, reason, row, logged, as_it_ran, under = line.split()
    assert (ended, reason, row, logged, as_it_ran) == (
        "rejected",
        "queue_full",
        "lane=acme",
        "0",
        "0",
    )
    assert int(under) > 5
    assert f"{under} jobs would not have been answered: acme." in out
    assert "Lanes that lose: acme (band 1)." in out


def test_what_yesterday_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under looser quotas it asks again; the simulation as it ran takes the refusals as they were,
    or refuses by itself when told the file that did.
    """
    log = a_log(tmp_path, per_s=8.0, refusing=True)
    tight, loose = tmp_path / "tight.toml", tmp_path / "loose.toml"
    tight.write_text(QUOTAS)
    loose.write_text(QUOTAS.replace("jobs_max = 1\n", "jobs_max = 500\n"))
    assert run(log, "--quotas", loose, "--report", tmp_path / "r.json") == 0
    out, err = capsys.readouterr()
    found = orjson.loads((tmp_path / "r.json").read_bytes())
    (refused,) = found["endings"]
    assert refused["logged"] == refused["as_it_ran"] == found["answered_now"] > 5
    assert refused["changed"] == 0
    assert f"{refused['logged']} jobs would have been answered that were not." in out
    assert "which quotas ran is not known (--quotas-before FILE)" in err
    assert run(log, "--quotas", loose, "--quotas-before", tight) == 0
    out, err = capsys.readouterr()
    assert "which quotas ran is not known" not in err
    assert "lane=acme" in out


def test_fleet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Workers, engine, cache and slots as asked, and each said."""
    log, report = a_log(tmp_path), tmp_path / "r.json"
    fleet = ("--workers", "1", "--profile", "demo", "--blocks-per-worker", "500", "--slots", "2")
    assert run(log, "--policy", "weighted", "--report", report, *fleet) == 0
    err = capsys.readouterr().err
    assert "engine: profile demo (13,824 tokens of KV cache)" in err
    assert "32,000 tokens of KV cache a worker, as asked" in err
    assert "1 worker alike" in err
    found = orjson.loads(report.read_bytes())
    assert (found["workers"], found["profile"]) == (1, "demo")
    mean_s = found["rows"][0]["as_it_ran"]["ttft_s"]["mean"]
    assert mean_s > 2 * found["rows"][0]["logged"]["ttft_s"]["mean"]


def test_log_of_several_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One is chosen; workers are those that served it."""
    log = a_log(tmp_path)
    other = (
        a_dispatch_line("x", model="big", worker="w9", prompt_tokens=650),
        an_end_line("x", worker="w9"),
    )
    log.write_bytes(b"".join(other) + log.read_bytes())
    assert run(log, "--policy", "weighted") == 2
    assert "choose one with --model: big, tiny" in capsys.readouterr().err
    assert run(log, "--policy", "weighted", "--model", "tiny") == 0
    assert "2 workers alike, all the time; model tiny" in capsys.readouterr().err
    assert run(log, "--policy", "weighted", "--model", "tin") == 2
    assert "no job of 'tin' in the log; there are: big, tiny" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "say what to change: --policy NAME, --quotas FILE, or both"),
        (("--policy", "nope"), "no policy is called 'nope'; there are: first_token"),
        (("--policy", "weighted", "--profile", "nope"), "no profile is called 'nope'"),
        (("--quotas", "gone.toml"), "gone.toml: cannot be read"),
        (("--policy", "weighted", "--workers", "0"), "workers"),
        (("--policy", "weighted", "--workers", "1000000000"), "--workers"),
        (("--policy", "weighted", "--blocks-per-worker", "9" * 400), "--blocks-per-worker"),
    ],
)
def test_misuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    """Told in a sentence, with 2."""
    assert run(a_log(tmp_path, count=30), *arguments) == 2
    assert says in capsys.readouterr().err


def test_logs_with_nothing_in_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No file, an empty one, one of refusals alone."""
    assert run("--policy", "weighted") == 2
    assert "name the log's files" in capsys.readouterr().err
    empty = tmp_path / "d.jsonl"
    empty.write_bytes(b"garbage\n")
    assert run(empty, "--policy", "weighted") == 1
    assert "no line of a decision log in it" in capsys.readouterr().err
    empty.write_bytes(an_end_line())
    assert run(empty, "--policy", "weighted") == 1
    assert "(1 without a dispatch): give all files" in capsys.readouterr().err
    empty.write_bytes(a_refusal_line(prompt_tokens=700, output_tokens_max=40))
    assert run(empty, "--policy", "weighted") == 2
    assert "the log names no worker of this model" in capsys.readouterr().err
    assert run(empty, "--policy", "weighted", "--workers", "1") == 0
    assert "too few runs in the log to fit rates" in capsys.readouterr().err


def test_nothing_answered_is_no_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under quotas that let nobody in, first tokens don't come in 0 s, 100 % sooner."""
    log, file = a_log(tmp_path, count=40), tmp_path / "closed.toml"
    lane = '[[policy.lanes]]\nname = "{}"\npaused = true\n'
    file.write_text(f'[policy]\nmodels = ["tiny"]\n{lane.format("acme")}{lane.format("bolt")}')
    assert run(log, "--quotas", file) == 0
    out = capsys.readouterr().out
    (mean,) = [line for line in out.splitlines() if "TTFT mean" in line and "p50" not in line]
    assert mean.split()[-1] == "–"
    (acme,) = [line for line in out.splitlines() if line.strip().startswith("acme ")]
    assert "/ –" in acme
    assert "0 s" not in acme
    assert "-100%" not in mean + acme


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (2, 3, "+50%"),
        (2, 1, "-50%"),
        (2, 2, "+0%"),
        (2, 28, "x 14"),
        (0, 0, "+0%"),
        (0, 1, ""),
        (1, None, ""),
    ],
)
def test_changes_read_well(before: float, after: float | None, text: str) -> None:
    """Percent, or a factor where percent would have five digits."""
    assert percent(before, after) == text


def test_report_that_can_not_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is told before anything runs, and a report never takes the place of what was read."""
    log, quotas = a_log(tmp_path, count=40), tmp_path / "q.toml"
    quotas.write_text(QUOTAS)
    for report, told in (
        (tmp_path / "gone" / "r.json", "r.json can't be written: name a file in a folder"),
        (log, "decisions.jsonl is what is read"),
        (quotas, "q.toml is what is read"),
    ):
        read = log.read_bytes()
        assert run(log, "--quotas", quotas, "--report", report) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert told in err
        assert log.read_bytes() == read


def test_full_disk_costs_the_new_report_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old one still stands, and the tables are shown all the same."""
    log, report = a_log(tmp_path, count=40), tmp_path / "r.json"
    report.write_bytes(b"old")

    def full(_: Path, __: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert run(log, "--policy", "weighted", "--report", report) == 1
    out, err = capsys.readouterr()
    assert "as logged, and simulated" in out
    assert "r.json can't be written: no space left" in err
    assert report.read_bytes() == b"old"
