"""`inferlane batch` and `submit` as processes: a real NATS server, and a responder in its own
process.
"""

import os
import random
import shlex
import signal
import subprocess
import sys
import time
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from ops.nats.server import NatsServer
from producers.batch.plan import default_errors
from tests.batches import a_line, a_plan, check_invariant, lines, whole_lines

INFERLANE = [sys.executable, "-m", "ops.cli.main"]


class Responding:
    """A responder process; its last word says what it ran."""

    def __init__(self, url: str, **faults: Any) -> None:
        command = [sys.executable, "-m", "tests.responding", url, orjson.dumps(faults).decode()]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def line(self) -> bytes:
        """Its next word: `begun` at the first job."""
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def end(self) -> dict[str, int]:
        """End it; return the number of runs, of jobs, the most runs of one job, cancellations."""
        self._process.send_signal(signal.SIGTERM)
        said, _ = self._process.communicate(timeout=20)
        return orjson.loads(said.splitlines()[-1]) if said else {}


@pytest.fixture
def responding(nats_server: NatsServer) -> Iterator[Responding]:
    """A responder that works well."""
    responder = Responding(nats_server.url)
    yield responder
    responder.end()


def ran(jobs: int) -> dict[str, int]:
    """What a responder tells that ran so many jobs, each once."""
    return {"runs": jobs, "jobs": jobs, "most": min(jobs, 1), "cancelled": 0}


def start(*arguments: str, stdin: int | None = None) -> subprocess.Popen[bytes]:
    """Start a command."""
    pipe = subprocess.PIPE
    return subprocess.Popen([*INFERLANE, *arguments], stdin=stdin, stdout=pipe, stderr=pipe)


def run(*arguments: str, data: bytes | None = None) -> tuple[int, str, str]:
    """Run a command; return exit code, output and errors."""
    made = subprocess.run(
        [*INFERLANE, *arguments], input=data, capture_output=True, timeout=50, check=False
    )
    return made.returncode, made.stdout.decode(), made.stderr.decode()


def batch(server: NatsServer, folder: Path, *more: str) -> list[str]:
    """Arguments of `batch run` over the files of `a_plan`."""
    return [
        *("batch", "run", str(folder / "in.jsonl"), "--nats", server.url, "--lane", "acme"),
        *("--output", str(folder / "out.jsonl"), *more),
    ]


def test_a_good_batch_ends_with_counts_and_exit_code_0(
    tmp_path: Path, nats_server: NatsServer, responding: Responding
) -> None:
    """The whole way over a real server, told in one line."""
    plan = a_plan(tmp_path, lines(300))
    code, said, _ = run(*batch(nats_server, tmp_path))
    assert (code, said.split(";")[0]) == (0, "300 lines: 300 completed, 0 failed")
    check_invariant(plan, (f"id-{number}" for number in range(300)))
    again = run(*batch(nats_server, tmp_path))
    assert again[:2] == (code, said)
    assert responding.end() == ran(300)


def test_failed_lines_give_exit_code_1_and_retry_mends_them(
    tmp_path: Path, nats_server: NatsServer
) -> None:
    """Exit code 1 until nothing failed is left; bad lines keep it at 1, and are told."""
    plan = a_plan(tmp_path, lines(40), errors=tmp_path / "failed")
    failing = Responding(nats_server.url, fails=1.0)
    code, said, hint = run(*batch(nats_server, tmp_path), "--errors", str(plan.errors))
    assert (code, said.split(";")[0]) == (1, "40 lines: 0 completed, 40 failed")
    assert "batch retry" in hint
    failing.end()
    mended = Responding(nats_server.url)
    code, said, _ = run("batch", "retry", str(plan.output), "--nats", nats_server.url)
    assert (code, said.split(";")[0]) == (0, "40 lines: 40 completed, 0 failed")
    check_invariant(plan, (f"id-{number}" for number in range(40)))
    assert not default_errors(plan.output).exists()
    assert mended.end()["most"] == 1


