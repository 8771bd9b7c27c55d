"""Agents' sessions: what an increment's prompt is, and what its blocks share."""

import os
from pathlib import Path
from typing import Any

import orjson
import pytest

from broker.sim.errors import TraceError
from broker.sim.workload.loading import load

AGENTIC = "agentic-synth/dataset.jsonl"


def a_turn(session: str, **changes: Any) -> dict[str, Any]:
    """Return a row as a trace has it."""
    row = {"session_id": session, "input_length": 600, "output_length": 100, "hash_ids": [0, 1]}
    return row | changes


def a_file(folder: Path, *rows: dict[str, Any]) -> str:
    """Write a trace, and return its path."""
    path = folder / "sessions.jsonl"
    path.write_bytes(b"\n".join(orjson.dumps(row) for row in rows))
    return str(path)


def test_prompt_is_history_and_increment(tmp_path: Path) -> None:
    """Each prompt is all before it, answers included, and its own; delays are in seconds."""
    turns = (
        a_turn("a", timestamp=2000),
        a_turn("a", delay=500, input_length=50, output_length=10, hash_ids=[9]),
        a_turn("a", delay=1500, input_length=400, hash_ids=[10]),
    )
    requests = load(a_file(tmp_path, *turns)).requests
    assert [request.prompt_tokens for request in requests] == [600, 750, 1160]
    assert [request.at_s for request in requests] == [2.0, 0.5, 1.5]
    assert [request.after for request in requests] == [None, 0, 1]
    assert {request.session for request in requests} == {"a"}


def test_blocks_grow_with_the_history(tmp_path: Path) -> None:
    """A later turn has all blocks of the turn before, and new ones that no row has used."""
    turns = (
        a_turn("a", timestamp=0),
        a_turn("a", delay=1, input_length=500, hash_ids=[7]),
        a_turn("b", timestamp=0),
        a_turn("b", delay=1, input_length=500, hash_ids=[7]),
    )
    first, grown, other, other_grown = load(a_file(tmp_path, *turns)).requests
    assert first.blocks == other.blocks == (0,)
    assert grown.blocks == (0, 8)
    assert other_grown.blocks == (0, 9)


def test_blocks_beside_ids_that_use_every_bit(tmp_path: Path) -> None:
    """New ids have 64 bits too, and are nobody's."""
    last = (1 << 64) - 1
    turns = (
        a_turn("a", timestamp=0, hash_ids=[last]),
        a_turn("a", delay=1, input_length=2000, hash_ids=[1, 2]),
    )
    _, second = load(a_file(tmp_path, *turns)).requests
    assert second.blocks == (last, 3, 4, 5, 6)


def test_sessions_come_by_start_and_their_turns_together(tmp_path: Path) -> None:
    """Rows of sessions may be mixed in the file; what follows has a later index."""
    turns = (
        a_turn("late", timestamp=9000),
        a_turn("early", timestamp=10),
        a_turn("late", delay=1),
        a_turn("early", delay=1),
    )
    requests = load(a_file(tmp_path, *turns)).requests
    assert [request.session for request in requests] == ["early", "early", "late", "late"]
    assert [request.after for request in requests] == [None, 0, None, 2]
    assert [request.index for request in requests] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("turns", "problem"),
    [
        ([a_turn("a", timestamp=0), a_turn("a", delay=1), a_turn("a")], "turn 2.*`delay`"),
        ([a_turn("a", timestamp=0), a_turn("a", delay=1), a_turn("b")], "turn 0.*`timestamp`"),
        ([a_turn("a", timestamp=0), a_turn("a", delay=1), a_turn("a", delay=-1)], "delay"),
    ],
    ids=["no delay", "no timestamp", "negative delay"],
)
def test_turn_without_its_time_is_named(
    tmp_path: Path, *, turns: list[dict[str, Any]], problem: str
) -> None:
    """The error names the line and what it lacks."""
    with pytest.raises(TraceError, match=problem) as caught:
        load(a_file(tmp_path, *turns))
    assert caught.value.line == 3


@pytest.mark.trace(AGENTIC)
def test_agentic_trace() -> None:
    """300 sessions of 4,116 turns; no prompt has more blocks than it fills."""
    traces = Path(os.environ.get("INFERLANE_TRACES", "traces"))
    requests = load("agentic", traces=traces).requests
    assert len(requests) == 4_116
    assert sum(request.after is None for request in requests) == 300
    assert max(request.prompt_tokens for request in requests) < 140_000
    assert all(len(r.blocks) == r.prompt_tokens // r.block_tokens for r in requests)
