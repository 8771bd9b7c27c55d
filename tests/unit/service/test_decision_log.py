"""The decision log: what its lines say, and that it never holds up or brings down the broker."""

import base64
import threading
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from broker.core.decisions import Candidate, Dispatch, Explanation, HeldBy
from broker.core.events import JobSpec
from broker.service.decision_log import (
    CANDIDATES_MAX,
    PREFIXES_MAX,
    DecisionLog,
    Dispatched,
    Ended,
    line,
)
from broker.service.log_files import LogFiles
from broker.wire.messages import Attempt, Finished, Kind, Outcome, Reason, Usage
from broker.wire.prefix import BLOCKS_MAX, block_hashes, seed, unpack_hashes


def a_dispatch(*, candidates: int = 2) -> Dispatch:
    """Job acme.j1, given to w0 by first_token."""
    return Dispatch(
        key="acme.j1",
        worker="w0",
        attempt=Attempt(7, 3),
        number=12,
        stream_sequence=5,
        predicted_hit_tokens=640,
        enqueued_at_s=999.0,
        failures=(),
        run_s_max=60.0,
        stall_s=10.0,
        explanation=Explanation(
            policy="first_token",
            candidates=tuple(
                Candidate(f"w{number}", score=9.0 - number, hit_tokens=640, backlog_tokens=0)
                for number in range(candidates)
            ),
            previous_worker="w0",
            predicted_hit_tokens=640,
            predicted_ttft_s=0.12345678,
            queue_s=1.0,
            held_by=HeldBy.AFFINITY,
        ),
    )


def a_job(blocks: Sequence[int] = (), **fields: Any) -> JobSpec:
    """What acme.j1 asked for."""
    defaults: dict[str, Any] = {"blocks": array("Q", blocks)}
    return JobSpec("acme.j1", "acme", 1, "tiny", **{**defaults, **fields})


def a_finished(**fields: Any) -> Finished:
    """Attempt (7, 3) of acme.j1, completed."""
    defaults: dict[str, Any] = {
        "key": "acme.j1",
        "attempt": Attempt(7, 3),
        "outcome": Outcome.SETTLED,
        "kind": Kind.COMPLETED,
        "usage": Usage(700, 600, 16),
        "predicted_hit_tokens": 640,
        "ttft_s": 0.2,
        "run_s": 1.0,
    }
    return Finished(**{**defaults, **fields})


def a_log(folder: Path, **fields: Any) -> DecisionLog:
    """A log of one file of a megabyte."""
    defaults: dict[str, Any] = {"file_bytes_max": 1_000_000, "files_max": 2}
    return DecisionLog(folder, **{**defaults, **fields})


def _read(entry: Dispatched | Ended) -> dict[str, Any]:
    return orjson.loads(line(entry))


def test_line_of_a_dispatch() -> None:
    """Scores, choice, previous worker, wait, what held it, and what was expected."""
    told = _read(Dispatched(1000.0, a_dispatch(), band=1, model="tiny"))
    assert told == {
        "event": "dispatch",
        "at_s": 1000.0,
        "key": "acme.j1",
        "attempt": [7, 3],
        "enqueued_at_s": 999.0,
        "worker": "w0",
        "band": 1,
        "model": "tiny",
        "policy": "first_token",
        "previous_worker": "w0",
        "queue_s": 1.0,
        "held_by": "affinity",
        "is_probe": False,
        "predicted_hit_tokens": 640,
        "predicted_ttft_s": 0.123457,
        "failed_attempts": 0,
        "candidates": 2,
        "scores": [
            {"worker": "w1", "score": 8.0, "hit_tokens": 640, "backlog_tokens": 0},
            {"worker": "w0", "score": 9.0, "hit_tokens": 640, "backlog_tokens": 0},
        ],
    }


def test_what_a_job_asked_for() -> None:
    """Tokens, its session's hash, and one prefix hash of each eight, as on the wire."""
    job = a_job(range(20), prompt_tokens=700, output_tokens_max=64, session="alice@example.org")
    told = _read(Dispatched(1000.0, a_dispatch(), band=1, model="tiny", job=job))
    assert (told["prompt_tokens"], told["output_tokens_max"], told["prompt_blocks"]) == (
        700,
        64,
        20,
    )
    assert list(unpack_hashes(base64.b64decode(told["blocks"]))) == [7, 15]
    assert len(told["session"]) == 16
    assert "alice" not in str(told)


def test_sessions_are_told_apart() -> None:
    """The same name is one session in a lane, and another one in another lane; none is none."""
    jobs = (
        a_job(session="s"),
        JobSpec("acme.j2", "acme", 1, "tiny", session="s"),
        JobSpec("bolt.j1", "bolt", 1, "tiny", session="s"),
        a_job(),
    )
    one, same, other, none = (
        _read(Dispatched(1.0, a_dispatch(), 1, "tiny", job))["session"] for job in jobs
    )
    assert one == same
    assert one != other
    assert none == ""


