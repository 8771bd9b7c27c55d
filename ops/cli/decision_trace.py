"""From a decision log to a trace file: jobs are spooled to disk, sorted by arrival, and written.

Jobs end in another order than they came, and a batch job may have come a day before its dispatch.
So only arrivals and places stay in memory (16 bytes a job, and the prefixes' numbers).
"""

import tempfile
from array import array
from collections.abc import Iterable, Iterator
from typing import IO, Protocol

import msgspec
import orjson
from msgspec import Struct

from broker.sim.decision_trace import BlockTokens, TraceRows, is_traceable
from broker.sim.decisions import LoggedJob, Tally, read_jobs
from ops.cli.decision_tally import nothing_usable
from ops.cli.errors import CommandError

SPOOL_BYTES_MAX = 16 << 20
"""Kept in memory before a file is made: most logs are small."""


class Sink(Protocol):
    """Where the trace goes."""

    def write(self, data: bytes, /) -> object:
        """Write whole lines."""
        ...


class Written(Struct, kw_only=True):
    """What came of it."""

    tally: Tally
    rows: int = 0
    without_output: int = 0
    """Jobs that ended before any engine counted a token."""
    without_prefix: int = 0
    """Rows of jobs whose prefix was not logged."""
    models: dict[str, int] = {}
    """Jobs that could be rows, by model; also of those that were not asked for."""


class Spool:
    """Jobs on disk, given back in the order of their arrivals."""

    def __init__(self) -> None:
        """Begin empty; the file is gone with the process, however it ends."""
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(SPOOL_BYTES_MAX)  # noqa: SIM115 - closed by `close`
        self._arrivals_s = array("d")
        self._ends = array("Q")

    def put(self, job: LoggedJob) -> None:
        """Take a job in."""
        self._file.write(msgspec.msgpack.encode(job))
        self._arrivals_s.append(job.enqueued_at_s)
        self._ends.append(self._file.tell())

    def jobs(self) -> Iterator[LoggedJob]:
        """Give all jobs; of equal arrivals the one that ended first comes first."""
        decoder = msgspec.msgpack.Decoder(LoggedJob)
        for place in sorted(range(len(self._ends)), key=self._arrivals_s.__getitem__):
            begin = self._ends[place - 1] if place else 0
            self._file.seek(begin)
            yield decoder.decode(self._file.read(self._ends[place] - begin))

    def close(self) -> None:
        """Remove the file."""
        self._file.close()


def write_trace(
    lines: Iterable[bytes], sink: Sink, *, salt: bytes, anonymous: bool, model: str = ""
) -> Written:
    """Make a trace of a decision log's lines, which come in the order of time; of a model, or all.

    Raises:
        CommandError: there is no job to write; the message says why.
    """
    written = Written(tally=Tally())
    block_tokens = BlockTokens()
    spool = Spool()
    try:
        for job in read_jobs(lines, written.tally):
            if is_traceable(job):
                written.models[job.model] = written.models.get(job.model, 0) + 1
                if model not in {"", job.model}:
                    continue
                spool.put(job)
                block_tokens.add(job)
                written.rows += 1
                written.without_prefix += not job.has_prefix
            else:
                written.without_output += 1
        _require_rows(written)
        rows = TraceRows(block_tokens, salt=salt, anonymous=anonymous)
        for job in spool.jobs():
            sink.write(orjson.dumps(rows.row(job), option=orjson.OPT_APPEND_NEWLINE))
    finally:
        spool.close()
    return written


def _require_rows(written: Written) -> None:
    if written.rows:
        return
    if written.models:
        message = f"no job of that model in the log; there are: {', '.join(sorted(written.models))}"
        raise CommandError(message)
    if not written.tally.jobs:
        raise CommandError(nothing_usable(written.tally))
    lines = written.tally.lines
    message = f"no job that ended with tokens in {lines:,} lines; nothing to make a trace of"
    raise CommandError(message)
