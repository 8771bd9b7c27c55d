"""Rows of a trace: the same traffic, with nothing that leads back to the log."""

from array import array
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from broker.sim.decision_trace import (
    BLOCK_TOKENS_UNKNOWN,
    BlockTokens,
    PrefixIds,
    TraceRows,
    is_traceable,
)
from broker.sim.decisions import LoggedJob
from broker.wire.prefix import BLOCKS_MAX, pack_hashes

SALT = b"0123456789abcdef"


def a_logged(*blocks: int, **fields: Any) -> LoggedJob:
    """A completed job of 512 tokens for each of `blocks`, and a rest of 250."""
    defaults: dict[str, Any] = {
        "key": "acme.j1",
        "lane": "acme",
        "band": 1,
        "model": "tiny",
        "enqueued_at_s": 1000.0,
        "dispatched_at_s": 1001.0,
        "queue_s": 1.0,
        "prompt_blocks": 8 * len(blocks) + 3,
        "packed_blocks": pack_hashes(blocks),
        "kind": "completed",
        "counted_prompt_tokens": 512 * len(blocks) + 224,
        "output_tokens": 16,
    }
    return LoggedJob(**{**defaults, **fields})


def some_rows(*jobs: LoggedJob, salt: bytes = SALT, anonymous: bool = False) -> list[Any]:
    """The trace of these jobs, which come in the order of arrival."""
    block_tokens = BlockTokens()
    for job in jobs:
        block_tokens.add(job)
    rows = TraceRows(block_tokens, salt=salt, anonymous=anonymous)
    return [rows.row(job) for job in jobs]


def test_row() -> None:
    """Time since the first arrival in ms, tokens as the engine counted, ids from 0."""
    first, second = some_rows(
        a_logged(901, 902),
        a_logged(901, 999, enqueued_at_s=1002.0005, prompt_tokens=7, output_tokens_max=64),
    )
    assert first["timestamp"] == 0.0
    assert second == {
        "timestamp": 2000.5,
        "input_length": 1248,
        "output_length": 16,
        "hash_ids": [0, 2],
        "block_tokens": 512,
        "lane": "acme",
        "band": 1,
        "model": "tiny",
        "output_tokens_max": 64,
    }


def test_session() -> None:
    """Turns of one session share an id, which another trace's salt would make another."""
    session = {"session": "5a5a5a5a5a5a5a5a"}
    one, two, other = some_rows(a_logged(**session), a_logged(**session), a_logged(session="x"))
    assert one["session_id"] == two["session_id"] != other["session_id"]
    (again,) = some_rows(a_logged(**session), salt=b"another salt")
    assert again["session_id"] not in {one["session_id"], "5a5a5a5a5a5a5a5a"}


def test_nothing_of_the_log_stays() -> None:
    """Neither job, worker, session nor hash is found in a row; anonymous, nor the lane."""
    job = a_logged(0xABCDEF0123456789, session="5a5a5a5a5a5a5a5a", worker="gpu-77", lane="bank")
    text = str(some_rows(job, anonymous=True)[0])
    for name in ("acme.j1", "5a5a5a5a5a5a5a5a", "gpu-77", "bank", str(0xABCDEF0123456789), "1000"):
        assert name not in text


def test_anonymous_lanes() -> None:
    """Numbered in the order of appearance, each the same name every time."""
    rows = some_rows(*(a_logged(lane=lane) for lane in ("b", "a", "b")), anonymous=True)
    assert [row["lane"] for row in rows] == ["lane1", "lane2", "lane1"]


def test_tokens_of_a_block_are_the_models_mean() -> None:
    """All rows of a model have one size, which the loader takes for the cache's."""
    rows = some_rows(
        a_logged(1, 2, counted_prompt_tokens=1000, prompt_blocks=16),
        a_logged(3, 4, counted_prompt_tokens=2000, prompt_blocks=16),
        a_logged(5, 6, counted_prompt_tokens=990, prompt_blocks=16, model="big"),
    )
    assert [row["block_tokens"] for row in rows] == [727, 727, 480]
    assert [len(row["hash_ids"]) for row in rows] == [1, 2, 2]


def test_prompts_that_say_nothing_of_a_blocks_tokens() -> None:
    """Shorter than a logged block, or cut at the longest prefix; without any, English is taken."""
    short = a_logged(counted_prompt_tokens=90, prompt_blocks=7)
    cut = a_logged(1, counted_prompt_tokens=9_000_000, prompt_blocks=BLOCKS_MAX)
    assert [row["block_tokens"] for row in some_rows(short, cut)] == [BLOCK_TOKENS_UNKNOWN] * 2


def test_lengths_are_at_least_one() -> None:
    """A job that gave no token (an embedding), or of an unknown prompt, is a row that loads."""
    (row,) = some_rows(a_logged(counted_prompt_tokens=0, output_tokens=0))
    assert (row["input_length"], row["output_length"], row["hash_ids"]) == (1, 1, [])


def test_which_jobs_make_a_row() -> None:
    """Those whose work an engine counted, to its end or up to where it was stopped."""
    assert is_traceable(a_logged())
    assert is_traceable(a_logged(output_tokens=0))
    assert is_traceable(a_logged(kind="cancelled"))
    assert not is_traceable(a_logged(kind="failed", output_tokens=0))
    assert not is_traceable(a_logged(output_tokens=0, counted_prompt_tokens=0))


def _chained(path: list[int]) -> "array[int]":
    """Hashes that are equal where the whole path up to there is."""
    return array("Q", [hash(tuple(path[: end + 1])) % (1 << 64) for end in range(len(path))])


@given(st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=30))
def test_prefix_ids_are_those_of_a_plain_table(paths: list[list[int]]) -> None:
    """Runs are only a smaller table: ids are as a number for each hash, by first appearance."""
    ids, table = PrefixIds(), dict[int, int]()
    for path in paths:
        hashes = _chained(path)
        assert ids.of(hashes) == [table.setdefault(one, len(table)) for one in hashes]
