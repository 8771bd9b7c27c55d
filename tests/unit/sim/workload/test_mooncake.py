"""Traces in JSON lines: what a row becomes, and what a broken file says."""

import gzip
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
import zstandard

from broker.sim.errors import TraceError
from broker.sim.workload.loading import load

CONVERSATION = "mooncake/conversation_trace.jsonl"
SYNTHETIC = "mooncake/synthetic_trace.jsonl"


def a_row(**changes: Any) -> dict[str, Any]:
    """Return a row as a trace has it."""
    row = {"timestamp": 0, "input_length": 1200, "output_length": 9, "hash_ids": [0, 1, 2]}
    return row | changes


def a_file(folder: Path, *rows: dict[str, Any]) -> Path:
    """Write a trace."""
    path = folder / "t.jsonl"
    path.write_bytes(b"\n".join(orjson.dumps(row) for row in rows))
    return path


def traces() -> Path:
    """Return the folder of the public traces."""
    return Path(os.environ.get("INFERLANE_TRACES", "traces"))


def ceiling(prefixes: Iterable[Sequence[int]]) -> float:
    """Return the share of block references that one infinite cache would serve."""
    seen: set[int] = set()
    references = hits = 0
    for blocks in prefixes:
        references += len(blocks)
        hits += sum(block in seen for block in blocks)
        seen.update(blocks)
    return hits / references


def published(name: str) -> Iterator[Sequence[int]]:
    """Read the ids of each row as published, partial blocks included."""
    for line in (traces() / name).read_bytes().splitlines():
        yield orjson.loads(line)["hash_ids"]


def test_row_keeps_whole_blocks_only(tmp_path: Path) -> None:
    """Of 1,200 tokens two blocks of 512 are whole; the third id stands for a partial one."""
    (request,) = load(str(a_file(tmp_path, a_row(timestamp=2500)))).requests
    assert request.blocks == (0, 1)
    assert (request.prompt_tokens, request.output_tokens, request.block_tokens) == (1200, 9, 512)
    assert (request.lane, request.band, request.session, request.after) == ("main", 1, "", None)


def test_output_of_nothing_is_one_token(tmp_path: Path) -> None:
    """A request yields at least one token."""
    (request,) = load(str(a_file(tmp_path, a_row(output_length=0)))).requests
    assert request.output_tokens == 1


@pytest.mark.parametrize(("largest", "limit"), [(1, 1), (2, 2), (9, 16), (1024, 1024)])
def test_limit_is_the_largest_output_rounded_up(
    tmp_path: Path, *, largest: int, limit: int
) -> None:
    """All rows allow the same power of two, so that it tells nothing of a single one."""
    path = a_file(tmp_path, a_row(output_length=1), a_row(output_length=largest))
    assert [r.output_tokens_max for r in load(str(path)).requests] == [limit, limit]


def test_rows_are_sorted_stably_and_start_at_zero(tmp_path: Path) -> None:
    """Rows out of order are put in order; those that came at once keep the file's order."""
    times = [(3000, 1), (1000, 2), (3000, 3), (1500, 4)]
    path = a_file(tmp_path, *(a_row(timestamp=at, output_length=tag) for at, tag in times))
    requests = load(str(path)).requests
    assert [request.output_tokens for request in requests] == [2, 4, 1, 3]
    assert [request.at_s for request in requests] == [0.0, 0.5, 2.0, 2.0]
    assert [request.index for request in requests] == [0, 1, 2, 3]


def test_own_keys_are_read_and_unknown_ones_ignored(tmp_path: Path) -> None:
    """Our own format adds lane, band, session, block size and limit."""
    row = a_row(
        lane="a", band=2, session_id="s", block_tokens=256, output_tokens_max=77, colour="red"
    )
    (request,) = load(str(a_file(tmp_path, row | {"hash_ids": [1, 2, 3, 4, 5]}))).requests
    assert (request.lane, request.band, request.session) == ("a", 2, "s")
    assert (request.block_tokens, request.output_tokens_max) == (256, 77)
    assert request.blocks == (1, 2, 3, 4)


def test_row_without_prefix(tmp_path: Path) -> None:
    """A row may know nothing of its prefix."""
    row = {"timestamp": 0, "input_length": 600, "output_length": 1}
    assert load(str(a_file(tmp_path, row))).requests[0].blocks == ()