@pytest.mark.parametrize("kind", ["gz", "zst", "pipe"])
def test_input_may_be_compressed_or_piped(
    tmp_path: Path, nats_server: NatsServer, responding: Responding, kind: str
) -> None:
    """.gz, .zst and standard input are read alike; from a pipe also on the second run."""
    import gzip  # noqa: PLC0415

    import zstandard  # noqa: PLC0415

    plan = a_plan(tmp_path)
    content = b"\n".join(lines(100))
    data = None
    match kind:
        case "gz":
            source = tmp_path / "in.jsonl.gz"
            source.write_bytes(gzip.compress(content))
        case "zst":
            source = tmp_path / "in.jsonl.zst"
            source.write_bytes(zstandard.ZstdCompressor().compress(content))
        case _:
            source, data = Path("-"), content
    arguments = ["batch", "run", str(source), "--nats", nats_server.url, "--lane", "acme"]
    arguments += ["--output", str(plan.output)]
    for _ in range(2):
        code, said, told = run(*arguments, data=data)
        assert (code, said.split(";")[0]) == (0, "100 lines: 100 completed, 0 failed"), told
    check_invariant(plan, (f"id-{number}" for number in range(100)))
    if kind == "pipe":
        code, _, told = run(*arguments, data=b"\n".join(reversed(lines(100))))
        assert code == 2
        assert "line 1 differs" in told
        code, _, told = run("batch", "retry", str(plan.output), "--nats", nats_server.url)
        assert code == 2
        assert "--input" in told
    assert responding.end()["most"] == 1


