"""Makes rows of a trace out of logged jobs: arrivals, lengths, prefixes; no text and no names.

The rows are of Mooncake's shape with keys of our own (`workload/mooncake` reads them). Prefix ids
are numbered anew and sessions hashed with the trace's own salt: neither leads back to the log.
"""

from array import array
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from broker.sim.decisions import LOGGED_BLOCK_BYTES, LoggedJob
from broker.wire.prefix import BLOCK_BYTES, BLOCKS_MAX

BLOCK_TOKENS_UNKNOWN = 512
"""Tokens of a logged block where no job tells: four bytes a token, as English has."""

BLOCKS_PER_LOGGED = LOGGED_BLOCK_BYTES // BLOCK_BYTES

SESSION_BYTES = 8


class PrefixIds:
    """Small numbers for chained hashes, in the order of first appearance.

    A prompt's new blocks all follow its known ones, and get consecutive numbers. So one entry for
    each run of new blocks is enough: the run is found by its first hash, which stands for the
    whole prefix before it, and a prompt that leaves it midway begins a run of its own. Memory: 8
    bytes a block and some 200 a run, where a dict of all blocks takes 150 a block.
    """

    def __init__(self) -> None:
        """Know no prefix."""
        self._runs: dict[int, tuple[int, array[int]]] = {}
        self._next_id = 0

    def of(self, hashes: "array[int]") -> list[int]:
        """Return the ids of a prompt's prefix, first block first."""
        ids: list[int] = []
        while len(ids) < len(hashes):
            rest = hashes[len(ids) :]
            run = self._runs.get(rest[0])
            if run is None:
                run = self._runs[rest[0]] = (self._next_id, rest)
                self._next_id += len(rest)
            first_id, known = run
            ids.extend(range(first_id, first_id + _common(rest, known)))
        return ids


def _common(left: "array[int]", right: "array[int]") -> int:
    """Count the equal items that both begin with."""
    if left == right:
        return len(left)
    shorter = min(len(left), len(right))
    return next((place for place in range(shorter) if left[place] != right[place]), shorter)


class BlockTokens:
    """How many tokens a logged block stands for, by model: the mean over its jobs."""

    def __init__(self) -> None:
        """Know no job."""
        self._sums: dict[str, tuple[int, float]] = {}

    def add(self, job: LoggedJob) -> None:
        """Take a job in. One without whole blocks, or cut at the longest prefix, says nothing."""
        if not BLOCKS_PER_LOGGED <= job.prompt_blocks < BLOCKS_MAX:
            return
        tokens, blocks = self._sums.get(job.model, (0, 0.0))
        # On average half a block is left over behind the last whole one.
        self._sums[job.model] = (tokens + job.input_tokens, blocks + job.prompt_blocks + 0.5)

    def of(self, model: str) -> int:
        """Return a model's, at least 1."""
        tokens, blocks = self._sums.get(model, (0, 0.0))
        return (
            max(1, round(BLOCKS_PER_LOGGED * tokens / blocks)) if tokens else BLOCK_TOKENS_UNKNOWN
        )


class TraceRows:
    """Turns jobs into rows, in the order of their arrivals."""

    def __init__(self, block_tokens: BlockTokens, *, salt: bytes, anonymous: bool = False) -> None:
        """`salt` (16 to 64 random bytes) hides sessions; `anonymous` lanes are numbered."""
        self._block_tokens = block_tokens
        self._salt = salt
        self._anonymous = anonymous
        self._prefixes = PrefixIds()
        self._lanes: dict[str, str] = {}
        self._start_s: float | None = None

    def row(self, job: LoggedJob) -> Mapping[str, Any]:
        """Make a job's row; the first one's arrival is 0 ms."""
        if self._start_s is None:
            self._start_s = job.enqueued_at_s
        input_tokens = max(1, job.input_tokens)
        block_tokens = self._block_tokens.of(job.model)
        row: dict[str, Any] = {
            "timestamp": round((job.enqueued_at_s - self._start_s) * 1000, 3),
            "input_length": input_tokens,
            "output_length": max(1, job.output_tokens),
            # A prompt with fewer tokens a block than others of its model has a block less.
            "hash_ids": self._prefixes.of(job.blocks[: input_tokens // block_tokens]),
            "block_tokens": block_tokens,
            "lane": self._lane(job.lane),
            "band": job.band,
            "model": job.model,
        }
        if job.output_tokens_max:
            row["output_tokens_max"] = job.output_tokens_max
        if job.session:
            row["session_id"] = self._session(job.session)
        return row

    def _lane(self, lane: str) -> str:
        if not self._anonymous:
            return lane
        return self._lanes.setdefault(lane, f"lane{len(self._lanes) + 1}")

    def _session(self, session: str) -> str:
        return blake2b(session.encode(), key=self._salt, digest_size=SESSION_BYTES).hexdigest()


def is_traceable(job: LoggedJob) -> bool:
    """Say whether a job's work is known: the engine counted it, to its end or until it stopped."""
    return job.output_tokens > 0 or (job.kind == "completed" and job.counted_prompt_tokens > 0)
