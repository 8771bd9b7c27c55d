"""Looks a batch over before it is run: which lines are bad, how much work the others are.

Nothing is sent. Memory is flat: ids are kept in the same kind of file as a run's, which goes away
afterwards.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from broker.wire.messages import Job, LaneOffer
from broker.wire.prefix import BLOCK_BYTES, HASH_BYTES
from broker.wire.prompt import BYTES_PER_TOKEN
from producers.batch.lines import BadLine, Request
from producers.batch.plan import Bounds
from producers.batch.reader import Reader, Work
from producers.batch.source import Line, read_lines
from producers.batch.state import State, new_identity
from producers.request import Wish, build_job

FAULTS_SHOWN_MAX = 20
"""Faults that are told one by one; the others are only counted."""


@dataclass(slots=True)
class Findings:
    """What a batch is made of."""

    requests: int = 0
    """Lines that can be run."""
    faults: Counter[str] = field(default_factory=Counter[str])
    """Lines that can't, by code."""
    first_faults: list[BadLine] = field(default_factory=list[BadLine])
    models: Counter[str] = field(default_factory=Counter[str])
    endpoint: str = ""
    prompt_tokens: int = 0
    """Estimated: four bytes a token, as for English."""
    output_tokens_max: int = 0
    """What the lines allow at most; 256 each where they say nothing."""
    shared_tokens: int = 0
    """Of the prompt tokens, those that repeat the beginning of a line put next to them."""

    def hours(self, tokens_per_second: float) -> float:
        """Longest time at this rate (prompt and output tokens together), reuse left out."""
        return (self.prompt_tokens + self.output_tokens_max) / tokens_per_second / 3600.0


def check_batch(
    path: str,
    *,
    endpoint: str = "",
    offer: LaneOffer | None = None,
    bounds: Bounds | None = None,
) -> Findings:
    """Read a batch's lines as a run would, and count; without an offer any model is taken.

    Raises InputUnusable, OutputUnusable.
    """
    models = None if offer is None else frozenset(offer.models)
    findings = Findings()
    with tempfile.TemporaryDirectory(prefix="inferlane-check-") as folder:
        identity = new_identity(input_name="", lane="check", band=3, window_s=1.0)
        identity = msgspec.structs.replace(identity, endpoint=endpoint)
        with State(Path(folder) / "state") as state:
            reader = Reader(state, identity, build=partial(_build, offer), models=models)
            for lines in _windows(read_lines(path), bounds or Bounds()):
                window = reader.read(lines)
                for fault in window.bad:
                    _count_fault(findings, fault)
                _count_work(findings, window.work)
            reader.end()
    return findings


def _windows(lines: Iterator[Line], bounds: Bounds) -> Iterator[list[Line]]:
    """Windows as a run would read them from a file."""
    window: list[Line] = []
    size = 0
    for line in lines:
        window.append(line)
        size += len(line.text)
        if len(window) >= bounds.lookahead_lines or size >= bounds.lookahead_bytes:
            yield window
            window, size = [], 0
    if window:
        yield window


def _build(offer: LaneOffer | None, request: Request, job_id: str) -> Job:
    wish = Wish(job_id=job_id, endpoint=request.url)
    return build_job(request.body, wish, lane="check", client="check", offer=offer)


def _count_fault(findings: Findings, fault: BadLine) -> None:
    findings.faults[fault.code] += 1
    if len(findings.first_faults) < FAULTS_SHOWN_MAX:
        findings.first_faults.append(fault)


def _count_work(findings: Findings, work: list[Work]) -> None:
    """Count a window of lines, which stand in the order of their prefixes."""
    before = b""
    for item in work:
        job = item.job
        findings.requests += 1
        findings.models[job.model] += 1
        findings.endpoint = job.endpoint
        findings.prompt_tokens += job.prompt_tokens
        findings.output_tokens_max += job.output_tokens_max
        shared_bytes = _shared_blocks(before, job.blocks) * BLOCK_BYTES
        findings.shared_tokens += min(job.prompt_tokens, int(shared_bytes / BYTES_PER_TOKEN))
        before = job.blocks


def _shared_blocks(one: bytes, other: bytes) -> int:
    """Blocks that two chains of hashes share, by halving: equal is equal from the start."""
    low, high = 0, min(len(one), len(other)) // HASH_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        at = slice((middle - 1) * HASH_BYTES, middle * HASH_BYTES)
        low, high = (middle, high) if one[at] == other[at] else (low, middle - 1)
    return low