def test_blank_lines_and_a_byte_order_mark_are_nothing(tmp_path: Path) -> None:
    """What editors leave behind is no row."""
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xef\xbb\xbf\n" + orjson.dumps(a_row()) + b"\r\n\n")
    assert len(load(str(path)).requests) == 1


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{garbage", "no row of a trace"),
        (b"\xff\xfe{}", "no row of a trace"),
        (b"17", "no row of a trace"),
        (orjson.dumps(a_row(input_length=-5)), "input_length"),
        (orjson.dumps(a_row(input_length=0)), "input_length"),
        (orjson.dumps(a_row(output_length=-1)), "output_length"),
        (orjson.dumps(a_row(timestamp=-1)), "timestamp"),
        (orjson.dumps(a_row(timestamp=None)), "timestamp"),
        (orjson.dumps(a_row(block_tokens=0)), "block_tokens"),
        (orjson.dumps(a_row(band=4)), "band"),
        (orjson.dumps(a_row(hash_ids=[1, -1])), "hash_ids"),
        (
            b'{"timestamp": 1, "input_length": 9, "output_length": 1, "hash_ids": [%d]}' % 2**64,
            "64",
        ),
        (b'{"timestamp": 1e999, "input_length": 1, "output_length": 1}', "range"),
        (b'{"timestamp": 1, "input_length": 1}', "output_length"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, *, line: bytes, problem: str) -> None:
    """The error names the file, the line's number and what is wrong in it."""
    path = tmp_path / "t.jsonl"
    path.write_bytes(orjson.dumps(a_row()) + b"\n\n" + line)
    with pytest.raises(TraceError, match=problem) as caught:
        load(str(path))
    assert str(caught.value).startswith(f"{path}:3: ")
    assert caught.value.line == 3


@pytest.mark.parametrize(
    "content", [b"", b"\n \n", gzip.compress(b"")], ids=["nothing", "blank", "gzip of nothing"]
)
def test_empty_file_says_so(tmp_path: Path, *, content: bytes) -> None:
    """A file without rows is no workload."""
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="empty"):
        load(str(path))


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress], ids=["gzip", "zstd"])
def test_compressed_file_reads_as_the_plain_one(tmp_path: Path, *, compress: Any) -> None:
    """Gzip and Zstandard are told by content, whatever the name."""
    plain = load(str(a_file(tmp_path, a_row(), a_row(timestamp=7))))
    content = (tmp_path / "t.jsonl").read_bytes()
    path = tmp_path / "packed"
    path.write_bytes(compress(content))
    assert load(str(path)).requests == plain.requests


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress], ids=["gzip", "zstd"])
def test_broken_compressed_file_says_so(tmp_path: Path, *, compress: Any) -> None:
    """A cut-off download is told from a bad row."""
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(compress(orjson.dumps(a_row()) * 50)[:-9])
    with pytest.raises(TraceError, match="fetch it again"):
        load(str(path))


def test_a_trace_of_several_models_is_refused(tmp_path: Path) -> None:
    """A simulated fleet serves one: they would share workers that serve only some of them."""
    alike = a_file(tmp_path, a_row(model="a"), a_row(), a_row(model="a"), a_row(model=None))
    assert len(load(str(alike)).requests) == 4
    mixed = a_file(tmp_path, a_row(), a_row(model="a"), a_row(model="b"))
    with pytest.raises(TraceError, match=r"decisions trace --model a") as raised:
        load(str(mixed))
    assert "line 3" in str(raised.value) or ":3:" in str(raised.value)


@pytest.mark.trace(CONVERSATION)
def test_conversation_trace() -> None:
    """The figures that the trace is known by."""
    workload = load("conversation", traces=traces())
    requests = workload.requests
    assert workload.name == "conversation"
    assert len(requests) == 12_031
    assert requests[-1].at_s == pytest.approx(3537, abs=0.5)
    assert sum(r.prompt_tokens for r in requests) / 12_031 == pytest.approx(12_035, abs=0.5)
    assert sum(r.output_tokens for r in requests) / 12_031 == pytest.approx(343, abs=0.5)
    assert all(request.blocks[:1] in ((), (0,)) for request in requests)
    assert ceiling(published(CONVERSATION)) == pytest.approx(0.366, abs=0.0005)
    assert ceiling(r.blocks for r in requests) == pytest.approx(0.382, abs=0.0005)
    assert {request.output_tokens_max for request in requests} == {2048}


@pytest.mark.trace(SYNTHETIC)
def test_synthetic_trace() -> None:
    """The figures that the trace is known by."""
    workload = load("synthetic", traces=traces())
    requests = workload.requests
    assert len(requests) == 3_993
    assert requests[-1].at_s == pytest.approx(1022, abs=0.5)
    assert sum(r.prompt_tokens for r in requests) / 3_993 == pytest.approx(15_325, abs=0.5)
    assert ceiling(published(SYNTHETIC)) == pytest.approx(0.64, abs=0.005)
    assert ceiling(r.blocks for r in requests) == pytest.approx(0.66, abs=0.005)
