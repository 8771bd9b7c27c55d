"""Reads a broker's decision log back: what was asked, where it went, and what came of it.

The log has a line for each dispatch and for each end (`service/decision_log` writes it); a job's
lines are joined by its key. Logs are cut by rotation, by kill -9 and by full disks, so nothing in
one is fatal: what can't be used is left out and counted.
"""

from array import array
from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from broker.wire.ids import BANDS, split_job_key
from broker.wire.prefix import BLOCK_BYTES, HASH_BYTES, unpack_hashes

LOGGED_BLOCK_BYTES = 8 * BLOCK_BYTES
"""Prompt text that a logged hash stands for: one of eight is logged, some 512 tokens each."""

OPEN_JOBS_MAX = 100_000
"""Jobs whose end is awaited at once, some 100 MB; beyond it the one dispatched longest ago is
given up. 256 workers of 64 slots run 16,000; the rest are jobs whose end the log has lost."""

COUNT_MAX = 1 << 53
"""Largest integer that every reader of JSON takes for what it is (RFC 8259, 6)."""

Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
Band = Annotated[int, Meta(ge=BANDS[0], le=BANDS[-1])]
Seconds = Annotated[float, Meta(ge=0)]


class LoggedJob(Struct, frozen=True, kw_only=True):
    """One job, however often it was tried."""

    key: str
    lane: str
    band: int
    model: str
    session: str = ""
    """Hash of its session within its lane; empty if it had none."""
    enqueued_at_s: float
    """Unix time, as all instants here."""
    prompt_tokens: int = 0
    """As the broker estimated it; 0: not known."""
    output_tokens_max: int = 0
    """0: not known."""
    prompt_blocks: int = 0
    """The wire's whole prefix blocks of its prompt."""
    has_prefix: bool = False
    """Its prefix was logged, if only to say that no block is whole. Not so with
    `decision_log_prefixes = false`, or when a new leader knew it from a worker's list only."""
    packed_blocks: bytes = b""
    """Every eighth of their hashes, as on the wire."""
    deadline_at_s: float | None = None
    dispatched_at_s: float = 0.0
    """The first time, as `queue_s`, `held_by` and what was predicted; 0: it never was."""
    queue_s: float = 0.0
    held_by: str = ""
    predicted_hit_tokens: int = 0
    predicted_ttft_s: float = 0.0
    dispatches: int = 1
    """0: it ended while it waited, or was refused."""
    policy: str = ""
    """Of the last dispatch, as `worker`."""
    worker: str = ""
    ended_at_s: float = 0.0
    kind: str = ""
    """How it ended; empty when only a record of it was found."""
    reason: str = ""
    row: str = ""
    """The quota row, or lane, that refused it."""
    counted_prompt_tokens: int = 0
    """By the engine; 0: it did not run to its end."""
    cached_tokens: int = 0
    cache_source: str = ""
    """Whose word on the cache its worker's credit rested on; empty: not told."""
    output_tokens: int = 0
    ttft_s: float | None = None
    """From its queue to its first token; None: there was none."""
    run_s: float | None = None
    """On its last worker."""

    @property
    def blocks(self) -> "array[int]":
        """Chained hashes, one for each whole LOGGED_BLOCK_BYTES of its prompt."""
        return unpack_hashes(self.packed_blocks)

    @property
    def input_tokens(self) -> int:
        """Prompt tokens as the engine counted them, else as the broker guessed; 0: not known."""
        return self.counted_prompt_tokens or self.prompt_tokens


class Tally(Struct, kw_only=True):
    """What was read, and what could not be used."""

    lines: int = 0
    dispatches: int = 0
    jobs: int = 0
    """With an end, and a word of what they asked for: those that were given."""
    broken_lines: int = 0
    """Cut off, or no line of a decision log."""
    outdated_lines: int = 0
    """Dispatches told by a broker that did not log yet what a job asked for."""
    without_end: int = 0
    without_dispatch: int = 0
    """Ends of jobs whose dispatch is not in the log: older, lost, or there was none and the broker
    is of before it told what such jobs asked for."""


class _Line(Struct, frozen=True, kw_only=True, tag_field="event"):
    """What a dispatch tells of its job, and the end of a job that never was dispatched."""

    at_s: Seconds
    key: str
    enqueued_at_s: Seconds | UnsetType = UNSET
    prompt_tokens: Count = 0
    """On the end of an attempt: as the engine counted them."""
    output_tokens_max: Count = 0
    session: str = ""
    prompt_blocks: Count = 0
    blocks: bytes | UnsetType = UNSET
    deadline_at_s: float | None = None


class _Dispatch(_Line, frozen=True, kw_only=True, tag="dispatch"):
    worker: str
    band: Band
    model: str
    queue_s: float
    policy: str = ""
    held_by: str = ""
    predicted_hit_tokens: Count = 0
    predicted_ttft_s: float = 0.0


