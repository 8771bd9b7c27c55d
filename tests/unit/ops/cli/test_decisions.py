"""`inferlane decisions trace`: a trace from whatever lies in the state folder."""

import gzip
import io
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import orjson
import pytest
import zstandard

from ops.cli.decision_files import PIECE_BYTES, lines_in_order
from ops.cli.decision_trace import Spool, write_trace
from ops.cli.errors import CommandError, Misused
from ops.cli.main import main
from tests.decision_logs import a_closing_line, a_dispatch_line, an_end_line


def _day() -> list[bytes]:
    """Five jobs in the order of time, each come before the one before it, and ended at once."""
    return [
        line
        for number in range(5)
        for line in (
            a_dispatch_line(
                f"j{number}",
                enqueued_s=-10.0 * number,
                waited_s=20.0 * number,
                blocks=range(16),
                lane="acme" if number % 2 else "bolt",
                session="alice",
            ),
            an_end_line(
                f"j{number}", at_s=10.0 * number + 5, lane="acme" if number % 2 else "bolt"
            ),
        )
    ]


def _file(folder: Path, name: str, *lines: bytes) -> Path:
    path = folder / name
    path.write_bytes(b"".join(lines))
    return path


def _trace(*arguments: str | Path) -> int:
    return main(["decisions", "trace", *map(str, arguments)])


def _rows(text: bytes) -> list[Any]:
    return [orjson.loads(line) for line in text.splitlines()]


def test_trace_of_a_log(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """A line a job in the order of arrival, on standard output; how many, on standard error."""
    log = _file(tmp_path, "decisions.jsonl", *_day())
    assert _trace(log) == 0
    out, err = capfdbinary.readouterr()
    rows = _rows(out)
    assert [row["timestamp"] for row in rows] == [0.0, 10_000.0, 20_000.0, 30_000.0, 40_000.0]
    assert [row["lane"] for row in rows] == ["bolt", "acme", "bolt", "acme", "bolt"]
    assert {tuple(row["hash_ids"]) for row in rows} == {(0, 1)}
    assert len({row["session_id"] for row in rows}) == 2
    assert err == b"5 jobs in the trace\n"


def test_trace_of_one_model(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """The simulator takes one at a time: which there are is told, and --model takes its jobs."""
    lines = [
        line
        for name, model in (("j1", "tiny"), ("j2", "large"), ("j3", "tiny"))
        for line in (a_dispatch_line(name, model=model), an_end_line(name))
    ]
    log = _file(tmp_path, "decisions.jsonl", *lines)
    assert _trace(log) == 0
    out, err = capfdbinary.readouterr()
    assert [row["model"] for row in _rows(out)] == ["tiny", "large", "tiny"]
    assert b"of several models (large, tiny): for the simulator take one, with --model" in err
    assert _trace(log, "--model", "tiny") == 0
    out, err = capfdbinary.readouterr()
    assert [row["model"] for row in _rows(out)] == ["tiny", "tiny"]
    assert err == b"2 jobs in the trace\n"
    assert _trace(log, "--model", "huge") != 0
    assert (
        b"no job of that model in the log; there are: large, tiny" in capfdbinary.readouterr().err
    )


def test_trace_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output stays empty, lanes may be numbered, and what is left out is told."""
    log = _file(
        tmp_path,
        "d.jsonl",
        *_day(),
        a_closing_line("j7"),
        a_dispatch_line("j8"),
        a_closing_line("j8"),
        a_dispatch_line("j9", prefixes=False),
        an_end_line("j9"),
        a_dispatch_line("ja"),
        b"garbage\n",
        a_dispatch_line("jb")[:-20],
    )
    output = tmp_path / "trace.jsonl"
    assert _trace(log, "--output", output, "--anonymous") == 0
    assert [row["lane"] for row in _rows(output.read_bytes())][:2] == ["lane1", "lane2"]
    out, err = capsys.readouterr()
    assert out == ""
    rows, missing, prefixes = err.splitlines()
    assert rows == f"6 jobs in the trace {output}"
    assert missing == (
        "left out: 1 ended without tokens, 1 without an end, 1 without a dispatch, "
        "2 lines that can't be read"
    )
    assert prefixes.startswith("logged without a prefix: 1; they share none in the trace.")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.jsonl", "trace.jsonl"]


def test_sessions_of_two_traces_of_one_log(tmp_path: Path) -> None:
    """Each trace has a salt of its own: nobody joins two."""
    log = _file(tmp_path, "d.jsonl", *_day())
    first, second = tmp_path / "1", tmp_path / "2"
    assert _trace(log, "--output", first) == _trace(log, "--output", second) == 0
    sessions = [{row["session_id"] for row in _rows(one.read_bytes())} for one in (first, second)]
    assert not sessions[0] & sessions[1]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_rotated_files_in_any_order(tmp_path: Path, order: tuple[int, ...]) -> None:
    """Jobs that were dispatched in one file and ended in the next are whole."""
    day = _day()
    names = ("decisions.2.jsonl", "decisions.1.jsonl", "decisions.jsonl")
    parts = (day[:3], day[3:7], day[7:])
    files = [_file(tmp_path, name, *part) for name, part in zip(names, parts, strict=True)]
    found = lines_in_order(files[place] for place in order)
    assert [line for line in found if line] == day


def test_lines_of_one_instant_in_two_files(tmp_path: Path) -> None:
    """The older file's come first: a dispatch before its end, though both are of one moment."""
    lines = [a_dispatch_line("j0"), a_dispatch_line(waited_s=5.0), an_end_line(at_s=5.0)]
    old = _file(tmp_path, "decisions.1.jsonl", *lines[:2])
    new = _file(tmp_path, "decisions.jsonl", lines[2])
    assert [line for line in lines_in_order((new, old)) if line] == lines


def test_logs_of_two_brokers(tmp_path: Path) -> None:
    """Leadership went to the other one and came back: lines are merged by time."""
    day = _day()
    one = _file(tmp_path, "a.jsonl", *day[:3], *day[7:])
    other = _file(tmp_path, "b.jsonl", *day[3:7])
    assert [line for line in lines_in_order((other, one)) if line] == day


def test_file_that_is_given_twice(tmp_path: Path) -> None:
    """Under whatever name, it is read once."""
    log = _file(tmp_path, "a.jsonl", *_day())
    again = log.parent / "x" / ".." / "a.jsonl"
    (tmp_path / "x").mkdir()
    assert [line for line in lines_in_order((log, again)) if line] == _day()


def test_compressed_files(tmp_path: Path) -> None:
    """Old logs that someone compressed are read as they are, of several frames too."""
    day = _day()
    parts = (day[:3], day[3:7], day[7:])
    zstd = b"".join(zstandard.compress(line) for line in parts[0])
    files = (
        _file(tmp_path, "a.zst", zstd),
        _file(tmp_path, "b.gz", gzip.compress(b"".join(parts[1]))),
        _file(tmp_path, "c", *parts[2]),
    )
    assert [line for line in lines_in_order(files) if line] == day


@pytest.mark.parametrize("lost_bytes", [1, 9, 60])
@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress], ids=["gz", "zst"])
def test_compressed_file_that_is_cut_off(
    tmp_path: Path, compress: Callable[[bytes], bytes], lost_bytes: int
) -> None:
    """It is named, and what is wrong with it: it was taken for a short log."""
    whole = compress(b"".join(_day()))
    cut = _file(tmp_path, "b", compress(b"".join(_day())), whole[:-lost_bytes])
    with pytest.raises(CommandError, match="b can't be read to its end"):
        list(lines_in_order([cut]))