def test_thinned_hashes_tell_the_same_prefixes_apart() -> None:
    """Prompts that share 2,048-byte beginnings share that many hashes, and no more."""
    start = seed(model="tiny", scope="acme")
    texts = (b"a" * 4096 + b"b" * 2048, b"a" * 4096 + b"c" * 2048)
    one, two = (
        _read(Dispatched(1.0, a_dispatch(), 1, "tiny", a_job(block_hashes(text, seed=start))))
        for text in texts
    )
    left, right = (unpack_hashes(base64.b64decode(told["blocks"])) for told in (one, two))
    assert [a == b for a, b in zip(left, right, strict=True)] == [True, True, False]


def test_log_without_prefixes() -> None:
    """Turned off, nothing tells what prompts share; all else stands."""
    entry = Dispatched(1.0, a_dispatch(), 1, "tiny", a_job(range(16), prompt_tokens=9))
    told = orjson.loads(line(entry, prefixes=False))
    assert "blocks" not in told
    assert (told["prompt_tokens"], told["prompt_blocks"]) == (9, 16)


def test_longest_line() -> None:
    """The longest prefix of the wire is told whole, in some 12 kB."""
    entry = Dispatched(
        1.0, a_dispatch(candidates=99), 1, "tiny", a_job(range(1 << 60, (1 << 60) + BLOCKS_MAX))
    )
    told = line(entry)
    hashes = unpack_hashes(base64.b64decode(orjson.loads(told)["blocks"]))
    assert len(hashes) == PREFIXES_MAX
    assert hashes[-1] == (1 << 60) + BLOCKS_MAX - 1
    assert len(told) < 13_000


def test_line_of_an_end_joins_its_dispatch() -> None:
    """Same key and attempt; predicted and real hit stand side by side."""
    told = _read(Ended(1002.0, "acme.j1", "w0", a_finished(), Kind.COMPLETED, e2e_s=3.0))
    dispatch = _read(Dispatched(1000.0, a_dispatch(), band=1, model="tiny"))
    assert (told["key"], told["attempt"]) == (dispatch["key"], dispatch["attempt"])
    assert (told["predicted_hit_tokens"], told["cached_tokens"]) == (640, 600)
    assert (told["kind"], told["ttft_s"], told["e2e_s"]) == ("completed", 0.2, 3.0)


def test_line_of_a_job_that_never_ran() -> None:
    """A refusal has kind and reason, and nothing of an attempt."""
    entry = Ended(1.0, "acme.j1", kind=Kind.REJECTED, reason=Reason.QUEUE_FULL)
    told = _read(entry)
    assert told == {
        "event": "end",
        "at_s": 1.0,
        "key": "acme.j1",
        "kind": "rejected",
        "reason": "queue_full",
    }


def test_what_a_refused_job_asked_for() -> None:
    """No dispatch tells it, so its end does, in the same words, and which row refused it."""
    job = a_job(
        range(20), prompt_tokens=700, output_tokens_max=64, session="alice", enqueued_at_s=999.0
    )
    entry = Ended(
        1000.0, job.key, kind=Kind.REJECTED, reason=Reason.QUEUE_FULL, row="band=1", job=job
    )
    told = _read(entry)
    asked = _read(Dispatched(1000.0, a_dispatch(), band=1, model="tiny", job=job))
    assert told["row"] == "band=1"
    same = ("enqueued_at_s", "band", "model", "prompt_tokens", "output_tokens_max", "session")
    assert {key: told[key] for key in same} == {key: asked[key] for key in same}
    assert (told["prompt_blocks"], told["blocks"]) == (20, asked["blocks"])
    assert "blocks" not in orjson.loads(line(entry, prefixes=False))


def test_deadline_is_told_where_there_is_one() -> None:
    """In Unix time, as all instants."""
    told = _read(Dispatched(1.0, a_dispatch(), 1, "tiny", a_job(deadline_at_s=1234.5)))
    assert told["deadline_at_s"] == 1234.5
    assert "deadline_at_s" not in _read(Dispatched(1.0, a_dispatch(), 1, "tiny", a_job()))


def test_scores_past_their_bound() -> None:
    """Of many workers the best are told, and how many there were."""
    entry = Dispatched(1.0, a_dispatch(candidates=CANDIDATES_MAX + 1), band=1, model="tiny")
    told = _read(entry)
    assert told["candidates"] == CANDIDATES_MAX + 1
    assert len(told["scores"]) == CANDIDATES_MAX
    assert told["scores"][0]["worker"] == f"w{CANDIDATES_MAX}"


