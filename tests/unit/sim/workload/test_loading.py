"""Where a workload is looked for, and what is said when it isn't there."""

import gzip
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from broker.sim.errors import SimError, TraceError
from broker.sim.workload import trace_file
from broker.sim.workload.loading import EXCERPTS, load
from broker.sim.workload.trace_file import read_lines

ROW = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}'


def a_traces_folder(folder: Path) -> Path:
    """Return a traces folder that has the conversation trace."""
    (folder / "mooncake").mkdir()
    (folder / "mooncake" / "conversation_trace.jsonl").write_text(ROW)
    return folder


def test_short_name_is_found_in_the_traces_folder(tmp_path: Path) -> None:
    """A public trace is known by a short name, and says where it comes from."""
    workload = load("conversation", traces=a_traces_folder(tmp_path))
    assert workload.name == "conversation"
    assert "Apache-2.0" in workload.source


def test_path_within_the_traces_folder(tmp_path: Path) -> None:
    """A path is also looked for in the traces folder."""
    path = "mooncake/conversation_trace.jsonl"
    workload = load(path, traces=a_traces_folder(tmp_path))
    assert workload.name == "conversation_trace"
    assert workload.source == str(tmp_path / path)


def test_missing_variable_is_named() -> None:
    """Without a traces folder, a short name says what to set."""
    with pytest.raises(SimError, match="set INFERLANE_TRACES"):
        load("conversation")


def test_missing_file_says_where_it_was_looked_for(tmp_path: Path) -> None:
    """All places and known names are told."""
    with pytest.raises(TraceError) as caught:
        load("nope.jsonl", traces=tmp_path)
    text = str(caught.value)
    assert str(tmp_path / "nope.jsonl") in text
    assert "excerpt:conversation" in text
    assert "shared_prompts" in text


def test_name_too_long_for_a_file_is_just_missing() -> None:
    """What no file can be called is told like any other missing one."""
    with pytest.raises(TraceError, match="no such trace"):
        load("x" * 5000)


def test_unreadable_file_says_why(tmp_path: Path) -> None:
    """What the system says is passed on, with the path."""
    with pytest.raises(TraceError, match=f"{tmp_path}: can't be read: Is a directory"):
        read_lines(tmp_path)


def test_folder_is_no_trace(tmp_path: Path) -> None:
    """A folder without clients' files is refused."""
    with pytest.raises(TraceError, match="is a folder"):
        load(str(tmp_path))


def test_other_text_is_no_trace(tmp_path: Path) -> None:
    """A file of no known format says which ones are, and which line told."""
    path = tmp_path / "notes.txt"
    path.write_text("\nDear diary")
    with pytest.raises(TraceError, match=r"notes\.txt:2: not a trace: expected JSON"):
        load(str(path))


def test_file_takes_no_parameters(tmp_path: Path) -> None:
    """Parameters that would be ignored are refused."""
    with pytest.raises(TraceError, match="no parameters"):
        load("conversation?speed=3", traces=a_traces_folder(tmp_path))


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_excerpt_ships(name: str) -> None:
    """1,000 rows are in the package, and share enough to show a cache's worth."""
    workload = load(f"excerpt:{name}")
    seen: set[int] = set()
    references = hits = 0
    for request in workload.requests:
        references += len(request.blocks)
        hits += sum(block in seen for block in request.blocks)
        seen.update(request.blocks)
    assert len(workload.requests) == 1_000
    assert workload.requests[0].at_s == 0.0
    assert hits / references > 0.24


def test_excerpts_are_small_and_bring_their_licence() -> None:
    """Under 100 KB in all, the licence of the data beside it."""
    sizes = {path.name: path.stat().st_size for path in EXCERPTS.iterdir()}
    assert sum(sizes.values()) < 100_000
    assert "LICENSE-APACHE" in sizes


def test_unknown_excerpt_says_which_there_are() -> None:
    """The known ones are named."""
    with pytest.raises(TraceError, match="conversation, synthetic"):
        load("excerpt:azure")


@pytest.mark.parametrize(
    "pack", [gzip.compress, zstandard.ZstdCompressor().compress], ids=["gzip", "zstd"]
)
def test_a_trace_that_unpacks_to_more_than_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes]
) -> None:
    """FILE_BYTES_MAX holds for what comes out of a packed file; what fits is read whole."""
    monkeypatch.setattr(trace_file, "FILE_BYTES_MAX", 1_000_000)
    path = tmp_path / "packed"
    path.write_bytes(pack(b"x" * 1_000_000))
    assert read_lines(path) == [(1, b"x" * 1_000_000)]
    path.write_bytes(pack(b"x" * 1_000_001))
    with pytest.raises(TraceError, match="is larger than 1,000,000 bytes when unpacked"):
        read_lines(path)


def test_frames_of_zstandard_one_behind_the_other(tmp_path: Path) -> None:
    """All are read, wherever the pieces end; a cut-off one is told."""
    random_bytes = random.Random(7).randbytes(3 * trace_file.PIECE_BYTES).hex().encode()
    packed = zstandard.ZstdCompressor().compress(random_bytes)
    path = tmp_path / "frames"
    path.write_bytes(packed * 3 + zstandard.ZstdCompressor().compress(b"\nlast"))
    assert [line for _, line in read_lines(path)] == [random_bytes * 3, b"last"]
    path.write_bytes(packed * 2 + packed[:-9])
    with pytest.raises(TraceError, match="broken compressed file"):
        read_lines(path)