def test_compressed_file_beyond_one_piece(tmp_path: Path) -> None:
    """Frames and pieces of the file end in different places."""
    lines = [a_dispatch_line(f"j{n}", enqueued_s=n, blocks=range(n, n + 64)) for n in range(3000)]
    frames = b"".join(
        zstandard.compress(b"".join(lines[at : at + 700]), 1) for at in range(0, len(lines), 700)
    )
    assert len(frames) > 3 * PIECE_BYTES
    assert [one for one in lines_in_order([_file(tmp_path, "a", frames)]) if one] == lines


def test_line_without_an_end(tmp_path: Path) -> None:
    """A file of gigabytes without a line end is no reason to hold it in memory."""
    log = _file(tmp_path, "a", b"x" * 2_500_000)
    assert max(map(len, lines_in_order([log]))) == 1 << 20


def test_log_of_an_older_broker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No trace can be made of it, and the message says which broker writes what is needed."""
    told = orjson.loads(a_dispatch_line())
    old = {name: told[name] for name in told if name != "enqueued_at_s"}
    log = _file(tmp_path, "d.jsonl", orjson.dumps(old), b"\n", an_end_line())
    output = tmp_path / "t.jsonl"
    assert _trace(log, "--output", output) == 1
    err = capsys.readouterr().err
    assert "none of 1 dispatches says what its job asked for" in err
    assert "inferlane 0.1.0 and later write `enqueued_at_s`" in err
    assert [path.name for path in tmp_path.iterdir()] == ["d.jsonl"]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ((), "no line of a decision log in it"),
        ((b"x\n", b"y\n"), "no line of a decision log in it"),
        ((a_dispatch_line(),), "no job has both its dispatch and its end in 1 lines (1 without an"),
        ((an_end_line(),), "no job has both its dispatch and its end in 1 lines (1 without a"),
        ((a_dispatch_line(), a_closing_line()), "no job that ended with tokens in 2 lines"),
    ],
)
def test_log_without_jobs(
    lines: tuple[bytes, ...], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is no trace of nothing, but an error that says what is missing."""
    assert _trace(_file(tmp_path, "d.jsonl", *lines)) == 1
    assert told in capsys.readouterr().err


def test_place_that_can_not_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is said before the log is read."""
    log = _file(tmp_path, "d.jsonl", *_day())
    assert _trace(log, "--output", tmp_path / "absent" / "t.jsonl") == Misused.code
    assert "t.jsonl can't be written: name a file in a folder" in capsys.readouterr().err


def test_spool_of_more_than_memory_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs come back from disk as they were, by arrival; of equal ones the first put first."""
    monkeypatch.setattr("ops.cli.decision_trace.SPOOL_BYTES_MAX", 10)
    sink = io.BytesIO()
    lines = [
        line
        for number, enqueued_s in enumerate((3.0, 1.0, 2.0, 1.0))
        for line in (
            a_dispatch_line(f"j{number}", enqueued_s=enqueued_s, output_tokens_max=number + 1),
            an_end_line(f"j{number}"),
        )
    ]
    written = write_trace(lines, sink, salt=b"salt", anonymous=False)
    assert (written.rows, written.without_output) == (4, 0)
    assert [row["output_tokens_max"] for row in _rows(sink.getvalue())] == [2, 4, 3, 1]


def test_empty_spool() -> None:
    """It gives nothing."""
    spool = Spool()
    assert list(spool.jobs()) == []
    spool.close()
