"""Why each job went where it went: a JSON line per dispatch and per end, joined by key and attempt.

The loop only puts records on a bounded queue; a thread encodes, writes and rotates. A slow or full
disk costs lines, which are counted, and never a job: no broker reads them back. People do, and
`sim/decisions` makes traces and replays of them: what a job asked for, never its text.
"""

import base64
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import structlog
import xxhash

from broker.core.decisions import Candidate, Dispatch
from broker.core.events import JobSpec
from broker.service.log_files import LogFiles
from broker.wire.messages import Attempt, Finished, Kind, Reason
from broker.wire.prefix import BLOCKS_MAX, pack_hashes

QUEUE_LINES_MAX = 20_000
"""Records waiting for the writer: two seconds at 5,000 jobs/s, some 20 MB."""

QUEUE_BLOCKS_MAX = 4_000_000
"""Prefix blocks of the jobs that those records keep in memory: 32 MB, 200 blocks (some 12,000
tokens) a line. Without it a disk that hangs could hold 20,000 of the longest prompts: 1.3 GB."""

PREFIX_STRIDE = 8
"""One prefix hash of so many is told: 2,048 bytes of text, some 512 tokens, the block of public
traces (Mooncake). Hashes are chained: an equal one is an equal whole prefix, so thinning is exact
down to the stride."""

PREFIXES_MAX = BLOCKS_MAX // PREFIX_STRIDE
"""Prefix hashes in a line, 11 bytes each: all that the wire's longest list comes to (11 kB). The
mean of Mooncake's conversations is 23."""

CANDIDATES_MAX = 8
"""Scored workers told in a line, best first; the number of all stands beside them."""

FLUSH_S = 0.2
"""How long a line may wait before it is written: `tail -f` feels live, and writes stay few."""

CLOSE_S_MAX = 5.0
"""How long `close` waits for the last lines; a disk that hangs must not keep the broker."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A job was given to a worker."""

    at_s: float
    decision: Dispatch
    band: int
    model: str
    job: JobSpec | None = None
    """What it asked for; None of a job known from a worker's list only."""

    @property
    def blocks(self) -> int:
        """Count the prefix blocks it keeps in memory."""
        return 0 if self.job is None else len(self.job.blocks)


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt ended, or a job that had none."""

    at_s: float
    key: str
    worker: str = ""
    finished: Finished | None = None
    """What the worker said of the attempt; None when the broker ended the job itself."""
    kind: Kind | None = None
    """Of the job's record; None when the job is tried again, or its record was found."""
    reason: Reason | None = None
    e2e_s: float | None = None
    """Since the job was queued."""
    row: str = ""
    """The quota row, or lane, that refused it."""
    job: JobSpec | None = None
    """What a job asked for that ended without a dispatch: no other line tells it."""

    @property
    def blocks(self) -> int:
        """Count the prefix blocks it keeps in memory."""
        return 0 if self.job is None else len(self.job.blocks)


Entry = Dispatched | Ended