class _End(_Line, frozen=True, kw_only=True, tag="end"):
    kind: str | None = None
    reason: str | None = None
    row: str = ""
    band: Band = 0
    model: str = ""
    worker: str = ""
    outcome: str | None = None
    cached_tokens: Count = 0
    cache_source: str = ""
    output_tokens: Count = 0
    ttft_s: Seconds = 0.0
    run_s: Seconds | None = None

    @property
    def is_final(self) -> bool:
        """Say whether the job ended, or only an attempt that is followed by another."""
        return self.kind is not None or self.outcome in {None, "settled"}

    @property
    def is_undispatched(self) -> bool:
        """Say whether it tells what its job asked for, as no dispatch did."""
        return self.enqueued_at_s is not UNSET and self.outcome is None


_lines = msgspec.json.Decoder(_Dispatch | _End)


def read_jobs(
    lines: Iterable[bytes], tally: Tally | None = None, *, open_jobs_max: int = OPEN_JOBS_MAX
) -> Iterator[LoggedJob]:
    """Give each job that ended, in the order of ends; one that never ran if its end says more.

    `lines` come in the order of time. Memory holds the jobs that have not ended. `tally` says
    afterwards what was left out.
    """
    told = Tally() if tally is None else tally
    open_jobs: dict[str, LoggedJob] = {}
    for line in lines:
        match _read(line, told):
            case _Dispatch() as dispatch:
                _dispatched(dispatch, open_jobs, told)
                if len(open_jobs) > open_jobs_max:
                    del open_jobs[next(iter(open_jobs))]
                    told.without_end += 1
            case _End() as end if end.is_final:
                job = open_jobs.pop(end.key, None)
                if job is not None:
                    told.jobs += 1
                    yield _ended(job, end)
                elif end.is_undispatched:
                    told.jobs += 1
                    yield _undispatched(end)
                else:
                    told.without_dispatch += 1
            case _:
                pass
    told.without_end += len(open_jobs)


def _read(line: bytes, tally: Tally) -> _Dispatch | _End | None:
    """Decode a line; None when it is blank, or no line of a decision log."""
    if not line.strip():
        return None
    tally.lines += 1
    try:
        entry = _lines.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        tally.broken_lines += 1
        return None
    if entry.blocks and len(entry.blocks) % HASH_BYTES:
        tally.broken_lines += 1
        return None
    return entry


def _dispatched(dispatch: _Dispatch, open_jobs: dict[str, LoggedJob], tally: Tally) -> None:
    tally.dispatches += 1
    if dispatch.enqueued_at_s is UNSET:
        tally.outdated_lines += 1
        return
    known = open_jobs.get(dispatch.key)
    if known is not None:
        open_jobs[dispatch.key] = msgspec.structs.replace(
            known,
            dispatches=known.dispatches + 1,
            worker=dispatch.worker,
            policy=dispatch.policy,
        )
        return
    open_jobs[dispatch.key] = msgspec.structs.replace(
        _asked(dispatch, dispatch.enqueued_at_s),
        dispatched_at_s=dispatch.at_s,
        queue_s=dispatch.queue_s,
        held_by=dispatch.held_by,
        predicted_hit_tokens=dispatch.predicted_hit_tokens,
        predicted_ttft_s=dispatch.predicted_ttft_s,
        policy=dispatch.policy,
        worker=dispatch.worker,
    )


def _asked(line: _Dispatch | _End, enqueued_at_s: float) -> LoggedJob:
    """Make the record of what a job asked for."""
    return LoggedJob(
        key=line.key,
        lane=split_job_key(line.key)[0],
        band=line.band,
        model=line.model,
        session=line.session,
        enqueued_at_s=enqueued_at_s,
        prompt_tokens=line.prompt_tokens,
        output_tokens_max=line.output_tokens_max,
        prompt_blocks=line.prompt_blocks,
        has_prefix=line.blocks is not UNSET,
        packed_blocks=b"" if line.blocks is UNSET else line.blocks,
        deadline_at_s=line.deadline_at_s,
    )


def _undispatched(end: _End) -> LoggedJob:
    assert end.enqueued_at_s is not UNSET, "the caller looked"
    return msgspec.structs.replace(
        _asked(end, end.enqueued_at_s),
        dispatches=0,
        ended_at_s=end.at_s,
        kind=end.kind or "",
        reason=end.reason or "",
        row=end.row,
    )


def _ended(job: LoggedJob, end: _End) -> LoggedJob:
    return msgspec.structs.replace(
        job,
        worker=end.worker or job.worker,
        ended_at_s=end.at_s,
        kind=end.kind or "",
        reason=end.reason or "",
        row=end.row,
        counted_prompt_tokens=0 if end.is_undispatched else end.prompt_tokens,
        cached_tokens=end.cached_tokens,
        cache_source=end.cache_source,
        output_tokens=end.output_tokens,
        ttft_s=_ttft_s(job, end),
        run_s=end.run_s,
    )


def _ttft_s(job: LoggedJob, end: _End) -> float | None:
    """Count from the queue, as the caller does: the line's own counts from the run's begin."""
    if not end.ttft_s or end.run_s is None:
        return None
    return max(end.at_s - end.run_s + end.ttft_s - job.enqueued_at_s, 0.0)