def test_a_slow_pipe_is_run_as_it_comes(
    tmp_path: Path, nats_server: NatsServer, responding: Responding
) -> None:
    """Results of the first lines stand in the output while the pipe is still open."""
    plan = a_plan(tmp_path)
    arguments = ["batch", "run", "-", "--nats", nats_server.url, "--lane", "acme"]
    process = start(*arguments, "--output", str(plan.output), stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(a_line("first") + b"\n")
    process.stdin.flush()
    wait_for(lambda: bool(whole_lines(plan.output)))
    said, _ = process.communicate(a_line("last"), timeout=20)
    assert said.startswith(b"2 lines: 2 completed")


def wait_for(condition: Any, *, s_max: float = 20.0) -> None:
    """Wait until another process has done something."""
    deadline_s = time.monotonic() + s_max
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_is_told_and_gone_on_from(
    tmp_path: Path, nats_server: NatsServer, number: signal.Signals
) -> None:
    """It dies of the signal, as loops of a shell expect, with a sentence on how to go on; then each
    line is run once.
    """
    plan = a_plan(tmp_path, lines(400))
    slow = Responding(nats_server.url, run_s=0.05, window=20)
    process = start(*batch(nats_server, tmp_path, "--concurrency", "20"))
    wait_for(lambda: whole_lines(plan.output) > 20)
    process.send_signal(number)
    said, told = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT
    assert b"not finished" in said
    assert b"same command" in told
    code, said_again, _ = run(*batch(nats_server, tmp_path))
    assert (code, said_again.split(";")[0]) == (0, "400 lines: 400 completed, 0 failed")
    assert slow.end() == ran(400)
    check_invariant(plan, (f"id-{one}" for one in range(400)))


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_any_point_each_line_ends_once(
    tmp_path: Path, nats_server: NatsServer, seed: int
) -> None:
    """Kill -9 at random moments, ends lost and doubled: the invariant holds, nothing runs twice."""
    chance = random.Random(seed)
    plan = a_plan(tmp_path, [*lines(600), b"bad", a_line("id-7")])
    faulty = Responding(nats_server.url, seed=seed, loses_end=0.02, ends=2, run_s=0.002)
    for _ in range(5):
        process = start(*batch(nats_server, tmp_path, "--concurrency", "50"))
        time.sleep(chance.uniform(0.3, 1.3))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    config = tmp_path / "quick.toml"
    config.write_text("[producer.client]\nwatchdog_s = 0.3\n")
    code, said, told = run(*batch(nats_server, tmp_path, "--config", str(config)))
    assert (code, said.split(";")[0]) == (1, "602 lines: 600 completed, 2 failed"), told
    assert faulty.end() == ran(600)
    check_invariant(plan, (f"id-{number}" for number in range(600)))


def test_two_runs_at_once_on_the_same_output(tmp_path: Path, nats_server: NatsServer) -> None:
    """The second leaves with exit code 2 and a sentence; the first ends well."""
    plan = a_plan(tmp_path, lines(100))
    slow = Responding(nats_server.url, run_s=0.3, window=20)
    first = start(*batch(nats_server, tmp_path))
    wait_for(plan.state.exists)
    code, _, told = run(*batch(nats_server, tmp_path))
    assert code == 2
    assert "another run" in told
    assert first.communicate(timeout=30)[0].startswith(b"100 lines: 100 completed")
    slow.end()


def test_the_server_restarts_under_a_batch(tmp_path: Path, nats_server: NatsServer) -> None:
    """A killed and restarted NATS server costs time, and no line."""
    plan = a_plan(tmp_path, lines(300))
    slow = Responding(nats_server.url, run_s=0.02, window=20)
    config = tmp_path / "quick.toml"
    config.write_text("[producer.client]\nwatchdog_s = 0.5\n")
    process = start(*batch(nats_server, tmp_path, "--config", str(config)))
    wait_for(lambda: whole_lines(plan.output) > 20)
    nats_server.kill()
    nats_server.start()
    said, told = process.communicate(timeout=50)
    assert said.startswith(b"300 lines: 300 completed, 0 failed"), told
    check_invariant(plan, (f"id-{number}" for number in range(300)))
    slow.end()


def test_nothing_to_connect_to_is_exit_code_3(tmp_path: Path) -> None:
    """No server: told in one sentence without the password, and no file is left behind."""
    a_plan(tmp_path, lines(3))
    arguments = ["batch", "run", str(tmp_path / "in.jsonl"), "--lane", "acme"]
    arguments += ["--nats", "nats://me:secret@127.0.0.1:1", "--output", str(tmp_path / "out.jsonl")]
    code, _, told = run(*arguments)
    assert code == 3
    assert "secret" not in told
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--concurrency", "0"], "--concurrency"),
        (["--window", "soon"], "no duration"),
        (["--window", "0s"], "no duration"),
        (["--window", "-5h"], "--window takes no value that begins with a dash: '-5h'"),
        (["--window", "9999999999d"], "no duration of up to 10 years"),
        (["--lane", "a b"], "lane"),
        (["--output", "/nowhere/out.jsonl"], "no folder"),
        (["--output", "/dev/null"], "regular file"),
        (["--output", "/dev/stdout"], "/dev/stdout is no regular file"),
        (["--output", "-"], "--output takes no value that begins with a dash: '-'"),
        (["--errors", "out.jsonl"], "can't both go"),
        (["--errors", "out.jsonl.state"], "needs beside its results"),
        (["--output", "in.jsonl"], "is the input itself"),
        (["--output", ""], "names no file"),
        (["--output", "x" * 300], "can't be written or read (File name too long)"),
        (["--endpoint", "/v1/chat"], "--endpoint '/v1/chat' is none of /v1/chat/completions"),
        (["--config", "absent.toml"], "absent.toml"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_a_sentence(
    tmp_path: Path, more: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told before anything is begun."""
    a_plan(tmp_path, lines(3))
    arguments = ["--lane", "acme", "--output", "out.jsonl"]
    for flag, value in zip(more[::2], more[1::2], strict=True):
        at = arguments.index(flag) if flag in arguments else len(arguments)
        arguments[at : at + 2] = [flag, value]
    made = subprocess.run(
        [*INFERLANE, "batch", "run", "in.jsonl", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert made.returncode == 2, made.stderr
    assert said in made.stderr.decode()
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_check_counts_without_a_cluster(tmp_path: Path) -> None:
    """Good and bad lines, tokens, hours; exit code 1 because of the bad one."""
    a_plan(tmp_path, [*lines(9), b"bad"])
    arguments = ["batch", "check", str(tmp_path / "in.jsonl"), "--tokens-per-second", "100"]
    code, said, _ = run(*arguments)
    assert code == 1
    assert "10 lines: 9 good, 1 bad" in said
    assert "line 10:" in said
    assert "hours: at most" in said


def test_submit_prints_the_answer(nats_server: NatsServer, responding: Responding) -> None:
    """One request, its text on standard output; the only lane and model need no naming."""
    code, said, told = run("submit", "Hello", "--nats", nats_server.url)
    assert (code, said) == (0, "hi\n"), told
    code, said, _ = run("submit", "Hello", "--nats", nats_server.url, "--lane", "acme", "--json")
    assert orjson.loads(said)["choices"]
    code, _, told = run("submit", "Hi", "--nats", nats_server.url, "--model", "huge")
    assert code == 1
    assert "it offers: tiny" in told


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (["--lane", "nowhere"], 1, "no such lane: nowhere. Known: acme"),
        (["--band", "9"], 2, "band 9 is none of"),
        (["--job-id", "a b"], 2, "job id 'a b'"),
        (["--endpoint", "/v1/nope"], 2, "'/v1/nope' is none of"),
        (["--deadline", "99999999999999h"], 2, "no duration of up to 10 years"),
    ],
)
def test_submit_tells_what_would_be_right(
    nats_server: NatsServer, responding: Responding, more: list[str], code: int, said: str
) -> None:
    """Wrong usage is exit code 2, what this cluster lacks 1; both in a sentence."""
    assert responding
    ended, _, told = run("submit", "Hello", "--nats", nats_server.url, *more)
    assert (ended, said in told) == (code, True), told


def test_submit_without_a_cluster_says_so(nats_server: NatsServer) -> None:
    """A server on which no broker has run: not the model is missing."""
    code, _, told = run("submit", "Hello", "--nats", nats_server.url, "--lane", "acme")
    assert code == 3
    assert "has a broker run here?" in told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_cancels_what_was_submitted(nats_server: NatsServer, number: signal.Signals) -> None:
    """Nobody waits for the answer any more, so it isn't made, and that is told: after Ctrl-C, in a
    script with a time limit, and when the terminal is closed.
    """
    slow = Responding(nats_server.url, run_s=2.0)
    process = start("submit", "Hello", "--nats", nats_server.url, "--lane", "acme")
    assert slow.line() == b"begun\n"
    process.send_signal(number)
    _, told = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT
    first, *rest = told.decode().splitlines()
    assert first.startswith("job acme.")
    assert first.endswith(": cancelled")
    assert rest == (["inferlane: interrupted"] if number == signal.SIGINT else [])
    assert slow.end()["cancelled"] == 1


def test_ctrl_c_ends_a_loop_of_submits(nats_server: NatsServer) -> None:
    """The shell sees that it died of the signal, and submits no more."""
    slow = Responding(nats_server.url, run_s=2.0)
    one = shlex.join([*INFERLANE, "submit", "Hello", "--nats", nats_server.url, "--lane", "acme"])
    loop = subprocess.Popen(
        ["bash", "-c", f"for number in 1 2 3; do {one}; done; echo all"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert slow.line() == b"begun\n"
    os.killpg(loop.pid, signal.SIGINT)
    said, told = loop.communicate(timeout=20)
    assert (said, told.count(b"cancelled")) == (b"", 1), told
    assert slow.end()["cancelled"] == 1


def test_submit_reads_a_body_and_streams(
    tmp_path: Path, nats_server: NatsServer, responding: Responding
) -> None:
    """--body takes a whole request, Windows' mark before it or not; --stream prints what comes."""
    body = tmp_path / "body.json"
    body.write_bytes(BOM_UTF8 + orjson.dumps({"model": "tiny", "messages": []}))
    code, said, told = run("submit", "--body", str(body), "--nats", nats_server.url, "--stream")
    assert (code, said) == (0, "hi\n"), told
    code, _, told = run("submit", "--nats", nats_server.url)
    assert code == 2
    assert "either a prompt or --body" in told