class DecisionLog:
    """Takes entries from the loop; its thread writes them."""

    def __init__(
        self,
        folder: Path,
        *,
        file_bytes_max: int,
        files_max: int,
        prefixes: bool = True,
        queue_lines_max: int = QUEUE_LINES_MAX,
        queue_blocks_max: int = QUEUE_BLOCKS_MAX,
    ) -> None:
        """Write to `folder`, made if absent. With `file_bytes_max` 0 nothing is logged.

        Without `prefixes` dispatches are told without the hashes of the prompt's prefix.
        """
        self._files = LogFiles(folder, "decisions", bytes_max=file_bytes_max, files_max=files_max)
        self._queue: deque[Entry] = deque()
        self._queue_lines_max = queue_lines_max if file_bytes_max else 0
        self._queue_blocks_max = queue_blocks_max
        # Each is written by one thread only: what waits is the difference.
        self._blocks_put = 0
        self._blocks_taken = 0
        self._prefixes = prefixes
        self._dropped = 0
        self._lost = 0
        self._written = 0
        self._errors = 0
        self._trouble = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="decision-log", daemon=True)
        if file_bytes_max:
            self._thread.start()

    @property
    def path(self) -> Path:
        """Where the newest lines are."""
        return self._files.path

    @property
    def lines_written(self) -> int:
        """Lines on disk."""
        return self._written

    @property
    def lines_dropped(self) -> int:
        """Lines lost: the queue was full, or the disk."""
        return self._dropped + self._lost

    @property
    def write_errors(self) -> int:
        """Writes that failed."""
        return self._errors

    @property
    def trouble(self) -> str:
        """What keeps lines from the disk now; empty when all is well."""
        return self._trouble

    def put(self, entry: Entry) -> None:
        """Log an entry. Never waits: with a full queue the entry is dropped and counted."""
        blocks_put = self._blocks_put + entry.blocks
        has_room = blocks_put - self._blocks_taken <= self._queue_blocks_max
        if has_room and len(self._queue) < self._queue_lines_max:
            self._blocks_put = blocks_put
            self._queue.append(entry)
        elif self._queue_lines_max:
            self._dropped += 1

    def close(self, *, timeout_s: float = CLOSE_S_MAX) -> None:
        """Write what is queued and stop, within `timeout_s`. Idempotent."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        self._look()
        while not self._closing.wait(FLUSH_S):
            self._drain()
        self._drain()
        self._files.close()

    def _look(self) -> None:
        """Open the file: what keeps lines from it is told at the start, not when one is lost."""
        try:
            self._files.open()
        except OSError as error:
            self._tell(self._said(error))

    def _said(self, error: OSError) -> str:
        return f"{self._files.path}: {error.strerror or error}"

    def _drain(self) -> None:
        entries = [self._queue.popleft() for _ in range(len(self._queue))]
        if not entries:
            return
        try:
            self._files.append(b"".join(line(one, prefixes=self._prefixes) for one in entries))
        except OSError as error:
            self._lost += len(entries)
            self._tell(self._said(error))
            # Last: who sees the error counted sees what it cost, too.
            self._errors += 1
        else:
            self._tell("")
            self._written += len(entries)
        finally:
            self._blocks_taken += sum(entry.blocks for entry in entries)

    def _tell(self, trouble: str) -> None:
        """Say once that lines are being lost, and once that they are not any more."""
        if trouble and not self._trouble:
            _log.error("decision_log.failing", error=trouble, lost_lines=self._lost)
        elif self._trouble and not trouble:
            _log.warning("decision_log.recovered", lost_lines=self._lost)
        self._trouble = trouble


def line(entry: Entry, *, prefixes: bool = True) -> bytes:
    """Write one entry as a JSON line."""
    match entry:
        case Dispatched():
            record = _dispatch(entry)
            if entry.job is not None:
                record |= _asked(entry.job, prefixes=prefixes)
        case Ended():
            record = _end(entry)
            if entry.job is not None:
                record |= _came(entry.job) | _asked(entry.job, prefixes=prefixes)
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)


def _dispatch(entry: Dispatched) -> dict[str, Any]:
    decision, why = entry.decision, entry.decision.explanation
    best_first = sorted(why.candidates, key=_score)[:CANDIDATES_MAX]
    return {
        "event": "dispatch",
        "at_s": round(entry.at_s, 6),
        "key": decision.key,
        "attempt": _numbers(decision.attempt),
        "enqueued_at_s": round(decision.enqueued_at_s, 6),
        "worker": decision.worker,
        "band": entry.band,
        "model": entry.model,
        "policy": why.policy,
        "previous_worker": why.previous_worker,
        "queue_s": round(why.queue_s, 6),
        "held_by": why.held_by,
        "is_probe": why.is_probe,
        "predicted_hit_tokens": why.predicted_hit_tokens,
        "predicted_ttft_s": round(why.predicted_ttft_s, 6),
        "failed_attempts": len(decision.failures),
        "candidates": len(why.candidates),
        "scores": [
            {
                "worker": one.worker,
                "score": one.score,
                "hit_tokens": one.hit_tokens,
                "backlog_tokens": one.backlog_tokens,
            }
            for one in best_first
        ],
    }


def _came(job: JobSpec) -> dict[str, Any]:
    """Tell when a job came and to which queue, as the line of a dispatch does."""
    return {
        "enqueued_at_s": round(job.enqueued_at_s, 6),
        "band": job.band,
        "model": job.model,
    }


def _asked(job: JobSpec, *, prefixes: bool) -> dict[str, Any]:
    """Tell what a job asked for, as the broker knows it; its lane stands in its key."""
    asked: dict[str, Any] = {
        "prompt_tokens": job.prompt_tokens,
        "output_tokens_max": job.output_tokens_max,
        "session": _session(job),
        "prompt_blocks": len(job.blocks),
    }
    if job.deadline_at_s is not None:
        asked["deadline_at_s"] = round(job.deadline_at_s, 6)
    if prefixes:
        asked["blocks"] = _thinned(job)
    return asked


def _session(job: JobSpec) -> str:
    """Tell sessions apart without their names, which may name people."""
    if not job.session:
        return ""
    return xxhash.xxh3_64_hexdigest(f"{job.lane}.{job.session}".encode())


def _thinned(job: JobSpec) -> str:
    """Pack the hash of every whole PREFIX_STRIDE blocks, as on the wire, in base64."""
    hashes = job.blocks[PREFIX_STRIDE - 1 :: PREFIX_STRIDE][:PREFIXES_MAX]
    return base64.b64encode(pack_hashes(hashes)).decode()


def _score(candidate: Candidate) -> float:
    return candidate.score


def _end(entry: Ended) -> dict[str, Any]:
    record: dict[str, Any] = {
        "event": "end",
        "at_s": round(entry.at_s, 6),
        "key": entry.key,
        "kind": entry.kind,
        "reason": entry.reason,
    }
    if entry.row:
        record["row"] = entry.row
    if entry.e2e_s is not None:
        record["e2e_s"] = round(entry.e2e_s, 6)
    finished = entry.finished
    if finished is not None:
        record |= {
            "attempt": _numbers(finished.attempt),
            "worker": entry.worker,
            "outcome": finished.outcome,
            "predicted_hit_tokens": finished.predicted_hit_tokens,
            "cached_tokens": finished.usage.cached_tokens,
            "cache_source": finished.cache_source,
            "prompt_tokens": finished.usage.prompt_tokens,
            "output_tokens": finished.usage.output_tokens,
            "ttft_s": round(finished.ttft_s, 6),
            "run_s": round(finished.run_s, 6),
            "detail": finished.detail,
        }
    return record


def _numbers(attempt: Attempt) -> tuple[int, int]:
    return attempt.epoch, attempt.number