def test_closing_writes_what_is_queued(tmp_path: Path) -> None:
    """Nothing that was put before `close` is missing after it; closing twice is closing."""
    log = a_log(tmp_path)
    for number in range(100):
        log.put(Ended(float(number), "acme.j1", kind=Kind.EXPIRED))
    log.close()
    log.close()
    lines = log.path.read_bytes().splitlines()
    assert [orjson.loads(one)["at_s"] for one in lines] == list(range(100))
    assert (log.lines_written, log.lines_dropped, log.write_errors) == (100, 0, 0)


def test_log_that_is_turned_off(tmp_path: Path) -> None:
    """It writes nothing, makes nothing, and counts nothing as lost."""
    log = a_log(tmp_path / "state", file_bytes_max=0)
    log.put(Ended(1.0, "acme.j1"))
    log.close()
    assert not (tmp_path / "state").exists()
    assert log.lines_dropped == 0


def test_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop never waits: lines past the queue's bound are dropped and counted."""
    entered, release = threading.Event(), threading.Event()
    real = LogFiles.append

    def append(self: LogFiles, lines: bytes) -> None:
        entered.set()
        release.wait()
        real(self, lines)

    monkeypatch.setattr(LogFiles, "append", append)
    log = a_log(tmp_path, queue_lines_max=5)
    log.put(Ended(0.0, "acme.j1"))
    assert entered.wait(5)
    start = time.monotonic()
    for number in range(1, 8):
        log.put(Ended(float(number), "acme.j1"))
    log.close(timeout_s=0.01)
    assert time.monotonic() - start < 5
    assert log.lines_dropped == 2
    release.set()
    log.close()
    assert log.lines_written == 6


def test_prefixes_that_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waiting lines keep in memory is bounded; once they are written there is room again."""
    monkeypatch.setattr("broker.service.decision_log.FLUSH_S", 0.001)
    entered, release = threading.Event(), threading.Event()
    real = LogFiles.append

    def append(self: LogFiles, lines: bytes) -> None:
        entered.set()
        release.wait()
        real(self, lines)

    monkeypatch.setattr(LogFiles, "append", append)
    log = a_log(tmp_path, queue_blocks_max=25)
    entry = Dispatched(1.0, a_dispatch(), 1, "tiny", a_job(range(10)))
    refused = Ended(1.0, "acme.j1", kind=Kind.REJECTED, job=a_job(range(10)))
    log.put(entry)
    assert entered.wait(5)
    for one in (entry, refused, refused):
        log.put(one)
    log.put(Ended(2.0, "acme.j1"))
    assert log.lines_dropped == 2
    release.set()
    _until(lambda: log.lines_written == 3)
    log.put(entry)
    log.close()
    assert (log.lines_written, log.lines_dropped) == (4, 2)


def test_log_that_is_told_to_leave_prefixes_out(tmp_path: Path) -> None:
    """The setting reaches the lines."""
    log = a_log(tmp_path, prefixes=False)
    log.put(Dispatched(1.0, a_dispatch(), 1, "tiny", a_job(range(8))))
    log.close()
    assert "blocks" not in orjson.loads(log.path.read_bytes())


def test_a_folder_that_can_not_be_is_told_before_a_line_is_lost(tmp_path: Path) -> None:
    """A file stands in the folder's place: the `log` watchdog says so from the start."""
    (tmp_path / "taken").write_bytes(b"")
    log = a_log(tmp_path / "taken" / "state")
    _until(lambda: bool(log.trouble))
    assert log.trouble.endswith("decisions.jsonl: Not a directory")
    assert log.lines_dropped == 0
    log.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost lines are counted and the trouble is told; with room again, both end by themselves."""
    monkeypatch.setattr("broker.service.decision_log.FLUSH_S", 0.001)
    newest = tmp_path / "decisions.jsonl"
    newest.symlink_to("/dev/full")
    log = a_log(tmp_path)
    log.put(Ended(1.0, "acme.j1"))
    _until(lambda: log.write_errors == 1)
    assert log.lines_dropped == 1
    assert "No space left" in log.trouble
    newest.unlink()
    log.put(Ended(2.0, "acme.j1"))
    _until(lambda: log.lines_written == 1)
    assert log.trouble == ""
    log.close()
    assert [orjson.loads(one)["at_s"] for one in newest.read_bytes().split()] == [2.0]


def _until(true: Any) -> None:
    """Wait for the writer thread, which tells nobody when it is done."""
    pause = threading.Event()
    deadline_s = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline_s
        pause.wait(0.001)


def test_put_is_cheap(tmp_path: Path) -> None:
    """The loop pays less than a microsecond a line; 20 allowed on a busy machine."""
    log = a_log(tmp_path)
    entry = Dispatched(1.0, a_dispatch(), band=1, model="tiny")
    best_s = float("inf")
    for _ in range(1000):
        start = time.perf_counter()
        log.put(entry)
        best_s = min(best_s, time.perf_counter() - start)
    log.close()
    assert best_s < 20e-6
